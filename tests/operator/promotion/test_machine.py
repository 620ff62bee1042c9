"""Verify and Load: nothing gets traffic before every serving replica holds the bytes and has answered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from promotion_world import (
    MISSING,
    PROVEN,
    SERVED_ONE,
    SOURCE,
    THREE,
    Adapter,
    digest,
    fault,
    release,
    spec,
    views,
)
from tenantry.promotion.asked import precedence
from tenantry.promotion.machine import Artifact, Candidate, Held, Phase, Release, ReplicaView
from tenantry.promotion.memory import Memory, written


def loading(*replicas: ReplicaView) -> Candidate:
    return Candidate(None, Artifact(True), replicas)


def fresh(**changes: object) -> Adapter:
    return Adapter(status=written(replace(SERVED_ONE, **changes)))  # type: ignore[arg-type]


def version(found: Release | None) -> str | None:
    return None if found is None else found.version


def test_switches_only_when_every_ready_replica_holds_it() -> None:
    adapter = Adapter()
    waiting = adapter.step(loading(*views(Held.LOADED, Held.MISSING)))
    assert (waiting.phase, version(waiting.active)) == (Phase.LOAD, "1.0.0")
    assert [found.version for found in waiting.declare] == ["1.0.0", "2.0.0"]
    assert waiting.message == "`2.0.0` is on 1 of 2 ready replicas"
    done = adapter.step()
    assert (done.phase, version(done.active)) == (Phase.PROMOTED, "2.0.0")
    assert adapter.targets == {"2.0.0": 100}
    assert adapter.status["lastPromoted"]["version"] == "2.0.0"
    assert [past["version"] for past in adapter.status["history"]] == ["1.0.0"]


def test_a_replica_that_has_not_answered_a_smoke_request_gets_no_traffic() -> None:
    adapter = Adapter(spec(steps=((50, 10),)))
    silent = adapter.step(loading(*views(Held.LOADED), *views(Held.LOADED, answered=False)))
    assert (silent.reason, adapter.targets) == ("Smoke", {"1.0.0": 100})
    assert silent.message == "`2.0.0` has answered on 1 of 2 ready replicas"
    assert adapter.step().phase is Phase.SHIFT


def test_an_unknown_replica_is_not_a_loaded_one() -> None:
    assert Adapter().step(loading(*views(Held.LOADED, Held.UNKNOWN))).phase is Phase.LOAD


def test_a_replica_that_gets_no_traffic_is_not_waited_for() -> None:
    down = loading(*views(Held.LOADED), ReplicaView("r1", False, Held.UNKNOWN))
    assert Adapter().step(down).phase is Phase.PROMOTED


def test_without_any_ready_replica_nothing_switches() -> None:
    for on in ([], views(Held.LOADED, ready=False)):
        waiting = Adapter().step(loading(*on))
        assert (waiting.reason, version(waiting.active)) == ("WaitingForReplicas", "1.0.0")


def test_verify_comes_first() -> None:
    decision = Adapter().step(Candidate(None, Artifact(), views(Held.MISSING)))
    assert (decision.phase, decision.reason) == (Phase.VERIFY, "Verifying")


def test_artifact_faults_stall_and_heal_by_themselves_while_the_old_version_serves() -> None:
    adapter = Adapter(spec(steps=((50, 0),)))
    broken = Candidate(None, Artifact(False, fault("SourceUnavailable")), views(Held.MISSING))
    decision = adapter.step(broken)
    assert (decision.phase, decision.reason, decision.stalled) == (Phase.STALLED, "SourceUnavailable", True)
    assert [found.version for found in decision.declare] == ["1.0.0", "2.0.0"], "a repaired registry heals it"
    assert adapter.targets == {"1.0.0": 100}
    assert adapter.step().phase is Phase.SHIFT
    assert adapter.status["rollout"]["attempt"] == 1, "it is the same attempt"


def test_engine_faults_name_the_replica() -> None:
    failed = ReplicaView("r1", True, Held.FAILED, fault("BaseModelMismatch"))
    decision = Adapter().step(loading(*views(Held.LOADED), failed))
    assert decision.reason == "BaseModelMismatch"
    assert "r1" in decision.message
    assert version(decision.active) == "1.0.0"


def test_spec_faults_never_reach_a_replica() -> None:
    decision = Adapter().step(Candidate(fault("RankTooLarge")))
    assert (decision.reason, [found.version for found in decision.declare]) == ("RankTooLarge", ["1.0.0"])


@pytest.mark.parametrize("reason", ["NotBound", "NotAllowed", "TenantNotFound"])
def test_withdrawn_consent_serves_nothing_and_a_rebinding_starts_anew(reason: str) -> None:
    adapter = Adapter(spec(canary=("1.0.0", 10)))
    withdrawn = adapter.step(Candidate(fault(reason)))
    assert (withdrawn.phase, withdrawn.active, withdrawn.declare) == (Phase.STALLED, None, ())
    assert adapter.targets == {}
    again = adapter.step(MISSING)
    assert (again.phase, again.active) == (Phase.LOAD, None)


def test_same_version_with_other_bytes_is_refused() -> None:
    adapter = Adapter(spec("1.0.0", {"1.0.0": "c"}))
    decision = adapter.step()
    assert (decision.phase, decision.reason) == (Phase.STALLED, "VersionChanged")
    assert decision.active == release("1.0.0")
    assert decision.memory.known["1.0.0"] == digest("a")


def test_version_removed_and_added_again_with_other_bytes_while_active() -> None:
    """The list no longer has the active version for a while; its digest is remembered all the same."""
    adapter = Adapter(spec("2.0.0", {"2.0.0": "b"}))
    assert adapter.step(MISSING).memory.known == {"1.0.0": digest("a"), "2.0.0": digest("b")}
    adapter.edit(spec("1.0.0", {"1.0.0": "c"}))
    assert adapter.step().reason == "VersionChanged"


def test_an_unlisted_or_missing_stable_version_says_so() -> None:
    adapter = Adapter(spec("2.0.0", {"1.0.0": "a"}))
    assert "`2.0.0` is not listed" in adapter.step().message
    only = spec("1.0.0").model_copy(update={"channels": spec("1.0.0", canary=("1.0.0", 5)).channels[1:]})
    adapter.edit(only)
    assert "must hold the channel `stable`" in adapter.step().message
    assert adapter.targets == {"1.0.0": 100}


def test_deadline_stalls_with_the_culprits_and_is_tried_on() -> None:
    adapter = Adapter()
    half = loading(*views(Held.LOADED, Held.UNKNOWN))
    assert adapter.step(half).again_in == 600
    decision = adapter.step(half, after=601)
    assert (decision.reason, decision.stalled) == ("ProgressDeadlineExceeded", True)
    assert "`r1` Unknown" in decision.message
    assert [found.version for found in decision.declare] == ["1.0.0", "2.0.0"]
    assert adapter.step().phase is Phase.PROMOTED, "late is better than never"


def test_first_promotion_has_no_active_version_until_loaded_and_takes_no_steps() -> None:
    adapter = Adapter(spec(steps=((10, 60),)), status=written(Memory()))
    first = adapter.step(MISSING)
    assert first.active is None
    assert [found.version for found in first.declare] == ["2.0.0"]
    assert adapter.step().phase is Phase.PROMOTED
    assert adapter.targets == {"2.0.0": 100}


def test_a_corrected_source_takes_effect_at_once() -> None:
    moved = replace(release("1.0.0"), source="oci://gone/tone:1")
    adapter = Adapter(spec("1.0.0"), status=written(Memory(active=moved)))
    assert adapter.step().active == release("1.0.0")
    assert adapter.memory.active is not None
    assert adapter.memory.active.source == SOURCE


def test_the_last_promoted_is_kept_with_digest_and_source_when_git_drops_it() -> None:
    adapter = Adapter(spec("2.0.0", {"2.0.0": "b"}, steps=((50, 60),)))
    adapter.step()
    assert adapter.targets == {"1.0.0": 50, "2.0.0": 50}
    decision = adapter.step(loading(ReplicaView("r0", True, Held.FAILED, fault("Corrupt"))))
    assert (decision.phase, adapter.targets) == (Phase.ROLLED_BACK, {"1.0.0": 100})
    assert decision.declare == (release("1.0.0"),)


def test_history_is_bounded() -> None:
    many = {f"{i}.0.0": "abcdef"[i % 6] for i in range(1, 21)}
    adapter = Adapter()
    for number in many:
        adapter.edit(spec(number, many))
        adapter.step(after=1)
    assert len(adapter.status["history"]) == 10
    assert adapter.status["history"][0]["version"] == "19.0.0"


@pytest.mark.parametrize("order", [["1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-beta.2",
                                    "1.0.0-beta.11", "1.0.0-rc.1", "1.0.0", "1.2.0", "1.10.0", "2.0.0"]])  # fmt: skip
def test_versions_sort_as_semver_says(order: list[str]) -> None:
    assert sorted(set(order), key=precedence) == order


def test_nothing_changes_once_it_is_promoted() -> None:
    adapter = Adapter()
    adapter.step()
    before = adapter.status
    later = adapter.step(after=3600)
    assert adapter.status == before
    assert later.again_in is None
    assert set(THREE) >= {later.desired.version if later.desired else ""}
    assert adapter.step(PROVEN).memory == later.memory
