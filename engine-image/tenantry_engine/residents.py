"""The sequences that hold a slot and pages: how they come by them, give way to others, and give everything back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from tenantry_engine.admission import LOADS
from tenantry_engine.kv import KvPages
from tenantry_engine.lines import Line
from tenantry_engine.pages import PagePool
from tenantry_engine.preemption import gives_way, victim, within_share
from tenantry_engine.sequence import Phase, Sequence
from tenantry_engine.work import Work


class Adapters(Protocol):
    """What is asked about adapters."""

    def pages_needed(self, digest: str) -> int:
        """Pages of the adapter."""

    def ready(self, digest: str) -> bool:
        """Whether its pages are filled."""

    def load(self, digest: str) -> None:
        """Its pages were reserved: fill them (in the background), then `Scheduler.adapter_loaded`."""


class Residents:
    """Those of one replica. `lines` are the scheduler's: who waits and who is here, tenant by tenant.

    Where a method takes `works`, it is what the step that is planned runs so far; whoever gives way leaves it. While
    another step is under way nobody gives way: its tokens may be unknown and its pages in use. `held_up` then says that
    somebody must.
    """

    def __init__(
        self, pool: PagePool, kv: KvPages, adapters: Adapters, lines: Mapping[str, Line], slots: int
    ) -> None:
        self._pool = pool
        self._kv = kv
        self._adapters = adapters
        self._lines = lines
        self._slots = slots
        self._loads: set[str] = set()  # adapters whose loading was begun here
        self._under_way = 0  # steps
        self._leaving: set[Sequence] = set()  # ended, but a step under way has rows of them
        self.count = 0
        self.preemptions = 0
        self.held_up = False

    # whether

    def may_admit(self) -> bool:
        """Whether a waiting sequence could have a slot now, perhaps that of a bulk one."""
        return self.count < self._slots or any(s.bulk for line in self._lines.values() for s in line.admitted)

    def can_load(self, sequence: Sequence) -> bool:
        """Whether its adapter is here or may be loaded now."""
        digest = sequence.adapter
        return digest is None or self._pool.holds(digest) or len(self._loads) < LOADS

    def must_hold_back(self, sequence: Sequence) -> bool:
        """Whether it would take its tenant above its share of pages while another tenant lacks some."""
        if not self._others_lack_pages(sequence.tenant):
            return False
        line = self._lines[sequence.tenant]
        return not within_share(line, self._lines.values(), self._pool, self._pages_wanted(sequence))

    # in

    def admit(self, sequence: Sequence, works: dict[Sequence, Work]) -> bool:
        """Reserves all that the sequence needs to start, or nothing; others give way to it where they should."""
        while self.count >= self._slots:
            if not self._make_room(sequence, works, None):
                return False
        while not self._kv.reserve(sequence, unloaded := self._adapter_pages(sequence)):
            if not self._make_room(sequence, works, self._pages_wanted(sequence)):
                return False
        self._lines[sequence.tenant].admit(sequence)
        self.count += 1
        sequence.passed_at, sequence.overtaken = None, 0
        sequence.phase = Phase.PREFILL
        digest = sequence.adapter
        if digest is not None:
            if unloaded:
                self._loads.add(digest)
                self._adapters.load(digest)
            if not self._adapters.ready(digest):
                sequence.phase = Phase.LOADING
        return True

    def load_ended(self, digest: str) -> None:
        """The adapter's pages are filled, or will not be."""
        self._loads.discard(digest)

    def grow(self, sequence: Sequence, works: dict[Sequence, Work]) -> bool:
        """Makes room for one more token; others (or the sequence itself) give way when no page is left."""
        while not self._kv.grow(sequence, self._lines[sequence.tenant]):
            if self._under_way:
                self.held_up = True
                return False
            chosen = victim(self._lines.values(), self._pool)
            assert chosen is not None, "the sequence itself can always give way"
            self._preempt(chosen, works)
            if chosen is sequence:
                return False
        return True

    # out

    def release(self, sequence: Sequence) -> None:
        """Gives back everything that the sequence holds; pages and adapter when no step has rows of it any more."""
        self._lines[sequence.tenant].release(sequence)
        self.count -= 1
        if sequence.under_way:
            self._leaving.add(sequence)
        else:
            self._kv.release(sequence)

    def step_began(self, works: Iterable[Work]) -> None:
        """From now on the device may write what these works fill."""
        self._under_way += 1
        for work in works:
            work.sequence.under_way += 1

    def step_ended(self, works: Iterable[Work]) -> None:
        """The device is through with it."""
        self._under_way -= 1
        for sequence in (work.sequence for work in works):
            sequence.under_way -= 1
            if not sequence.under_way and sequence in self._leaving:
                self._leaving.remove(sequence)
                self._kv.release(sequence)

    def _preempt(self, sequence: Sequence, works: dict[Sequence, Work]) -> None:
        """Back to its place in the line; its tokens are computed again later, at no charge."""
        works.pop(sequence, None)
        self.release(sequence)
        sequence.phase = Phase.WAITING
        sequence.preempted += 1
        self._lines[sequence.tenant].wait(sequence)
        self.preemptions += 1

    def _make_room(self, sequence: Sequence, works: dict[Sequence, Work], needed: int | None) -> bool:
        """Lets one sequence here give way to a waiting one that lacks `needed` pages, or a slot (None)."""
        lines = list(self._lines.values())
        chosen = gives_way(sequence, lines, self._pool, needed=needed, busy=works)
        if chosen is None:
            return False
        if self._under_way:
            self.held_up = True
            return False
        self._preempt(chosen, works)
        return True

    # counts

    def _adapter_pages(self, sequence: Sequence) -> int:
        """Pages of its adapter that are still to be taken."""
        digest = sequence.adapter
        if digest is None or self._pool.holds(digest):
            return 0
        return self._adapters.pages_needed(digest)

    def _pages_wanted(self, sequence: Sequence) -> int:
        return self._kv.needs(sequence)[1] + self._adapter_pages(sequence)

    def _others_lack_pages(self, tenant: str) -> bool:
        """Whether the head of another tenant's line was passed over, in this step or an earlier one."""
        heads = (line.waiting[0] for line in self._lines.values() if line.waiting)
        return any(head.tenant != tenant and head.passed_at is not None for head in heads)
