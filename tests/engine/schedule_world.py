"""A scheduler with simulated adapters and time, whose books are checked after every step."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

from tenantry_engine.chunk import StepSize
from tenantry_engine.pages import PagePool
from tenantry_engine.pipeline import Pipeline
from tenantry_engine.prefix import Space
from tenantry_engine.runner import Pending
from tenantry_engine.sampler import Choices
from tenantry_engine.scheduler import Scheduler
from tenantry_engine.sequence import UNKNOWN, Phase, Sampling, Sequence
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


class Device:
    """Runs nothing, and hands out late what it chose: the tokens that `text` says, after the step's time has passed.

    It refuses what a device could not run: a token that neither host nor device knows, and more steps than it queues.
    """

    def __init__(self, check: Callable[[list[Work]], None], *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.now = 0.0
        self.running: deque[list[Work]] = deque()
        self.pace: Callable[[int], float] = lambda rows: 0.02
        self.fail_next = ""  # `run` or `take`
        self.overlapped = 0  # steps given while another one ran
        self._check = check

    def run(self, works: list[Work], paged: object, before: Pending | None) -> Pending:
        self._check(works)
        self._fail("run")
        assert len(self.running) <= self.overlaps
        self.overlapped += len(self.running)
        for work in works:
            if UNKNOWN in work.sequence.tokens[work.start : work.start + work.count]:
                assert before is not None, "a token is not known anywhere"
                assert work.sequence in before.rows
                assert work.count == 1
        self.running.append(works)
        sampled = {w.sequence: w.start + w.count for w in works if w.samples}

        def take() -> Choices:
            assert self.running[0] is works, "steps end in their order"
            self._fail("take")
            self.running.popleft()
            self.now += self.pace(sum(w.count for w in works))
            return Choices({s: text(s)[at - s.prompt_len] for s, at in sampled.items()})

        return Pending(take, rows={sequence: row for row, sequence in enumerate(sampled)})

    def _fail(self, where: str) -> None:
        if self.fail_next == where:
            self.fail_next = ""
            raise RuntimeError("out of memory")


def text(sequence: Sequence) -> list[int]:
    """All that the model would ever say to it."""
    draw = random.Random(sequence.id)
    return [draw.randrange(3) if draw.random() < 0.95 else 9 for _ in range(sequence.sampling.max_tokens)]


def answer(sequence: Sequence) -> tuple[list[int], str]:
    """What it says until it ends by itself, and why it ends then."""
    said = text(sequence)
    for index, token in enumerate(said):
        if token in sequence.sampling.stop_ids:
            return said[: index + 1], "stop"
    return said, "length"


class World:
    """`strict` checks all books after every step, which costs time."""

    def __init__(
        self,
        pages: int = 64,
        slots: int = 4,
        step_tokens: int = 32,
        size: StepSize | None = None,
        strict: bool = True,
        overlaps: bool = False,
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
        self.device = Device(self._check_works, overlaps=overlaps)
        self.pipeline = Pipeline(self.scheduler, self.device, lambda name: None, lambda: self.device.now)  # type: ignore[arg-type,return-value]
        self.step_tokens = step_tokens
        self.strict = strict
        self.sequences: list[Sequence] = []
        self.ended: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.said: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.served: Counter[str] = Counter()  # tokens scheduled per tenant

    def add(
        self,
        tenant: str = "t",
        prompt: int | list[int] = 8,
        output: int = 4,
        stop_ids: frozenset[int] = frozenset(),
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
            Sampling(max_tokens=output, stop_ids=stop_ids),
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

    def turn(self) -> bool:
        """One turn as the engine does it, on the simulated device; a step that fails ends everything."""
        try:
            done = self.pipeline.turn(self.device.now)
            self.take(done.events if done else [])
        except RuntimeError:
            self.fail()
            return True
        if self.strict:
            self.check()
        return done is not None

    def fail(self, reason: str = "error") -> None:
        """Everything ends, and what still runs is dropped."""
        self.take(self.scheduler.abort_all(reason))
        self.check()
        self.pipeline.abandon()
        self.check()

    def plan(self) -> list[Work]:
        works = self.scheduler.plan()
        self._check_works(works)
        return works

    def complete(self, works: list[Work], token: int = 1, seconds: float | None = None) -> None:
        chosen = {w.sequence: token for w in works if w.samples}
        self.scheduler.began(works)
        self.take(self.scheduler.complete(works, chosen, seconds=seconds))
        if self.strict:
            self.check()

    def take(self, events: list[Event]) -> None:
        for event in events:
            if event.token is not None:
                self.tokens[event.sequence.id] += 1
                self.said.setdefault(event.sequence.id, []).append(event.token)
                assert self.ended[event.sequence.id] == 0, "a token comes after the end"
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
        leaving = scheduler._residents._leaving
        assert all(s.phase is Phase.DONE and s.under_way for s in leaving)
        flying = Counter(work.sequence for works in self.device.running for work in works)
        assert leaving == {s for s in flying if s.phase is Phase.DONE}
        assert all(s.under_way == flying[s] for s in {*live, *leaving})
        for works in self.device.running:
            for work in works:  # what a step may still write has one owner, and that is its sequence
                first, last = work.start // PAGE, -(-(work.start + work.count) // PAGE)
                assert len(work.sequence.pages) >= last
                for page in work.sequence.pages[max(first, work.sequence.shared) : last]:
                    assert page in pool._private
        holders = [*admitted, *leaving]
        uses = Counter(page for s in holders for page in s.pages)
        adapters = Counter(s.adapter for s in holders if s.adapter is not None)
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

    def check_answers(self) -> None:
        """Everybody was told what the model says to it: all of it, or as far as it went."""
        for sequence in self.sequences:
            said, reason = self.said.get(sequence.id, []), self.reasons[sequence.id]
            whole, end = answer(sequence)
            assert said == whole[: len(said)]
            if reason in ("stop", "length"):
                assert (said, reason) == (whole, end)
            else:
                assert len(said) < len(whole)
