"""Promotion: what is active changes only when every serving replica holds the new bytes, whatever else happens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tenantry.api import AdapterSpec, AdapterStatus
from tenantry.promotion import machine
from tenantry.promotion.machine import Artifact, Decision, Fault, Held, Inputs, Phase, Release, ReplicaView


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def spec(stable: str, versions: dict[str, str], **rollout: int) -> AdapterSpec:
    listed = [
        {"version": version, "digest": digest(letter), "source": "oci://registry/tone:1", "rank": 8}
        for version, letter in versions.items()
    ]
    return AdapterSpec.model_validate(
        {
            "tenantRef": "acme",
            "versions": listed,
            "channels": [{"name": "stable", "version": stable}],
            "rollout": rollout,
        }
    )


TWO = {"1.0.0": "a", "2.0.0": "b"}
ONE = Release("1.0.0", digest("a"), "oci://registry/tone:1", 8)


def inputs(**changes: Any) -> Inputs:
    base = Inputs(
        spec=spec("2.0.0", TWO),
        active=ONE,
        known={"1.0.0": digest("a")},
        objection=None,
        artifact=Artifact(True),
        desired_on=[ReplicaView("r0", True, Held.LOADED), ReplicaView("r1", True, Held.LOADED)],
        elapsed=1.0,
    )
    return replace(base, **changes)


def views(*held: Held, ready: bool = True) -> list[ReplicaView]:
    return [ReplicaView(f"r{i}", ready, state) for i, state in enumerate(held)]


def version(release: Release | None) -> str | None:
    return None if release is None else release.version


def test_switches_only_when_every_ready_replica_holds_it() -> None:
    waiting = machine.step(inputs(desired_on=views(Held.LOADED, Held.MISSING)))
    assert (waiting.phase, version(waiting.active)) == (Phase.LOAD, "1.0.0")
    assert [r.version for r in waiting.declare] == ["1.0.0", "2.0.0"]
    assert waiting.message == "`2.0.0` is on 1 of 2 ready replicas"
    done = machine.step(inputs())
    assert (done.phase, version(done.active), (done.loaded, done.replicas)) == (
        Phase.PROMOTED,
        "2.0.0",
        (2, 2),
    )


def test_an_unknown_replica_is_not_a_loaded_one() -> None:
    assert machine.step(inputs(desired_on=views(Held.LOADED, Held.UNKNOWN))).phase is Phase.LOAD


def test_a_replica_that_gets_no_traffic_is_not_waited_for() -> None:
    down = [*views(Held.LOADED), ReplicaView("r1", False, Held.UNKNOWN)]
    assert machine.step(inputs(desired_on=down)).phase is Phase.PROMOTED


def test_without_any_ready_replica_nothing_switches() -> None:
    for on in ([], views(Held.LOADED, ready=False)):
        waiting = machine.step(inputs(desired_on=on))
        assert (waiting.reason, version(waiting.active)) == ("WaitingForReplicas", "1.0.0")


def test_verify_comes_first() -> None:
    assert machine.step(inputs(artifact=Artifact(), desired_on=views(Held.MISSING))).phase is Phase.VERIFY


def test_artifact_faults_stall_and_the_old_version_serves_on() -> None:
    fault = Fault("DigestMismatch", "got other bytes")
    decision = machine.step(inputs(artifact=Artifact(False, fault), desired_on=views(Held.MISSING)))
    assert (decision.phase, decision.reason, version(decision.active)) == (
        Phase.STALLED,
        "DigestMismatch",
        "1.0.0",
    )
    assert [r.version for r in decision.declare] == ["1.0.0", "2.0.0"], "a repaired registry heals it"


def test_engine_faults_name_the_replica() -> None:
    failed = ReplicaView("r1", True, Held.FAILED, Fault("BaseModelMismatch", "made for another base"))
    decision = machine.step(inputs(desired_on=[*views(Held.LOADED), failed]))
    assert decision.reason == "BaseModelMismatch"
    assert "r1" in decision.message
    assert version(decision.active) == "1.0.0"


def test_spec_faults_never_reach_a_replica() -> None:
    decision = machine.step(inputs(objection=Fault("RankTooLarge", "rank 64 above 16")))
    assert (decision.reason, [r.version for r in decision.declare]) == ("RankTooLarge", ["1.0.0"])


@pytest.mark.parametrize("reason", ["NotBound", "NotAllowed", "TenantNotFound"])
def test_withdrawn_consent_serves_nothing_and_a_rebinding_starts_anew(reason: str) -> None:
    withdrawn = machine.step(inputs(objection=Fault(reason, "")))
    assert (withdrawn.phase, withdrawn.active, withdrawn.declare) == (Phase.STALLED, None, ())
    again = machine.step(
        inputs(active=withdrawn.active, known=withdrawn.known, desired_on=views(Held.MISSING))
    )
    assert (again.phase, again.active) == (Phase.LOAD, None)


def test_same_version_with_other_bytes_is_refused() -> None:
    decision = machine.step(inputs(spec=spec("1.0.0", {"1.0.0": "c"})))
    assert (decision.phase, decision.reason) == (Phase.STALLED, "VersionChanged")
    assert decision.active == ONE
    assert decision.known["1.0.0"] == digest("a")


def test_version_removed_and_added_again_with_other_bytes_while_active() -> None:
    """The list no longer has the active version for a while; its digest is remembered all the same."""
    dropped = machine.step(inputs(spec=spec("2.0.0", {"2.0.0": "b"}), desired_on=views(Held.MISSING)))
    assert dropped.known == {"1.0.0": digest("a"), "2.0.0": digest("b")}
    back = machine.step(
        inputs(spec=spec("1.0.0", {"1.0.0": "c"}), known=dropped.known, active=dropped.active)
    )
    assert back.reason == "VersionChanged"


def test_deadline_stalls_with_the_culprits_and_is_tried_on() -> None:
    decision = machine.step(inputs(desired_on=views(Held.LOADED, Held.UNKNOWN), elapsed=601))
    assert decision.reason == "ProgressDeadlineExceeded"
    assert "`r1` Unknown" in decision.message
    assert [r.version for r in decision.declare] == ["1.0.0", "2.0.0"]
    assert machine.step(inputs(elapsed=601)).phase is Phase.PROMOTED, "late is better than never"


def test_first_promotion_has_no_active_version_until_loaded() -> None:
    first = machine.step(inputs(active=None, known={}, desired_on=views(Held.MISSING)))
    assert first.active is None
    assert [r.version for r in first.declare] == ["2.0.0"]


def test_rollback_is_an_ordinary_promotion() -> None:
    back = machine.step(
        inputs(spec=spec("1.0.0", TWO), active=Release("2.0.0", digest("b"), "oci://x/y:1", 8))
    )
    assert (back.phase, version(back.active)) == (Phase.PROMOTED, "1.0.0")


@dataclass
class World:
    """Replicas that hold names, and the status that survives a restart."""

    held: dict[str, dict[str, Held]] = field(default_factory=dict)
    ready: dict[str, bool] = field(default_factory=dict)


class Promotions(RuleBasedStateMachine):
    """Any interleaving of commits, loads, failures, replica restarts and operator restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.versions = {"1.0.0": "a", "2.0.0": "b", "3.0.0": "c"}
        self.spec = spec("1.0.0", self.versions)
        self.status = AdapterStatus()
        self.world = World({f"r{i}": {} for i in range(3)}, {f"r{i}": True for i in range(3)})
        self.fault: Fault | None = None
        self.decision: Decision | None = None

    def loaded_everywhere(self, wanted: str) -> bool:
        serving = [name for name, ready in self.world.ready.items() if ready]
        return bool(serving) and all(self.world.held[name].get(wanted) is Held.LOADED for name in serving)

    @rule()
    def reconcile(self) -> None:
        active, known = machine.resume(self.status)
        desired = machine.desired_release(self.spec)
        wanted = desired.version if desired else ""
        on = [
            ReplicaView(name, self.world.ready[name], held.get(wanted, Held.MISSING))
            for name, held in self.world.held.items()
        ]
        decision = machine.step(
            Inputs(self.spec, active, known, None, Artifact(self.fault is None, self.fault), on, 0.0)
        )
        if decision.active != active:
            assert decision.active is not None
            assert decision.active.version == wanted
            assert self.loaded_everywhere(wanted), "switched before every serving replica held it"
            assert self.fault is None
        assert active is None or decision.active is not None, "an active version never vanishes"
        if decision.active is not None:
            assert decision.active in decision.declare
        self.decision = decision
        for held in self.world.held.values():
            declared = {release.version for release in decision.declare}
            for name in [name for name in held if name not in declared]:
                del held[name]
        channel = {
            "name": "stable",
            "desiredVersion": self.spec.channels[0].version,
            "activeVersion": decision.active and decision.active.version,
            "activeDigest": decision.active and decision.active.digest,
            "activeSource": decision.active and decision.active.source,
            "activeRank": decision.active and decision.active.rank,
        }
        known_wire = [{"version": name, "digest": value} for name, value in decision.known.items()]
        self.status = AdapterStatus.model_validate({"channels": [channel], "known": known_wire})

    @rule(stable=st.sampled_from(["1.0.0", "2.0.0", "3.0.0"]), drop=st.booleans())
    def commit(self, stable: str, drop: bool) -> None:
        listed = {stable: self.versions[stable]} if drop else self.versions
        self.spec = spec(stable, listed)

    @precondition(lambda self: self.decision is not None)
    @rule(
        name=st.sampled_from(["r0", "r1", "r2"]),
        outcome=st.sampled_from([Held.LOADED, Held.FAILED, Held.UNKNOWN]),
    )
    def replica_answers(self, name: str, outcome: Held) -> None:
        assert self.decision is not None
        for release in self.decision.declare:
            self.world.held[name][release.version] = outcome

    @rule(name=st.sampled_from(["r0", "r1", "r2"]))
    def replica_restarts(self, name: str) -> None:
        self.world.held[name] = {}

    @rule(name=st.sampled_from(["r0", "r1", "r2"]), ready=st.booleans())
    def traffic(self, name: str, ready: bool) -> None:
        self.world.ready[name] = ready

    @rule(broken=st.booleans())
    def registry(self, broken: bool) -> None:
        self.fault = Fault("SourceUnavailable", "503") if broken else None

    @invariant()
    def the_active_version_is_remembered_with_digest_and_source(self) -> None:
        active, known = machine.resume(self.status)
        if active is not None:
            assert active.digest == digest(self.versions[active.version])
            assert active.source
            assert known[active.version] == active.digest


Promotions.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPromotions = Promotions.TestCase
