"""The page books add up, whatever is asked of them."""

from __future__ import annotations

import random

import pytest
from tenantry_engine.pages import PagePool


def make(total: int) -> tuple[PagePool, list[int], list[object]]:
    wiped: list[int] = []
    evicted: list[object] = []
    return PagePool(total, wipe=wiped.extend, evicted=evicted.append), wiped, evicted


def test_all_or_nothing() -> None:
    pool, _, _ = make(10)
    assert pool.reserve(6, "a", 5) is None
    assert pool.counts().free == 10
    assert not pool.holds("a")
    pages = pool.reserve(5, "a", 5)
    assert pages is not None
    assert len(pages) == 5
    assert pool.reserve(1) is None


def test_idle_adapters_give_way_in_order_of_use_and_are_wiped() -> None:
    pool, wiped, evicted = make(9)
    for name in "abc":
        assert pool.reserve(0, name, 3) == []
        pool.release((), name)
    assert pool.reserve(0, "a", 3) == []  # used again: the youngest now
    pool.release((), "a")
    of_b = pool.pages_of("b")
    assert pool.reserve(2) is not None
    assert evicted == ["b"]
    assert sorted(wiped) == sorted(of_b)
    assert pool.holds("a")
    assert pool.holds("c")


def test_an_adapter_in_use_or_pinned_stays() -> None:
    pool, _, evicted = make(6)
    pool.reserve(0, "used", 2)
    pool.reserve(0, "pinned", 2)
    pool.release((), "pinned")
    pool.pin("pinned", True)
    assert pool.reserve(3) is None
    assert evicted == []
    pool.pin("pinned", False)
    assert pool.reserve(3) is not None
    assert evicted == ["pinned"]


def test_reserving_an_idle_adapter_does_not_count_its_own_pages_as_room() -> None:
    pool, _, evicted = make(5)
    pool.reserve(0, "a", 3)
    pool.release((), "a")
    assert pool.reserve(3, "a", 3) is None
    assert pool.reserve(2, "a", 3) is not None
    assert evicted == []


def test_dropping_waits_for_the_last_reference() -> None:
    pool, wiped, evicted = make(4)
    pool.reserve(0, "a", 2)
    pool.drop("a")
    assert pool.holds("a")
    pool.release((), "a")
    assert evicted == ["a"]
    assert len(wiped) == 2
    assert pool.counts().free == 4


def test_a_double_release_is_an_error() -> None:
    pool, _, _ = make(4)
    pages = pool.reserve(2, "a", 1)
    assert pages is not None
    pool.release(pages, "a")
    with pytest.raises(KeyError):
        pool.release(pages)
    with pytest.raises(KeyError):
        pool.release((), "a")


@pytest.mark.parametrize("seed", range(4))
def test_books_add_up_over_random_operations(seed: int) -> None:
    draw = random.Random(seed)
    dirty: set[int] = set()  # pages that hold an adapter's bytes
    pool = PagePool(40, wipe=dirty.difference_update)
    sizes = {f"a{i}": draw.randint(1, 9) for i in range(12)}
    live: list[tuple[list[int], str | None]] = []
    for step in range(8000):
        action = draw.random()
        if action < 0.45:
            adapter = draw.choice([None, *sizes])
            fresh = adapter is not None and not pool.holds(adapter)
            pages = pool.reserve(draw.randint(0, 6), adapter, sizes.get(adapter or "", 0))
            if pages is not None:
                assert not dirty & set(pages), "a sequence was given bytes of an adapter"
                live.append((pages, adapter))
                if fresh and adapter is not None:
                    assert not dirty & set(pool.pages_of(adapter))
                    dirty.update(pool.pages_of(adapter))
        elif action < 0.9 and live:
            pool.release(*live.pop(draw.randrange(len(live))))
        elif action < 0.95:
            pool.drop(draw.choice(list(sizes)))
        else:
            pool.pin(draw.choice(list(sizes)), draw.random() < 0.3)
        if step % 50 == 0:
            pool.check()
    for pages, adapter in live:
        pool.release(pages, adapter)
    for name in sizes:
        pool.pin(name, False)
        pool.drop(name)
    pool.check()
    assert pool.counts().free == 40
    assert not dirty
