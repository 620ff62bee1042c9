"""The fair queue alone, without time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tenantry_gateway.fairqueue import QUANTUM, FairQueue, Verdict


def run_all(_item: object) -> Verdict:
    return Verdict.RUN


def served(queue: FairQueue[tuple[str, int, int]], rounds: int) -> dict[str, int]:
    """Cost served by tenant over so many pops, with every line refilled."""
    totals: dict[str, int] = {}
    for _ in range(rounds):
        found = queue.pop(run_all)
        assert found is not None
        tenant, weight, cost = found[1]
        totals[tenant] = totals.get(tenant, 0) + cost
        queue.push(tenant, weight, cost, (tenant, weight, cost))
    return totals


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3000)), min_size=2, max_size=8),
)
def test_backlogged_tenants_share_by_weight_whatever_their_requests_cost(
    kinds: list[tuple[int, int]],
) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    for index, (weight, cost) in enumerate(kinds):
        for _ in range(3):
            queue.push(f"t{index}", weight, cost, (f"t{index}", weight, cost))
    totals = served(queue, 3000)
    shares = [totals.get(f"t{index}", 0) / weight for index, (weight, _) in enumerate(kinds)]
    largest = max(cost for _, cost in kinds)
    # The bound of deficit round robin: a quantum and a largest item per unit of weight, here with one item more.
    assert max(shares) - min(shares) <= 2 * (QUANTUM + 2 * largest)


def test_first_in_first_out_within_a_tenant() -> None:
    queue: FairQueue[int] = FairQueue()
    for index in range(20):
        queue.push("a", 1, 1 + 400 * (index % 3), index)
    order = [found[1] for found in iter(lambda: queue.pop(run_all), None)]
    assert order == list(range(20))


def test_a_tenant_that_returns_has_no_credit_and_a_flood_gets_no_head_start() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("idle", 1, 100, "idle")
    assert queue.pop(run_all) is not None
    queue.refund("idle", 1_000_000)
    for _ in range(100):
        queue.push("busy", 1, 500, "busy")
    for _ in range(100):
        queue.push("idle", 1, 500, "idle")
    first = [found[1] for found in itertools.islice(iter(lambda: queue.pop(run_all), None), 20)]
    assert abs(first.count("idle") - first.count("busy")) <= 2


def test_a_head_that_waits_is_passed_over_without_gain() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(30):
        queue.push("blocked", 1, 10, "blocked")
        queue.push("free", 1, 10, "free")

    def judge(item: str) -> Verdict:
        return Verdict.WAIT if item == "blocked" else Verdict.RUN

    assert [queue.pop(judge) for _ in range(30)] == [(Verdict.RUN, "free")] * 30
    assert queue.pop(judge) is None
    assert len(queue) == 30


def test_dropped_items_cost_nothing_and_removed_ones_are_gone() -> None:
    queue: FairQueue[object] = FairQueue()
    first, second, third = object(), object(), object()
    for item in (first, second, third):
        queue.push("a", 1, 10_000, item)
    assert queue.remove("a", second)
    assert not queue.remove("a", second)
    assert queue.pop(lambda item: Verdict.DROP if item is first else Verdict.RUN) == (Verdict.DROP, first)
    assert queue.pop(run_all) == (Verdict.RUN, third)
    assert (len(queue), queue.length("a")) == (0, 0)
