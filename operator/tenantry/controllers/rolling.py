"""Rolls the lanes of a pool onto their wanted revisions: sees the pods, asks the pure plan, does what it says."""

from __future__ import annotations

from dataclasses import dataclass

from tenantry.api.pool import Lane, LaneName
from tenantry.cluster import Key, Obj, is_deleting, key_of, uid_of
from tenantry.desired import upgrade
from tenantry.desired.revision import History
from tenantry.desired.upgrade import PodState, Stage
from tenantry.engines import EngineError, ReplicaReport

from . import pods
from .farewell import Farewells
from .world import Pool, World

LOOK_SECONDS = 1.0
"""While something is on its way that no event tells: a drain, a proof."""

WAIT_SECONDS = 30.0
"""While events will tell: only the deadline is looked at."""

MOST_RESTARTS = 3
"""A new pod whose containers ended this often fails its revision."""


@dataclass
class _Seen:
    """Of one pod: since when it has been on its way to answering, and since when this very process of it answers."""

    first: float
    process: str | None = None
    since: float | None = None


@dataclass(frozen=True)
class Progress:
    """How a lane stands. `empty`: it has no replicas to judge by. `again_in`: seconds until the next look, None when
    events will tell."""

    complete: bool = False
    empty: bool = False
    failure: str = ""
    again_in: float | None = None


class Rolling:
    """All lanes of all pools; remembers what it saw of the pods that are there."""

    def __init__(self, world: World, farewells: Farewells) -> None:
        self.world = world
        self.farewells = farewells
        self._seen: dict[tuple[str, LaneName], dict[str, _Seen]] = {}

    async def step(self, pool: Pool, lane: Lane, history: History) -> Progress:
        """One step of the lane; nothing is asked or done where every pod runs a revision that has proven itself."""
        workload = self.world.workload(pool, lane.name)
        status = (workload or {}).get("status") or {}
        update = status.get("updateRevision")
        if workload is None or not update:
            return Progress()
        if int(status.get("observedGeneration", 0)) < int(workload["metadata"].get("generation", 0)):
            return Progress()  # the StatefulSet's controller has not seen the template yet
        self.farewells.look(pool, lane)
        replicas = [
            replica
            for replica in self.world.lane_replicas(pool, lane.name)
            if Key(pool.name, replica) not in self.world.retiring
        ]
        if not replicas:
            return Progress(empty=True)
        present = [pod for name in replicas if (pod := self.world.pod(pool, name)) is not None]
        outdated = any(pods.revision(pod) != update for pod in present)
        leaving = any(self.farewells.stage(pod) is not Stage.SERVING for pod in present)
        if not history.rolling and not outdated and not leaving:
            self._seen.pop((pool.uid, lane.name), None)
            return Progress(complete=True)
        before = self._seen.get((pool.uid, lane.name), {})
        seen = {uid: before.get(uid) or _Seen(self.world.clock()) for uid in map(uid_of, present)}
        self._seen[pool.uid, lane.name] = seen
        states = [
            await self._state(
                pool, lane, history, pod, current=pods.revision(pod) == update, seen=seen[uid_of(pod)]
            )
            for pod in present
        ]
        rules = pool.spec.upgrade
        canaries = rules.canary_replicas if history.rolling and history.stable is not None else 0
        plan = upgrade.plan(states, len(replicas), canaries=canaries, max_unavailable=rules.max_unavailable)
        if plan.failure:
            return Progress(failure=plan.failure)
        by_name = {key_of(pod).name: pod for pod in present}
        for name in plan.leave:
            self.farewells.leave(pool, by_name[name])
        for name in plan.drain:
            await self.farewells.drain(pool, by_name[name])
        for name in plan.delete:
            await self.farewells.end(pool, by_name[name])
        if plan.complete:
            return Progress(complete=True)
        on_the_clock = any(
            state.stage is not Stage.SERVING or state.ready != state.proven for state in states
        )
        return Progress(again_in=LOOK_SECONDS if on_the_clock or plan.leave else WAIT_SECONDS)

    async def _state(
        self, pool: Pool, lane: Lane, history: History, pod: Obj, *, current: bool, seen: _Seen
    ) -> PodState:
        name, rules = key_of(pod).name, pool.spec.upgrade
        ending, ready = is_deleting(pod), pods.is_ready(pod)
        stage = self.farewells.stage(pod)
        if current and stage is Stage.LEAVING:
            self.farewells.stay(pool, pod)
            stage = Stage.SERVING
        report = await self._ask(pool, pod) if current and not ending and stage is Stage.SERVING else None
        if current and report is not None and report.draining:
            current = False  # drained for a revision that nobody wants any more: it takes requests again as a new pod
        answers = _answers(pool, report) if self.world.driver is not None else True
        process = pods.incarnation(pod)
        if not current or not ready or not answers:
            if seen.since is not None:
                seen.first, seen.since = self.world.clock(), None  # it did answer: the deadline counts anew
        elif seen.process != process or seen.since is None:
            seen.process, seen.since = process, self.world.clock()
        replacing = history.rolling and history.stable is not None  # else there is nothing to go back to
        proven = seen.since is not None and self.world.clock() - seen.since >= rules.canary_seconds
        return PodState(
            name=name,
            current=current,
            ready=ready and (answers or not current),
            proven=proven,
            stage=stage,
            over=stage is not Stage.SERVING and await self.farewells.over(pool, lane, pod),
            ending=ending,
            fault=""
            if proven or ending or not current or not replacing
            else self._fault(pool, pod, seen, report),
        )

    def _fault(self, pool: Pool, pod: Obj, seen: _Seen, report: ReplicaReport | None) -> str:
        if pods.restarts(pod) >= MOST_RESTARTS:
            return f"its containers ended {pods.restarts(pod)} times"
        if report is not None and report.ready and not _answers(pool, report):
            return f"it serves `{report.model.name}` {report.model.digest}, not the pool's base model"
        limit = pool.spec.upgrade.progress_deadline_seconds
        if self.world.clock() - seen.first < limit:
            return ""
        return f"it did not come to serve within {limit} s ({pods.waits_for(pod) or 'it is not ready'})"

    async def _ask(self, pool: Pool, pod: Obj) -> ReplicaReport | None:
        ip = pods.address(pod)
        if self.world.driver is None or ip is None or not pods.is_running(pod):
            return None
        try:
            return await self.world.driver.observe(self.world.peer(pool, key_of(pod).name, ip))
        except EngineError:
            return None


def _answers(pool: Pool, report: ReplicaReport | None) -> bool:
    """Whether the replica itself says that it serves this pool's model."""
    if report is None or not report.ready:
        return False
    wanted = pool.spec.base_model
    return report.model.name == wanted.name and wanted.digest in (None, report.model.digest)
