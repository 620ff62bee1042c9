"""Any order of commits, loads, failures, data, restarts and time: what holds always, and that it ends."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from promotion_world import THREE, Adapter, fault, spec, window
from tenantry.api.adapter import ChannelName, Phase
from tenantry.promotion.analysis import Window
from tenantry.promotion.machine import Artifact, Candidate, Decision, Held, Release, ReplicaView, wanted

VERSIONS = list(THREE)
REPLICAS = ["r0", "r1", "r2"]
ANALYSIS = [{"metric": "ErrorsPerThousand", "threshold": 100, "minSamples": 10, "failureLimit": 1}]


class Promotions(RuleBasedStateMachine):
    """One adapter; replicas hold and answer what the test lets them, and forget what is not declared."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = Adapter(spec("1.0.0"), status={})
        self.held: dict[str, dict[str, Held]] = {name: {} for name in REPLICAS}
        self.answered: set[tuple[str, str]] = set()
        self.ready = dict.fromkeys(REPLICAS, True)
        self.registry: bool | None = True
        self.declared: tuple[Release, ...] = ()
        self.data: Window | None = None

    # what is seen

    def candidate(self, release: Release | None) -> Candidate:
        if release is None:
            return Candidate()
        artifact = Artifact(self.registry, fault("SourceUnavailable") if self.registry is False else None)
        return Candidate(None, artifact, [self.view(name, release.version) for name in REPLICAS])

    def view(self, replica: str, version: str) -> ReplicaView:
        held = self.held[replica].get(version, Held.MISSING)
        active = self.adapter.memory.active
        answered = (replica, version) in self.answered or (active is not None and active.version == version)
        return ReplicaView(replica, self.ready[replica], held, answered=answered)

    def proven(self, version: str) -> bool:
        serving = [name for name in REPLICAS if self.ready[name]]
        return bool(serving) and all(self.view(name, version).proven for name in serving)

    def failed(self, version: str) -> bool:
        return any(self.held[name].get(version) is Held.FAILED for name in REPLICAS)

    def reconcile(self, after: float = 0.0) -> Decision:
        adapter, before = self.adapter, self.adapter.memory
        was = {release.version: weight for release, weight in before.targets}
        stable, canary = (wanted(adapter.spec, channel) for channel in ChannelName)
        decision = adapter.step(
            self.candidate(stable), after=after, window=self.data, canary=self.candidate(canary)
        )
        if decision.measured:
            self.data = None
        now = adapter.targets
        for version in now.keys() - was.keys():
            assert self.proven(version), f"{version} got traffic before all replicas had proven it"
        asked = {release.version for release in (stable, canary) if release is not None}
        for version in now.keys() - was.keys():
            assert version in asked
        last = before.promoted.release if before.promoted is not None else None
        assert set(now) <= asked | ({last.version} if last is not None else set()), (
            "a third version is served"
        )
        if before.active is not None:
            assert decision.active is not None, "an active version never vanishes"
        if decision.active != before.active:
            assert stable is not None
            assert stable.same(decision.active)
        self.never_less(before.rollout, adapter.memory.rollout)
        self.declared = decision.declare
        for release, _ in adapter.memory.targets:
            assert release in decision.declare
        self.replicas_obey()
        return decision

    def never_less(self, before: Any, after: Any) -> None:
        """Within one attempt the weight falls only to 0, and only when it failed."""
        if before is None or after is None or before.attempt != after.attempt:
            return
        if after.weight < before.weight:
            assert (after.weight, after.phase) == (0, Phase.ROLLED_BACK)

    def replicas_obey(self) -> None:
        kept = {release.version for release in self.declared}
        for name, held in self.held.items():
            for version in [version for version in held if version not in kept]:
                del held[version]
                self.answered.discard((name, version))

    # what happens

    @rule(after=st.sampled_from([0, 1, 30, 61, 700]))
    def time_passes(self, after: float) -> None:
        self.reconcile(after)

    @rule(
        stable=st.sampled_from(VERSIONS),
        canary=st.none() | st.tuples(st.sampled_from(VERSIONS), st.sampled_from([0, 10, 60])),
        steps=st.sampled_from([(), ((10, 0),), ((10, 60), (50, 60)), ((100, 30),)]),
        measured=st.booleans(),
        how=st.fixed_dictionaries(
            {
                "paused": st.sampled_from([False, False, True]),
                "onFailure": st.sampled_from(["Rollback", "Pause"]),
                "retryToken": st.sampled_from(["", "again"]),
                "rollbackWindowSeconds": st.sampled_from([0, 600]),
            }
        ),
        drop=st.booleans(),
    )
    def commit(self, stable: str, canary: Any, steps: Any, measured: bool, how: Any, drop: bool) -> None:
        kept = {stable, canary[0] if canary else stable} if drop else set(VERSIONS)
        listed = {version: letter for version, letter in THREE.items() if version in kept}
        analysis = ANALYSIS if measured and steps else None
        self.adapter.edit(spec(stable, listed, canary=canary, steps=steps, analysis=analysis, **how))

    @rule(name=st.sampled_from(REPLICAS), outcome=st.sampled_from([Held.LOADED, Held.FAILED, Held.UNKNOWN]))
    def replica_tells(self, name: str, outcome: Held) -> None:
        for release in self.declared:
            self.held[name][release.version] = outcome

    @rule()
    def all_load_and_answer(self) -> None:
        for name in REPLICAS:
            for release in self.declared:
                self.held[name][release.version] = Held.LOADED
                self.answered.add((name, release.version))

    @rule(name=st.sampled_from(REPLICAS))
    def replica_restarts(self, name: str) -> None:
        self.held[name] = {}
        self.answered = {(other, version) for other, version in self.answered if other != name}

    @rule(name=st.sampled_from(REPLICAS), ready=st.booleans())
    def traffic(self, name: str, ready: bool) -> None:
        self.ready[name] = ready

    @rule(state=st.sampled_from([True, False, None]))
    def registry_turns(self, state: bool | None) -> None:
        self.registry = state

    @rule(data=st.sampled_from([None, window(3), window(50), window(25, 25)]))
    def gateways_count(self, data: Window | None) -> None:
        self.data = data

    @rule()
    def operator_restarts(self) -> None:
        """What it had in memory alone: smoke answers and the window."""
        self.answered, self.data = set(), None

    @rule()
    def all_is_well_then_it_ends(self) -> None:
        """With working replicas, a working registry, good data and nobody holding it, it comes to an end."""
        self.adapter.edit(
            self.adapter.spec.model_copy(
                update={"rollout": self.adapter.spec.rollout.model_copy(update={"paused": False})}
            )
        )
        self.registry, self.ready = True, dict.fromkeys(REPLICAS, True)
        decision = self.reconcile()
        for _ in range(40):
            self.all_load_and_answer()
            self.data = window(50)
            decision = self.reconcile(61)
            if decision.again_in is None and decision.memory == self.adapter.memory:
                break
        memory = decision.memory
        if decision.reason == "TooManyVersions":
            return
        if decision.stalled:
            assert memory.ended(), f"stuck: {decision.reason} {decision.message}"
            return
        assert decision.phase is Phase.PROMOTED
        assert decision.desired is not None
        assert decision.desired.same(memory.active)
        canary = self.adapter.spec.channel(ChannelName.CANARY)
        if canary is not None and canary.version != decision.desired.version:
            assert self.adapter.targets[canary.version] == canary.weight

    # what holds always

    @invariant()
    def weights_are_whole(self) -> None:
        targets = self.adapter.memory.targets
        assert len(targets) <= 2
        assert not targets or sum(weight for _, weight in targets) == 100

    @invariant()
    def the_way_back_is_known(self) -> None:
        memory = self.adapter.memory
        if memory.active is None:
            return
        assert memory.promoted is not None
        assert memory.promoted.release.same(memory.active)
        assert memory.promoted.release.source
        assert memory.known[memory.active.version] == memory.active.digest
        assert len(memory.history) <= 10
        assert len(memory.failed) <= 10


Promotions.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestPromotions = Promotions.TestCase
