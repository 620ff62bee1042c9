"""Only what has not been ready for long counts as lost, and it must last to count again."""

from __future__ import annotations

from tenantry.placement.standing import PATIENCE_SECONDS, Standing, Standings

READY, AWAY, LOST = Standing.READY, Standing.AWAY, Standing.LOST


def test_a_restart_is_no_loss() -> None:
    seen = Standings()
    assert seen.see("r", True, 0.0) is READY
    assert seen.see("r", False, 10.0) is AWAY
    assert seen.see("r", False, 9.0 + PATIENCE_SECONDS) is AWAY
    assert not seen.is_lost("r", 9.0 + PATIENCE_SECONDS)
    assert seen.see("r", True, 9.5 + PATIENCE_SECONDS) is READY
    assert seen.changes_in("r", 9.5 + PATIENCE_SECONDS, seated=True) is None


def test_long_unready_is_lost_and_returns_after_as_long() -> None:
    seen = Standings()
    seen.see("r", False, 0.0)
    assert seen.changes_in("r", 100.0, seated=True) == PATIENCE_SECONDS - 100
    assert seen.changes_in("r", 100.0, seated=False) is None, "nobody else waits for it"
    assert seen.see("r", False, PATIENCE_SECONDS) is LOST
    assert seen.is_lost("r", PATIENCE_SECONDS)
    back = PATIENCE_SECONDS + 50
    assert seen.see("r", True, back) is AWAY
    assert seen.changes_in("r", back + 100, seated=False) == PATIENCE_SECONDS - 100
    assert seen.see("r", True, back + PATIENCE_SECONDS) is READY
    assert seen.changes_in("r", back + PATIENCE_SECONDS, seated=False) is None


def test_a_replica_that_crashes_again_and_again_stays_lost() -> None:
    seen = Standings()
    seen.see("r", False, 0.0)
    now = PATIENCE_SECONDS
    found = {seen.see("r", False, now)}
    for _ in range(20):
        found |= {seen.see("r", True, now + 60), seen.see("r", False, now + 120)}
        now += 180
    assert found == {AWAY, LOST}
    assert seen.see("r", False, now) is LOST


def test_a_replica_that_is_made_anew_begins_anew() -> None:
    seen = Standings()
    seen.see("r", False, 0.0)
    seen.forget("r")
    assert seen.see("r", False, 2 * PATIENCE_SECONDS) is AWAY
