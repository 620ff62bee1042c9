"""The one declarer of each replica: tells it its whole set of adapters, has missing bytes sent, reports what it holds.

Keys are `Key(pool, pod)`. Tenant and Adapter workers only mark them dirty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from tenantry.api.pool import EngineType
from tenantry.cluster import Key, is_deleting
from tenantry.engines import (
    AdapterDeclaration,
    ArtifactState,
    EngineError,
    Pull,
    PushState,
    Replica,
    ReplicaReport,
)
from tenantry.engines import Fence as EngineFence
from tenantry.engines.base import AdapterState
from tenantry.promotion.machine import Fault
from tenantry.promotion.retire import retire
from tenantry.runtime.controller import DONE, Context, Result

from . import pods
from .observations import Observation
from .wanted import Needs, Wanted
from .world import Pool, World

STEADY_SECONDS = 30.0
PENDING_SECONDS = 0.5
FAILED_SECONDS = 10.0
TRANSFERS_AT_ONCE = 8


@dataclass
class _Memory:
    """What the controller remembers of one replica between reconciles."""

    last_needed: dict[str, float] = field(default_factory=dict)
    drains: dict[str, float] = field(default_factory=dict)
    failures: int = 0


class ReplicaReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self._memory: dict[Key, _Memory] = {}
        self._needs = Needs(world)

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        began = self.world.clock()
        try:
            return await self._reconcile(key, ctx)
        finally:
            self.world.rest_replica(key, self.world.clock() - began)

    async def _reconcile(self, key: Key, ctx: Context) -> Result:
        world = self.world
        pool = world.pool(key.namespace)
        pod = world.pod(pool, key.name) if pool is not None else None
        process = pods.incarnation(pod) if pod is not None else None
        ip = pods.address(pod) if pod is not None else None
        if pool is None or pod is None or is_deleting(pod) or process is None or ip is None:
            self._forget(key, pool, gone=pod is None)
            return DONE
        if pool.spec.lora is None or world.driver is None:
            return DONE
        memory = self._memory.setdefault(key, _Memory())
        everything = self._needs.on(pool, key.name)
        wanted, crowded = _fitting(everything, pool.spec.lora.max_registered)
        seen = world.observations.get(key, process)
        peer = world.peer(pool, key.name, ip)
        try:
            report = await world.driver.observe(peer)
            kept, again_in = self._retiring(memory, wanted, report)
            declared = {**kept, **{name: declaration(entry, pool) for name, entry in wanted.items()}}
            if seen is None or seen.report is None or differs(report, declared):
                drain = max([60, *(int(memory.drains.get(entry.name, 0)) for entry in report.adapters)])
                fence = ctx.fence()
                report = await world.driver.declare(
                    peer, list(declared.values()), EngineFence(fence.epoch, fence.counter), drain
                )
        except EngineError as error:
            memory.failures += 1
            self._publish(
                key, pool, Observation(process, None, Fault("ReplicaUnreachable", str(error))), everything
            )
            return Result(1.0 if memory.failures < 10 else 5.0)
        memory.failures = 0
        faults, pending = await self._fetch(peer, wanted, report)
        self._publish(key, pool, Observation(process, report, None, {**crowded, **faults}), everything)
        waits = [STEADY_SECONDS, *([again_in] if again_in is not None else [])]
        if pending:
            waits.append(PENDING_SECONDS)
        elif faults:
            waits.append(FAILED_SECONDS)
        return Result(min(waits))

    def _retiring(
        self, memory: _Memory, wanted: Mapping[str, Wanted], report: ReplicaReport
    ) -> tuple[dict[str, AdapterDeclaration], float | None]:
        """What the replica holds beyond what is wanted and may not forget yet."""
        now = self.world.clock()
        for name, entry in wanted.items():
            memory.last_needed[name] = now
            memory.drains[name] = float(entry.drain_seconds)
        held = {entry.name: entry for entry in report.adapters if entry.state is not AdapterState.DRAINING}
        unneeded = {name: memory.last_needed.setdefault(name, now) for name in held if name not in wanted}
        for name in [name for name in memory.last_needed if name not in held and name not in wanted]:
            del memory.last_needed[name]
            memory.drains.pop(name, None)
        requests = {name: entry.requests for name, entry in held.items()}
        verdict = retire(unneeded, requests, memory.drains, now, self.world.retire_seconds)
        kept = {name: AdapterDeclaration(name, held[name].digest, held[name].tenant) for name in verdict.keep}
        return kept, verdict.again_in

    async def _fetch(
        self, peer: Replica, wanted: Mapping[str, Wanted], report: ReplicaReport
    ) -> tuple[dict[str, Fault], bool]:
        """Have missing bytes pulled and pushed; (what failed, by served name; whether something is on its way)."""
        missing: dict[Pull, list[Wanted]] = {}
        for name, entry in wanted.items():
            held = report.adapter(name)
            if entry.pull is not None and held is not None and held.state is AdapterState.MISSING:
                missing.setdefault(entry.pull, []).append(entry)
        if not missing or self.world.fetcher is None:
            return {}, False
        gate = asyncio.Semaphore(TRANSFERS_AT_ONCE)
        outcomes = await asyncio.gather(
            *(self._transfer(gate, peer, pull, entries) for pull, entries in missing.items())
        )
        faults: dict[str, Fault] = {}
        pending = False
        for (_, entries), fault in zip(missing.items(), outcomes, strict=True):
            pending = pending or fault is None
            faults |= {entry.name: fault for entry in entries if fault is not None}
        return faults, pending

    async def _transfer(
        self, gate: asyncio.Semaphore, peer: Replica, pull: Pull, entries: list[Wanted]
    ) -> Fault | None:
        """The fault of one transfer; None while it goes on."""
        assert self.world.fetcher is not None
        async with gate:
            try:
                transfer = await self.world.fetcher.transfer(pull, [peer])
            except EngineError:
                return None  # the fetcher is away for a while: nothing is wrong with the adapter
        if self.world.observations.put_artifact(pull, transfer):
            self.world.wake_adapters(entry.adapter for entry in entries if entry.adapter is not None)
        if transfer.artifact.state is ArtifactState.FAILED:
            return Fault(transfer.artifact.reason or "SourceUnavailable", transfer.artifact.message)
        push = next((push for push in transfer.replicas if push.name == peer.name), None)
        if push is not None and push.state is PushState.FAILED:
            return Fault("PushFailed", f"{push.reason}: {push.message}")
        return None

    def _publish(self, key: Key, pool: Pool, observation: Observation, wanted: Mapping[str, Wanted]) -> None:
        """Store what was seen; wake whom a difference concerns."""
        before = self.world.observations.get(key, observation.incarnation)
        self.world.observations.put(key, observation)
        changed = [
            entry
            for entry in wanted.values()
            if before is None
            or before.held(entry.name, entry.digest) != observation.held(entry.name, entry.digest)
        ]
        adapters = {entry.adapter for entry in changed if entry.adapter is not None}
        if adapters:
            self.world.wake_adapters(sorted(adapters))
            self.world.wake_tenants(
                sorted({user for adapter in adapters for user in self.world.links.users_of(adapter)})
            )
        if adapters or before is None or _names(before) != _names(observation):
            self.world.wake_pool(pool.name)

    def _forget(self, key: Key, pool: Pool | None, *, gone: bool) -> None:
        """No process there: nothing of what it said holds any more."""
        if gone:
            self._memory.pop(key, None)
        if not self.world.observations.forget(key):
            return
        for tenant in self._tenants(key):
            self.world.wake_adapters(self.world.links.adapters_of(tenant))
            self.world.wake_tenants([tenant])
        if pool is not None:
            self.world.wake_pool(pool.name)

    def _tenants(self, key: Key) -> list[str]:
        return sorted(self.world.placements.tenants_of(key) | self.world.links.routed_to(key))


def _names(observation: Observation) -> frozenset[str]:
    report = observation.report
    return frozenset(entry.name for entry in report.adapters) if report is not None else frozenset()


def declaration(entry: Wanted, pool: Pool) -> AdapterDeclaration:
    """What is on its way is not pinned yet, and nothing is where vLLM decides."""
    pinned = entry.pinned and entry.urgency == 0 and pool.spec.engine.type is EngineType.TENANTRY
    return AdapterDeclaration(entry.name, entry.digest, entry.tenant, pinned)


def differs(report: ReplicaReport, declared: Mapping[str, AdapterDeclaration]) -> bool:
    held = {
        entry.name: (entry.digest, entry.tenant, entry.pinned)
        for entry in report.adapters
        if entry.state is not AdapterState.DRAINING
    }
    return held != {name: (entry.digest, entry.tenant, entry.pinned) for name, entry in declared.items()}


def _fitting(wanted: Mapping[str, Wanted], limit: int) -> tuple[dict[str, Wanted], dict[str, Fault]]:
    """An engine refuses a set above its limit as a whole, so what is too much is left out: served versions last."""
    order = sorted(wanted.values(), key=lambda entry: (entry.urgency, entry.name))
    out = [entry.name for entry in order[limit:]]
    message = f"the pool's limit of {limit} registered adapters is reached: raise `lora.maxRegistered`"
    return {e.name: e for e in order[:limit]}, {name: Fault("PoolFull", message) for name in out}
