"""A pod's way out, step by step: its tenants find another replica, it takes nothing new, ends what it has, is deleted.

In memory. After a restart of the operator a pod that was drained is not ready, and its own word says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenantry.api.pool import Lane
from tenantry.cluster import POD, Key, Obj, key_of, uid_of
from tenantry.desired.upgrade import Stage
from tenantry.engines import EngineError

from . import pods
from .placements import stored_lanes
from .world import Pool, World

GATEWAY_SECONDS = 3.0
"""After this time no gateway sends a draining replica anything more: they look several times a second."""


@dataclass
class _Way:
    replica: Key
    stage: Stage
    since: float


class Farewells:
    """The pods of all pools that are on their way out, by uid."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._ways: dict[str, _Way] = {}

    def stage(self, pod: Obj) -> Stage:
        way = self._ways.get(uid_of(pod))
        return way.stage if way is not None else Stage.SERVING

    def look(self, pool: Pool, lane: Lane) -> None:
        """Forget pods of the lane that somebody else has ended meanwhile."""
        for replica in self.world.lane_replicas(pool, lane.name):
            pod = self.world.pod(pool, replica)
            uid = uid_of(pod) if pod is not None else ""
            key = Key(pool.name, replica)
            for gone in [u for u, way in self._ways.items() if way.replica == key and u != uid]:
                del self._ways[gone]
            if uid not in self._ways:
                self._back(key)

    async def over(self, pool: Pool, lane: Lane, pod: Obj) -> bool:
        """Whether the pod's stage has come to its end, by itself or by `drainSeconds`."""
        way = self._ways.get(uid_of(pod))
        if way is None:
            return False
        waited = self.world.clock() - way.since
        limit = float(pool.spec.upgrade.drain_seconds)
        if way.stage is Stage.LEAVING:
            return waited >= limit or not self._needed(pool, lane, key_of(pod).name)
        if waited < GATEWAY_SECONDS:
            return False
        return waited >= limit or await self._idle(pool, pod)

    def leave(self, pool: Pool, pod: Obj) -> None:
        """Its tenants are to find another replica, those that have no other one."""
        key = Key(pool.name, key_of(pod).name)
        self._ways[uid_of(pod)] = _Way(key, Stage.LEAVING, self.world.clock())
        self.world.leaving.add(key)
        self._wake(key)

    async def drain(self, pool: Pool, pod: Obj) -> None:
        """It takes no new request from now on."""
        key = Key(pool.name, key_of(pod).name)
        self._ways[uid_of(pod)] = _Way(key, Stage.DRAINING, self.world.clock())
        ip = pods.address(pod)
        if self.world.driver is None or ip is None:
            return
        try:
            await self.world.driver.drain(self.world.peer(pool, key.name, ip))
        except EngineError:
            return  # SIGTERM drains it too

    async def further(self, pool: Pool, lane: Lane, pod: Obj) -> bool:
        """One stage further where it is time; whether the pod has drained, so that it may go."""
        stage = self.stage(pod)
        if stage is Stage.SERVING:
            self.leave(pool, pod)
        elif await self.over(pool, lane, pod):
            if stage is Stage.DRAINING:
                return True
            await self.drain(pool, pod)
        return False

    async def end(self, pool: Pool, pod: Obj) -> None:
        await self.world.setup.client.delete(POD, key_of(pod), uid=uid_of(pod))
        self.stay(pool, pod)

    def stay(self, pool: Pool, pod: Obj) -> None:
        """It leaves no more, or is gone: the next pod of that name is a place like any other."""
        self._ways.pop(uid_of(pod), None)
        self._back(Key(pool.name, key_of(pod).name))

    def retire(self, pool: Pool, lane: Lane, replicas: Sequence[str]) -> None:
        """Exactly these replicas of the lane are not to come back."""
        known = {Key(pool.name, replica) for replica in self.world.lane_replicas(pool, lane.name)}
        before, after = self.world.retiring & known, {Key(pool.name, replica) for replica in replicas}
        self.world.retiring -= before - after
        self.world.retiring |= after
        for key in before ^ after:
            self._wake(key)

    def forget(self, pool: str) -> None:
        """The pool is no more."""
        for uid in [uid for uid, way in self._ways.items() if way.replica.namespace == pool]:
            del self._ways[uid]
        for replicas in (self.world.leaving, self.world.retiring):
            replicas -= {key for key in replicas if key.namespace == pool}

    def _back(self, replica: Key) -> None:
        if replica in self.world.leaving:
            self.world.leaving.discard(replica)
            self._wake(replica)

    def _wake(self, replica: Key) -> None:
        placed = self.world.placements.tenants_of(replica) | self.world.links.routed_to(replica)
        self.world.wake_tenants(sorted(placed))

    def _needed(self, pool: Pool, lane: Lane, replica: str) -> bool:
        """Whether a tenant has no other replica of the lane that is ready, though there is one."""
        away = self.world.leaving | self.world.retiring
        others = {
            other
            for other in self.world.lane_replicas(pool, lane.name)
            if other != replica and Key(pool.name, other) not in away and self.world.is_ready(pool, other)
        }
        if not others:
            return False  # nowhere to go
        for name in self.world.links.routed_to(Key(pool.name, replica)):
            tenant = self.world.tenant(name)
            routed = stored_lanes(tenant, pool.name, lane.name) if tenant is not None else frozenset()
            if replica in routed and not routed & others:
                return True
        return False

    async def _idle(self, pool: Pool, pod: Obj) -> bool:
        """Whether the replica itself says that it has no request left."""
        ip = pods.address(pod)
        if self.world.driver is None or ip is None:
            return True
        try:
            report = await self.world.driver.observe(self.world.peer(pool, key_of(pod).name, ip))
        except EngineError:
            return not pods.is_running(pod)
        return report.requests == 0
