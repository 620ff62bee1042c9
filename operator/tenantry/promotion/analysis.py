"""Analysis of a rollout: what gateways counted of the new version since the last measurement, held against the spec.

Gateways count from their start, so a measurement is a difference, gateway by gateway; one that counts less than before
has started anew. Percentiles come from histograms: the upper bound of the bucket that holds them, so never too low.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tenantry.api.adapter import Analysis, Metric

QUANTILE = 0.95


@dataclass(frozen=True)
class Histogram:
    """Observations by bucket, not cumulative; `bounds` in seconds, the last is infinite."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """The upper bound of the bucket in which the quantile lies; of the last finite one beyond it, doubled."""
        wanted, seen = q * self.total, 0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound if math.isfinite(bound) else 2 * max(self.bounds[:-1], default=0.0)
        return 0.0

    def minus(self, before: Histogram) -> Histogram:
        """What was observed since; all of it where the buckets are others."""
        if self.bounds != before.bounds or any(
            a < b for a, b in zip(self.counts, before.counts, strict=True)
        ):
            return self
        return Histogram(self.bounds, tuple(a - b for a, b in zip(self.counts, before.counts, strict=True)))

    def plus(self, other: Histogram) -> Histogram:
        """Both together. Raises ValueError where their buckets differ."""
        if not self.bounds:
            return other
        if not other.bounds:
            return self
        if self.bounds != other.bounds:
            raise ValueError("histograms of one metric must have the same buckets")
        return Histogram(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))


@dataclass(frozen=True)
class Counts:
    """What was counted of one version: requests that it answered, that it failed, and how long they took."""

    answered: int = 0
    failed: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    duration: Histogram = field(default_factory=Histogram)

    def minus(self, before: Counts) -> Counts:
        """What came since; all of it where the counter has started anew."""
        if self.answered < before.answered or self.failed < before.failed:
            return self
        return Counts(
            self.answered - before.answered,
            self.failed - before.failed,
            self.first_token.minus(before.first_token),
            self.duration.minus(before.duration),
        )

    def plus(self, other: Counts) -> Counts:
        """Both together. Raises ValueError where buckets differ."""
        return Counts(
            self.answered + other.answered,
            self.failed + other.failed,
            self.first_token.plus(other.first_token),
            self.duration.plus(other.duration),
        )


Reading = Mapping[str, Counts]
"""Counts of one version by gateway, since each gateway's start."""


@dataclass(frozen=True)
class Window:
    """What all gateways together counted between two readings."""

    counts: Counts = Counts()

    def samples(self, metric: Metric) -> int:
        if metric is Metric.ERRORS:
            return self.counts.answered + self.counts.failed
        return self._histogram(metric).total

    def value(self, metric: Metric) -> int:
        """In the metric's unit, rounded up; 0 without samples."""
        if metric is Metric.ERRORS:
            return math.ceil(1000 * self.counts.failed / max(1, self.samples(metric)))
        return math.ceil(1000 * self._histogram(metric).quantile(QUANTILE))

    def _histogram(self, metric: Metric) -> Histogram:
        return self.counts.first_token if metric is Metric.FIRST_BYTE else self.counts.duration


def between(before: Reading, after: Reading) -> Window:
    """The window of two readings. A gateway that is new counts from its start; one that is gone tells nothing more.

    Raises ValueError where gateways count in different buckets.
    """
    total = Counts()
    for gateway, counts in after.items():
        total = total.plus(counts.minus(before.get(gateway, Counts())))
    return Window(total)


@dataclass(frozen=True)
class Tally:
    """The last measurement of a metric; `failures` of the rollout, `passed` in the present step."""

    metric: Metric
    value: int = 0
    samples: int = 0
    failures: int = 0
    passed: bool = False


def sufficient(rules: Iterable[Analysis], window: Window) -> bool:
    """Whether there is enough to judge every rule by."""
    return all(window.samples(rule.metric) >= rule.min_samples for rule in rules)


def tallies(rules: Sequence[Analysis], before: Iterable[Tally]) -> tuple[Tally, ...]:
    """One tally for each rule, with what is known of it."""
    known = {tally.metric: tally for tally in before}
    return tuple(known.get(rule.metric, Tally(rule.metric)) for rule in rules)


def measure(rules: Sequence[Analysis], before: Iterable[Tally], window: Window) -> tuple[Tally, ...]:
    """The tallies after one measurement. `window` must be sufficient."""
    result = []
    for rule, tally in zip(rules, tallies(rules, before), strict=True):
        value = window.value(rule.metric)
        passed = value <= rule.threshold
        failures = tally.failures + (not passed)
        result.append(Tally(rule.metric, value, window.samples(rule.metric), failures, passed))
    return tuple(result)


def verdict(rules: Sequence[Analysis], tally: Sequence[Tally]) -> str | None:
    """What is wrong, in words, once more measurements of a rule have failed than may; else None."""
    for rule, seen in zip(rules, tally, strict=True):
        if seen.failures > rule.failure_limit:
            return (
                f"`{rule.metric.value}` was {seen.value} on {seen.samples} requests and must be at most "
                f"{rule.threshold}; {seen.failures} measurements failed, {rule.failure_limit} may"
            )
    return None
