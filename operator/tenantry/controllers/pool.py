"""AdapterPool: its engines' StatefulSets, Services and budgets as the spec says, rolled one pod at a time."""

from __future__ import annotations

from dataclasses import dataclass

from tenantry.api import names
from tenantry.api.pool import Lane, LaneName
from tenantry.cluster import (
    ADAPTER_POOL,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    STATEFUL_SET,
    Key,
    NameTaken,
    Obj,
    is_deleting,
    key_of,
    uid_of,
)
from tenantry.desired import engine
from tenantry.desired.conditions import Verdict, no, not_ready, progress, settled, stall, wire, yes
from tenantry.desired.problems import SpecError
from tenantry.engines import EngineError
from tenantry.runtime.controller import DONE, Context, Result

from . import pods
from .world import Pool, World

DRAIN_SECONDS = 3.0
"""Between draining a replica and deleting its pod: gateways look this often and send nothing more by then."""

OWNED = (STATEFUL_SET, SERVICE, POD_DISRUPTION_BUDGET)


class PoolReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self._drained: dict[str, float] = {}

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        obj = self.world.store.get(ADAPTER_POOL, key)
        if obj is None:
            self.world.forget_spec("AdapterPool", key)
            return DONE
        if is_deleting(obj):
            return DONE
        pool = self.world.pool(key.name)
        if pool is None:
            await ctx.set_status(obj, self._refused(obj))
            return DONE
        region = None
        if pool.tenant is not None:
            tenant = self.world.tenant(pool.tenant)
            if tenant is None or is_deleting(tenant):
                return DONE  # the tenant's deletion takes the pool along
            region = ((tenant.get("spec") or {}).get("isolation") or {}).get("region")
        objects = engine.render(pool.spec, self._facts(pool, region))
        try:
            await ctx.ensure(obj, objects)
        except NameTaken as taken:
            await ctx.set_status(obj, self._status(pool, stall("NameTaken", str(taken))))
            return DONE
        await ctx.prune(obj, OWNED, objects)
        rolling = [await self._roll(pool, lane) for lane in pool.spec.lanes]
        await ctx.set_status(obj, self._status(pool))
        waits = [wait for wait in rolling if wait is not None]
        return Result(min(waits)) if waits else DONE

    def _facts(self, pool: Pool, region: str | None) -> engine.PoolFacts:
        config = self.world.config
        return engine.PoolFacts(
            name=pool.name,
            uid=pool.uid,
            namespace=pool.namespace,
            image=config.engine_image,
            pull_policy=config.image_pull_policy,
            region_label=config.region_label,
            replicas={
                lane.name: engine.replicas_to_send(lane.replicas.min, self.world.workload(pool, lane.name))
                for lane in pool.spec.lanes
            },
            dedicated=None if pool.tenant is None else engine.DedicatedTo(pool.tenant, region),
        )

    # rolling

    async def _roll(self, pool: Pool, lane: Lane) -> float | None:
        """Replace outdated pods within `maxUnavailable`; seconds until the next step, None when none is due."""
        workload = self.world.workload(pool, lane.name)
        status = (workload or {}).get("status") or {}
        update = status.get("updateRevision")
        if workload is None or not update:
            return None
        if int(status.get("observedGeneration", 0)) < int(workload["metadata"].get("generation", 0)):
            return None  # the StatefulSet's controller has not seen the template yet
        replicas = self.world.lane_replicas(pool, lane.name)
        present = {name: pod for name in replicas if (pod := self.world.pod(pool, name)) is not None}
        outdated = {n: p for n, p in present.items() if pods.revision(p) != update and not is_deleting(p)}
        if not outdated:
            return None
        broken = [
            name
            for name in outdated
            if not pods.is_ready(present[name]) and not self._draining(present[name])
        ]
        for name in broken:
            await self._delete(outdated[name])  # it serves nobody already
        serving = sum(name in present and pods.is_ready(present[name]) for name in replicas)
        waits = []
        budget = pool.spec.upgrade.max_unavailable - (len(replicas) - serving)
        for name, pod in sorted(outdated.items()):
            if name in broken:
                continue
            since = self._drained.get(uid_of(pod))
            if since is not None:
                left = DRAIN_SECONDS - (self.world.clock() - since)
                if left <= 0:
                    await self._delete(pod)
                else:
                    waits.append(left)
            elif budget > 0:
                budget -= 1
                await self._drain(pool, name, pod)
                waits.append(DRAIN_SECONDS)
        return min(waits) if waits else None

    def _draining(self, pod: Obj) -> bool:
        return uid_of(pod) in self._drained

    async def _drain(self, pool: Pool, replica: str, pod: Obj) -> None:
        self._drained[uid_of(pod)] = self.world.clock()
        ip = pods.address(pod)
        if self.world.driver is None or ip is None:
            return
        try:
            await self.world.driver.drain(self.world.peer(pool, replica, ip))
        except EngineError:
            return  # SIGTERM drains it too

    async def _delete(self, pod: Obj) -> None:
        await self.world.setup.client.delete(POD, key_of(pod), uid=uid_of(pod))
        self._drained.pop(uid_of(pod), None)

    # status

    def _status(self, pool: Pool, halted: tuple[Verdict, Verdict] | None = None) -> Obj:
        lanes: list[Obj] = []
        for lane in pool.spec.lanes:
            replicas = self.world.lane_replicas(pool, lane.name)
            lanes.append(
                {
                    "name": lane.name.value,
                    "statefulSet": names.lane_workload(pool.name, lane.name),
                    "replicas": len(replicas),
                    "readyReplicas": sum(self.world.is_ready(pool, replica) for replica in replicas),
                }
            )
        counts = _Counts(
            wanted=sum(lane["replicas"] for lane in lanes),
            ready=sum(lane["readyReplicas"] for lane in lanes),
            empty=tuple(lane["name"] for lane in lanes if not lane["readyReplicas"]),
            outdated=sum(self._outdated(pool, lane.name) for lane in pool.spec.lanes),
        )
        declared, registered = self._adapters(pool)
        return {
            "namespace": pool.namespace,
            "lanes": lanes,
            "tenants": len(self.world.placements.tenants_on(pool.name)),
            "adapters": {"declared": declared, "registered": registered},
            "conditions": wire(_verdicts(pool.obj, halted, counts)),
        }

    def _outdated(self, pool: Pool, lane: LaneName) -> int:
        workload = self.world.workload(pool, lane)
        update = ((workload or {}).get("status") or {}).get("updateRevision")
        present = (self.world.pod(pool, replica) for replica in self.world.lane_replicas(pool, lane))
        return sum(pod is not None and pods.revision(pod) != update for pod in present) if update else 0

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
        verdicts = [
            *stall("InvalidSpec", message),
            not_ready(stored, "InvalidSpec", message, provisioning=False),
        ]
        return {**kept, "conditions": wire(verdicts)}


@dataclass(frozen=True)
class _Counts:
    """Replicas over all lanes; `empty` are lanes without a ready one, `outdated` run an older template."""

    wanted: int
    ready: int
    empty: tuple[str, ...]
    outdated: int


def _verdicts(obj: Obj, halted: tuple[Verdict, Verdict] | None, counts: _Counts) -> list[Verdict]:
    stored = obj.get("status") or {}
    message = f"{counts.ready} of {counts.wanted} replicas are ready"
    if halted is not None:
        summary = not_ready(stored, halted[1].reason, halted[1].message, provisioning=False)
        progressing = halted
    elif counts.wanted == 0:
        summary = not_ready(stored, "ScaledToZero", "the pool has no replicas", provisioning=False)
        progressing = settled()
    else:
        lanes = f"no replica is ready in lane {', '.join(counts.empty)}"
        summary = (
            not_ready(stored, "NoReplicaReady", lanes, provisioning=True)
            if counts.empty
            else yes("Ready", "Serving", message)
        )
        progressing = settled()
    if halted is None and counts.outdated:
        progressing = progress("Rolling", f"{counts.outdated} replicas run an older template")
    elif halted is None and counts.ready < counts.wanted:
        progressing = progress("Starting", message)
    return [summary, *progressing, _degraded(counts, message)]


def _degraded(counts: _Counts, message: str) -> Verdict:
    if counts.ready == counts.wanted:
        return no("Degraded", "AllReady" if counts.wanted else "ScaledToZero", message)
    return (
        yes("Degraded", "ReplicasMissing", message) if counts.ready else no("Degraded", "NotServing", message)
    )
