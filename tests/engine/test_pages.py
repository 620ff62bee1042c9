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


def test_a_published_block_is_shared_and_stays_until_room_is_needed() -> None:
    pool, wiped, evicted = make(4)
    pages = pool.reserve(2)
    assert pages is not None
    assert pool.publish(pages[0], b"one") == pages[0]
    assert pool.matching([b"one", b"two"]) == 1
    shared = pool.reserve(1, blocks=[b"one"])
    assert shared is not None
    assert shared[0] == pages[0]
    assert pool.counts().kv == 3
    pool.release(pages)
    pool.release(shared)
    assert pool.counts().cached == 1
    assert pool.reserve(4) is not None
    assert pool.matching([b"one"]) == 0
    assert pool.blocks_evicted == 1
    assert wiped == evicted == [], "no adapter was here"


def test_the_second_copy_of_a_block_is_given_up() -> None:
    pool, _, _ = make(4)
    [one], [two] = pool.reserve(1) or [], pool.reserve(1) or []
    pool.publish(one, b"key")
    assert pool.publish(two, b"key") == one
    assert pool.references(b"key") == 2
    assert pool.counts().free == 3
    pool.release([one])
    pool.release([one])
    with pytest.raises(KeyError):
        pool.release([one])
    with pytest.raises(KeyError):
        pool.publish(two, b"other")


def test_blocks_and_adapters_go_by_one_clock() -> None:
    pool, _, evicted = make(6)
    for name in (b"old", "adapter", b"new"):
        if isinstance(name, bytes):
            [page] = pool.reserve(1) or []
            pool.publish(page, name)
            pool.release([page])
        else:
            pool.reserve(0, name, 2)
            pool.release((), name)
    assert pool.reserve(2) is not None  # the free ones
    assert pool.reserve(1) is not None
    assert pool.matching([b"old"]) == 0
    assert evicted == []
    assert pool.reserve(1) is not None
    assert evicted == ["adapter"]
    assert pool.matching([b"new"]) == 1


def test_wanted_blocks_do_not_count_as_room() -> None:
    pool, _, _ = make(3)
    pages = pool.reserve(2) or []
    for page, key in zip(pages, (b"a", b"b"), strict=True):
        pool.publish(page, key)
    pool.release(pages)
    assert pool.reserve(2, blocks=[b"a", b"b"]) is None
    assert pool.matching([b"a", b"b"]) == 2
    assert pool.reserve(1, blocks=[b"a", b"b"]) is not None


def test_blocks_leave_with_their_adapter() -> None:
    pool, _, _ = make(8)
    idle, live = (pool.reserve(1, "a", 2) or [], pool.reserve(2, "a", 2) or [])
    pool.publish(idle[0], b"idle", "a")
    pool.publish(live[0], b"live", "a")
    pool.release(idle, "a")
    pool.drop("a")
    assert pool.matching([b"idle"]) == pool.matching([b"live"]) == 0
    assert pool.publish(live[1], b"late", "a") == live[1], "what leaves is not added to"
    pool.check()
    pool.release(live, "a")
    assert pool.counts().free == 8


def test_an_adapter_that_was_to_leave_may_stay_but_its_blocks_are_not_added_to() -> None:
    pool, _, evicted = make(8)
    one = pool.reserve(1, "a", 2) or []
    pool.publish(one[0], b"key", "a")
    pool.drop("a")
    pool.keep("a")
    two = pool.reserve(1, "a") or []
    assert pool.matching([b"key"]) == 0
    assert pool.publish(two[0], b"key", "a") == two[0]
    pool.release(one, "a")
    pool.release(two, "a")
    pool.check()
    assert pool.holds("a")
    assert evicted == []


def test_pins_have_a_limit() -> None:
    pool = PagePool(10, wipe=lambda pages: None, pin_limit=5)
    for name in "ab":
        pool.reserve(0, name, 3)
        pool.release((), name)
    assert pool.pin("a", True)
    assert not pool.pin("b", True)
    assert not pool.pin("nothing", True)
    assert pool.counts().adapter == pool.pinned_pages() == 3
    assert pool.pin("a", False)
    assert pool.pin("b", True)
    pool.drop("b")
    assert pool.pinned_pages() == 0


@pytest.mark.parametrize("seed", range(4))
def test_books_add_up_over_random_operations(seed: int) -> None:
    draw = random.Random(seed)
    dirty: set[int] = set()  # pages that hold an adapter's bytes
    pool = PagePool(40, wipe=dirty.difference_update, pin_limit=15)
    sizes = {f"a{i}": draw.randint(1, 9) for i in range(12)}
    live: list[tuple[list[int], str | None]] = []
    for step in range(30_000):
        action = draw.random()
        if action < 0.35:
            adapter = draw.choice([None, *sizes])
            fresh = adapter is not None and not pool.holds(adapter)
            chain = [f"{adapter}{draw.randrange(4)}".encode() for _ in range(3)]
            blocks = list(dict.fromkeys(chain))
            blocks = blocks[: pool.matching(blocks)]
            before = pool.counts()
            pages = pool.reserve(draw.randint(0, 6), adapter, sizes.get(adapter or "", 0), blocks)
            if pages is None:
                assert pool.counts() == before
            else:
                assert not dirty & set(pages), "a sequence was given bytes of an adapter"
                live.append((pages, adapter))
                if fresh and adapter is not None:
                    assert not dirty & set(pool.pages_of(adapter))
                    dirty.update(pool.pages_of(adapter))
        elif action < 0.5 and live:
            pages, adapter = draw.choice(live)
            own = [index for index, page in enumerate(pages) if page in pool._private]
            if own:
                index = draw.choice(own)
                pages[index] = pool.publish(pages[index], f"{adapter}{draw.randrange(4)}".encode(), adapter)
        elif action < 0.9 and live:
            pool.release(*live.pop(draw.randrange(len(live))))
        elif action < 0.95:
            pool.drop(draw.choice(list(sizes)))
        else:
            pool.pin(draw.choice(list(sizes)), draw.random() < 0.3)
        if step % 200 == 0:
            pool.check()
    for pages, adapter in live:
        pool.release(pages, adapter)
    for name in sizes:
        pool.pin(name, False)
        pool.drop(name)
    pool.check()
    counts = pool.counts()
    assert counts.free + counts.cached == 40
    assert counts.cached == len(pool._block_of), "only blocks of the base model are left"
    assert not dirty
