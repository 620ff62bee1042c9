"""What gateways counted, as windows and measurements."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promotion_world import window
from tenantry.api.adapter import Analysis, Metric
from tenantry.promotion.analysis import (
    Counts,
    Histogram,
    Tally,
    Window,
    between,
    measure,
    sufficient,
    tallies,
    verdict,
)

BOUNDS = (0.1, 1.0, math.inf)
RULE = Analysis(metric=Metric.ERRORS, threshold=10, min_samples=20)


def counts(answered: int, failed: int = 0, *taken: int) -> Counts:
    histogram = Histogram(BOUNDS, taken) if taken else Histogram()
    return Counts(answered, failed, histogram, histogram)


def test_a_window_is_what_all_gateways_counted_since() -> None:
    before = {"a": counts(10, 1, 10, 0, 0), "b": counts(5, 0, 5, 0, 0)}
    after = {"a": counts(15, 2, 11, 4, 0), "b": counts(7, 0, 5, 2, 0)}
    found = between(before, after).counts
    assert (found.answered, found.failed, found.duration.counts) == (7, 1, (1, 6, 0))


def test_a_gateway_that_started_anew_or_is_new_counts_from_its_start() -> None:
    found = between({"a": counts(10, 0, 10, 0, 0)}, {"a": counts(3, 0, 3, 0, 0), "b": counts(2, 0, 0, 2, 0)})
    assert (found.counts.answered, found.counts.duration.counts) == (5, (3, 2, 0))


def test_a_gateway_that_is_gone_tells_nothing() -> None:
    assert between({"a": counts(10)}, {}) == Window()


def test_gateways_that_count_in_other_buckets_cannot_be_added() -> None:
    other = Counts(1, 0, Histogram((5.0, math.inf), (1, 0)), Histogram())
    with pytest.raises(ValueError, match="same buckets"):
        between({}, {"a": counts(1, 0, 1, 0, 0), "b": other})


def test_errors_are_rounded_up_and_need_no_times() -> None:
    found = Window(Counts(answered=999, failed=1))
    assert (found.samples(Metric.ERRORS), found.value(Metric.ERRORS)) == (1000, 1)
    assert Window(Counts(answered=1999, failed=1)).value(Metric.ERRORS) == 1
    assert Window().value(Metric.ERRORS) == 0


def test_percentiles_are_never_too_low() -> None:
    slow = Window(Counts(100, 0, Histogram(BOUNDS, (94, 5, 1)), Histogram(BOUNDS, (0, 0, 100))))
    assert slow.value(Metric.FIRST_BYTE) == 1000
    assert slow.value(Metric.DURATION) == 2000, "beyond the last bucket"
    assert Window().value(Metric.DURATION) == 0


@given(st.lists(st.floats(0.001, 5.0), min_size=1, max_size=200))
def test_the_percentile_bounds_the_true_one(taken: list[float]) -> None:
    bounds = (0.01, 0.1, 0.5, 1.0, 2.0, 10.0, math.inf)
    bucket = [min(bound for bound in bounds if value <= bound) for value in taken]
    found = Histogram(bounds, tuple(bucket.count(bound) for bound in bounds)).quantile(0.95)
    true = sorted(taken)[math.ceil(0.95 * len(taken)) - 1]
    assert found >= true
    assert found == min(bound for bound in bounds if true <= bound)


def test_failed_requests_count_for_errors_and_not_for_times() -> None:
    found = window(0, 50)
    assert found.samples(Metric.ERRORS) == 50
    assert not sufficient([Analysis(metric=Metric.DURATION, threshold=1, min_samples=1)], found)


def test_measurements_are_kept_by_metric() -> None:
    rules = [RULE, Analysis(metric=Metric.DURATION, threshold=50)]
    first = measure(rules, (), window(20))
    assert first == (
        Tally(Metric.ERRORS, 0, 20, 0, True),
        Tally(Metric.DURATION, 100, 20, 1, False),
    )
    assert verdict(rules, first) is not None
    assert verdict([rules[0]], first[:1]) is None
    kept = tallies([rules[1]], first)
    assert kept == first[1:], "a rule that is gone is forgotten"


def test_the_threshold_itself_passes() -> None:
    assert measure([RULE], (), window(99, 1))[0].passed
    assert not measure([RULE], (), window(88, 1))[0].passed
