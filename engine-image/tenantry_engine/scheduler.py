"""Decides what each step runs. Pure: no tensors, no clock of its own, no I/O.

Continuous batching: every step takes one token of each decoding sequence, then fills its token budget with chunks of
prompts, each chunk for the tenant that has received least service. A request is admitted with all pages that its
prompt and its adapter need, or not at all, so half-admitted requests cannot block each other. What the prefix cache
already has of a prompt is neither computed nor charged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from tenantry_engine.admission import Round
from tenantry_engine.chunk import Load, StepSize, pairs_of
from tenantry_engine.fairness import FairShare
from tenantry_engine.kv import KvPages
from tenantry_engine.lines import Line
from tenantry_engine.pages import PagePool
from tenantry_engine.prefix import Space
from tenantry_engine.residents import Adapters, Residents
from tenantry_engine.sequence import UNKNOWN, Phase, Sequence
from tenantry_engine.work import Event, Work

CROWD = 4
"""Times the slots of another tenant, over weight, from which on a tenant's prompts hardly slow it down."""


class Scheduler:
    """All sequences of one replica. `space` None = no prefix cache; `size` None = every step may be full."""

    def __init__(
        self,
        pool: PagePool,
        adapters: Adapters,
        *,
        slots: int,
        step_tokens: int,
        page_tokens: int,
        space: Space | None = None,
        size: StepSize | None = None,
    ) -> None:
        if step_tokens <= slots:
            raise ValueError(f"`step_tokens` must be more than `slots` ({slots}), not {step_tokens}")
        self._kv = KvPages(pool, page_tokens, space)
        self._slots = slots
        self._step_tokens = step_tokens
        self._size = size
        self._fair = FairShare()
        self._lines: dict[str, Line] = {}
        self._residents = Residents(pool, self._kv, adapters, self._lines, slots)
        self._by_id: dict[str, Sequence] = {}
        self._arrivals = 0
        self._steps = 0
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
        contending = self._contending() if self._fair.idle(sequence.tenant) else []
        self._fair.arrive(sequence.tenant, sequence.weight, contending)
        line = self._lines.setdefault(sequence.tenant, Line(sequence.tenant))
        line.cap, line.weight = sequence.cap, sequence.weight
        line.wait(sequence)

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
        self._residents.load_ended(digest)
        for sequence in self._by_id.values():
            if sequence.phase is Phase.LOADING and sequence.adapter == digest:
                sequence.phase = Phase.PREFILL

    def adapter_failed(self, digest: str) -> list[Event]:
        """The adapter cannot be loaded: its sequences end."""
        self._residents.load_ended(digest)
        doomed = [s for s in self._by_id.values() if s.adapter == digest]
        return [self._finish(s, "error") for s in doomed]

    # numbers

    @property
    def running(self) -> int:
        """Sequences that hold pages."""
        return self._residents.count

    @property
    def waiting(self) -> int:
        """Sequences that hold nothing yet."""
        return len(self._by_id) - self._residents.count

    @property
    def preemptions(self) -> int:
        """Times that a sequence gave way so far."""
        return self._residents.preemptions

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that the sequences here may still take: prompt not computed, output not made."""
        return sum(s.missing + s.sampling.max_tokens - s.generated for s in self._by_id.values())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of all requests that were admitted so far."""
        return self._kv.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Those of `prompt_tokens` that the prefix cache had."""
        return self._kv.cached_tokens

    @property
    def crossed_tokens(self) -> int:
        """Tokens in cached blocks of one tenant that a request of another one referred to; 0 unless keys fail."""
        return self._kv.crossed_tokens

    @property
    def tenants(self) -> list[str]:
        """Everybody whose requests were ever admitted, in that order."""
        return list(self._kv.tenants)

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
        """What the next step runs; empty when nothing can run. `began` and `complete` must follow, or everything end.

        The step before may still be under way. Then a sequence that lacks what only others can give up is left out.
        """
        self._steps += 1
        self._residents.held_up = False
        works: dict[Sequence, Work] = {}
        for sequence in self._decoding():
            if sequence.phase is Phase.DECODE and self._residents.grow(sequence, works):
                works[sequence] = Work(sequence, sequence.computed, 1, True)
        admissions = Round(self._steps, self._residents.can_load)
        while self._room(works, start=0) > 0:
            chosen = self._next_prefill(works, admissions)
            if chosen is None:
                break
            rows = self._slots if self._crowds(chosen.tenant, works) else None
            count = min(chosen.missing, self._room(works, chosen.computed, rows=rows))
            if count == 0:
                break
            works[chosen] = Work(chosen, chosen.computed, count, count == chosen.missing)
            self._charge(works[chosen])
        for work in works.values():
            if work.sequence.phase is Phase.DECODE:
                self._charge(work)
        return list(works.values())

    @property
    def held_up(self) -> bool:
        """Whether the last plan left something out that it would not have when no step is under way."""
        return self._residents.held_up

    def began(self, works: list[Work]) -> None:
        """The step runs: what is certain about it counts from now on. Its tokens are `UNKNOWN`."""
        self._residents.step_began(works)
        for work in works:
            work.sequence.computed += work.count
            if work.samples:
                work.sequence.tokens.append(UNKNOWN)
                work.sequence.phase = Phase.DECODE

    def complete(
        self,
        works: list[Work],
        tokens: Mapping[Sequence, int],
        ends: Mapping[Sequence, str] = MappingProxyType({}),
        seconds: float | None = None,
    ) -> list[Event]:
        """The step ended; `tokens` holds the next one of every sequence that samples. Steps end in their order.

        `ends` says why a sequence ends with its token for a reason that lies outside the scheduler; `seconds` is how
        long the step took.
        """
        if self._size is not None and seconds is not None and works:
            self._size.measured(_load(works), seconds)
        self._residents.step_ended(works)
        events: list[Event] = []
        for work in works:
            sequence, end = work.sequence, work.start + work.count
            if sequence.phase is Phase.DONE:
                continue  # it ended while the step ran
            self._kv.publish(sequence, self._lines[sequence.tenant], end)
            if not work.samples:
                continue
            token = sequence.tokens[end] = tokens[sequence]
            generated = end + 1 - sequence.prompt_len  # with this one, but without what a later step draws
            sampling = sequence.sampling
            if sequence in ends:
                self._finish(sequence, ends[sequence])
                events.append(Event(sequence, token, ends[sequence]))
            elif token in sampling.stop_ids and generated > sampling.min_tokens:
                self._finish(sequence, "stop")
                events.append(Event(sequence, token, "stop"))
            elif generated >= sampling.max_tokens:
                self._finish(sequence, "length")
                events.append(Event(sequence, token, "length"))
            else:
                events.append(Event(sequence, token))
        return events

    def _crowds(self, tenant: str, works: Mapping[Sequence, Work]) -> bool:
        """Whether it holds many times the slots of a tenant that runs in this step and has received less service: one
        that asks for little, whose tokens must not become rare for all that the other asks for."""
        mine, service = self._lines[tenant], self._fair.service(tenant)
        slots = len(mine.admitted) / mine.weight
        beside = {work.sequence.tenant for work in works.values() if work.sequence.phase is Phase.DECODE}
        lines = (self._lines[other] for other in beside - {tenant} if self._fair.service(other) < service)
        return any(slots >= CROWD * len(line.admitted) / line.weight for line in lines)

    def _room(self, works: Mapping[Sequence, Work], start: int, *, rows: int | None = None) -> int:
        """Tokens of a prompt, from position `start` on, that the step may take besides `works`."""
        load = _load(works.values())
        if self._size is None:
            return self._step_tokens - load.tokens
        decoding = _load(work for work in works.values() if work.sequence.phase is Phase.DECODE)
        return min(self._step_tokens - load.tokens, self._size.room(load, decoding, start, rows=rows))

    # whose turn it is

    def _decoding(self) -> list[Sequence]:
        """Those that take one more token, in order of arrival; not those whose last one is under way."""
        admitted = (s for line in self._lines.values() for s in line.admitted)
        found = [s for s in admitted if s.phase is Phase.DECODE and s.generated < s.sampling.max_tokens]
        return sorted(found, key=lambda s: s.arrival)

    def _contending(self) -> list[str]:
        """Tenants that would take prompt tokens now."""
        admissions = Round(self._steps, self._residents.can_load)
        return [
            tenant
            for tenant, line in self._lines.items()
            if line.started(()) is not None or admissions.candidate(line) is not None
        ]

    def _next_prefill(self, works: dict[Sequence, Work], admissions: Round) -> Sequence | None:
        """The sequence whose turn it is, admitted if need be."""
        open_ = self._residents.may_admit()
        while True:
            ready: dict[str, Sequence] = {}
            for tenant, line in self._lines.items():
                sequence = line.started(works) or (admissions.candidate(line) if open_ else None)
                if sequence is not None:
                    ready[tenant] = sequence
            turn = self._fair.least(ready)
            if turn is None:
                return None
            chosen, line = ready[turn], self._lines[turn]
            if chosen.phase is Phase.PREFILL:
                return chosen
            if self._residents.must_hold_back(chosen):
                admissions.hold_back(turn)
            elif self._residents.admit(chosen, works):
                admissions.admitted(chosen, line)
            elif self._residents.held_up:
                return None
            else:
                admissions.pass_over(chosen)

    # books

    def _charge(self, work: Work) -> None:
        sequence = work.sequence
        end = work.start + work.count
        fresh = max(0, min(end, sequence.prompt_len) - sequence.charged)
        sequence.charged = max(sequence.charged, end)
        prompt = sequence.phase is Phase.PREFILL
        self._fair.charge(sequence.tenant, fresh, 1 if work.samples else 0, prompt=prompt)

    def _finish(self, sequence: Sequence, reason: str) -> Event:
        """The only way out: everything that the sequence holds is given back here, once."""
        line = self._lines[sequence.tenant]
        if sequence.phase is Phase.WAITING:
            line.waiting.remove(sequence)
        else:
            self._residents.release(sequence)
        sequence.phase = Phase.DONE
        del self._by_id[sequence.id]
        self.in_flight[sequence.served] -= 1
        if not self.in_flight[sequence.served]:
            del self.in_flight[sequence.served]
        if not line:
            del self._lines[sequence.tenant]
        self._fair.leave(sequence.tenant)
        return Event(sequence, None, reason)


def _load(works: Iterable[Work]) -> Load:
    tokens = pairs = 0  # not a sum of Loads: a plan asks for it several times, of hundreds of rows
    for work in works:
        tokens += work.count
        pairs += pairs_of(work.start, work.count)
    return Load(tokens, pairs)
