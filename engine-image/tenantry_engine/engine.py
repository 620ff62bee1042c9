"""The engine's thread: owns scheduler, pages, adapters and runner, and is the only one that touches them.

Others reach it through `call` (a function that runs between two steps) and hear from it through `listener`, once per
turn of its loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tenantry_kernels import PAGE_TOKENS

from tenantry_engine.adapters.base import Base, weights_of
from tenantry_engine.adapters.loading import host_budget
from tenantry_engine.adapters.registry import Registry
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.chunk import StepSize
from tenantry_engine.config import EngineConfig
from tenantry_engine.errors import RequestError
from tenantry_engine.loader import read_config
from tenantry_engine.memory import Sizes, available_bytes
from tenantry_engine.models.split import split
from tenantry_engine.pages import PagePool
from tenantry_engine.pipeline import Pipeline
from tenantry_engine.prefix import Space
from tenantry_engine.runner import Runner
from tenantry_engine.scheduler import Scheduler
from tenantry_engine.sequence import Sequence
from tenantry_engine.work import Event

log = logging.getLogger(__name__)
T = TypeVar("T")

_IDLE_SECONDS = 0.25
_CHECK_SECONDS = 5.0
_FAILURES_TO_DIE = 3


class Engine:
    """One replica without its HTTP. `digest` is the base model's.

    All hooks are called on the engine's thread: `listener` with the events of every turn while there is work (perhaps
    none: a sign of life), before it `observer` with the seconds, rows and distinct adapters of the step that it ran;
    `faulted` when a background result could not be taken in; `ended` when the loop is over, with the reason when it is
    not `stop`.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        sizes: Sizes,
        max_model_len: int,
        *,
        digest: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.listener: Callable[[list[Event]], None] = lambda events: None
        self.observer: Callable[[float, int, int], None] = lambda seconds, rows, adapters: None
        self.faulted: Callable[[], None] = lambda: None
        self.ended: Callable[[str | None], None] = lambda reason: None
        self._clock = clock
        self._runner = runner
        self.pool = PagePool(sizes.pages, wipe=runner.wipe, pin_limit=sizes.pin_limit)
        model = runner.model
        store = BlobStore(config.data_dir)
        self.registry = Registry(
            base=Base(
                shape=split(model.config, 0, 1).lora_shape,
                page_elems=model.kv_shape.page_elems,
                dtype=model.dtype,
                max_pages=sizes.largest_adapter,
                tied=model.config.tied,
                weight=weights_of(config.model),
                part=model.lora_shape,
            ),
            limits=config.lora,
            model_name=config.model_name,
            pool=self.pool,
            loader=runner.loader(
                store,
                host_budget(
                    runner.memory.is_cuda, config.lora.host_bytes if config.lora else None, available_bytes()
                ),
            ),
            store=store,
            checker=self._background("check"),
            filler=self._background("fill"),
            prefetcher=self._background("prefetch"),
            loaded=self._adapter_loaded,
            failed=self._adapter_failed,
        )
        self.pool.evicted = self.registry.on_evicted
        self._preparing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self.scheduler = Scheduler(
            self.pool,
            self.registry,
            slots=config.slots,
            step_tokens=config.step_tokens,
            page_tokens=PAGE_TOKENS,
            space=Space.of(digest, model.dtype, read_config(config.model)) if config.prefix_cache else None,
            size=StepSize(config.token_gap, config.step_tokens),
        )
        self._pipeline = Pipeline(self.scheduler, runner, self.registry.paged, clock)
        self.draining = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._events: list[Event] = []
        self._failures = 0
        self._progress = clock()  # when a step last ended, or nothing was left to do
        self._idle = True
        self._next_check = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # from other threads

    def start(self) -> None:
        """Begins to run steps."""
        self._thread.start()

    def stop(self) -> None:
        """Ends every request and the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        self._runner.close()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                if not isinstance(error, RequestError):
                    log.exception("a call failed")
                future.set_exception(error)

        self._post(run)
        return future

    def prepare(self, tenant: str, grammar: str) -> Future[None]:
        """Compiles a grammar, off the step path, for sequences that will ask for it. Its errors are RequestErrors."""
        return self._preparing.submit(self._runner.sampler.grammars.prepare, tenant, grammar)

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence soon; nothing more is heard of it."""

        def run() -> None:
            self.scheduler.abort(sequence_id)

        self._post(run)

    @property
    def healthy(self) -> bool:
        """False when work waits and no step has ended for `stall_seconds`, or the loop is over."""
        stalled = not self._idle and self._clock() - self._progress > self.config.stall_seconds
        return not stalled and (self._thread.is_alive() or self._thread.ident is None)

    # on the engine's thread (through `call`)

    def submit(self, sequences: list[Sequence], digest: str | None, uid: str | None) -> None:
        """Takes the sequences of one request in. Raises RequestError.

        `digest` is what the identity says: empty for the base model; `digest` and `uid` None in development.
        """
        if self.draining:
            raise RequestError("this replica is draining", status=503, code="draining", retry_after=1)
        if self.scheduler.waiting + len(sequences) > self.config.max_waiting:
            raise RequestError(
                f"{self.scheduler.waiting} requests are waiting here already",
                status=503,
                code="overloaded",
                retry_after=1,
            )
        served = sequences[0].served
        adapter = None
        if served != self.config.model_name or digest:
            adapter = self.registry.resolve(served, digest, uid)
            self.registry.prefetch(adapter)
        for sequence in sequences:
            sequence.adapter = adapter
            self.scheduler.add(sequence)

    # inside

    def _post(self, item: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        reason: str | None = "its loop failed"
        try:
            reason = self._loop()
            self._events += self.scheduler.abort_all("error" if reason else "abort")
            self._pipeline.abandon()
            self._publish()
        except BaseException:
            log.exception("the engine's loop failed")
            reason = reason or "it failed while it ended"
        finally:
            self.ended(reason)

    def _loop(self) -> str | None:
        """Runs steps until `stop`; returns early, with the reason, when steps fail one after another."""
        while True:
            self._read_inbox()
            if self._stopping:
                return None
            try:
                stepped = self._step()
                if stepped:
                    self._failures = 0
            except Exception:
                self._failures += 1
                log.exception("a step failed; its requests end with an error")
                if self._failures >= _FAILURES_TO_DIE:
                    return f"{self._failures} steps failed one after another"
                self._events += self.scheduler.abort_all("error")
                self._pipeline.abandon()
                stepped = True
            self._idle = not stepped and self.scheduler.running + self.scheduler.waiting == 0
            if self._events or not self._idle:
                self._publish()
            self._progress = self._clock()
            if self._idle and self._progress >= self._next_check:
                self.pool.check()  # pages that do not add up are a fault that no restart of a step can heal
                self._next_check = self._progress + _CHECK_SECONDS
            if not stepped:
                with self._wake:
                    if not self._inbox and not self._stopping:
                        self._wake.wait(timeout=_IDLE_SECONDS)

    def _read_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            try:
                item()
            except Exception:
                log.exception("a result could not be taken in")
                self.faulted()

    def _step(self) -> bool:
        now = self._clock()
        self._events += self.scheduler.expire(now)
        for name in self.registry.sweep(now, self.scheduler.in_flight):
            self._events += self.scheduler.abort_served(name, "unloaded")
        self._idle = self._idle and self.scheduler.running + self.scheduler.waiting == 0
        done = self._pipeline.turn(now)
        if done is None:
            return False
        self._events += done.events
        self.observer(done.seconds, done.rows, done.adapters)
        return True

    def _publish(self) -> None:
        events, self._events = self._events, []
        self.listener(events)

    def _adapter_loaded(self, digest: str) -> None:
        self.scheduler.adapter_loaded(digest)

    def _adapter_failed(self, digest: str) -> None:
        self._events += self.scheduler.adapter_failed(digest)

    def _background(self, name: str) -> Any:
        """A thread of its own whose results come back to the engine's thread."""
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

        def run(job: Callable[[], Any], done: Callable[[Any], None]) -> None:
            def work() -> None:
                result: Any
                try:
                    result = job()
                except BaseException as error:
                    result = error
                self._post(lambda: done(result))

            executor.submit(work)

        return run
