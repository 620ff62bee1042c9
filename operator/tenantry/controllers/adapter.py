"""Adapter: verified, loaded on every replica of its tenant, tried, then step by step active; or why not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from prometheus_client import Counter

from tenantry.api import AdapterSpec, AdapterStatus
from tenantry.api.adapter import ChannelName, Phase
from tenantry.cluster import Key, Obj, uid_of
from tenantry.desired.problems import SpecError
from tenantry.engines import ArtifactState, EngineError, Replica, SignatureReport
from tenantry.promotion import machine
from tenantry.promotion.machine import (
    Artifact,
    Candidate,
    Decision,
    Fault,
    Held,
    Memory,
    Release,
    ReplicaView,
)
from tenantry.runtime.controller import DONE, Context, Result

from . import adapter_status, bindings, pods
from .adapter_status import Seen
from .measuring import Measuring
from .smoke import Question, Smokes
from .world import Pool, World

PULLING_SECONDS = 1.0
RETRY_SECONDS = 30.0
EARLY_SECONDS = 2.0
"""One commit may bring an adapter and its tenant, in any order: so old is an adapter before it is told to lack one."""
UNSEEN_SECONDS = 5.0
"""The first word of a replica wakes the adapters that it is to hold; this is for all others."""

ROLLOUTS = Counter("tenantry_rollouts_total", "Rollouts of adapters that ended, by how.", ["result"])


@dataclass(frozen=True)
class _Spot:
    """One replica that is to serve the adapter. `process`: which process runs there, None for none."""

    pool: Pool
    replica: str
    ready: bool
    process: str | None
    address: str | None

    @property
    def key(self) -> Key:
        return Key(self.pool.name, self.replica)


class AdapterReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self._smokes = Smokes(world)
        self._measuring = Measuring(world)
        self._came: dict[Key, float] = {}

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        adapter = self.world.adapter(key)
        if adapter is None:
            self._smokes.forget(key)
            self._measuring.forget(key)
            self._came.pop(key, None)
            self.world.forget_spec("Adapter", key)
            return DONE
        try:
            spec = self.world.adapter_spec(adapter)
        except SpecError as error:
            await ctx.set_status(adapter, adapter_status.invalid(adapter, str(error)))
            return DONE
        if self._is_early(key, adapter, spec):
            return Result(EARLY_SECONDS)
        memory = machine.recall(AdapterStatus.model_validate(adapter.get("status") or {}))
        spots = list(self._spots(key, spec))
        if any(self._unseen(spot) for spot in spots):
            return Result(UNSEEN_SECONDS)  # judging before that would only flap
        stable, stable_wait = await self._candidate(key, spec, ChannelName.STABLE, memory, spots)
        canary, canary_wait = await self._candidate(key, spec, ChannelName.CANARY, memory, spots)
        silent = await self._smoke(key, spec, memory, spots)
        inputs = machine.Inputs(
            spec=spec,
            generation=int(adapter["metadata"].get("generation", 0)),
            memory=memory,
            stable=self._viewed(key, stable, machine.wanted(spec, ChannelName.STABLE), memory, spots),
            canary=self._viewed(key, canary, machine.wanted(spec, ChannelName.CANARY), memory, spots),
            window=await self._window(key, spec, memory),
            now=time.time(),
        )
        decision = machine.step(inputs)
        if decision.measured:
            self._measuring.used(key)
        seen = Seen(
            inputs.stable, inputs.canary, self._views(key, decision.active, memory, spots), bool(spots)
        )
        if await ctx.set_status(adapter, adapter_status.status(adapter, spec, decision, seen)):
            self._announce(ctx, adapter, memory, decision)
            self.world.wake_replicas(spot.key for spot in spots)
        waits = [decision.again_in, canary_wait, PULLING_SECONDS if silent else None]
        if decision.phase not in (Phase.PROMOTED, Phase.ROLLED_BACK):
            waits.append(stable_wait or RETRY_SECONDS)
        elif spec.verification is not None and not stable.artifact.verified:
            waits.append(stable_wait)
        due = [wait for wait in waits if wait is not None]
        return Result(max(machine.AT_ONCE, min(due))) if due else DONE

    # what is there

    def _is_early(self, key: Key, adapter: Obj, spec: AdapterSpec) -> bool:
        """Whether its tenant may be on its way here."""
        if self.world.tenant(spec.tenant_ref) is not None or (adapter.get("status") or {}).get("conditions"):
            self._came.pop(key, None)
            return False
        now = self.world.clock()
        return now - self._came.setdefault(key, now) < EARLY_SECONDS

    def _spots(self, key: Key, spec: AdapterSpec) -> Iterator[_Spot]:
        """Every replica that serves a model which the adapter answers, now or as soon as it can."""
        tenant = self.world.tenant(spec.tenant_ref)
        if tenant is None:
            return
        try:
            tenant_spec = self.world.tenant_spec(tenant)
        except SpecError:
            return
        for pool in bindings.pools_of(self.world, spec.tenant_ref, tenant_spec, key):
            if pool.spec.lora is None:
                continue
            existing = set(self.world.replicas(pool))
            placed = self.world.placements.get(spec.tenant_ref).pools.get(pool.name)
            serving = set(placed.replicas) if placed is not None else set()
            serving |= {
                r for r in existing if spec.tenant_ref in self.world.links.routed_to(Key(pool.name, r))
            }
            for replica in sorted(serving & existing):
                pod = self.world.pod(pool, replica)
                yield _Spot(
                    pool,
                    replica,
                    pod is not None and pods.is_ready(pod),
                    pods.incarnation(pod) if pod is not None else None,
                    pods.address(pod) if pod is not None else None,
                )

    def _unseen(self, spot: _Spot) -> bool:
        if not spot.ready or self.world.driver is None:
            return False
        return self.world.observations.get(spot.key, spot.process) is None

    def _views(
        self, key: Key, release: Release | None, memory: Memory, spots: list[_Spot]
    ) -> list[ReplicaView]:
        if release is None:
            return []
        return [self._view(key, release, memory, spot) for spot in spots]

    def _view(self, key: Key, release: Release, memory: Memory, spot: _Spot) -> ReplicaView:
        name = bindings.served(key, release)
        seen = self.world.observations.get(spot.key, spot.process) if spot.process is not None else None
        held, fault = seen.held(name, release.digest) if seen is not None else (Held.UNKNOWN, None)
        if release.same(memory.active):
            return ReplicaView(spot.replica, spot.ready, held, fault, answered=True)  # clients are answered
        question = self._question(key, release, spot)
        if held is not Held.LOADED or question is None:
            return ReplicaView(spot.replica, spot.ready, held, fault)
        failed = self._smokes.fault(key, question)
        if failed is not None:
            return ReplicaView(spot.replica, spot.ready, Held.FAILED, failed)
        return ReplicaView(
            spot.replica, spot.ready, held, fault, answered=self._smokes.answered(key, question)
        )

    def _question(self, key: Key, release: Release, spot: _Spot) -> Question | None:
        adapter = self.world.adapter(key)
        tenant = self.world.tenant(adapter["spec"]["tenantRef"]) if adapter is not None else None
        if tenant is None or spot.process is None:
            return None
        name = bindings.served(key, release)
        return Question(spot.key, spot.process, name, release.digest, uid_of(tenant))

    # what is asked

    async def _candidate(
        self, key: Key, spec: AdapterSpec, channel: ChannelName, memory: Memory, spots: list[_Spot]
    ) -> tuple[Candidate, float | None]:
        """What tenant, pool and fetcher say of a channel's version; seconds until the fetcher is asked again."""
        release = machine.wanted(spec, channel)
        objection = bindings.objection(self.world, key, spec, release)
        if release is None or objection is not None:
            return Candidate(objection), None
        artifact, wait = await self._artifact(key, spec, release, memory, spots)
        # the bytes may have told something
        return Candidate(bindings.objection(self.world, key, spec, release), artifact), wait

    def _viewed(
        self, key: Key, candidate: Candidate, release: Release | None, memory: Memory, spots: list[_Spot]
    ) -> Candidate:
        return replace(candidate, on=self._views(key, release, memory, spots))

    async def _artifact(
        self, key: Key, spec: AdapterSpec, release: Release, memory: Memory, spots: list[_Spot]
    ) -> tuple[Artifact, float | None]:
        """What is known of the bytes, and after how many seconds to ask again."""
        views = self._views(key, release, memory, spots)
        signed = spec.verification is not None
        if not signed and (any(view.held is Held.LOADED for view in views) or release.same(memory.active)):
            return Artifact(True), None
        unknown = Artifact(None, unproven=signed)
        if self.world.fetcher is None:
            return unknown, None
        pull = bindings.pull(key, spec, release)
        transfer = self.world.observations.artifact(pull)
        if transfer is None or transfer.artifact.state is not ArtifactState.VERIFIED:
            try:
                transfer = await self.world.fetcher.transfer(pull)
            except EngineError:
                return unknown, PULLING_SECONDS * 5
            self.world.observations.put_artifact(pull, transfer)
        report = transfer.artifact
        if report.state is ArtifactState.VERIFIED:
            return _as_signed(report.signature), None
        if report.state is ArtifactState.FAILED:
            return Artifact(False, Fault(report.reason or "SourceUnavailable", report.message)), RETRY_SECONDS
        return unknown, PULLING_SECONDS

    async def _smoke(self, key: Key, spec: AdapterSpec, memory: Memory, spots: list[_Spot]) -> bool:
        """Try each version that wants traffic where it is loaded; whether a replica has not answered yet."""
        questions: list[tuple[Question, Replica]] = []
        for channel in ChannelName:
            release = machine.wanted(spec, channel)
            if release is None or release.same(memory.active):
                continue
            for spot in spots:
                question = self._question(key, release, spot)
                if question is None or spot.address is None or not spot.ready:
                    continue
                seen = self.world.observations.get(spot.key, spot.process)
                if seen is not None and seen.held(question.name, release.digest)[0] is Held.LOADED:
                    questions.append((question, self.world.peer(spot.pool, spot.replica, spot.address)))
        return await self._smokes.ask(key, dict(questions).items())

    async def _window(self, key: Key, spec: AdapterSpec, memory: Memory) -> machine.Window | None:
        rollout = memory.rollout
        if rollout is None or not rollout.shifting or not spec.rollout.analysis or memory.ended():
            self._measuring.forget(key)
            return None
        return await self._measuring.window(key, bindings.served(key, rollout.release), rollout)

    # what is said

    def _announce(self, ctx: Context, adapter: Obj, before: Memory, decision: Decision) -> None:
        def event(reason: str, note: str, kind: Literal["Normal", "Warning"] = "Normal") -> None:
            ctx.recorder.event(adapter, reason, note, action="Promote", type=kind)

        after = decision.memory
        was, now = before.rollout, after.rollout
        if after.active is not None and not after.active.same(before.active):
            event("Promoted", f"`{after.active.version}` ({after.active.digest}) is active")
            ROLLOUTS.labels("promoted").inc()
        elif len(after.failed) > len(before.failed) or after.failed[-1:] != before.failed[-1:]:
            event(decision.phase.value, f"{decision.reason}: {decision.message}", "Warning")
            ROLLOUTS.labels("rolled_back" if decision.phase is Phase.ROLLED_BACK else "paused").inc()
        elif decision.stalled:
            event(decision.reason, decision.message, "Warning")
        elif now is not None and now.shifting and (was is None or now.weight != was.weight):
            event("Shifting", decision.message)


def _as_signed(signature: SignatureReport | None) -> Artifact:
    """Verified bytes, with what was found of the signature that was asked for."""
    if signature is None:
        return Artifact(True)
    if signature.verified:
        return Artifact(True, signature=signature.message)
    return Artifact(True, unsigned=Fault(signature.reason, signature.message))
