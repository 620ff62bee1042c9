"""The work queue's rules against a model, over arbitrary histories: no lost wake-up, never two workers on one key."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tenantry.cluster import Key
from tenantry.runtime.queue import Queue
from tenantry.runtime.workset import Backoff, Priority, TokenBucket, Workset

KEYS = st.sampled_from([Key("", name) for name in "abcde"])


class WorksetMachine(RuleBasedStateMachine):
    """`owed` is the truth: keys that somebody marked dirty after their processing began (or never began)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.workset = Workset(Backoff(base=1.0, ceiling=8.0, jitter=0.0), TokenBucket(rate=1e6, burst=1e6))
        self.owed: dict[Key, Priority] = {}
        self.later: dict[Key, float] = {}
        self.processing: set[Key] = set()

    @rule(key=KEYS, priority=st.sampled_from(list(Priority)))
    def add(self, key: Key, priority: Priority) -> None:
        fresh = self.workset.add(key, self.now, priority)
        assert fresh == (key not in self.owed)
        self.owed[key] = min(priority, self.owed.get(key, priority))

    @rule(key=KEYS, delay=st.sampled_from([0.5, 1.0, 2.0, 30.0]))
    def add_after(self, key: Key, delay: float) -> None:
        self.workset.add_after(key, delay, self.now)
        self.later[key] = min(self.now + delay, self.later.get(key, float("inf")))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.workset.release_due(self.now)
        for key, due in list(self.later.items()):
            if due <= self.now:
                del self.later[key]
                self.owed[key] = Priority.HIGH

    @rule()
    def take(self) -> None:
        taken = self.workset.take(self.now)
        ready = [key for key in self.owed if key not in self.processing]
        if taken is None:
            assert not ready, "a dirty key was not handed out"
            return
        key, _ = taken
        assert key not in self.processing, "two workers on one key"
        assert key in ready, "a clean key was handed out"
        best = min(self.owed[other] for other in ready)
        assert self.owed[key] == best, "low priority went first"
        del self.owed[key]
        self.processing.add(key)

    @precondition(lambda self: self.processing)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.processing)))
        self.processing.discard(key)
        assert self.workset.done(key, self.now) == (key in self.owed)

    @precondition(lambda self: self.processing)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.processing)))
        before = self.workset.failures(key)
        delay = self.workset.retry(key, self.now)
        assert delay == min(8.0, 2.0**before)
        self.later[key] = min(self.now + delay, self.later.get(key, float("inf")))

    @rule(key=KEYS)
    def forget(self, key: Key) -> None:
        self.workset.forget(key)
        assert self.workset.failures(key) == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.workset.processing()) == self.processing
        assert self.workset.next_due() == min(self.later.values(), default=None)


TestWorkset = WorksetMachine.TestCase
TestWorkset.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_the_back_off_grows_is_spread_and_is_bounded() -> None:
    backoff = Backoff(base=1.0, ceiling=10.0, jitter=0.5)
    assert [backoff.delay(failures, 0.5) for failures in (1, 2, 3, 4, 5, 2000)] == [1, 2, 4, 8, 10, 10]
    assert backoff.delay(1, 0.0) == 0.5
    assert backoff.delay(1, 1.0) == 1.5


def test_the_bucket_bounds_retries_over_all_keys() -> None:
    bucket = TokenBucket(rate=10.0, burst=2.0, tokens=2.0)
    assert [bucket.reserve(0.0) for _ in range(4)] == [0.0, 0.0, 0.1, 0.2]
    assert bucket.reserve(10.0) == 0.0
    workset = Workset(Backoff(base=0.001, jitter=0.0), TokenBucket(rate=1.0, burst=1.0, tokens=1.0))
    delays = [workset.retry(Key("", name), 0.0) for name in "abc"]
    assert delays == [0.001, 1.0, 2.0]


def test_a_low_key_that_turns_urgent_goes_first() -> None:
    workset = Workset()
    for name in "abc":
        workset.add(Key("", name), 0.0, Priority.LOW)
    workset.add(Key("", "c"), 0.0, Priority.HIGH)
    order = [workset.take(0.0) for _ in range(3)]
    assert [taken[0].name for taken in order if taken] == ["c", "a", "b"]


async def test_waiting_workers_get_delayed_keys_and_each_key_once() -> None:
    queue = Queue("waiting")
    seen: list[str] = []

    async def work() -> None:
        while True:
            key = await queue.get()
            seen.append(key.name)
            await asyncio.sleep(0)
            queue.done(key)

    workers = [asyncio.create_task(work()) for _ in range(3)]
    for name in ("late", "later"):
        queue.add_after(Key("", name), 0.05 if name == "late" else 0.1)
    for _ in range(5):
        queue.add(Key("", "now"))
    async with asyncio.timeout(5):
        while len(seen) < 3 or not queue.idle():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    for worker in workers:
        worker.cancel()
    assert seen == ["now", "late", "later"]
    assert queue.idle()


async def test_a_cancelled_worker_takes_no_key_with_it() -> None:
    queue = Queue("cancelled")
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add(Key("", "a"))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5):
        assert await queue.get() == Key("", "a")
