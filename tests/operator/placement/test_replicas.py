"""Placement as properties: bounded, spread, deterministic, sticky, and few moves when replicas come and go."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tenantry.placement.load import Limits, Load, Wish, load_of
from tenantry.placement.replicas import BOUND, Assignment, Replica, place, place_all
from tenantry.placement.standing import Standing

UNLIMITED = Limits(10_000, 10_000)

Seats = dict[str, tuple[str, ...]]

weights = st.lists(st.integers(1, 4), min_size=1, max_size=40)
counts = st.integers(1, 3)


def fleet(count: int, zones: int = 0) -> list[Replica]:
    """`zones` 0: nobody knows them."""
    return [Replica(f"lora-fast-{i}", f"zone-{i % zones}" if zones else "") for i in range(count)]


@st.composite
def fleets(draw: st.DrawFn) -> list[Replica]:
    """Up to eight replicas, some without a known zone, some away or lost."""
    standing = st.sampled_from([Standing.READY] * 4 + [Standing.AWAY, Standing.LOST])
    zone = st.sampled_from(["", "a", "b", "c"])
    size = draw(st.integers(1, 8))
    return [Replica(f"r{i}", draw(zone), draw(standing)) for i in range(size)]


def wishes(weighted: Iterable[int], count: int) -> list[Wish]:
    return [Wish(f"tenant-{i}", weight, count) for i, weight in enumerate(weighted)]


def seats(result: Mapping[str, Assignment]) -> Seats:
    return {name: assignment.replicas for name, assignment in result.items()}


def settled(wanted: Sequence[Wish], replicas: Sequence[Replica], limits: Limits, start: Seats) -> Seats:
    """Decisions repeated until nothing moves any more; fails when that does not happen."""
    now = start
    for _ in range(10):
        after = seats(place_all(wanted, replicas, now, limits))
        if after == now:
            return now
        now = after
    raise AssertionError("it flaps")


def zones_of(replicas: Iterable[Replica], names: Iterable[str]) -> set[str]:
    zone = {replica.name: replica.zone for replica in replicas}
    return {zone[name] for name in names} - {""}


def moves(before: Seats, after: Seats) -> int:
    return sum(len(set(after[name]) - set(before[name])) for name in before)


@settings(max_examples=40, deadline=None)
@given(fleets(), weights, counts)
def test_distinct_present_and_at_rest(replicas: list[Replica], weighted: list[int], count: int) -> None:
    wanted = wishes(weighted, count)
    first = seats(place_all(wanted, replicas, {}, UNLIMITED))
    usable = [r for r in replicas if r.standing is not Standing.LOST] or replicas
    for names in first.values():
        assert len(set(names)) == len(names) == min(count, len(usable))
        assert set(names) <= {replica.name for replica in usable}
    rest = settled(wanted, replicas, UNLIMITED, first)
    assert seats(place_all(wanted, replicas, rest, UNLIMITED)) == rest


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 3), weights, counts)
def test_no_replica_above_the_bound_when_the_largest_tenant_allows_it(
    size: int, zones: int, weighted: list[int], count: int
) -> None:
    replicas, wanted = fleet(size, zones), wishes(weighted, count)
    rest = settled(wanted, replicas, UNLIMITED, {})
    loads = load_of((wish.load, rest[wish.tenant]) for wish in wanted)
    total = sum(weighted) * min(count, size)
    # Weights are whole: a replica may be one tenant above what divides evenly.
    most = max(BOUND * total / size, total / size + max(weighted))
    assert max(load.weight for load in loads.values()) <= most


@settings(max_examples=30, deadline=None)
@given(fleets(), weights, counts, st.randoms(use_true_random=False))
def test_the_order_of_tenants_and_replicas_decides_nothing(
    replicas: list[Replica], weighted: list[int], count: int, chance: random.Random
) -> None:
    wanted = wishes(weighted, count)
    expected = place_all(wanted, replicas, {}, UNLIMITED)
    before = seats(expected)
    shuffled = {name: tuple(chance.sample(names, len(names))) for name, names in before.items()}
    chance.shuffle(wanted)
    mixed = chance.sample(replicas, len(replicas))
    assert place_all(wanted, mixed, {}, UNLIMITED) == expected
    assert seats(place_all(wanted, mixed, shuffled, UNLIMITED)) == seats(
        place_all(wanted, replicas, before, UNLIMITED)
    )


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_in_whatever_order_tenants_arrive_the_bound_holds(chance: random.Random) -> None:
    replicas = fleet(8, 3)
    wanted = wishes([chance.choice([1, 1, 1, 2]) for _ in range(200)], 2)
    chance.shuffle(wanted)
    placed: list[tuple[Load, tuple[str, ...]]] = []
    for wish in wanted:
        found = place(wish, replicas, load_of(placed), (), UNLIMITED)
        placed.append((wish.load, found.replicas))
    loads = load_of(placed)
    assert max(load.weight for load in loads.values()) <= BOUND * sum(w.weight for w in wanted) * 2 / 8


def test_ten_thousand_tenants_stay_within_the_bound_and_every_zone() -> None:
    replicas, wanted = fleet(20, 3), wishes([1] * 10_000, 2)
    result = seats(place_all(wanted, replicas, {}, UNLIMITED))
    loads = load_of((wish.load, result[wish.tenant]) for wish in wanted)
    assert len(loads) == 20
    assert max(load.weight for load in loads.values()) <= BOUND * 20_000 / 20
    wide = sum(len(zones_of(replicas, names)) == 2 for names in result.values())
    assert wide >= 0.99 * 10_000, "only the first ones, whom the bound left no choice"


def test_noisy_neighbours_are_few() -> None:
    """Shuffle sharding: hardly anybody shares all of its replicas with one given tenant."""
    replicas, wanted = fleet(12), wishes([1] * 660, 2)
    result = seats(place_all(wanted, replicas, {}, UNLIMITED))
    noisy = result["tenant-0"]
    same = sum(names == noisy for names in result.values())
    assert same <= 3 * 660 / 66  # pairs of 12 replicas: 66


@pytest.mark.parametrize("zones", [0, 3])
def test_a_leaving_replica_moves_only_its_own_tenants(zones: int) -> None:
    replicas, wanted = fleet(10, zones), wishes([1] * 1000, 2)
    before = settled(wanted, replicas, UNLIMITED, {})
    after = seats(place_all(wanted, replicas[:-1], before, UNLIMITED))
    gone = replicas[-1].name
    victims = {name for name, names in before.items() if gone in names}
    moved = {name for name in before if before[name] != after[name]}
    assert victims <= moved
    assert moves(before, after) <= BOUND * 2000 / 10
    assert len(moved - victims) <= 0.02 * len(wanted)
    for name in victims:
        assert set(before[name]) - {gone} <= set(after[name]), "the replica that stayed was kept"


@pytest.mark.parametrize("zones", [0, 3])
def test_a_joining_replica_draws_about_its_fair_share(zones: int) -> None:
    replicas, wanted = fleet(10, zones), wishes([1] * 1000, 2)
    before = settled(wanted, replicas[:-1], UNLIMITED, {})
    after = settled(wanted, replicas, UNLIMITED, before)
    fair = 2 * 1000 / 10
    joined = sum(replicas[-1].name in names for names in after.values())
    assert joined >= 0.5 * fair
    assert moves(before, after) <= BOUND * fair


def test_a_replica_that_leaves_and_returns_ends_about_where_it_was() -> None:
    replicas, wanted = fleet(6), wishes([1] * 300, 2)
    before = settled(wanted, replicas, UNLIMITED, {})
    without = settled(wanted, replicas[:-1], UNLIMITED, before)
    after = settled(wanted, replicas, UNLIMITED, without)
    assert moves(before, after) <= 0.5 * 2 * 300 / 6


def standing(replicas: list[Replica], name: str, now: Standing) -> list[Replica]:
    return [Replica(r.name, r.zone, now) if r.name == name else r for r in replicas]


def test_away_moves_nobody_and_lost_moves_everybody_once() -> None:
    replicas, wanted = fleet(6), wishes([1] * 120, 2)
    before = settled(wanted, replicas, UNLIMITED, {})
    away = standing(replicas, "lora-fast-2", Standing.AWAY)
    assert seats(place_all(wanted, away, before, UNLIMITED)) == before
    lost = standing(replicas, "lora-fast-2", Standing.LOST)
    result = place_all(wanted, lost, before, UNLIMITED)
    after = seats(result)
    assert not any("lora-fast-2" in names for names in after.values())
    victim = next(name for name, names in before.items() if "lora-fast-2" in names)
    assert "left `lora-fast-2` (not ready for 5 minutes)" in result[victim].reason
    assert seats(place_all(wanted, away, after, UNLIMITED)) == after, "one that is away draws nobody"


def test_when_everything_is_lost_everybody_stays() -> None:
    replicas, wanted = fleet(3), wishes([1] * 9, 2)
    before = settled(wanted, replicas, UNLIMITED, {})
    lost = [Replica(r.name, r.zone, Standing.LOST) for r in replicas]
    assert seats(place_all(wanted, lost, before, UNLIMITED)) == before


def test_a_newcomer_prefers_what_is_ready() -> None:
    replicas = [Replica("r0", "", Standing.AWAY), Replica("r1"), Replica("r2", "", Standing.AWAY)]
    for number in range(8):
        assert place(Wish(f"t{number}", 1, 1), replicas, {}, (), UNLIMITED).replicas == ("r1",)


def test_two_zones_before_a_second_replica_in_one() -> None:
    replicas = [*(Replica(f"a{i}", "a") for i in range(4)), Replica("b0", "b")]
    loads = {f"a{i}": Load(4, 4) for i in range(4)} | {"b0": Load(4, 4)}
    for number in range(20):
        found = place(Wish(f"t{number}", 1, 2), replicas, loads, (), UNLIMITED)
        assert "b0" in found.replicas
        assert "in 2 zones" in found.reason


def test_a_seat_moves_when_its_zone_has_two_and_another_none() -> None:
    replicas = [Replica("a0", "a"), Replica("a1", "a"), Replica("b0", "b")]
    found = place(Wish("t", 1, 2), replicas, {}, ("a0", "a1"), UNLIMITED)
    assert len(zones_of(replicas, found.replicas)) == 2
    assert "(zones)" in found.reason
    again = place(Wish("t", 1, 2), replicas, {}, found.replicas, UNLIMITED)
    assert again.replicas == found.replicas


def test_full_replicas_take_nobody_and_say_so() -> None:
    replicas, full = fleet(2), {"lora-fast-0": Load(5, 5), "lora-fast-1": Load(4, 4)}
    assert place(Wish("a", 1, 2), replicas, full, (), Limits(5)).replicas == ("lora-fast-1",)
    nowhere = place(Wish("a", 1, 1), replicas[:1], full, (), Limits(5))
    assert nowhere.replicas == ()
    assert nowhere.reason == "each of the pool's 1 replicas has 5 tenants already: add replicas"
    assert place(Wish("a", 1, 1), [], {}, (), Limits(5)).reason == "the pool has no replicas"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=40),
    st.integers(2, 6),
    counts,
)
def test_adapters_and_pinned_pages_never_exceed_what_a_replica_may_hold(
    sizes: list[tuple[int, int]], size: int, count: int
) -> None:
    replicas = [Replica(f"r{i}", "", Standing.READY, 24 if i % 2 else None) for i in range(size)]
    wanted = [Wish(f"t{i}", 1, count, adapters, pages) for i, (adapters, pages) in enumerate(sizes)]
    rest = settled(wanted, replicas, Limits(1000, 10), {})
    loads = load_of((wish.load, rest[wish.tenant]) for wish in wanted)
    for replica in replicas:
        load = loads.get(replica.name, Load())
        assert load.adapters <= 10
        assert replica.pages is None or load.pages <= replica.pages


def test_a_tenant_leaves_a_replica_whose_pages_ran_out() -> None:
    replicas = [Replica("r0", "", Standing.READY, 8), Replica("r1", "", Standing.READY, 8)]
    found = place(Wish("t", 1, 1, 1, 6), replicas, {"r0": Load(1, 1, 1, 6)}, ("r0",), UNLIMITED)
    assert found.replicas == ("r1",)
    assert "left `r0` (full)" in found.reason
    both = {name: Load(1, 1, 1, 6) for name in ("r0", "r1")}
    assert place(Wish("t", 1, 1, 1, 6), replicas, both, ("r0",), UNLIMITED).replicas == ("r0",), (
        "it serves on"
    )


def test_a_tenant_too_large_for_the_pool_is_not_squeezed_in() -> None:
    replicas = [Replica("r0", "", Standing.READY, 8), Replica("r1", "", Standing.READY, 8)]
    many = place(Wish("t", 1, 1, 11), replicas, {}, (), Limits(10, 10))
    assert (many.replicas, many.too_large) == ((), True)
    assert "its 11 adapters are more than the 10" in many.reason
    assert "raise `lora.maxRegistered`" in many.reason
    assert "(Enterprise, Regulated)" in many.reason
    pinned = place(Wish("t", 1, 1, 1, 9), replicas, {}, (), Limits(10, 10))
    assert (pinned.replicas, pinned.too_large) == ((), True)
    assert "take 9 pages, more than the 8" in pinned.reason
    unknown = [Replica("r0", "", Standing.READY, 8), Replica("r1")]
    assert place(Wish("t", 1, 1, 1, 9), unknown, {}, (), Limits(10, 10)).replicas == ("r1",)
    grown = place(Wish("t", 1, 1, 11), replicas, {}, ("r0",), Limits(10, 10))
    assert (grown.replicas, grown.too_large) == (("r0",), True), "what is served goes on"


def test_a_weight_above_the_bound_is_told() -> None:
    replicas, loads = fleet(5), {f"lora-fast-{i}": Load(1, 1) for i in range(5)}
    found = place(Wish("whale", 50, 1), replicas, loads, (), UNLIMITED)
    assert len(found.replicas) == 1
    assert "its weight 50 alone is above the bound of the mean load 11" in found.reason
    assert "alone" not in place(Wish("minnow", 1, 1), replicas, loads, (), UNLIMITED).reason


def test_reasons_are_words() -> None:
    replicas, loads = fleet(4), {f"lora-fast-{i}": Load(4, 4) for i in range(4)}
    first = place(Wish("a", 1, 2), replicas, loads, (), UNLIMITED)
    assert first.reason == "2 of 4 replicas, first in its hash order"
    heavy = {**loads, first.replicas[0]: Load(9, 9)}
    passed = place(Wish("a", 1, 2), replicas, heavy, (), UNLIMITED)
    assert passed.reason == f"2 of 4 replicas, next in its hash order after `{first.replicas[0]}` (load)"
    assert place(Wish("a", 1, 2), fleet(2), {}, (), UNLIMITED).reason == "all 2 replicas"
    assert place(Wish("a", 1, 3), fleet(1), {}, (), UNLIMITED).reason == "the only replica (3 wanted)"
    gone = place(Wish("a", 1, 2), replicas, loads, ("lora-fast-9", first.replicas[1]), UNLIMITED)
    assert "left `lora-fast-9` (gone)" in gone.reason
