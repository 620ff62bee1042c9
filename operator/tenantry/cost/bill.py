"""The bill of a topology: whole replicas times their price, plus storage of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from enum import StrEnum

from .capacity import peak, replicas
from .inputs import Fleet, TenantTraffic

CENT = Decimal("0.01")


class Topology(StrEnum):
    """Where tenants run. `tiers`: Enterprise and Regulated alone, all others in one pool."""

    SHARED = "shared"
    TIERS = "tiers"
    DEDICATED = "dedicated"


@dataclass(frozen=True)
class PoolBill:
    """Bill of one set of tenants that share replicas, for the fleet's period. Money in cents, exactly."""

    tenants: tuple[TenantTraffic, ...]
    dedicated: bool
    peak: float
    replicas: int
    accelerators: Decimal
    storage: Decimal

    @property
    def total(self) -> Decimal:
        return self.accelerators + self.storage


@dataclass(frozen=True)
class Bill:
    """Bill of a topology."""

    topology: Topology
    pools: tuple[PoolBill, ...]

    @property
    def total(self) -> Decimal:
        return sum((pool.total for pool in self.pools), Decimal(0))

    @property
    def replicas(self) -> int:
        return sum(pool.replicas for pool in self.pools)


def cents(money: Decimal) -> Decimal:
    return money.quantize(CENT, ROUND_HALF_EVEN)


def storage_cost(tenant: TenantTraffic, copies: int, fleet: Fleet) -> Decimal:
    """Money for a tenant's adapter on every replica that it may be served by."""
    gib = Decimal(tenant.adapter_bytes * copies) / (1 << 30)
    return cents(gib * fleet.storage_per_gib_month * fleet.hours / 730)


def price_pool(tenants: Sequence[TenantTraffic], fleet: Fleet, *, dedicated: bool) -> PoolBill:
    """Bill of one pool; an empty one costs nothing. Raises ValueError."""
    if not tenants:
        return PoolBill((), dedicated, 0.0, 0, Decimal(0), Decimal(0))
    load = peak(tenants, fleet)
    count = replicas(load, fleet)
    return PoolBill(
        tenants=tuple(tenants),
        dedicated=dedicated,
        peak=load,
        replicas=count,
        accelerators=cents(fleet.price(dedicated=dedicated) * count * fleet.hours),
        storage=sum((storage_cost(tenant, count, fleet) for tenant in tenants), Decimal(0)),
    )


def bill_of(topology: Topology, tenants: Sequence[TenantTraffic], fleet: Fleet) -> Bill:
    """Bill of all tenants in a topology. Raises ValueError."""
    alone = [tenant for tenant in tenants if _alone(topology, tenant)]
    together = [tenant for tenant in tenants if not _alone(topology, tenant)]
    pools = [price_pool(together, fleet, dedicated=False)] if together else []
    pools += [price_pool([tenant], fleet, dedicated=True) for tenant in alone]
    return Bill(topology, tuple(pools))


def _alone(topology: Topology, tenant: TenantTraffic) -> bool:
    return topology is Topology.DEDICATED or (topology is Topology.TIERS and tenant.tier.dedicated)
