"""Who waits and who holds pages, tenant by tenant."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from tenantry_engine.pages import PagePool
from tenantry_engine.sequence import Phase, Sequence

K = TypeVar("K")


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


@dataclass
class Line:
    """One tenant's sequences: those that wait, and those that hold pages; both in order of arrival."""

    tenant: str
    weight: int = 1
    cap: int = 1
    waiting: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    _pages: Counter[int] = field(default_factory=Counter)  # page -> sequences here that refer to it
    _adapters: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        """Whether anything is here."""
        return bool(self.waiting or self.admitted)

    def started(self, works: Container[Sequence]) -> Sequence | None:
        """The first one that has begun its prompt and has no work in this step yet."""
        return next((s for s in self.admitted if s.phase is Phase.PREFILL and s not in works), None)

    def wait(self, sequence: Sequence) -> None:
        """Takes a sequence in, at the place of its arrival."""
        insort(self.waiting, sequence, key=_arrival)

    def admit(self, sequence: Sequence) -> None:
        """It holds pages now."""
        self.waiting.remove(sequence)
        insort(self.admitted, sequence, key=_arrival)
        self.hold(sequence.pages)
        if sequence.adapter is not None:
            self._adapters[sequence.adapter] += 1

    def release(self, sequence: Sequence) -> None:
        """It holds nothing any more."""
        self.admitted.remove(sequence)
        self.let_go(sequence.pages)
        if sequence.adapter is not None:
            _decrement(self._adapters, sequence.adapter)

    def hold(self, pages: Iterable[int]) -> None:
        """An admitted sequence refers to more pages."""
        self._pages.update(pages)

    def let_go(self, pages: Iterable[int]) -> None:
        """An admitted sequence no longer refers to these pages."""
        for page in pages:
            _decrement(self._pages, page)

    def footprint(self, pool: PagePool) -> int:
        """Pages that the tenant keeps others from having: each page of KV once, and its adapters in use."""
        return len(self._pages) + sum(len(pool.pages_of(adapter)) for adapter in self._adapters)


def _decrement(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
