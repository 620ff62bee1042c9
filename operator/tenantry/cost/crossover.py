"""From which traffic on a tenant is cheaper alone: where two staircases cross, beside the formula for large pools.

Decision on whole bills: dedicated(t) <= shared(S and t) - shared(S). Both sides are step functions of t's traffic, so
they are compared once per step. The answer can be no interval, one, or several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from .bill import price_pool
from .capacity import Demand, demand, peak, rates_of, work
from .inputs import Fleet, TenantTraffic

MAX_STEPS = 256


@dataclass(frozen=True)
class Interval:
    """Traffic in tokens/day for which dedicated costs no more. `end` is None where the scan ended inside.

    `saving` is the greatest difference within, for the fleet's period; 0 means that both cost the same.
    """

    begin: float
    end: float | None
    saving: Decimal


@dataclass(frozen=True)
class Crossover:
    """Both answers and why they differ."""

    tenant: str
    intervals: tuple[Interval, ...]
    scanned_to: float
    closed_form: float | None
    closed_form_holds: bool
    reason: str


def crossover(
    tenant: TenantTraffic, others: Sequence[TenantTraffic], fleet: Fleet, *, most_replicas: int = 8
) -> Crossover:
    """Scan the tenant's traffic from nothing to what `most_replicas` dedicated replicas carry. Raises ValueError."""
    unit = tenant.tokens_per_day
    alone = peak([tenant], fleet)
    if unit <= 0 or alone < 1e-12:
        return Crossover(tenant.name, (), 0.0, None, False, "the tenant has no traffic")
    limit = most_replicas * fleet.max_utilisation / alone
    base = price_pool(others, fleet, dedicated=False)

    rates = rates_of([*others, tenant], fleet)
    rest = sum((demand(other, fleet, rates) for other in others), Demand())

    def together(factor: float) -> float:
        return (rest + demand(tenant.scaled(factor), fleet, rates)).peak()

    edges = {0.0, limit}
    edges.update(n * fleet.max_utilisation / alone for n in range(1, most_replicas))
    edges.update(_steps(together, limit, fleet.max_utilisation))
    marks = sorted(edges)
    intervals: list[Interval] = []
    for begin, end in pairwise(marks):
        if end - begin < 1e-9 * limit:
            continue
        middle = tenant.scaled((begin + end) / 2)
        own = price_pool([middle], fleet, dedicated=True).total
        added = price_pool([*others, middle], fleet, dedicated=False).total - base.total
        if own > added:
            continue
        stop = None if end >= limit * (1 - 1e-9) else end * unit
        if (
            intervals
            and intervals[-1].end is not None
            and abs(intervals[-1].end - begin * unit) < 1e-6 * unit
        ):
            before = intervals.pop()
            intervals.append(Interval(before.begin, stop, max(before.saving, added - own)))
        else:
            intervals.append(Interval(begin * unit, stop, added - own))
    formula, holds, why = _closed_form(tenant, others, fleet, unit)
    return Crossover(
        tenant.name, tuple(intervals), limit * unit, formula, holds, _why(intervals, formula, holds, why)
    )


def _steps(load: Callable[[float], float], limit: float, u_max: float) -> list[float]:
    """Factors at which a rising load needs one more whole replica."""
    first = int(load(0.0) / u_max) + 1
    last = int(load(limit) / u_max)
    found: list[float] = []
    low = 0.0
    for step in range(first, min(last, first + MAX_STEPS) + 1):
        high = limit
        for _ in range(48):
            middle = (low + high) / 2
            low, high = (low, middle) if load(middle) / u_max >= step else (middle, high)
        found.append(high)
    return found


def _closed_form(
    tenant: TenantTraffic, others: Sequence[TenantTraffic], fleet: Fleet, unit: float
) -> tuple[float | None, bool, str]:
    """lambda* = R_t k u_max / PAR_pool (by price) in tokens/day; holds only if R_t replicas carry it at its bursts."""
    everyone = [*others, tenant]
    rates = rates_of(everyone, fleet)
    mean = sum(work(each, fleet, rates).total for each in everyone)
    par_pool = peak(everyone, fleet) / mean
    count = max(fleet.min_replicas, 1) + fleet.spare_replicas
    ratio = float(fleet.price(dedicated=True) / fleet.price(dedicated=False)) if fleet.price_per_hour else 1.0
    own_work = work(tenant, fleet, rates).total
    factor = count * fleet.max_utilisation / par_pool * ratio / own_work
    carried = (count - fleet.spare_replicas) * fleet.max_utilisation
    needed = peak([tenant.scaled(factor)], fleet)
    if needed <= carried + 1e-9:
        return factor * unit, True, ""
    why = f"{count} dedicated replicas carry a peak of {carried:.2f}, but the tenant's bursts reach {needed:.2f} there"
    return factor * unit, False, why


def _why(intervals: Sequence[Interval], formula: float | None, holds: bool, why: str) -> str:
    if not intervals and not holds:
        return f"no crossover: {why}"
    if not intervals:
        return "no crossover in the scanned range: the pool's free replicas absorb the tenant at every step"
    if not holds:
        return f"the formula does not hold ({why}); the intervals come from whole replicas"
    return "the formula is for a large pool; whole replicas move the crossing to where a step falls"
