"""Limits alone, on a clock that the test moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tenantry.api.tenant import EffectiveLimits
from tenantry_gateway.limits import Fit, Lease, Limiter, Window, month_of, month_start, until_next_month

MONTH = "2026-03"


def limits(**changes: int | None) -> EffectiveLimits:
    values = {
        "requestsPerMinute": 60,
        "tokensPerMinute": 6000,
        "maxInFlight": 4,
        "maxQueued": 10,
        "maxInputTokens": 1000,
        "maxOutputTokens": 1000,
        "monthlyTokens": None,
    }
    return EffectiveLimits.model_validate(values | changes)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400)), max_size=200))
def test_a_window_admits_a_burst_and_then_the_rate(arrivals: list[tuple[float, int]]) -> None:
    window, now, taken = Window(), 0.0, 0
    for gap, amount in arrivals:
        now += gap
        if window.wait(amount, 600, now) == 0:
            window.take(amount, 600, now)
            taken += amount
        assert taken <= 600 + now * 10 + 1e-6


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_retry_after_is_exact(used: int, amount: int) -> None:
    window = Window()
    window.take(used, 1000, 0.0)
    wait = window.wait(amount, 1000, 0.0)
    if wait > 0.01:
        assert window.wait(amount, 1000, wait - 0.01) > 0
    assert window.wait(amount, 1000, wait + 1e-6) == 0


def test_a_changed_limit_applies_at_once() -> None:
    window = Window()
    window.take(500, 1000, 0.0)
    assert window.available(400, 0.0) == -100
    assert window.available(2000, 0.0) == 1500


class Machine(RuleBasedStateMachine):
    """Any order of admissions, ends and time; the truth is kept beside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limits = limits(monthlyTokens=20_000)
        self.limiter = Limiter(lease_seconds=1000)
        self.open: dict[str, Lease] = {}
        self.spent = 0
        self.count = 0

    @rule(reserve=st.integers(1, 6000), sequences=st.integers(1, 4))
    def admit(self, reserve: int, sequences: int) -> None:
        fit, _ = self.limiter.fit("u", self.limits, reserve, sequences, now=self.now, month=MONTH)
        if fit is Fit.YES:
            self.count += 1
            lease = Lease(str(self.count), sequences, reserve, MONTH)
            self.limiter.acquire(lease, "u", self.limits, self.now)
            self.open[lease.id] = lease

    @rule(data=st.data(), used=st.integers(0, 6000))
    def settle(self, data: st.DataObject, used: int) -> None:
        if self.open:
            lease = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
            used = min(used, lease.reserve)
            self.spent += used
            assert self.limiter.settle("u", lease.id, self.limits, used, self.now)
            assert not self.limiter.settle("u", lease.id, self.limits, used, self.now)

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def holds(self) -> None:
        usage = self.limiter.usage("u", MONTH)
        assert usage.in_flight == sum(lease.sequences for lease in self.open.values()) <= 4
        assert usage.month_used == self.spent
        assert self.spent + usage.reserved <= 20_000
        assert 0 <= usage.tokens.level(6000, self.now) <= 6000 + 1e-6


TestAnyOrder = Machine.TestCase


def test_why_a_request_does_not_fit() -> None:
    limiter, bound = Limiter(lease_seconds=10), limits(monthlyTokens=10_000)

    def fit(reserve: int, sequences: int = 1, now: float = 0.0) -> Fit:
        return limiter.fit("u", bound, reserve, sequences, now=now, month=MONTH)[0]

    limiter.acquire(Lease("a", 3, 5000, MONTH), "u", bound, 0.0)
    assert fit(100) is Fit.YES
    assert fit(100, 2) is Fit.CONCURRENCY
    assert fit(2000) is Fit.TOKENS_HELD, "what is reserved may come back"
    limiter.settle("u", "a", bound, 5000, 0.0)
    assert fit(2000) is Fit.TOKENS
    assert fit(2000, now=10.0) is Fit.YES
    assert fit(5001, now=60.0) is Fit.BUDGET
    assert limiter.fit("u", bound, 6000, 1, now=60.0, month="2026-04")[0] is Fit.YES, "a new month"


def test_the_ledger_tells_what_an_earlier_process_used() -> None:
    limiter = Limiter(10, lambda uid, month: 9_950 if (uid, month) == ("u", MONTH) else 0)
    assert limiter.fit("u", limits(monthlyTokens=10_000), 51, 1, now=0, month=MONTH)[0] is Fit.BUDGET
    assert limiter.fit("u", limits(monthlyTokens=10_000), 50, 1, now=0, month=MONTH)[0] is Fit.YES


def test_a_lease_that_nothing_renews_expires_and_counts_in_full() -> None:
    limiter, bound = Limiter(lease_seconds=10), limits()
    for name in ("kept", "lost"):
        limiter.acquire(Lease(name, 1, 100, MONTH), "u", bound, 0.0)
    kept = limiter.lease("u", "kept")
    assert kept is not None
    limiter.renew(kept, 8.0)
    assert [lease.id for lease in limiter.expire(10.0)] == ["lost"]
    assert (limiter.usage("u", MONTH).in_flight, limiter.usage("u", MONTH).month_used) == (1, 100)
    assert not limiter.settle("u", "lost", bound, 100, 11.0)


@given(st.floats(1_700_000_000, 2_000_000_000))
def test_months(wall: float) -> None:
    end = wall + until_next_month(wall)
    assert month_start(month_of(end + 1)) - end < 1
    assert month_of(end - 1) == month_of(wall) or until_next_month(wall) < 1
    assert month_start(month_of(wall)) <= wall
