"""The unified pool's books: which page belongs to whom. Host only, no tensors, no clock, no I/O.

KV cache and adapters share one pool of equal pages. Every page is in exactly one state:
free, referenced (KV of a live sequence, or an adapter in use), cached (an idle adapter) or pinned (an adapter that
may not leave). Idle adapters go in the order of least recent use when pages run short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counts:
    """Pages by state; the parts add up to `total`. `adapter` = adapters in use or pinned, `cached` = idle ones."""

    total: int
    free: int
    kv: int
    adapter: int
    cached: int


@dataclass
class Holding:
    """The pages of one adapter."""

    pages: tuple[int, ...]
    references: int = 0
    pinned: bool = False
    stale: bool = False  # leaves as soon as nobody refers to it


@dataclass
class PagePool:
    """Hands out pages and takes them back.

    `wipe` is called with pages that held an adapter before they become free; `evicted` with the key of an adapter whose
    pages were taken or given up.
    """

    total: int
    wipe: Callable[[tuple[int, ...]], None]
    evicted: Callable[[Hashable], None] = lambda key: None
    _free: list[int] = field(default_factory=list)
    _kv: set[int] = field(default_factory=set)
    _held: dict[Hashable, Holding] = field(default_factory=dict)
    _idle: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    _idle_pages: int = 0

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ValueError(f"`total` must be at least 1 page, not {self.total}")
        self._free = list(range(self.total - 1, -1, -1))

    # KV pages and admission

    @property
    def available(self) -> int:
        """Pages that a request could have now: free ones and those of idle adapters."""
        return len(self._free) + self._idle_pages

    def reserve(self, kv_pages: int, adapter: Hashable = None, adapter_pages: int = 0) -> list[int] | None:
        """All that a request needs, or nothing: `kv_pages` pages and, with `adapter`, one reference to it.

        An adapter that is not held gets `adapter_pages` pages of its own, still to be filled. None = not enough pages.
        """
        held = self._held.get(adapter) if adapter is not None else None
        own_idle = len(held.pages) if held is not None and adapter in self._idle else 0
        needed = kv_pages + (adapter_pages if adapter is not None and held is None else 0)
        if needed > self.available - own_idle:
            return None
        if adapter is not None:
            if held is None:
                held = self._held[adapter] = Holding(tuple(self._take(adapter_pages)))
            self._refer(adapter, held)
        pages = self._take(kv_pages)
        self._kv.update(pages)
        return pages

    def release(self, pages: Iterable[int], adapter: Hashable = None) -> None:
        """Gives back what a request reserved. Raises KeyError when it was given back before."""
        for page in pages:
            self._kv.remove(page)
            self._free.append(page)
        if adapter is not None:
            self._unrefer(adapter)

    # adapters

    def holds(self, adapter: Hashable) -> bool:
        """Whether the adapter has pages here (filled or being filled)."""
        return adapter in self._held

    def pages_of(self, adapter: Hashable) -> tuple[int, ...]:
        """The adapter's pages, in order; empty when it has none."""
        held = self._held.get(adapter)
        return held.pages if held else ()

    def references(self, adapter: Hashable) -> int:
        """How many live requests refer to the adapter's pages."""
        held = self._held.get(adapter)
        return held.references if held else 0

    def pin(self, adapter: Hashable, pinned: bool) -> None:
        """A pinned adapter stays when idle. Does nothing when it has no pages."""
        held = self._held.get(adapter)
        if held is None or held.pinned == pinned:
            return
        held.pinned = pinned
        if held.references == 0:
            self._set_idle(adapter, held, not pinned)

    def drop(self, adapter: Hashable) -> None:
        """The adapter leaves: at once when idle, else with its last reference."""
        held = self._held.get(adapter)
        if held is None:
            return
        held.stale = True
        if held.references == 0:
            self._free_holding(adapter)

    def keep(self, adapter: Hashable) -> None:
        """Takes back a `drop` that has not happened yet."""
        held = self._held.get(adapter)
        if held is not None:
            held.stale = False

    # books

    def counts(self) -> Counts:
        """Pages by state."""
        held = sum(len(h.pages) for h in self._held.values())
        return Counts(self.total, len(self._free), len(self._kv), held - self._idle_pages, self._idle_pages)

    def pinned_pages(self) -> int:
        """Pages of pinned adapters."""
        return sum(len(h.pages) for h in self._held.values() if h.pinned)

    def check(self) -> None:
        """Raises AssertionError when a page is lost, in two states, or counted wrongly."""
        owned = [*self._free, *self._kv, *(page for h in self._held.values() for page in h.pages)]
        assert len(owned) == self.total, f"{len(owned)} pages are accounted for, not {self.total}"
        assert set(owned) == set(range(self.total)), "a page is in two states"
        idle = {k for k, h in self._held.items() if h.references == 0 and not h.pinned}
        assert idle == set(self._idle), "the list of idle adapters is wrong"
        assert self._idle_pages == sum(len(self._held[k].pages) for k in idle), (
            "idle pages are counted wrongly"
        )
        assert all(h.references >= 0 for h in self._held.values()), "an adapter was released twice"

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._free_holding(next(iter(self._idle)))
        return [self._free.pop() for _ in range(count)]

    def _refer(self, key: Hashable, held: Holding) -> None:
        if key in self._idle:
            self._set_idle(key, held, False)
        held.references += 1

    def _unrefer(self, key: Hashable) -> None:
        held = self._held[key]
        if held.references < 1:
            raise KeyError(f"adapter {key!r} was released more often than it was reserved")
        held.references -= 1
        if held.references == 0:
            if held.stale:
                self._free_holding(key)
            elif not held.pinned:
                self._set_idle(key, held, True)

    def _set_idle(self, key: Hashable, held: Holding, idle: bool) -> None:
        if idle:
            self._idle[key] = None
            self._idle_pages += len(held.pages)
        else:
            del self._idle[key]
            self._idle_pages -= len(held.pages)

    def _free_holding(self, key: Hashable) -> None:
        held = self._held.pop(key)
        if key in self._idle:
            self._set_idle(key, held, False)
        self.wipe(held.pages)
        self._free.extend(held.pages)
        self.evicted(key)
