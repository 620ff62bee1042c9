"""Placement as properties: bounded, deterministic, sticky, and few moves when replicas come and go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tenantry.placement.replicas import BOUND, Load, Wish, load_of, place, place_all

UNLIMITED = 10_000

pools = st.integers(1, 8).map(lambda n: [f"lora-fast-{i}" for i in range(n)])
tenants = st.lists(st.integers(1, 3), min_size=1, max_size=40).map(
    lambda weights: [(f"tenant-{i}", weight) for i, weight in enumerate(weights)]
)


def wishes(weighted: list[tuple[str, int]], count: int) -> list[Wish]:
    return [Wish(name, weight, count) for name, weight in weighted]


def chosen(result: dict[str, object]) -> dict[str, tuple[str, ...]]:
    return {name: assignment.replicas for name, assignment in result.items()}  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(pools, tenants, st.integers(1, 3))
def test_bounded_distinct_and_stable(
    replicas: list[str], weighted: list[tuple[str, int]], count: int
) -> None:
    wanted = wishes(weighted, count)
    first = chosen(place_all(wanted, replicas, {}, UNLIMITED))
    k = min(count, len(replicas))
    for names in first.values():
        assert len(set(names)) == len(names) == k
        assert set(names) <= set(replicas)
    weights = dict(weighted)
    loads = load_of({name: (weights[name], names) for name, names in first.items()})
    total, largest = sum(weights.values()) * k, max(weights.values())
    # What a greedy choice of k distinct replicas can promise when the bound alone cannot be met.
    greedy = total / (len(replicas) - k + 1) + largest
    assert max(load.weight for load in loads.values()) <= max(BOUND * total / len(replicas), greedy)
    assert chosen(place_all(wanted, replicas, {}, UNLIMITED)) == first

    settled = first
    for _ in range(6):
        again = chosen(place_all(wanted, replicas, settled, UNLIMITED))
        if again == settled:
            break
        settled = again
    assert chosen(place_all(wanted, replicas, settled, UNLIMITED)) == settled, "it flaps"


def test_large_fleets_stay_within_the_bound() -> None:
    replicas = [f"r{i}" for i in range(20)]
    wanted = wishes([(f"t{i}", 1) for i in range(600)], 2)
    result = chosen(place_all(wanted, replicas, {}, UNLIMITED))
    loads = load_of({name: (1, names) for name, names in result.items()})
    assert max(load.weight for load in loads.values()) <= BOUND * 1200 / 20
    assert len(loads) == 20


def test_a_leaving_replica_moves_only_its_own_tenants() -> None:
    replicas = [f"r{i}" for i in range(10)]
    wanted = wishes([(f"t{i}", 1) for i in range(300)], 2)
    before = chosen(place_all(wanted, replicas, {}, UNLIMITED))
    after = chosen(place_all(wanted, replicas[:-1], before, UNLIMITED))
    moved = [name for name in before if before[name] != after[name]]
    victims = [name for name, names in before.items() if "r9" in names]
    extra = set(moved) - set(victims)
    assert set(victims) <= set(moved)
    assert len(extra) <= 0.05 * len(wanted)
    for name in victims:
        assert set(before[name]) - {"r9"} <= set(after[name]), "the replica that stayed was kept"


def test_a_joining_replica_draws_about_its_fair_share() -> None:
    replicas = [f"r{i}" for i in range(10)]
    wanted = wishes([(f"t{i}", 1) for i in range(300)], 2)
    before = chosen(place_all(wanted, replicas[:-1], {}, UNLIMITED))
    after = chosen(place_all(wanted, replicas, before, UNLIMITED))
    moves = sum(len(set(after[name]) - set(before[name])) for name in before)
    fair = 2 * 300 / 10
    joined = sum("r9" in names for names in after.values())
    assert joined >= 0.5 * fair
    assert moves <= BOUND * fair


def test_full_replicas_take_nobody_and_say_so() -> None:
    full = {"r0": Load(5, 5), "r1": Load(4, 4)}
    assert place(Wish("a", 1, 2), ["r0", "r1"], full, [], 5).replicas == ("r1",)
    nowhere = place(Wish("a", 1, 1), ["r0"], full, [], 5)
    assert nowhere.replicas == ()
    assert "has 5 tenants already: add replicas" in nowhere.reason
    assert place(Wish("a", 1, 1), [], {}, [], 5).reason == "the pool has no replicas"


def test_reasons_are_words() -> None:
    loads = {"r0": Load(1, 1), "r1": Load(1, 1), "r2": Load(1, 1)}
    first = place(Wish("a", 1, 2), ["r0", "r1", "r2"], loads, [], 5)
    assert first.reason == "2 of 3 replicas, by hash"
    assert (
        place(Wish("a", 1, 2), ["r0", "r1", "r2"], loads, first.replicas, 5).reason == "2 of 3 replicas, kept"
    )
    assert "(3 wanted)" in place(Wish("a", 1, 3), ["r0"], {}, [], 5).reason
