"""The engine's end of the link: puts what arrives before the engine's thread, and sends what that brings.

One thread reads. The engine's own thread writes, one frame per turn of its loop; when the HTTP process has not read for
so long that the socket is full, the write waits, and with it the engine: tokens that nobody takes are not made.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from tenantry_engine.adapters.registry import Declaration
from tenantry_engine.engine import Engine
from tenantry_engine.errors import EngineError
from tenantry_engine.ipc.messages import (
    Abort,
    Ask,
    Facts,
    Fault,
    Frames,
    Happened,
    Ran,
    Ready,
    Reply,
    Step,
    Submit,
    ToEngine,
    ToHttp,
    frame,
    to_engine,
)
from tenantry_engine.work import Event

log = logging.getLogger(__name__)

_READ = 1 << 18
_TENANTS = 16  # how many are listed by uid: enough to see whose replica it is
_FAILED = EngineError("the engine failed")


class Service:
    """Serves one HTTP process. `gone` is called, on the reader's thread, when it has gone."""

    def __init__(self, engine: Engine, facts: Facts, sock: socket.socket, gone: Callable[[], None]) -> None:
        self.facts = facts
        self._engine = engine
        self._socket = sock
        self._gone = gone
        self._lock = threading.Lock()
        self._ran: Ran | None = None
        self._deferred: set[int] = set()  # calls that a background result will answer
        self._reader = threading.Thread(target=self._read, name="link", daemon=True)
        self._questions: dict[str, Callable[..., Any]] = {
            "declare": self._declare,
            "report": self._report,
            "wants": engine.registry.wants,
            "names": engine.registry.names,
            "load": self._load,
            "drain": self._drain,
            "numbers": self._numbers,
        }

    def start(self) -> None:
        """Hooks into the engine, says that it is ready, and begins to listen."""
        self._engine.listener = self._heard
        self._engine.observer = self._observed
        self._engine.faulted = self._fail_deferred
        self._send(Ready(self.facts))
        self._reader.start()

    def close(self) -> None:
        """The other side sees the end of the link."""
        with contextlib.suppress(OSError):  # the other side may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # what arrives, on the reader's thread

    def _read(self) -> None:
        frames = Frames()
        try:
            while data := self._socket.recv(_READ):
                for body in frames.push(data):
                    self._take(to_engine.decode(body))
        except OSError:
            pass  # the end of the link, as below
        except Exception:
            log.exception("the link to the HTTP process failed")
        self._gone()

    def _take(self, message: ToEngine) -> None:
        engine = self._engine
        if isinstance(message, Abort):
            for sequence_id in message.ids:
                engine.abort(sequence_id)
        elif isinstance(message, Submit):
            sequences, digest, uid = message.sequences, message.digest, message.uid
            self._answer(message.call, lambda: engine.submit(sequences, digest, uid))
        elif message.what == "stored":
            self._stored(message)
        elif message.what == "prepare":
            self._answer_later(message.call, engine.prepare(**message.arguments))
        else:
            question = self._questions[message.what]
            arguments = message.arguments
            self._answer(message.call, lambda: question(**arguments))

    def _answer(self, call: int, question: Callable[[], Any]) -> None:
        """Asks on the engine's thread. A fault there is this call's fault alone."""

        self._ask(call, lambda: self._send(Reply(call, question())))

    def _ask(self, call: int, question: Callable[[], None]) -> None:
        """The question answers; here only its failure is told."""

        def refuse(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                self._refuse(call, error)

        self._engine.call(question).add_done_callback(refuse)

    def _answer_later(self, call: int, future: Future[None]) -> None:
        """Answers from the thread that does the work."""

        def done(future: Future[None]) -> None:
            error = future.exception()
            self._send(Reply(call, fault=Fault.of(error) if error else None))

        future.add_done_callback(done)

    # questions, on the engine's thread

    def _declare(self, fence: list[int], wanted: list[dict[str, Any]], drain_seconds: float) -> Any:
        registry = self._engine.registry
        epoch, counter = fence
        now = time.monotonic()
        registry.declare((epoch, counter), [Declaration(**item) for item in wanted], now + drain_seconds)
        registry.sweep(now, self._engine.scheduler.in_flight)
        registry.prune_store()
        return self._report()

    def _report(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "fence": engine.registry.fence,
            "pages": asdict(engine.pool.counts()),
            "adapters": engine.registry.reports(engine.scheduler.in_flight),
            "requests": engine.scheduler.running + engine.scheduler.waiting,
            "separation": self._separation(),
        }

    def _separation(self) -> dict[str, Any]:
        """Whom this replica served, and that none was given what was computed for another."""
        scheduler = self._engine.scheduler
        tenants = scheduler.tenants
        return {
            "tenants": tenants[:_TENANTS],
            "tenantCount": len(tenants),
            "promptTokens": scheduler.prompt_tokens,
            "cachedTokens": scheduler.cached_tokens,
            "crossedTokens": scheduler.crossed_tokens,
        }

    def _load(self) -> dict[str, Any]:
        scheduler = self._engine.scheduler
        registered, resident = self._engine.registry.names()
        return {
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "outstandingTokens": scheduler.outstanding_tokens,
            "registered": registered,
            "resident": resident,
        }

    def _drain(self) -> Any:
        self._engine.draining = True
        return self._report()

    def _numbers(self) -> dict[str, Any]:
        """For the metrics."""
        engine = self._engine
        scheduler = engine.scheduler
        registered, resident = engine.registry.names()
        return {
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "preemptions": scheduler.preemptions,
            "evictions": engine.registry.evictions,
            "pages": asdict(engine.pool.counts()),
            "registered": len(registered),
            "resident": len(resident),
            "active": len({s.adapter for s in scheduler.sequences()} - {None}),
        }

    def _stored(self, message: Ask) -> None:
        """Bytes are in the store: answered once they are checked against the base model."""
        call, digest = message.call, str(message.arguments["digest"])

        def then() -> None:
            if call in self._deferred:
                self._deferred.remove(call)
                self._send(Reply(call))

        def begin() -> None:
            self._deferred.add(call)
            try:
                self._engine.registry.blob_stored(digest, then)
            except BaseException:
                self._deferred.discard(call)
                raise

        self._ask(call, begin)

    def _fail_deferred(self) -> None:
        """A background result was lost: whoever may wait for it hears so now."""
        for call in sorted(self._deferred):
            self._refuse(call, _FAILED)
        self._deferred.clear()

    def _refuse(self, call: int, error: BaseException) -> None:
        self._send(Reply(call, fault=Fault.of(error)))

    # what the engine brings, on its thread

    def _observed(self, seconds: float, rows: int, adapters: int) -> None:
        self._ran = Ran(seconds, rows, adapters)

    def _heard(self, events: list[Event]) -> None:
        ran, self._ran = self._ran, None
        self._send(Step([_happened(event) for event in events], ran))

    def _send(self, message: ToHttp) -> None:
        data = frame(message)
        # when the HTTP process has gone, the reader sees it and ends this process
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(data)


def _happened(event: Event) -> Happened:
    sequence = event.sequence
    first = event.token is not None and sequence.generated == 1
    cached = sequence.cached if first else 0
    return Happened(sequence.id, event.token, event.finish, cached, event.scores, event.prompt_scores)
