"""Work instead of tokens, peaks instead of means, whole replicas instead of fractions.

The unit of work is the replica-second: input/k_in + cached/k_cached + output/k_out with rates k measured at the SLO.
Work per second is thus a number of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tenantry.api.common import Tier

from .inputs import Fleet, Rates, TenantTraffic

RARE = math.log(1000)
# The same for every set, so that peaks compare; from bursts of a thousand replicas to those of a millionth.
GRID: tuple[float, ...] = tuple(math.pow(2, k / 4) for k in range(-48, 81))


@dataclass(frozen=True)
class Work:
    """Mean work of a tenant in replicas, by what causes it."""

    input: float
    cached: float
    output: float
    loads: float

    @property
    def total(self) -> float:
        return self.input + self.cached + self.output + self.loads


def rates_of(tenants: Sequence[TenantTraffic], fleet: Fleet) -> Rates:
    """Rates of a replica that serves this set: adapters and confidential computing slow it down."""
    rates = fleet.rates_at(sum(1 for tenant in tenants if tenant.adapter_bytes))
    if not any(tenant.tier is Tier.REGULATED for tenant in tenants):
        return rates
    left = 1 - fleet.confidential_overhead
    return Rates(
        adapters=rates.adapters,
        input=rates.input * left,
        cached=rates.cached * left,
        output=rates.output * left,
    )


def work(tenant: TenantTraffic, fleet: Fleet, rates: Rates) -> Work:
    """Mean work of one tenant on replicas with these rates."""
    per_second = tenant.requests_per_second
    cached = tenant.input_tokens * tenant.cached_fraction
    return Work(
        input=per_second * (tenant.input_tokens - cached) / rates.input,
        cached=per_second * cached / rates.cached,
        output=per_second * tenant.output_tokens / rates.output,
        loads=tenant.loads_per_hour * fleet.load_seconds / 3600,
    )


@dataclass(frozen=True)
class Demand:
    """Load of a set of tenants over time, in replicas; the demand of two sets together is their sum.

    `periods`: sums of traces. `ceiling`: all bursts on at once. `moments`: log E exp(s X) of the bursts for every s of
    a fixed grid. Bursts are on or off, on for 1/PAR of the time, and independent.
    """

    periods: tuple[float, ...] = ()
    ceiling: float = 0.0
    moments: tuple[float, ...] = (0.0,) * len(GRID)

    def __add__(self, other: Demand) -> Demand:
        """Raises ValueError when traces have different lengths."""
        if self.periods and other.periods and len(self.periods) != len(other.periods):
            raise ValueError("every `trace` must have the same number of periods")
        if self.periods and other.periods:
            periods = tuple(a + b for a, b in zip(self.periods, other.periods, strict=True))
        else:
            periods = self.periods or other.periods
        return Demand(
            periods,
            self.ceiling + other.ceiling,
            tuple(a + b for a, b in zip(self.moments, other.moments, strict=True)),
        )

    def peak(self) -> float:
        """The load that is exceeded at most one moment in a thousand (Chernoff's bound; Kelly's effective bandwidth).

        It is never more than all bursts at once, rises with every tenant, and that of two sets together is never more
        than the sum of theirs, which a normal approximation does not promise for few tenants.
        """
        bounds = ((RARE + moment) / s for s, moment in zip(GRID, self.moments, strict=True))
        return max(self.periods, default=0.0) + min(self.ceiling, *bounds)


def demand(tenant: TenantTraffic, fleet: Fleet, rates: Rates) -> Demand:
    """Demand of one tenant on replicas with these rates."""
    mean = work(tenant, fleet, rates).total
    if tenant.trace:
        scale = mean * len(tenant.trace) / sum(tenant.trace)
        return Demand(periods=tuple(scale * part for part in tenant.trace))
    par = tenant.peak_to_average
    burst = mean * par
    # log(1 - 1/par + exp(s burst)/par), without overflow.
    moments = tuple(s * burst - math.log(par) + math.log1p((par - 1) * math.exp(-s * burst)) for s in GRID)
    return Demand(ceiling=burst, moments=moments)


def peak(tenants: Sequence[TenantTraffic], fleet: Fleet) -> float:
    """Peak work of a set in replicas. Raises ValueError when traces have different lengths."""
    rates = rates_of(tenants, fleet)
    return sum((demand(tenant, fleet, rates) for tenant in tenants), Demand()).peak()


def replicas(peak_work: float, fleet: Fleet) -> int:
    """Whole replicas that carry a peak below the highest utilisation, spare ones included."""
    # A peak of 3.0000000001 replicas is three: no replica is bought for a rounding error.
    needed = math.ceil(peak_work / fleet.max_utilisation - 1e-9)
    return max(fleet.min_replicas, needed) + fleet.spare_replicas
