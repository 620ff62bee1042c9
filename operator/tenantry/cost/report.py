"""All results of one question: topologies side by side, shares of every tenant, crossovers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from tenantry.api.common import Tier

from .allocate import IdlePolicy, Share, allocate
from .bill import Bill, Topology, bill_of
from .crossover import Crossover, crossover
from .inputs import Fleet, TenantTraffic

MOST_CROSSOVERS = 20


@dataclass(frozen=True)
class Report:
    """`shares`: of the chosen topology, pool by pool; they sum to its bill. `crossovers`: of the busiest tenants."""

    fleet: Fleet
    policy: IdlePolicy
    topology: Topology
    bills: tuple[Bill, ...]
    shares: tuple[Share, ...]
    crossovers: tuple[Crossover, ...]

    @property
    def total(self) -> Decimal:
        return sum((share.total for share in self.shares), Decimal(0))


def report(
    tenants: Sequence[TenantTraffic],
    fleet: Fleet,
    policy: IdlePolicy = IdlePolicy.PROPORTIONAL,
    topology: Topology = Topology.TIERS,
) -> Report:
    """Raises ValueError when the inputs do not fit together."""
    bills = tuple(bill_of(each, tenants, fleet) for each in Topology)
    chosen = next(bill for bill in bills if bill.topology is topology)
    shares = tuple(share for pool in chosen.pools for share in allocate(pool, fleet, policy))
    pooled = [tenant for tenant in tenants if not tenant.tier.dedicated]
    # Regulated tenants never share, so that nothing crosses.
    asked = sorted((t for t in tenants if t.tier is not Tier.REGULATED), key=lambda t: -t.tokens_per_day)
    crossovers = tuple(
        crossover(tenant, others, fleet)
        for tenant in asked[:MOST_CROSSOVERS]
        if (others := [other for other in pooled if other is not tenant])
    )
    return Report(fleet, policy, topology, bills, shares, crossovers)
