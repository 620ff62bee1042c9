"""Watches over one dedicated tenant: looks at what can be read, has its network probed, writes the report.

Keys are tenants. Comes back by itself every `evidence.periodSeconds`, at once when something that it guards changes,
and soon after it found something broken, since most of that is put right within one event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenantry.api import TenantSpec, names
from tenantry.cluster import NAMESPACE, TENANT, Forbidden, Key, NameTaken, Obj, is_deleting, owned_by
from tenantry.desired import gate
from tenantry.desired.isolation import GUARANTEES
from tenantry.desired.problems import SpecError
from tenantry.evidence import checks, probe
from tenantry.evidence.findings import Finding
from tenantry.evidence.network import judge
from tenantry.runtime.controller import DONE, Context, Result

from . import strangers
from .claims import subject_of
from .door import Door
from .looking import Looker, engines, tables
from .placements import adapter_names, routed_names
from .probing import Prober, Round
from .world import Pool, World

STEP_SECONDS = 1.0
REPAIR_SECONDS = 2.0
RETRY_SECONDS = 30.0


@dataclass
class _Watch:
    """When to look and to probe again (the world's clock), and the round that goes on."""

    look_at: float = 0.0
    probe_at: float = 0.0
    broken: int = 0  # looks in a row that left something broken
    round: Round | None = None
    unwritten: bool = False  # something was seen that the report does not say yet


class TenantEvidenceReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self.looker = Looker(world)
        self.prober = Prober(world)
        self.door = Door(world)
        self._watches: dict[str, _Watch] = {}

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        world = self.world
        tenant = world.store.get(TENANT, key)
        spec = self._spec(tenant)
        if tenant is None or spec is None or is_deleting(tenant):
            self._watches.pop(key.name, None)
            world.evidence.forget(subject_of(key.name))
            return DONE  # what is left of a round goes with the tenant's namespace
        space = world.store.get(NAMESPACE, Key("", names.tenant_namespace(key.name)))
        pool = world.pool(names.dedicated_pool(key.name))
        if space is None or is_deleting(space) or not owned_by(space, tenant) or pool is None:
            return DONE  # woken when they come
        await world.evidence.restore(subject_of(key.name), tenant, ctx.client)
        watch = self._watches.setdefault(key.name, _Watch())
        period = float(ctx.config.evidence.period_seconds)
        now = world.clock()
        if now >= watch.look_at:
            await self._look(tenant, spec, pool, ctx)
            watch.broken = watch.broken + 1 if self._broken(key.name) else 0
            soon = REPAIR_SECONDS * 2.0 ** min(watch.broken - 1, 16)
            watch.look_at = now + (min(soon, period) if watch.broken else period)
            watch.unwritten = True
        if watch.round is None and now >= watch.probe_at:
            watch.round = await self._begin(tenant, spec, pool, ctx)
            watch.probe_at = now + period
        if watch.round is not None:
            await self.prober.advance(tenant, watch.round, ctx.client)
            if watch.round.over:
                finding = await self._conclude(tenant, spec, watch.round, ctx)
                if finding.holds is not True:
                    watch.probe_at = world.clock() + min(RETRY_SECONDS, period)
                watch.round = None
                watch.unwritten = True
        if watch.unwritten:
            await self._write(tenant, ctx)
            watch.unwritten = False
        if watch.round is not None:
            return Result(STEP_SECONDS)
        return Result(max(0.1, min(watch.look_at, watch.probe_at) - world.clock()))

    def look_now(self, tenant: str) -> None:
        """Something that is guarded has changed."""
        if tenant in self._watches:
            self._watches[tenant].look_at = 0.0

    def _spec(self, tenant: Obj | None) -> TenantSpec | None:
        """Of a tenant that has something of its own to watch over."""
        if tenant is None:
            return None
        try:
            spec = self.world.tenant_spec(tenant)
        except SpecError:
            return None
        return spec if spec.tier.dedicated else None

    async def _look(self, tenant: Obj, spec: TenantSpec, pool: Pool, ctx: Context) -> None:
        """All that needs no probe."""
        world, name = self.world, tenant["metadata"]["name"]
        held = await self.looker.held(name, ctx.client)
        found = await self.looker.look(tenant, spec, held, ctx.client)
        reports = await self.looker.replicas(pool)
        at = world.evidence.now()
        found += engines(tenant["metadata"]["uid"], reports, at)
        wanted = sorted(set(routed_names(world.tenant(name) or tenant, pool.name)))
        found.append(("AdapterIntegrity", "pages", checks.integrity(wanted, tables(reports), at)))
        asked = await self.door.look(adapter_names(world.tenant(name) or tenant, pool.name))
        if asked is not None:
            found.append(("AdapterAccess", "door", asked))
        if gate.is_secured(spec):
            answered = {replica: report is not None for replica, report in reports.items()}
            seen = await strangers.look(self.looker.urls(pool), answered, at)
            found.append(("EncryptionInTransit", "handshake", seen))
        found = [entry for entry in found if spec.tier in GUARANTEES[entry[0]]]
        world.evidence.record_all(subject_of(name), found)
        for guarantee, _, finding in found:
            if finding.holds is False:
                note = f"{guarantee}: {finding.reason}"
                ctx.recorder.event(tenant, "IsolationBroken", note, action="Observe", type="Warning")

    def _broken(self, tenant: str) -> bool:
        """Whether something is broken that another look may find whole; a probe has times of its own."""
        page = self.world.evidence.page(subject_of(tenant))
        seen = page.findings.values() if page is not None else ()
        return any(f.holds is False for found in seen for aspect, f in found.items() if aspect != "probe")

    async def _begin(self, tenant: Obj, spec: TenantSpec, pool: Pool, ctx: Context) -> Round | None:
        """A new round, unless there is nothing to probe from or with."""
        world, name = self.world, tenant["metadata"]["name"]
        await self.prober.sweep(name, ctx.client)
        held = sorted(node["metadata"]["name"] for node in await self.looker.held(name, ctx.client))
        image = ctx.config.evidence.image
        if image is None or not held:
            why = "no image for probes is configured" if image is None else "the tenant holds no node"
            for guarantee in ("NetworkIsolation", "NoEgress"):
                self._record(tenant, spec, guarantee, Finding(None, why, world.evidence.now()), ctx)
            return None
        targets = tuple(await world.targets(ctx.client))
        return Round(tuple(held), targets, image, self._runtime_class(pool), world.clock())

    async def _conclude(self, tenant: Obj, spec: TenantSpec, over: Round, ctx: Context) -> Finding:
        world, name = self.world, tenant["metadata"]["name"]
        control = await world.control(over.targets)
        probes = [over.told[node] for node in over.nodes]
        at = world.evidence.now()

        def judged(egress: list[str]) -> Finding:
            return judge(over.targets, probes, control=control, ports=probe.PORTS, egress=egress, at=at)

        finding = judged(spec.isolation.egress)
        self._record(tenant, spec, "NetworkIsolation", finding, ctx)
        self._record(tenant, spec, "NoEgress", judged([]), ctx)
        if over.runtime_class is not None:
            kernels = {
                node["metadata"]["name"]: _kernel(node) for node in await self.looker.held(name, ctx.client)
            }
            seen = [
                checks.kernel(
                    inside.node, over.runtime_class, kernels.get(inside.node, ""), inside.kernel, at
                )
                for inside in probes
            ]
            worst = min(seen, key=lambda one: (one.holds is not False, one.holds is not None))
            self._record(tenant, spec, "KernelIsolation", worst, ctx)
        return finding

    def _record(self, tenant: Obj, spec: TenantSpec, guarantee: str, finding: Finding, ctx: Context) -> None:
        """What a probe showed, of a guarantee that the tier includes."""
        if spec.tier not in GUARANTEES[guarantee]:
            return
        self.world.evidence.record(subject_of(tenant["metadata"]["name"]), guarantee, "probe", finding)
        if finding.holds is False:
            note = f"{guarantee}: {finding.reason}"
            ctx.recorder.event(tenant, "IsolationBroken", note, action="Probe", type="Warning")

    def _runtime_class(self, pool: Pool) -> str | None:
        """What the engines of the tenant run with; the probe must see what they see."""
        for lane in pool.spec.lanes:
            workload: Any = self.world.workload(pool, lane.name) or {}
            found = workload.get("spec", {}).get("template", {}).get("spec", {}).get("runtimeClassName")
            if found:
                return str(found)
        return None

    async def _write(self, tenant: Obj, ctx: Context) -> None:
        wanted = self.world.evidence.report(subject_of(tenant["metadata"]["name"]), tenant)
        if wanted is not None:
            try:
                await ctx.ensure(tenant, [wanted])
            except NameTaken as taken:
                ctx.recorder.event(tenant, "NameTaken", str(taken), action="Report", type="Warning")
            except Forbidden:
                # Nothing is made in a namespace that is on its way out; any other refusal is a fault.
                space = await ctx.live(NAMESPACE, Key("", wanted["metadata"]["namespace"]))
                if space is not None and not is_deleting(space):
                    raise


def _kernel(node: Obj) -> str:
    return str(((node.get("status") or {}).get("nodeInfo") or {}).get("kernelVersion", ""))
