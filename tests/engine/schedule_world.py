"""A scheduler with simulated adapters and time, whose books are checked after every step."""

from __future__ import annotations

from collections import Counter

from tenantry_engine.chunk import StepSize
from tenantry_engine.pages import PagePool
from tenantry_engine.prefix import Space
from tenantry_engine.scheduler import Scheduler
from tenantry_engine.sequence import Phase, Sampling, Sequence
from tenantry_engine.work import Event, Work

PAGE = 16
SPACE = Space("sha256:base", "bfloat16", "{}")


class Adapters:
    """Adapters that load when the test says so."""

    def __init__(self, pages: dict[str, int]) -> None:
        self.pages = pages
        self.loading: list[str] = []
        self.loaded: set[str] = set()
        self.pool: PagePool | None = None

    def pages_needed(self, digest: str) -> int:
        return self.pages[digest]

    def ready(self, digest: str) -> bool:
        return digest in self.loaded

    def load(self, digest: str) -> None:
        assert self.pool is not None
        assert digest not in self.loading, "an adapter is loaded twice at a time"
        self.pool.reserve(0, digest)
        self.loading.append(digest)


class World:
    """`strict` checks all books after every step, which costs time."""

    def __init__(
        self,
        pages: int = 64,
        slots: int = 4,
        step_tokens: int = 32,
        size: StepSize | None = None,
        strict: bool = True,
        **adapters: int,
    ) -> None:
        self.adapters = Adapters(adapters)
        self.pool = PagePool(pages, wipe=lambda pages: None)
        self.pool.evicted = lambda digest: self.adapters.loaded.discard(str(digest))
        self.adapters.pool = self.pool
        self.scheduler = Scheduler(
            self.pool,
            self.adapters,
            slots=slots,
            step_tokens=step_tokens,
            page_tokens=PAGE,
            space=SPACE,
            size=size,
        )
        self.step_tokens = step_tokens
        self.strict = strict
        self.sequences: list[Sequence] = []
        self.ended: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.served: Counter[str] = Counter()  # tokens scheduled per tenant

    def add(
        self,
        tenant: str = "t",
        prompt: int | list[int] = 8,
        output: int = 4,
        **more: object,
    ) -> Sequence:
        """A number is a prompt that no other shares."""
        number = len(self.sequences) + 1
        tokens = [number] * prompt if isinstance(prompt, int) else list(prompt)
        more.setdefault("salt", f"salt of {tenant}")
        sequence = Sequence(
            f"s{number}",
            tenant,
            tokens,
            Sampling(max_tokens=output),
            "m",
            **more,  # type: ignore[arg-type]
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self, token: int = 1, seconds: float | None = None) -> int:
        """One step; the rows it ran."""
        works = self.plan()
        self.complete(works, token, seconds)
        return sum(w.count for w in works)

    def plan(self) -> list[Work]:
        works = self.scheduler.plan()
        self._check_works(works)
        return works

    def complete(self, works: list[Work], token: int = 1, seconds: float | None = None) -> None:
        chosen = {w.sequence: token for w in works if w.samples}
        self.take(self.scheduler.complete(works, chosen, seconds=seconds))
        if self.strict:
            self.check()

    def take(self, events: list[Event]) -> None:
        for event in events:
            if event.token is not None:
                self.tokens[event.sequence.id] += 1
            if event.finish is not None:
                self.ended[event.sequence.id] += 1
                self.reasons[event.sequence.id] = event.finish

    def finish_load(self, digest: str) -> None:
        self.adapters.loading.remove(digest)
        self.adapters.loaded.add(digest)
        self.scheduler.adapter_loaded(digest)
        self.pool.release((), digest)

    def fail_load(self, digest: str) -> None:
        self.adapters.loading.remove(digest)
        self.pool.drop(digest)
        self.take(self.scheduler.adapter_failed(digest))
        self.pool.release((), digest)

    def run(self, limit: int = 10_000) -> int:
        """Until nothing is left to do; loads take one step. The steps it took."""
        for count in range(limit):
            for digest in list(self.adapters.loading):
                self.finish_load(digest)
            if not self.step() and not self.adapters.loading:
                return count
        raise AssertionError("it never ends")

    # invariants

    def _check_works(self, works: list[Work]) -> None:
        rows = sum(w.count for w in works)
        assert rows <= self.step_tokens
        assert len({w.sequence for w in works}) == len(works)
        for work in works:
            sequence = work.sequence
            end = work.start + work.count
            assert sequence.phase in (Phase.PREFILL, Phase.DECODE)
            assert work.count >= 1
            assert sequence.adapter is None or self.adapters.ready(sequence.adapter), (
                "its pages are not filled"
            )
            assert work.start == sequence.computed
            assert end <= len(sequence.tokens)
            assert len(sequence.pages) * PAGE >= end, "a token has no page"
            for index in range(max(work.start // PAGE, sequence.shared), -(-end // PAGE)):
                page = sequence.pages[index]
                assert page not in self.pool._block_of, "a step writes what others may read"
            self.served[sequence.tenant] += work.count

    def check(self) -> None:
        """Every page, reference and counter is what the live sequences say it is."""
        pool, scheduler = self.pool, self.scheduler
        pool.check()
        live = list(scheduler.sequences())
        admitted = [s for line in scheduler._lines.values() for s in line.admitted]
        waiting = [s for line in scheduler._lines.values() for s in line.waiting]
        assert {s.id for s in live} == {s.id for s in [*admitted, *waiting]}
        assert len(live) == len(admitted) + len(waiting)
        assert (scheduler.running, scheduler.waiting) == (len(admitted), len(waiting))
        assert all(s.pages for s in admitted)
        assert not any(s.overtaken or s.passed_at is not None for s in admitted)
        assert not any(s.pages or s.computed for s in waiting)
        assert all(s.shared * PAGE <= s.computed + 1 for s in admitted), "published before it was computed"
        uses = Counter(page for s in admitted for page in s.pages)
        adapters = Counter(s.adapter for s in admitted if s.adapter is not None)
        adapters.update(self.adapters.loading)
        for key, holding in pool.holdings():
            expected = uses.pop(holding.pages[0], 0) if holding.block else adapters.pop(str(key), 0)
            assert holding.references == expected, f"{key!r}: {holding.references} references, not {expected}"
        assert not adapters, "an adapter is used that has no pages"
        assert set(uses) == pool._private
        assert all(count == 1 for count in uses.values()), "a private page belongs to two sequences"
        for line in scheduler._lines.values():
            for held in (line.waiting, line.admitted):
                assert held == sorted(held, key=lambda s: s.arrival)
            pages = {page for s in line.admitted for page in s.pages}
            names = {s.adapter for s in line.admitted} - {None}
            assert line.footprint(pool) == len(pages) + sum(len(pool.pages_of(name)) for name in names)

    def check_empty(self) -> None:
        """All have ended, once, and nothing is held."""
        self.check()
        counts = self.pool.counts()
        assert counts.kv == 0
        assert counts.adapter == self.pool.pinned_pages()
        assert set(self.ended) == {s.id for s in self.sequences}
        assert set(self.ended.values()) <= {1}, "a request ended twice"
        assert not self.scheduler.in_flight
        assert not self.scheduler._lines
        for sequence in self.sequences:
            if self.reasons[sequence.id] == "length":
                assert self.tokens[sequence.id] == sequence.sampling.max_tokens
