"""AdapterPool: its engines' StatefulSets, Services and budgets as the spec says, scaled and rolled with care."""

from __future__ import annotations

from collections import Counter

from tenantry.api import names
from tenantry.api.pool import Lane, LaneName
from tenantry.cluster import (
    ADAPTER_POOL,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    STATEFUL_SET,
    Key,
    NameTaken,
    Obj,
    is_deleting,
    spec_version,
)
from tenantry.desired import engine, pool_status, revision, scaling
from tenantry.desired.conditions import stall, wire
from tenantry.desired.problems import SpecError
from tenantry.desired.revision import History
from tenantry.desired.tenant import dedicated_to
from tenantry.runtime.controller import DONE, Context, Result

from . import pods
from .farewell import Farewells
from .rolling import LOOK_SECONDS, Rolling
from .world import Pool, World

OWNED = (STATEFUL_SET, SERVICE, POD_DISRUPTION_BUDGET)
REPLICAS = ("f:spec", "f:replicas")


class PoolReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self.farewells = Farewells(world)
        self.rolling = Rolling(world, self.farewells)
        self._taken_back: Counter[tuple[str, int, LaneName]] = Counter()
        world.setup.first.append(self._begin)

    def _begin(self) -> None:
        """No tenant may come to a replica that an earlier leader was about to take away."""
        for pool in self.world.pools():
            for lane in pool.spec.lanes:
                self._retire(pool, lane, scaling.decide(lane.replicas, self.world.workload(pool, lane.name)))

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        obj = self.world.store.get(ADAPTER_POOL, key)
        if obj is None:
            self.world.forget_spec("AdapterPool", key)
            self.farewells.forget(key.name)
            return DONE
        if is_deleting(obj):
            return DONE
        pool = self.world.pool(key.name)
        if pool is None:
            await ctx.set_status(obj, self._refused(obj))
            return DONE
        dedicated = None
        if pool.tenant is not None:
            tenant = self.world.tenant(pool.tenant)
            if tenant is None or is_deleting(tenant):
                return DONE  # the tenant's deletion takes the pool along
            dedicated = self._dedicated(pool, tenant)
            if dedicated is None:
                return DONE  # it is not known for what: nothing runs yet
        scales = {lane.name: await self._scale(pool, lane, ctx) for lane in pool.spec.lanes}
        facts = self._facts(pool, dedicated, {name: scale.send for name, scale in scales.items()})
        histories = self._histories(pool, facts)
        objects = engine.render(pool.spec, facts, histories)
        try:
            await ctx.ensure(obj, objects)
        except NameTaken as taken:
            await ctx.set_status(obj, self._status(pool, facts, histories, str(taken)))
            return DONE
        await ctx.prune(obj, OWNED, objects)
        waits = [LOOK_SECONDS] if any(self._shrinks(scale) for scale in scales.values()) else []
        steps = {
            lane.name: await self.rolling.step(pool, lane, histories[lane.name]) for lane in pool.spec.lanes
        }
        waits += [step.again_in for step in steps.values() if step.again_in is not None]
        failure = next((step.failure for step in steps.values() if step.failure), "")
        after = histories
        if failure:
            after = {
                lane.name: _failed(histories[lane.name], engine.asked(pool.spec, facts, lane), failure)
                for lane in pool.spec.lanes
            }
            ctx.recorder.event(obj, "UpgradeFailed", failure, action="Upgrade", type="Warning")
        elif any(step.complete for step in steps.values()) and all(
            step.complete or step.empty for step in steps.values()
        ):
            after = {name: revision.settle(history) for name, history in histories.items()}
        if after != histories:
            histories = after
            await ctx.ensure(obj, engine.render(pool.spec, facts, histories))
            waits.append(LOOK_SECONDS)
        await ctx.set_status(obj, self._status(pool, facts, histories))
        return Result(min(waits)) if waits else DONE

    def _dedicated(self, pool: Pool, tenant: Obj) -> engine.DedicatedTo | None:
        """For whom and how: by the tenant's spec, and as it stands while that is refused or asks for a shared tier."""
        try:
            spec = self.world.tenant_spec(tenant)
        except SpecError:
            spec = None
        if spec is not None and spec.tier.dedicated:
            return dedicated_to(tenant["metadata"]["name"], spec, self.world.config)
        kept = [revision.read(self.world.workload(pool, lane.name)).current for lane in pool.spec.lanes]
        found = [revision.asked(current) for current in kept if current is not None]
        return next((asked.dedicated for asked in found if asked is not None), None)

    def _facts(
        self, pool: Pool, dedicated: engine.DedicatedTo | None, replicas: dict[LaneName, int | None]
    ) -> engine.PoolFacts:
        config = self.world.config
        return engine.PoolFacts(
            name=pool.name,
            uid=pool.uid,
            namespace=pool.namespace,
            image=config.engine_image,
            pull_policy=config.image_pull_policy,
            region_label=config.region_label,
            replicas=replicas,
            dedicated=dedicated,
        )

    # what pods are made from

    def _histories(self, pool: Pool, facts: engine.PoolFacts) -> dict[LaneName, History]:
        """What each lane is to run now. Where a lane failed, the others go back with it."""
        found: dict[LaneName, History] = {}
        for lane in pool.spec.lanes:
            kept = revision.read(self.world.workload(pool, lane.name))
            found[lane.name] = revision.advance(
                kept, engine.asked(pool.spec, facts, lane), engine.template(pool.spec, facts, lane)
            )
        failed = next((history for history in found.values() if history.failed is not None), None)
        if failed is None:
            return found
        return {
            lane.name: _failed(found[lane.name], engine.asked(pool.spec, facts, lane), failed.why)
            for lane in pool.spec.lanes
        }

    # how many

    async def _scale(self, pool: Pool, lane: Lane, ctx: Context) -> scaling.Scale:
        live = self.world.workload(pool, lane.name)
        known = (*spec_version(pool.obj), lane.name)
        count = self._taken_back[known]
        scale = scaling.decide(lane.replicas, live, taken_back=count)
        retiring = self._retire(pool, lane, scale)
        if retiring and await self._emptied(pool, lane, retiring):
            scale = scaling.decide(lane.replicas, live, taken_back=count, emptied=True)
        if scale.give_up and live is not None:
            await ctx.client.give_up(live, REPLICAS)
        if scale.taken_back:
            self._taken_back[known] += 1
        return scale

    def _retire(self, pool: Pool, lane: Lane, scale: scaling.Scale) -> list[str]:
        """The replicas that are to go, from now on for everybody."""
        replicas = self.world.lane_replicas(pool, lane.name)
        retiring = replicas[scale.target :] if self._shrinks(scale) else []
        self.farewells.retire(pool, lane, retiring)
        return retiring

    @staticmethod
    def _shrinks(scale: scaling.Scale) -> bool:
        return scale.send is not None and scale.send > scale.target

    async def _emptied(self, pool: Pool, lane: Lane, retiring: list[str]) -> bool:
        """Send the last replicas on their way; whether all of them have come to its end."""
        present = [pod for name in retiring if (pod := self.world.pod(pool, name)) is not None]
        return all([await self.farewells.further(pool, lane, pod) for pod in present])

    # status

    def _status(
        self, pool: Pool, facts: engine.PoolFacts, histories: dict[LaneName, History], taken: str = ""
    ) -> Obj:
        views = [self._view(pool, facts, lane, histories[lane.name]) for lane in pool.spec.lanes]
        declared, registered = self._adapters(pool)
        return {
            "namespace": pool.namespace,
            "lanes": [view.wire() for view in views],
            "tenants": len(self.world.placements.tenants_on(pool.name)),
            "adapters": {"declared": declared, "registered": registered},
            "conditions": wire(
                pool_status.verdicts(
                    pool.obj.get("status") or {},
                    pool.spec,
                    views,
                    stall("NameTaken", taken) if taken else None,
                )
            ),
        }

    def _view(
        self, pool: Pool, facts: engine.PoolFacts, lane: Lane, history: History
    ) -> pool_status.LaneView:
        workload = self.world.workload(pool, lane.name)
        replicas = self.world.lane_replicas(pool, lane.name)
        update = ((workload or {}).get("status") or {}).get("updateRevision")
        present = [pod for name in replicas if (pod := self.world.pod(pool, name)) is not None]
        known = (*spec_version(pool.obj), lane.name)
        current = history.current
        return pool_status.LaneView(
            name=lane.name.value,
            workload=names.lane_workload(pool.name, lane.name),
            replicas=len(replicas),
            ready=sum(pods.is_ready(pod) for pod in present),
            updated=sum(pods.revision(pod) == update for pod in present),
            outdated=sum(pods.revision(pod) != update for pod in present) if update else 0,
            rolling=history.rolling and history.stable is not None,
            failure=history.why if history.failed is not None else "",
            kept=current is not None and current.template != engine.template(pool.spec, facts, lane),
            scaling=scaling.remark(lane.replicas, workload, taken_back=self._taken_back[known])
            if workload is not None
            else "",
        )

    def _adapters(self, pool: Pool) -> tuple[int, int]:
        """(declared, registered): names over the whole pool, and those verified wherever they are declared."""
        declared: dict[str, bool] = {}
        for report in self.world.observations.reported(pool.name).values():
            for entry in report.adapters:
                declared[entry.name] = declared.get(entry.name, True) and entry.state.verified
        return len(declared), sum(declared.values())

    def _refused(self, obj: Obj) -> Obj:
        """The stored status with the verdict: what runs, runs on."""
        try:
            self.world.pool_spec(obj)
            message = ""
        except SpecError as error:
            message = str(error)
        stored = obj.get("status") or {}
        kept = {
            name: stored[name] for name in ("namespace", "lanes", "tenants", "adapters") if name in stored
        }
        return {**kept, "conditions": wire(pool_status.refused(stored, message))}


def _failed(history: History, asked: revision.Asked, why: str) -> History:
    """The lane's history once the pool's upgrade failed; a lane that the upgrade does not concern stays as it is."""
    if history.failed is not None or (
        history.stable is not None and revision.same(history.stable.asked, asked)
    ):
        return history
    return revision.fail(history, asked, why)
