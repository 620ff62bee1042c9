"""Shift: weights rise on time and on data, fall on failure, and stay where somebody or missing data holds them."""

from __future__ import annotations

from typing import Any

import pytest
from promotion_world import MISSING, PROVEN, Adapter, digest, fault, release, spec, views, window
from tenantry.promotion.machine import LOOK_SECONDS, Artifact, Candidate, Held, Phase, ReplicaView

STEPS = ((10, 60), (50, 60))
ERRORS = {"metric": "ErrorsPerThousand", "threshold": 10, "minSamples": 20, "failureLimit": 0}
SLOW = {"metric": "DurationMillisecondsP95", "threshold": 1000, "minSamples": 10}
BROKEN = Candidate(None, Artifact(True), [ReplicaView("r0", True, Held.FAILED, fault("Corrupt"))])
LOST = Candidate(None, Artifact(True), [*views(Held.LOADED), ReplicaView("r1", True, Held.MISSING)])


def shifting(*, steps: tuple[tuple[int, int], ...] = STEPS, **how: Any) -> Adapter:
    """1.0.0 is served, 2.0.0 has its first step."""
    adapter = Adapter(spec(steps=steps, **how))
    decision = adapter.step()
    assert decision.phase is Phase.SHIFT
    return adapter


def test_weights_rise_step_by_step_and_no_sooner() -> None:
    adapter = shifting()
    seen = []
    for after in (0, 59, 1, 59, 1, 0):
        decision = adapter.step(after=after)
        seen.append((decision.phase, adapter.targets.get("2.0.0")))
    assert seen == [
        (Phase.SHIFT, 10),
        (Phase.SHIFT, 10),
        (Phase.SHIFT, 50),
        (Phase.SHIFT, 50),
        (Phase.PROMOTED, 100),
        (Phase.PROMOTED, 100),
    ]
    assert adapter.targets == {"2.0.0": 100}


def test_it_says_when_time_moves_it() -> None:
    adapter = shifting()
    assert adapter.step(after=20).again_in == 40
    measured = shifting(analysis=[ERRORS])
    assert measured.step(after=20).again_in == LOOK_SECONDS


def test_a_step_waits_for_data_and_missing_data_never_succeeds() -> None:
    adapter = shifting(analysis=[ERRORS], progressDeadlineSeconds=100)
    waiting = adapter.step(after=61)
    assert (waiting.phase, adapter.targets["2.0.0"]) == (Phase.SHIFT, 10)
    assert "measuring ErrorsPerThousand" in waiting.message
    few = adapter.step(after=1, window=window(19))
    assert (few.measured, adapter.targets["2.0.0"]) == (False, 10)
    starved = adapter.step(after=100, window=window(19))
    assert (starved.phase, starved.reason, starved.stalled) == (Phase.PAUSED, "InsufficientData", True)
    assert adapter.targets["2.0.0"] == 10
    assert starved.again_in == LOOK_SECONDS
    resumed = adapter.step(after=1, window=window(20))
    assert (resumed.phase, resumed.measured, adapter.targets["2.0.0"]) == (Phase.SHIFT, True, 50)


def test_every_step_needs_data_of_its_own() -> None:
    adapter = shifting(analysis=[ERRORS])
    adapter.step(after=61, window=window(50))
    assert adapter.targets["2.0.0"] == 50
    assert adapter.step(after=61).phase is Phase.SHIFT
    assert adapter.step(after=1, window=window(50)).phase is Phase.PROMOTED


def test_all_metrics_must_have_enough_and_pass() -> None:
    adapter = shifting(analysis=[ERRORS, {**SLOW, "minSamples": 100}])
    assert not adapter.step(after=61, window=window(99)).measured
    assert adapter.step(after=1, window=window(100)).phase is Phase.SHIFT
    assert adapter.targets["2.0.0"] == 50
    failed = adapter.step(after=1, window=window(100, seconds=5))
    assert (failed.phase, failed.reason) == (Phase.ROLLED_BACK, "AnalysisFailed")
    assert "`DurationMillisecondsP95` was 10000 on 100 requests and must be at most 1000" in failed.message


def test_a_failure_takes_all_traffic_away_and_the_same_spec_is_not_tried_again() -> None:
    adapter = shifting(analysis=[ERRORS])
    failed = adapter.step(after=5, window=window(10, 10))
    assert (failed.phase, failed.reason, failed.stalled, failed.measured) == (
        Phase.ROLLED_BACK,
        "AnalysisFailed",
        True,
        True,
    )
    assert "was 500 on 20 requests" in failed.message
    assert adapter.targets == {"1.0.0": 100}
    assert [found.version for found in failed.declare] == ["1.0.0"]
    [entry] = adapter.status["failedRevisions"]
    assert (entry["version"], entry["reason"], entry["attempt"]) == ("2.0.0", "AnalysisFailed", 1)
    for _ in range(3):
        again = adapter.step(after=3600, window=window(100))
        assert (again.phase, again.reason, again.again_in) == (Phase.ROLLED_BACK, "AnalysisFailed", None)
    assert adapter.targets == {"1.0.0": 100}


@pytest.mark.parametrize("change", ["retryToken", "threshold", "version", "back and forth"])
def test_git_starts_a_failed_rollout_anew(change: str) -> None:
    adapter = shifting(analysis=[ERRORS])
    adapter.step(after=5, window=window(0, 20))
    if change == "retryToken":
        adapter.edit(spec(steps=STEPS, analysis=[ERRORS], retryToken="again"))
    elif change == "threshold":
        adapter.edit(spec(steps=STEPS, analysis=[{**ERRORS, "threshold": 20}]))
    elif change == "version":
        adapter.edit(spec("3.0.0", steps=STEPS, analysis=[ERRORS]))
    else:
        adapter.edit(spec("1.0.0", steps=STEPS, analysis=[ERRORS]))
        assert adapter.step().phase is Phase.PROMOTED
        adapter.edit(spec(steps=STEPS, analysis=[ERRORS]))
    decision = adapter.step()
    assert (decision.phase, sorted(adapter.targets.values())) == (Phase.SHIFT, [10, 90])
    assert adapter.status["rollout"]["attempt"] == 2
    assert adapter.status["rollout"]["analysis"][0]["failures"] == 0, "each attempt is judged by itself"


def test_what_changes_nothing_of_the_rollout_does_not_start_it_anew() -> None:
    adapter = shifting(analysis=[ERRORS])
    adapter.step(after=5, window=window(0, 20))
    adapter.edit(spec(versions={"1.0.0": "a", "2.0.0": "b"}, steps=STEPS, analysis=[ERRORS], drainSeconds=5))
    assert adapter.step().phase is Phase.ROLLED_BACK


def test_failure_limit_counts_measurements_of_the_whole_rollout() -> None:
    adapter = shifting(analysis=[{**ERRORS, "failureLimit": 1}])
    first = adapter.step(after=61, window=window(10, 10))
    assert (first.phase, adapter.targets["2.0.0"]) == (Phase.SHIFT, 10)
    adapter.step(after=1, window=window(20))
    assert adapter.targets["2.0.0"] == 50
    assert adapter.step(after=1, window=window(10, 10)).phase is Phase.ROLLED_BACK


def test_on_failure_pause_keeps_the_weights_until_git_changes() -> None:
    adapter = shifting(analysis=[ERRORS], onFailure="Pause")
    paused = adapter.step(after=5, window=window(0, 20))
    assert (paused.phase, paused.stalled, adapter.targets) == (
        Phase.PAUSED,
        True,
        {"1.0.0": 90, "2.0.0": 10},
    )
    assert [found.version for found in paused.declare] == ["1.0.0", "2.0.0"]
    assert adapter.step(after=9999, window=window(500)).phase is Phase.PAUSED
    adapter.edit(spec(steps=STEPS, analysis=[ERRORS], onFailure="Pause", retryToken="1"))
    assert adapter.step().phase is Phase.SHIFT


def test_paused_by_hand_holds_the_weight_and_its_time_starts_anew() -> None:
    adapter = shifting()
    adapter.edit(spec(steps=STEPS, paused=True))
    held = adapter.step(after=30)
    assert (held.phase, held.reason, held.stalled) == (Phase.PAUSED, "PausedByHand", False)
    assert adapter.step(after=99_999).reason == "PausedByHand", "no deadline runs"
    assert adapter.targets["2.0.0"] == 10
    adapter.edit(spec(steps=STEPS))
    assert adapter.step(after=1).phase is Phase.SHIFT
    adapter.step(after=59)
    assert adapter.targets["2.0.0"] == 10
    adapter.step(after=1)
    assert adapter.targets["2.0.0"] == 50
    assert adapter.status["rollout"]["attempt"] == 1


def test_paused_before_it_began_loads_and_waits() -> None:
    adapter = Adapter(spec(steps=STEPS, paused=True))
    held = adapter.step(MISSING)
    assert (held.phase, [found.version for found in held.declare]) == (Phase.PAUSED, ["1.0.0", "2.0.0"])
    assert adapter.step(PROVEN).phase is Phase.PAUSED
    assert adapter.targets == {"1.0.0": 100}


def test_a_failing_version_is_rolled_back_while_it_is_paused_by_hand() -> None:
    adapter = shifting(analysis=[ERRORS])
    adapter.edit(spec(steps=STEPS, analysis=[ERRORS], paused=True))
    assert adapter.step(after=1, window=window(0, 20)).phase is Phase.ROLLED_BACK


def test_a_replica_that_cannot_serve_it_any_more_ends_it() -> None:
    adapter = shifting()
    decision = adapter.step(BROKEN)
    assert (decision.phase, decision.reason, adapter.targets) == (
        Phase.ROLLED_BACK,
        "Corrupt",
        {"1.0.0": 100},
    )


def test_a_replica_that_lost_it_holds_the_step_up_and_at_the_deadline_ends_it() -> None:
    adapter = shifting(progressDeadlineSeconds=100)
    held = adapter.step(LOST, after=61)
    assert (held.phase, held.reason, adapter.targets["2.0.0"]) == (Phase.SHIFT, "Loading", 10)
    assert adapter.step(after=1).phase is Phase.SHIFT
    assert adapter.targets["2.0.0"] == 50
    late = adapter.step(LOST, after=161)
    assert (late.phase, late.reason) == (Phase.ROLLED_BACK, "ProgressDeadlineExceeded")
    assert "tried on" not in late.message


def test_a_new_commit_supersedes_and_the_last_promoted_stays_the_way_back() -> None:
    adapter = shifting()
    adapter.edit(spec("3.0.0", {"3.0.0": "c"}, steps=STEPS))
    decision = adapter.step(MISSING, after=1)
    assert (decision.phase, adapter.targets) == (Phase.LOAD, {"1.0.0": 100})
    assert adapter.memory.active == release("1.0.0")
    assert [found.version for found in decision.declare] == ["1.0.0", "3.0.0"]
    adapter.step()
    assert adapter.targets == {"1.0.0": 90, "3.0.0": 10}
    assert adapter.step(BROKEN).active == release("1.0.0")


def test_git_revert_in_the_middle_takes_all_traffic_back_at_once() -> None:
    adapter = shifting()
    adapter.edit(spec("1.0.0", steps=STEPS))
    decision = adapter.step()
    assert (decision.phase, decision.stalled, adapter.targets) == (Phase.PROMOTED, False, {"1.0.0": 100})


def test_going_back_within_the_window_skips_steps_and_later_takes_them() -> None:
    for age, skips in ((100, True), (4000, False)):
        adapter = shifting(steps=((10, 0),))
        assert adapter.step(after=1).phase is Phase.PROMOTED
        adapter.edit(spec("1.0.0", steps=STEPS, rollbackWindowSeconds=3600))
        back = adapter.step(after=age)
        assert (back.phase is Phase.PROMOTED) is skips
        assert adapter.targets == ({"1.0.0": 100} if skips else {"2.0.0": 90, "1.0.0": 10})


def test_going_forward_again_takes_the_steps() -> None:
    """It was taken back for a reason."""
    adapter = shifting(steps=((10, 0),))
    adapter.step(after=1)
    adapter.edit(spec("1.0.0", steps=((10, 0),)))
    assert adapter.step(after=1).phase is Phase.PROMOTED
    adapter.edit(spec("2.0.0", steps=((10, 0),)))
    assert adapter.step(after=1).phase is Phase.SHIFT


def test_promote_roll_back_promote_three_times() -> None:
    adapter = Adapter(spec("1.0.0", steps=((50, 0),)))
    adapter.step()
    for cycle in range(3):
        adapter.edit(spec("2.0.0", steps=((50, 0),), retryToken=str(cycle)))
        assert adapter.step(after=1).phase is Phase.SHIFT
        assert adapter.targets == {"1.0.0": 50, "2.0.0": 50}
        assert adapter.step(BROKEN).phase is Phase.ROLLED_BACK
        assert adapter.targets == {"1.0.0": 100}
    adapter.edit(spec("2.0.0", steps=((50, 0),), retryToken="last"))
    adapter.step()
    assert adapter.step().phase is Phase.PROMOTED
    assert adapter.targets == {"2.0.0": 100}
    assert len(adapter.status["failedRevisions"]) == 3


def test_a_clock_that_runs_backwards_only_makes_it_wait() -> None:
    adapter = shifting()
    decision = adapter.step(after=-500)
    assert (decision.phase, adapter.targets["2.0.0"]) == (Phase.SHIFT, 10)
    assert decision.again_in == 60


# the canary channel


def test_a_canary_has_the_weight_that_was_set_by_hand() -> None:
    adapter = Adapter(spec("1.0.0", canary=("2.0.0", 20)))
    waiting = adapter.step(canary=MISSING)
    assert (adapter.targets, waiting.reason, waiting.stalled) == ({"1.0.0": 100}, "Loading", False)
    assert [found.version for found in waiting.declare] == ["1.0.0", "2.0.0"]
    done = adapter.step(canary=PROVEN)
    assert (adapter.targets, done.reason) == ({"1.0.0": 80, "2.0.0": 20}, "Promoted")
    adapter.edit(spec("1.0.0", canary=("2.0.0", 60)))
    adapter.step(canary=LOST)
    assert adapter.targets == {"1.0.0": 40, "2.0.0": 60}, "a replica that restarts takes nothing away"
    failed = adapter.step(canary=BROKEN)
    assert (adapter.targets, failed.reason, failed.stalled) == ({"1.0.0": 100}, "Corrupt", True)
    adapter.edit(spec("1.0.0"))
    assert adapter.step().reason == "Promoted"


def test_a_canary_of_weight_0_is_there_by_name() -> None:
    adapter = Adapter(spec("1.0.0", canary=("2.0.0", 0)))
    adapter.step(canary=PROVEN)
    assert adapter.targets == {"1.0.0": 100, "2.0.0": 0}


@pytest.mark.parametrize("keep", [True, False])
def test_a_canary_that_becomes_stable_starts_at_its_weight(keep: bool) -> None:
    adapter = Adapter(spec("1.0.0", canary=("2.0.0", 30), steps=((10, 60), (40, 60))))
    adapter.step(canary=PROVEN)
    adapter.edit(spec("2.0.0", canary=("2.0.0", 30) if keep else None, steps=((10, 60), (40, 60))))
    adapter.step(LOST, canary=LOST)
    assert adapter.targets == {"1.0.0": 70, "2.0.0": 30}, "it keeps its weight until the shift begins"
    adapter.step(canary=PROVEN)
    assert adapter.targets == {"1.0.0": 60, "2.0.0": 40}
    adapter.step(after=61, canary=PROVEN)
    assert adapter.targets == {"2.0.0": 100}


def test_a_canary_that_was_rolled_back_as_stable_is_no_canary_either() -> None:
    adapter = Adapter(spec("1.0.0", canary=("2.0.0", 30), steps=STEPS))
    adapter.step(canary=PROVEN)
    adapter.edit(spec("2.0.0", canary=("2.0.0", 30), steps=STEPS))
    adapter.step(canary=PROVEN)
    assert adapter.targets == {"1.0.0": 50, "2.0.0": 50}
    adapter.step(BROKEN, canary=BROKEN)
    assert adapter.step(PROVEN, canary=PROVEN).phase is Phase.ROLLED_BACK
    assert adapter.targets == {"1.0.0": 100}


def test_a_third_live_version_is_refused_and_never_declared() -> None:
    adapter = Adapter(spec("1.0.0", canary=("2.0.0", 30), steps=STEPS))
    adapter.step(canary=PROVEN)
    adapter.edit(spec("3.0.0", canary=("2.0.0", 30), steps=STEPS))
    decision = adapter.step(canary=PROVEN)
    assert (decision.reason, decision.stalled) == ("TooManyVersions", True)
    assert adapter.targets == {"1.0.0": 70, "2.0.0": 30}
    assert [found.version for found in decision.declare] == ["1.0.0", "2.0.0"]
    adapter.edit(spec("3.0.0", steps=STEPS))
    assert adapter.step().phase is Phase.SHIFT
    assert adapter.targets == {"1.0.0": 90, "3.0.0": 10}


def test_the_old_stable_may_become_the_canary() -> None:
    adapter = Adapter(spec("2.0.0", canary=("1.0.0", 25)))
    adapter.step(canary=PROVEN)
    adapter.step(canary=PROVEN)
    assert adapter.targets == {"2.0.0": 75, "1.0.0": 25}


def test_a_changed_canary_version_is_named() -> None:
    adapter = Adapter(spec("1.0.0", {"1.0.0": "a", "2.0.0": "b"}, canary=("2.0.0", 5)))
    adapter.step(canary=PROVEN)
    adapter.edit(spec("1.0.0", {"1.0.0": "a", "2.0.0": "f"}, canary=("2.0.0", 5)))
    decision = adapter.step(canary=PROVEN)
    assert (decision.reason, decision.stalled) == ("VersionChanged", True)
    assert digest("b") in decision.message
