"""The unified pool's books: which page belongs to whom. Host only, no tensors, no clock, no I/O.

KV cache and adapters share one pool of equal pages. Every page is in exactly one state: free, referenced (KV of a live
sequence, or an adapter in use), cached (an idle adapter, or a block of K and V that nobody refers to now) or pinned (an
adapter that may not leave). When pages run short, what is cached goes in the order of least recent use: one clock for
adapters and blocks.

A page of KV is private to the sequence that fills it until `publish` gives it a key; from then on it is never written
again, and others may refer to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counts:
    """Pages by state; the parts add up to `total`. `kv` = of live sequences, `adapter` = of adapters in use or pinned,
    `cached` = of idle adapters and idle blocks."""

    total: int
    free: int
    kv: int
    adapter: int
    cached: int


@dataclass
class Holding:
    """The pages of one adapter, or the page of one block."""

    pages: tuple[int, ...]
    block: bool = False
    group: Hashable = None  # the adapter that a block was computed with
    references: int = 0
    pinned: bool = False
    stale: bool = False  # leaves as soon as nobody refers to it


@dataclass
class PagePool:
    """Hands out pages and takes them back. Keys of adapters and of blocks must differ.

    `wipe` is called with pages that held an adapter before they become free; `evicted` with the key of an adapter whose
    pages were taken or given up. At most `pin_limit` pages may be pinned, so that what is not pinned always finds room.
    """

    total: int
    wipe: Callable[[tuple[int, ...]], None]
    evicted: Callable[[Hashable], None] = lambda key: None
    pin_limit: int | None = None
    blocks_evicted: int = 0
    _free: list[int] = field(default_factory=list)
    _private: set[int] = field(default_factory=set)
    _held: dict[Hashable, Holding] = field(default_factory=dict)
    _block_of: dict[int, Hashable] = field(default_factory=dict)  # page -> key of the block that it holds
    _groups: dict[Hashable, set[Hashable]] = field(default_factory=dict)  # adapter -> keys of its blocks
    _idle: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)  # least recently used first
    _idle_pages: int = 0
    _idle_blocks: int = 0
    _pinned: int = 0

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ValueError(f"`total` must be at least 1 page, not {self.total}")
        self._free = list(range(self.total - 1, -1, -1))

    # admission and KV pages

    @property
    def available(self) -> int:
        """Pages that a request could have now: free ones and cached ones."""
        return len(self._free) + self._idle_pages

    def reserve(
        self, kv_pages: int, adapter: Hashable = None, adapter_pages: int = 0, blocks: Sequence[Hashable] = ()
    ) -> list[int] | None:
        """All that a request needs, or nothing: the pages of published `blocks`, then `kv_pages` private ones, and,
        with `adapter`, one reference to it.

        An adapter that is not held gets `adapter_pages` pages of its own, still to be filled. None = not enough pages.
        """
        wanted = [*blocks] if adapter is None or adapter not in self._held else [*blocks, adapter]
        kept = sum(len(self._held[key].pages) for key in wanted if key in self._idle)
        fresh = adapter is not None and adapter not in self._held
        if kv_pages + (adapter_pages if fresh else 0) > self.available - kept:
            return None
        for key in wanted:
            self._refer(key)
        if fresh:
            self._held[adapter] = Holding(tuple(self._take(adapter_pages)), references=1)
        pages = self._take(kv_pages)
        self._private.update(pages)
        return [*(self._held[key].pages[0] for key in blocks), *pages]

    def release(self, pages: Sequence[int], adapter: Hashable = None) -> None:
        """Gives back what a request reserved. Raises KeyError when it was given back before.

        The last block becomes idle first, so that it leaves before those that it hangs on.
        """
        for page in reversed(pages):
            if page in self._block_of:
                self._unrefer(self._block_of[page])
            else:
                self._private.remove(page)
                self._free.append(page)
        if adapter is not None:
            self._unrefer(adapter)

    # blocks of the prefix cache

    def matching(self, keys: Iterable[Hashable]) -> int:
        """How many of `keys` from the first on are published without a gap."""
        count = 0
        for key in keys:
            held = self._held.get(key)
            if held is None or held.stale:
                break
            count += 1
        return count

    def publish(self, page: int, key: Hashable, group: Hashable = None) -> int:
        """A private page is full and computed: others may use it as `key` until the adapter `group` leaves.

        Returns the page to refer to from now on: the one that holds the block already, if there is one; `page` is free
        then. Raises KeyError when the page is not private.
        """
        known = self._held.get(key)
        owner = self._held.get(group)
        if (known is not None and known.stale) or (group is not None and (owner is None or owner.stale)):
            return page  # what leaves is not added to
        self._private.remove(page)
        if known is not None:
            self._refer(key)
            self._free.append(page)
            return known.pages[0]
        self._held[key] = Holding((page,), block=True, group=group, references=1)
        self._block_of[page] = key
        if group is not None:
            self._groups.setdefault(group, set()).add(key)
        return page

    # adapters

    def holds(self, adapter: Hashable) -> bool:
        """Whether the adapter has pages here (filled or being filled)."""
        return adapter in self._held

    def pages_of(self, adapter: Hashable) -> tuple[int, ...]:
        """The adapter's pages, in order; empty when it has none."""
        held = self._held.get(adapter)
        return held.pages if held else ()

    def references(self, key: Hashable) -> int:
        """How many live requests refer to the pages of an adapter or block."""
        held = self._held.get(key)
        return held.references if held else 0

    def pin(self, adapter: Hashable, pinned: bool) -> bool:
        """A pinned adapter stays when idle. False when it has no pages, or the pinned ones would exceed the limit."""
        held = self._held.get(adapter)
        if held is None:
            return False
        if held.pinned == pinned:
            return True
        if pinned and self.pin_limit is not None and self._pinned + len(held.pages) > self.pin_limit:
            return False
        if held.references == 0:
            self._set_idle(adapter, held, not pinned)
        held.pinned = pinned
        self._pinned += len(held.pages) if pinned else -len(held.pages)
        return True

    def drop(self, adapter: Hashable) -> None:
        """The adapter and the blocks computed with it leave: at once when idle, else with their last reference."""
        for key in [adapter, *self._groups.get(adapter, ())]:
            held = self._held.get(key)
            if held is not None:
                held.stale = True
                if held.references == 0:
                    self._free_holding(key)

    def keep(self, adapter: Hashable) -> None:
        """Takes back a `drop` that has not happened yet."""
        held = self._held.get(adapter)
        if held is not None:
            held.stale = False

    # books

    def counts(self) -> Counts:
        """Pages by state."""
        blocks, free, private = len(self._block_of), len(self._free), len(self._private)
        adapters = self.total - free - private - blocks
        idle_adapters = self._idle_pages - self._idle_blocks
        kv = private + blocks - self._idle_blocks
        return Counts(self.total, free, kv, adapters - idle_adapters, self._idle_pages)

    def pinned_pages(self) -> int:
        """Pages of pinned adapters."""
        return self._pinned

    def holdings(self) -> Iterator[tuple[Hashable, Holding]]:
        """All adapters and blocks, for checks."""
        return iter(self._held.items())

    def check(self) -> None:
        """Raises AssertionError when a page is lost, in two states, or counted wrongly."""
        owned = [*self._free, *self._private, *(page for h in self._held.values() for page in h.pages)]
        assert len(owned) == self.total, f"{len(owned)} pages are accounted for, not {self.total}"
        assert set(owned) == set(range(self.total)), "a page is in two states"
        blocks = {h.pages[0]: key for key, h in self._held.items() if h.block}
        assert blocks == self._block_of, "the list of blocks is wrong"
        idle = {k for k, h in self._held.items() if h.references == 0 and not h.pinned}
        assert idle == set(self._idle), "the list of idle adapters and blocks is wrong"
        assert self._idle_pages == sum(len(self._held[k].pages) for k in idle), (
            "idle pages are counted wrongly"
        )
        assert self._idle_blocks == sum(self._held[k].block for k in idle), "idle blocks are counted wrongly"
        assert self._pinned == sum(len(h.pages) for h in self._held.values() if h.pinned), (
            "pinned pages are counted wrongly"
        )
        assert self.pin_limit is None or self._pinned <= self.pin_limit, "more is pinned than may be"
        assert all(h.references >= 0 for h in self._held.values()), "something was released twice"
        assert not any(h.stale and h.references == 0 for h in self._held.values()), "a stale holding stays"
        grouped = {k for keys in self._groups.values() for k in keys}
        assert grouped == {k for k, h in self._held.items() if h.group is not None}, (
            "a block's adapter is lost"
        )

    # inside

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._free_holding(next(iter(self._idle)))
        return [self._free.pop() for _ in range(count)]

    def _refer(self, key: Hashable) -> None:
        held = self._held[key]
        if key in self._idle:
            self._set_idle(key, held, False)
        held.references += 1

    def _unrefer(self, key: Hashable) -> None:
        held = self._held[key]
        if held.references < 1:
            raise KeyError(f"{key!r} was released more often than it was reserved")
        held.references -= 1
        if held.references == 0:
            if held.stale:
                self._free_holding(key)
            elif not held.pinned:
                self._set_idle(key, held, True)

    def _set_idle(self, key: Hashable, held: Holding, idle: bool) -> None:
        sign = 1 if idle else -1
        if idle:
            self._idle[key] = None
        else:
            del self._idle[key]
        self._idle_pages += sign * len(held.pages)
        self._idle_blocks += sign * held.block

    def _free_holding(self, key: Hashable) -> None:
        held = self._held.pop(key)
        if key in self._idle:
            self._set_idle(key, held, False)
        if held.pinned:
            self._pinned -= len(held.pages)
        self._free.extend(held.pages)
        if not held.block:
            self.wipe(held.pages)
            self.evicted(key)
            return
        self.blocks_evicted += 1
        del self._block_of[held.pages[0]]
        group = self._groups.get(held.group)
        if group is not None:
            group.discard(key)
            if not group:
                del self._groups[held.group]
