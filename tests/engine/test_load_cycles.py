"""A thousand adapters come and go: objects, files and books are as before; and what every tier gave up comes back."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tenantry_engine.adapters.registry import Declaration
from test_registry import World, ready

Make = Callable[..., World]

PAGE_BYTES = 512 * 4
"""Of one page, which is what one of these adapters takes."""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **more: World(tmp_path / "data", **more)


def cycle(world: World, number: int, name: str) -> None:
    """One adapter, from its declaration to its end, with one request."""
    digest = world.put(number, rank=1)
    world.declare(Declaration(name, digest, pinned=number % 3 == 0))
    world.work()
    world.registry.prefetch(digest)
    assert world.admit(digest)
    world.work()
    assert world.value(digest) == number
    world.finish(digest)
    world.declare()
    assert world.registry.sweep(1.0, {}) == []


def test_a_thousand_cycles_of_load_and_unload_are_flat(make: Make) -> None:
    """Through all tiers: of one name whose bytes change each time, and of names that are never used again."""
    world = make(pages=6, host_bytes=1 << 20)
    world.registry.loaded = lambda digest: None  # this one keeps a list
    for number in range(50):
        cycle(world, number, "warm")

    def held() -> tuple[int, int]:
        gc.collect()
        return len(gc.get_objects()), len(os.listdir("/proc/self/fd"))

    objects, files = held()
    for number in range(50, 1050):
        cycle(world, number, "one" if number % 2 else f"n{number}")
    more_objects, more_files = held()
    assert more_objects - objects < 200, "one object of each would be a thousand"
    assert more_files <= files
    assert world.registry.evictions == 1050
    assert world.pool.counts().free == world.pool.total
    assert world.loader.host.used == 0
    assert not world.registry.reports({})
    assert not any(path for path in (world.folder / "blobs").iterdir())
    assert not any((world.folder / "incoming").iterdir())
    assert not world.memory.any(), "pages are zeroed when an adapter leaves them"
    world.pool.check()


def test_what_pages_and_host_memory_gave_up_comes_from_disk_again(make: Make) -> None:
    """The host tier holds one of three: each use finds its adapter on another tier, always with its own bytes."""
    world = make(pages=3, host_bytes=PAGE_BYTES)
    digests = ready(world, 1, 2, 3)
    seen = []
    for turn in (0, 0, 1, 2, 0, 1, 1, 2, 0):
        digest = digests[turn]
        seen.append(digest in world.loader.host)
        assert world.admit(digest)
        world.work("fill")
        assert world.value(digest) == turn + 1
        world.finish(digest)
        assert world.pool.reserve(3) is not None  # a long sequence takes every page
        world.pool.release([*world.pool._private])
        assert not world.pool.holds(digest)
        assert world.loader.host.used <= PAGE_BYTES
    assert seen == [False, True, False, False, False, False, True, False, False]


def test_an_adapter_without_pages_never_runs(make: Make) -> None:
    world = make()
    [digest] = ready(world, 5)
    with pytest.raises(AssertionError, match="without pages"):
        world.registry.paged(digest)
    assert world.admit(digest)
    with pytest.raises(AssertionError, match="before its pages are filled"):
        world.registry.paged(digest)
    world.work()
    assert world.registry.paged(digest).rows.numel() == 8
    world.finish(digest)
    world.pool.drop(digest)
    with pytest.raises(AssertionError, match="without pages"):
        world.registry.paged(digest)
