"""Watches over one shared pool, once for all tenants on it: asks its engines what they count, writes the report."""

from __future__ import annotations

from tenantry.cluster import ADAPTER_POOL, Key, NameTaken, is_deleting
from tenantry.evidence import checks
from tenantry.runtime.controller import DONE, Context, Result

from .claims import pool_subject
from .door import Door
from .looking import Looker, separation, tables
from .placements import adapter_names
from .world import Pool, World


class PoolEvidenceReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self.looker = Looker(world)
        self.door = Door(world)

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        world, subject = self.world, pool_subject(key.name)
        obj, pool = world.store.get(ADAPTER_POOL, key), world.pool(key.name)
        if obj is None or pool is None or is_deleting(obj) or pool.tenant is not None:
            world.evidence.forget(subject)
            return DONE
        await world.evidence.restore(subject, obj, ctx.client)
        reports = await self.looker.replicas(pool)
        at = world.evidence.now()
        counts = {name: separation(report) for name, report in reports.items()}
        finding = checks.separation(counts, at)
        world.evidence.record(subject, "PromptSeparation", "counters", finding)
        world.evidence.record(subject, "AdapterIntegrity", "pages", checks.tables_read(tables(reports), at))
        asked = await self.door.look(self._foreign(pool)) if pool.spec.lora is not None else None
        if asked is not None:
            world.evidence.record(subject, "AdapterAccess", "door", asked)
        if finding.holds is False:
            note = f"PromptSeparation: {finding.reason}"
            ctx.recorder.event(obj, "IsolationBroken", note, action="Observe", type="Warning")
        wanted = world.evidence.report(subject, obj)
        if wanted is not None:
            try:
                await ctx.ensure(obj, [wanted])
            except NameTaken as taken:
                ctx.recorder.event(obj, "NameTaken", str(taken), action="Report", type="Warning")
        return Result(float(ctx.config.evidence.period_seconds))

    def _foreign(self, pool: Pool) -> list[str]:
        """Names of adapters on the pool: their aliases and their served names."""
        tenants = map(self.world.tenant, sorted(self.world.placements.tenants_on(pool.name)))
        return [name for tenant in tenants if tenant is not None for name in adapter_names(tenant, pool.name)]
