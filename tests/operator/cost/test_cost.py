"""The arithmetic of the cost model: sums to the cent, whole replicas, crossovers that exist and that do not."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tenantry.api.common import Tier
from tenantry.cost import (
    Fleet,
    IdlePolicy,
    TenantTraffic,
    Topology,
    allocate,
    apportion,
    bill_of,
    crossover,
    peak,
    price_pool,
    replicas,
    report,
)

CENT = Decimal("0.01")


def fleet(**changes: Any) -> Fleet:
    """One output token per second is one replica, so that work can be read off; 1 hour for 1.00."""
    return Fleet.model_validate(
        {
            "accelerator": "test",
            "priceDate": "2026-01-01",
            "pricePerHour": "1",
            "rates": [{"input": 1000, "cached": 10000, "output": 1}],
            "hours": 1,
            **changes,
        }
    )


def tenant(name: str = "a", load: float = 1.0, **changes: Any) -> TenantTraffic:
    """A tenant whose mean work is `load` replicas."""
    return TenantTraffic.model_validate(
        {
            "name": name,
            "tier": "MidMarket",
            "requestsPerSecond": load,
            "inputTokens": 0,
            "outputTokens": 1,
            **changes,
        }
    )


loads = st.floats(0, 20, allow_nan=False)
tenants = st.lists(
    st.tuples(loads, st.floats(1, 20), st.integers(0, 2**34), st.floats(0, 500), st.floats(0, 1)),
    min_size=1,
    max_size=12,
).map(
    lambda rows: [
        tenant(f"t{i}", load, peakToAverage=par, adapterBytes=size, inputTokens=tokens, cachedFraction=cached)
        for i, (load, par, size, tokens, cached) in enumerate(rows)
    ]
)
fleets = st.builds(
    lambda price, spare, least, u_max, storage, hours: fleet(
        pricePerHour=price,
        spareReplicas=spare,
        minReplicas=least,
        maxUtilisation=u_max,
        storagePerGibMonth=storage,
        hours=hours,
    ),
    st.decimals("0.01", "99.99", places=3),
    st.integers(0, 3),
    st.integers(0, 5),
    st.floats(0.2, 1),
    st.decimals("0", "3", places=3),
    st.integers(1, 800),
)


@settings(max_examples=30, deadline=None)
@given(tenants, fleets, st.sampled_from(IdlePolicy))
def test_shares_sum_to_the_bill(who: list[TenantTraffic], what: Fleet, policy: IdlePolicy) -> None:
    pool = price_pool(who, what, dedicated=False)
    shares = allocate(pool, what, policy)
    assert sum(share.total for share in shares) == pool.total
    assert pool.accelerators == (what.price(dedicated=False) * pool.replicas * what.hours).quantize(CENT)
    for share in shares:
        for part in (share.direct, share.idle, share.overhead, share.storage):
            assert part >= 0
            assert part == part.quantize(CENT)
    assert [share.tenant for share in shares if share.tenant] == [each.name for each in who]
    if policy is IdlePolicy.UNALLOCATED:
        assert all(share.idle == 0 for share in shares[:-1])


@settings(max_examples=30, deadline=None)
@given(tenants, fleets, st.sampled_from([p for p in IdlePolicy if p is not IdlePolicy.UNALLOCATED]))
def test_more_idle_capacity_is_cheaper_for_nobody(
    who: list[TenantTraffic], what: Fleet, policy: IdlePolicy
) -> None:
    pool = price_pool(who, what, dedicated=False)
    idler = what.model_copy(update={"min_replicas": pool.replicas + 1})
    for before, after in zip(
        allocate(pool, what, policy),
        allocate(price_pool(who, idler, dedicated=False), idler, policy),
        strict=True,
    ):
        assert after.idle >= before.idle - CENT  # a cent may change hands by rounding


@settings(max_examples=30, deadline=None)
@given(tenants, fleets, st.sampled_from([p for p in IdlePolicy if p is not IdlePolicy.UNALLOCATED]))
def test_one_tenant_alone_pays_what_dedicated_costs(
    who: list[TenantTraffic], what: Fleet, policy: IdlePolicy
) -> None:
    [share] = allocate(price_pool(who[:1], what, dedicated=False), what, policy)
    assert share.total == bill_of(Topology.DEDICATED, who[:1], what).total


@settings(max_examples=30, deadline=None)
@given(tenants, fleets)
def test_one_more_tenant_is_never_cheaper(who: list[TenantTraffic], what: Fleet) -> None:
    all_of = price_pool(who, what, dedicated=False)
    assert all_of.replicas >= price_pool(who[1:], what, dedicated=False).replicas
    assert all_of.peak <= sum(peak([each], what) for each in who) * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.decimals("0", "99999", places=2), st.lists(st.floats(0, 1e9), min_size=1, max_size=40))
def test_apportion(amount: Decimal, weights: list[float]) -> None:
    parts = apportion(amount, weights)
    assert sum(parts) == amount
    if max(weights) > 1e-300:
        total = math.fsum(weights)
        for part, weight in zip(parts, weights, strict=True):
            assert abs(float(part) - float(amount) * weight / total) <= 0.01 + 1e-9 * float(amount)


@pytest.mark.parametrize(
    ("load", "count"), [(0.0, 1), (0.5, 1), (1.0, 1), (1.0000000001, 1), (1.01, 2), (2.0, 2), (2.5, 3)]
)
def test_replicas_are_whole(load: float, count: int) -> None:
    assert replicas(load, fleet()) == count
    assert replicas(load, fleet(spareReplicas=1)) == count + 1
    assert replicas(load, fleet(minReplicas=3)) == max(count, 3)


def test_thirty_customers_on_one_accelerator_pay_for_one() -> None:
    who = [tenant(f"t{i}", 0.01) for i in range(30)]
    for policy in IdlePolicy:
        shares = allocate(price_pool(who, fleet(), dedicated=False), fleet(), policy)
        assert sum(share.total for share in shares) == Decimal("1.00")


def test_sharing_lowers_the_peak_of_independent_bursts() -> None:
    def par(count: int) -> float:
        who = [tenant(f"t{i}", 0.1, peakToAverage=5) for i in range(count)]
        return peak(who, fleet()) / (0.1 * count)

    assert par(1) == pytest.approx(5)
    assert par(1) >= par(10) > par(100) > par(1000) > 1
    assert par(1000) < 1.3


def test_traces_share_when_busy_at_different_times() -> None:
    day, night = tenant("d", 1, trace=[2, 0]), tenant("n", 1, trace=[0, 2])
    assert peak([day], fleet()) == pytest.approx(2)
    assert peak([day, night], fleet()) == pytest.approx(2)
    assert peak([day, tenant("e", 1, trace=[4, 0])], fleet()) == pytest.approx(4)
    with pytest.raises(ValueError, match="same number of periods"):
        peak([day, tenant("x", 1, trace=[1, 1, 1])], fleet())


def test_adapters_cost_rate_and_storage() -> None:
    rates = [
        {"adapters": 0, "input": 1000, "cached": 1000, "output": 10},
        {"adapters": 10, "input": 1000, "cached": 1000, "output": 5},
    ]
    what = fleet(rates=rates, storagePerGibMonth="0.5", hours=730)
    who = [tenant(f"t{i}", 1, adapterBytes=2**30) for i in range(5)]
    assert what.rates_at(5).output == pytest.approx(7.5)
    assert peak(who, what) == pytest.approx(5 / 7.5)
    pool = price_pool(who, what, dedicated=False)
    assert pool.storage == Decimal("2.50")
    with pytest.raises(ValueError, match="measured up to 11 adapters"):
        what.rates_at(11)
    assert fleet(rates=rates, maxResidentAdapters=10).rates_at(10_000).output == 5


def test_token_prices_add_up_to_the_bill() -> None:
    who = [
        tenant("a", 0.01, inputTokens=900, cachedFraction=0.5, outputTokens=30),
        tenant("b", 0.02, inputTokens=100, outputTokens=10),
    ]
    what = fleet(hours=730)
    for share, each in zip(
        allocate(price_pool(who, what, dedicated=False), what, IdlePolicy.EVEN), who, strict=True
    ):
        million = Decimal(each.requests_per_second) * 730 * 3600 / 1_000_000
        cached = Decimal(each.input_tokens * each.cached_fraction)
        total = million * (
            (share.per_million_input or 0) * (Decimal(each.input_tokens) - cached)
            + (share.per_million_cached or 0) * cached
            + (share.per_million_output or 0) * Decimal(each.output_tokens)
        )
        assert total == pytest.approx(share.total, rel=Decimal("0.001"))
        assert share.per_million_input is not None
        assert share.per_million_output is not None
        assert share.per_million_output > share.per_million_input
        assert (share.per_million_cached is None) == (each.cached_fraction == 0)


def test_no_crossover_where_there_is_none() -> None:
    """PAR of the tenant 3, of the pool 2, no spare replicas: the formula alone would print a crossover."""
    bursty = tenant("t", 0.1, trace=[2, 3, 0, 0, 0, 1, 1, 1])
    assert peak([bursty], fleet()) == pytest.approx(0.3)
    others = [tenant("others", (100 - 0.7) / 2, trace=[2, 0, 1, 1, 1, 1, 1, 1])]
    found = crossover(bursty, others, fleet())
    assert found.closed_form is not None
    assert found.closed_form > 0
    assert not found.closed_form_holds
    assert found.intervals == ()
    assert found.reason.startswith("no crossover")


def test_a_step_that_falls_badly_makes_an_interval() -> None:
    """The same tenant beside a fuller pool: for a while it alone causes the next replica."""
    bursty = tenant("t", 0.1, trace=[2, 3, 0, 0, 0, 1, 1, 1])
    others = [tenant("others", (100 - 0.2) / 2, trace=[2, 0, 1, 1, 1, 1, 1, 1])]
    found = crossover(bursty, others, fleet())
    assert found.intervals
    assert found.intervals[0].begin == pytest.approx(0.1 * 86_400, rel=1e-6)
    assert found.intervals[0].end == pytest.approx(86_400 / 3, rel=1e-6)
    assert found.intervals[0].saving == 0


def test_cheaper_dedicated_hardware_crosses_once_and_stays() -> None:
    what = fleet(pricePerHour="4", dedicatedPricePerHour="1")
    found = crossover(tenant("t", 0.1), [tenant("o", 10.0)], what)
    assert len(found.intervals) == 1
    assert found.intervals[0].end is None
    assert found.intervals[0].saving > 0
    assert found.closed_form_holds


@settings(max_examples=30, deadline=None)
@given(tenants, fleets, st.floats(0.001, 0.999))
def test_every_interval_is_true_and_nothing_is_left_out(
    who: list[TenantTraffic], what: Fleet, where: float
) -> None:
    """At any traffic, the scan and the two bills agree."""
    subject, others = who[0], who[1:]
    found = crossover(subject, others, what, most_replicas=3)
    if not found.scanned_to:
        return
    tokens = where * found.scanned_to
    edges = [edge for i in found.intervals for edge in (i.begin, i.end) if edge]
    if any(abs(tokens - edge) < 1e-6 * found.scanned_to for edge in edges):
        return
    at = subject.scaled(tokens / subject.tokens_per_day)
    own = bill_of(Topology.DEDICATED, [at], what).total
    added = (
        price_pool([*others, at], what, dedicated=False).total
        - price_pool(others, what, dedicated=False).total
    )
    inside = any(i.begin < tokens and (i.end is None or tokens < i.end) for i in found.intervals)
    if abs(own - added) > CENT:
        assert inside is (own <= added)


def test_topologies_side_by_side() -> None:
    who = [
        *(tenant(f"s{i}", 0.1, tier="Smb") for i in range(5)),
        tenant("e", 0.4, tier="Enterprise"),
        tenant("r", 0.4, tier="Regulated"),
    ]
    result = report(who, fleet(confidentialOverhead=0.5))
    bills = {bill.topology: bill.replicas for bill in result.bills}
    assert bills == {Topology.SHARED: 3, Topology.TIERS: 3, Topology.DEDICATED: 7}
    assert result.total == next(b.total for b in result.bills if b.topology is Topology.TIERS)
    assert {share.tenant for share in result.shares} == {each.name for each in who}
    assert Tier.REGULATED.dedicated


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rates": []}, "rates"),
        ({"rates": [{"input": 1, "cached": 1, "output": 0}]}, "output"),
        ({"rates": [{"adapters": 2, "input": 1, "cached": 1, "output": 1}] * 2}, "sorted"),
        ({"maxUtilisation": 1.1}, "maxUtilisation"),
        ({"pricePerHour": "-1"}, "pricePerHour"),
        ({"hours": 0}, "hours"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_fleet_that_is_none(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fleet(**changes)
