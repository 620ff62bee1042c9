"""Decides what each step runs. Pure: no tensors, no clock of its own, no I/O.

Continuous batching: every step takes one token of each decoding sequence, then fills its token budget with chunks of
prompts, each chunk for the tenant that has received least service. A request is admitted with all pages that its
prompt and its adapter need, or not at all, so half-admitted requests cannot block each other.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from tenantry_engine.fairness import FairShare
from tenantry_engine.pages import PagePool
from tenantry_engine.sequence import Phase, Scores, Sequence


class Adapters(Protocol):
    """What the scheduler asks about adapters."""

    def pages_needed(self, digest: str) -> int:
        """Pages of the adapter."""

    def ready(self, digest: str) -> bool:
        """Whether its pages are filled."""

    def load(self, digest: str) -> None:
        """Its pages were reserved: fill them (in the background), then `Scheduler.adapter_loaded`."""


@dataclass(frozen=True)
class Work:
    """`count` tokens of a sequence from `start` on; `samples` = the step yields its next token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class Event:
    """Something happened to a sequence: a token, its end, or both.

    `finish`: stop, length, abort, deadline, error, or grammar (its structure became too complex to follow).
    """

    sequence: Sequence
    token: int | None = None
    finish: str | None = None
    scores: Scores | None = None  # of the token
    prompt_scores: list[Scores] | None = (
        None  # of the prompt's tokens from the second on, with the first token
    )


@dataclass
class _Queue:
    """One tenant's sequences: those that wait, in order of arrival, and those that hold pages."""

    cap: int = 1
    waiting: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """All sequences of one replica."""

    def __init__(
        self, pool: PagePool, adapters: Adapters, *, slots: int, step_tokens: int, page_tokens: int
    ) -> None:
        if step_tokens <= slots:
            raise ValueError(f"`step_tokens` must be more than `slots` ({slots}), not {step_tokens}")
        self._pool = pool
        self._adapters = adapters
        self._slots = slots
        self._step_tokens = step_tokens
        self._page_tokens = page_tokens
        self._fair = FairShare()
        self._queues: dict[str, _Queue] = {}
        self._by_id: dict[str, Sequence] = {}
        self._arrivals = 0
        self._admitted = 0
        self.preemptions = 0
        self.in_flight: Counter[str] = Counter()  # served name -> sequences, waiting or not

    # in and out

    def add(self, sequence: Sequence) -> None:
        """A new sequence, behind the others of its tenant."""
        if sequence.id in self._by_id:
            raise ValueError(f"a sequence {sequence.id} is here already")
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._by_id[sequence.id] = sequence
        self.in_flight[sequence.served] += 1
        queue = self._queues.setdefault(sequence.tenant, _Queue())
        queue.cap = sequence.cap
        queue.waiting.append(sequence)
        self._fair.arrive(sequence.tenant, sequence.weight)

    def abort(self, sequence_id: str, reason: str = "abort") -> Event | None:
        """Ends a sequence in any phase, between steps. None when it is not here (any more)."""
        sequence = self._by_id.get(sequence_id)
        return None if sequence is None else self._finish(sequence, reason)

    def abort_served(self, served: str, reason: str) -> list[Event]:
        """Ends every sequence of a served name."""
        doomed = [s for s in self._by_id.values() if s.served == served]
        return [self._finish(s, reason) for s in doomed]

    def abort_all(self, reason: str) -> list[Event]:
        """Ends every sequence."""
        return [self._finish(s, reason) for s in list(self._by_id.values())]

    def adapter_loaded(self, digest: str) -> None:
        """The adapter's pages are filled: its sequences may run."""
        for sequence in self._by_id.values():
            if sequence.phase is Phase.LOADING and sequence.adapter == digest:
                sequence.phase = Phase.PREFILL

    def adapter_failed(self, digest: str) -> list[Event]:
        """The adapter cannot be loaded: its sequences end."""
        doomed = [s for s in self._by_id.values() if s.adapter == digest]
        return [self._finish(s, "error") for s in doomed]

    # numbers

    @property
    def running(self) -> int:
        """Sequences that hold pages."""
        return self._admitted

    @property
    def waiting(self) -> int:
        """Sequences that hold nothing yet."""
        return len(self._by_id) - self._admitted

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that the sequences here may still take: prompt not computed, output not made."""
        return sum(s.missing + s.sampling.max_tokens - s.generated for s in self._by_id.values())

    def sequences(self) -> Iterator[Sequence]:
        """All sequences here."""
        return iter(self._by_id.values())

    def service(self, tenant: str) -> float:
        """The tenant's weighted service, for tests and metrics."""
        return self._fair.service(tenant)

    # one step

    def expire(self, now: float) -> list[Event]:
        """Ends the sequences whose deadline has passed."""
        late = [s for s in self._by_id.values() if s.deadline is not None and s.deadline <= now]
        return [self._finish(s, "deadline") for s in late]

    def plan(self) -> list[Work]:
        """What the next step runs; empty when nothing can run. The step must be completed by `complete`."""
        works: dict[Sequence, Work] = {}
        for sequence in self._decoding():
            if sequence.phase is Phase.DECODE and self._grow(sequence, works):
                works[sequence] = Work(sequence, sequence.computed, 1, True)
        budget = self._step_tokens - len(works)
        may_admit = True
        while budget > 0:
            chosen, may_admit = self._next_prefill(works, may_admit)
            if chosen is None:
                break
            count = min(chosen.missing, budget)
            works[chosen] = Work(chosen, chosen.computed, count, count == chosen.missing)
            self._charge(works[chosen])
            budget -= count
        for work in works.values():
            if work.sequence.phase is Phase.DECODE:
                self._charge(work)
        return list(works.values())

    def complete(
        self,
        works: list[Work],
        tokens: Mapping[Sequence, int],
        ends: Mapping[Sequence, str] = MappingProxyType({}),
    ) -> list[Event]:
        """The step ended; `tokens` holds the next one of every sequence that samples.

        `ends` says why a sequence ends with its token for a reason that lies outside the scheduler.
        """
        events: list[Event] = []
        for work in works:
            sequence = work.sequence
            sequence.computed += work.count
            if not work.samples:
                continue
            token = tokens[sequence]
            sequence.tokens.append(token)
            sequence.phase = Phase.DECODE
            sampling = sequence.sampling
            if sequence in ends:
                self._finish(sequence, ends[sequence])
                events.append(Event(sequence, token, ends[sequence]))
            elif token in sampling.stop_ids and sequence.generated > sampling.min_tokens:
                self._finish(sequence, "stop")
                events.append(Event(sequence, token, "stop"))
            elif sequence.generated >= sampling.max_tokens:
                self._finish(sequence, "length")
                events.append(Event(sequence, token, "length"))
            else:
                events.append(Event(sequence, token))
        return events

    def _decoding(self) -> list[Sequence]:
        found = [s for q in self._queues.values() for s in q.admitted if s.phase is Phase.DECODE]
        return sorted(found, key=lambda s: s.arrival)

    def _next_prefill(self, works: dict[Sequence, Work], may_admit: bool) -> tuple[Sequence | None, bool]:
        """The sequence whose turn it is, admitted if need be, and whether others may be admitted still."""
        while True:
            ready: dict[str, Sequence] = {}
            for tenant, queue in self._queues.items():
                started = next(
                    (s for s in queue.admitted if s.phase is Phase.PREFILL and s not in works), None
                )
                if started is not None:
                    ready[tenant] = started
                elif may_admit and queue.waiting and self._admissible(queue):
                    ready[tenant] = queue.waiting[0]
            turn = self._fair.least(ready)
            if turn is None:
                return None, may_admit
            sequence = ready[turn]
            if sequence.phase is Phase.WAITING and not self._admit(sequence):
                may_admit = False  # nobody overtakes the one that waits for pages
            elif sequence.phase is not Phase.LOADING:
                return sequence, may_admit

    def _admissible(self, queue: _Queue) -> bool:
        return self._admitted < self._slots and len(queue.admitted) < queue.cap

    def _admit(self, sequence: Sequence) -> bool:
        """Reserves all that the sequence needs to start, or nothing."""
        last = sequence.prompt_len + sequence.sampling.max_tokens
        kv_pages = min(self._pages(len(sequence.tokens)) + 1, self._pages(last))
        digest = sequence.adapter
        needed = 0 if digest is None else self._adapters.pages_needed(digest)
        held = digest is not None and self._pool.holds(digest)
        pages = self._pool.reserve(kv_pages, digest, needed)
        if pages is None:
            return False
        queue = self._queues[sequence.tenant]
        queue.waiting.remove(sequence)
        insort(queue.admitted, sequence, key=lambda s: s.arrival)
        self._admitted += 1
        sequence.pages = pages
        sequence.phase = Phase.PREFILL
        if digest is not None:
            if not held:
                self._adapters.load(digest)
            if not self._adapters.ready(digest):
                sequence.phase = Phase.LOADING
        return True

    def _grow(self, sequence: Sequence, works: dict[Sequence, Work]) -> bool:
        """Makes room for one more token; others (or the sequence itself) give way when no page is left."""
        while len(sequence.pages) * self._page_tokens <= sequence.computed:
            page = self._pool.reserve(1)
            if page is not None:
                sequence.pages += page
                continue
            victim = self._victim()
            works.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        """Bulk first, then the tenant with most pages for its weight, its youngest request."""
        admitted = [s for q in self._queues.values() for s in q.admitted if s.phase is not Phase.LOADING]
        share = {tenant: sum(len(s.pages) for s in queue.admitted) for tenant, queue in self._queues.items()}
        return max(admitted, key=lambda s: (s.bulk, share[s.tenant] / s.weight, s.arrival))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue; its tokens are computed again later, at no charge."""
        self._give_back(sequence)
        sequence.phase = Phase.WAITING
        sequence.computed = 0
        insort(self._queues[sequence.tenant].waiting, sequence, key=lambda s: s.arrival)
        self.preemptions += 1

    def _charge(self, work: Work) -> None:
        sequence = work.sequence
        end = work.start + work.count
        fresh = max(0, min(end, sequence.prompt_len) - sequence.charged)
        sequence.charged = max(sequence.charged, end)
        self._fair.charge(sequence.tenant, fresh, 1 if work.samples else 0)

    def _finish(self, sequence: Sequence, reason: str) -> Event:
        """The only way out: everything that the sequence holds is given back here, once."""
        queue = self._queues[sequence.tenant]
        if sequence.phase is Phase.WAITING:
            queue.waiting.remove(sequence)
        else:
            self._give_back(sequence)
        sequence.phase = Phase.DONE
        del self._by_id[sequence.id]
        self.in_flight[sequence.served] -= 1
        if not self.in_flight[sequence.served]:
            del self.in_flight[sequence.served]
        if not queue.waiting and not queue.admitted:
            del self._queues[sequence.tenant]
        self._fair.leave(sequence.tenant)
        return Event(sequence, None, reason)

    def _give_back(self, sequence: Sequence) -> None:
        self._queues[sequence.tenant].admitted.remove(sequence)
        self._admitted -= 1
        self._pool.release(sequence.pages, sequence.adapter)
        sequence.pages = []

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)
