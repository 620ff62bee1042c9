"""Whose money it is: a pool's bill divided among its tenants, to the cent, under a stated policy for what lies idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

from .bill import CENT, PoolBill, cents, storage_cost
from .capacity import Work, peak, rates_of, work
from .inputs import Fleet, Rates

MILLION = Decimal(1_000_000)


class IdlePolicy(StrEnum):
    """Who pays for idle capacity: by use, all alike, by what each may need at its own peak, or nobody."""

    PROPORTIONAL = "proportional"
    EVEN = "even"
    RESERVED = "reserved"
    UNALLOCATED = "unallocated"


@dataclass(frozen=True)
class Share:
    """A tenant's part of a pool's bill. `tenant` is None for what the policy gives to nobody.

    Prices are money per million tokens and None where there is no token of that kind.
    """

    tenant: str | None
    direct: Decimal
    idle: Decimal
    overhead: Decimal
    storage: Decimal
    utilisation: float = 0.0
    per_million_input: Decimal | None = None
    per_million_cached: Decimal | None = None
    per_million_output: Decimal | None = None

    @property
    def total(self) -> Decimal:
        return self.direct + self.idle + self.overhead + self.storage


def apportion(amount: Decimal, weights: Sequence[float]) -> list[Decimal]:
    """Divide whole cents by weight so that the parts sum to the amount (largest remainder; ties to the first).

    Weights that are all zero count alike. `amount` must be whole cents.
    """
    if not weights:
        return []
    total = int(amount / CENT)
    exact = [Fraction(weight) for weight in weights]
    if not any(exact):
        exact = [Fraction(1)] * len(weights)
    quotas = [total * weight / sum(exact) for weight in exact]
    parts = [quota.numerator // quota.denominator for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - quotas[i], i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return [part * CENT for part in parts]


def allocate(pool: PoolBill, fleet: Fleet, policy: IdlePolicy) -> list[Share]:
    """Shares of a pool's bill in the order of its tenants, with a last one for nobody under `unallocated`.

    direct: replicas that the mean work fills. overhead: spare replicas for availability, by use. idle: all other
    replicas' time. Their sum is the bill, exactly.
    """
    tenants = pool.tenants
    if not tenants:
        return []
    rates = rates_of(tenants, fleet)
    works = [work(tenant, fleet, rates) for tenant in tenants]
    means = [each.total for each in works]
    per_replica = fleet.price(dedicated=pool.dedicated) * fleet.hours
    overhead = min(cents(per_replica * fleet.spare_replicas), pool.accelerators)
    direct = min(cents(per_replica * Decimal(sum(means))), pool.accelerators - overhead)
    idle = pool.accelerators - overhead - direct
    directs = apportion(direct, means)
    overheads = apportion(overhead, means)
    match policy:
        case IdlePolicy.PROPORTIONAL:
            idles = apportion(idle, means)
        case IdlePolicy.EVEN:
            idles = apportion(idle, [1.0] * len(tenants))
        case IdlePolicy.RESERVED:
            idles = apportion(idle, [peak([tenant], fleet) for tenant in tenants])
        case IdlePolicy.UNALLOCATED:
            idles = [Decimal(0)] * len(tenants)
    shares = [
        _share(
            tenant.name,
            Money(directs[i], idles[i], overheads[i], storage_cost(tenant, pool.replicas, fleet)),
            works[i],
            rates,
            pool=pool,
            fleet=fleet,
        )
        for i, tenant in enumerate(tenants)
    ]
    if policy is IdlePolicy.UNALLOCATED:
        shares.append(Share(None, Decimal(0), idle, Decimal(0), Decimal(0)))
    return shares


class Money(NamedTuple):
    direct: Decimal
    idle: Decimal
    overhead: Decimal
    storage: Decimal


def _share(name: str, money: Money, own: Work, rates: Rates, *, pool: PoolBill, fleet: Fleet) -> Share:
    """Every kind of token carries the tenant's whole bill by its work: price = bill/work x work/token."""
    tokens_work = own.input + own.cached + own.output
    seconds = fleet.hours * 3600

    def price(part: float, rate: float) -> Decimal | None:
        if part * rate * seconds < 1:
            return None  # not one token of this kind in the whole period
        per_work = sum(money) / (Decimal(tokens_work) * seconds)
        return (per_work / Decimal(rate) * MILLION).quantize(Decimal("0.0001"))

    return Share(
        name,
        *money,
        utilisation=own.total / pool.replicas if pool.replicas else 0.0,
        per_million_input=price(own.input, rates.input),
        per_million_cached=price(own.cached, rates.cached),
        per_million_output=price(own.output, rates.output),
    )
