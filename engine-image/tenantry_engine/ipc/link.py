"""HTTP's end of the link: asks the engine and hears from it, on the event loop.

The engine may be deep in a step when it is asked; whoever cannot wait sets a timeout. When the link ends, every answer
that is still awaited ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec

from tenantry_engine.errors import EngineError, RequestError
from tenantry_engine.ipc.messages import (
    Abort,
    Ask,
    Facts,
    Frames,
    Happened,
    Ran,
    Ready,
    Refused,
    Reply,
    Step,
    Submit,
    ToEngine,
    frame,
    to_http,
)
from tenantry_engine.sequence import Sequence

log = logging.getLogger(__name__)


class EngineLink(asyncio.Protocol):
    """The engine as HTTP sees it. `listener` hears of sequences, `observer` of steps."""

    def __init__(self, facts: Facts | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.listener: Callable[[list[Happened]], None] = lambda events: None
        self.observer: Callable[[Ran], None] = lambda ran: None
        self.draining = False
        self.lost = asyncio.Event()
        self._facts = facts
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._frames = Frames()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_call = 0
        self._live: set[str] = set()
        self._heard = clock()
        self._ready: asyncio.Future[Facts] | None = None

    async def connect(self, sock: socket.socket) -> None:
        """Takes the link up."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    async def ready(self) -> Facts:
        """What the engine is, once it is loaded. Raises EngineError when it refuses to start or ends."""
        if self._facts is None:
            self._ready = asyncio.get_running_loop().create_future()
            if self.lost.is_set():
                raise EngineError("the engine ended while it started; see its last words above")
            self._facts = await self._ready
        return self._facts

    @property
    def facts(self) -> Facts:
        """What the engine is."""
        assert self._facts is not None, "the engine is asked before it is ready"
        return self._facts

    @property
    def model_name(self) -> str:
        """Served name of the base model."""
        return self.facts.model_name

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.facts.max_model_len

    @property
    def healthy(self) -> bool:
        """False when the engine has ended, or work waits and no step has ended for `stall_seconds`."""
        busy = bool(self._live or self._calls)
        return not self.lost.is_set() and not (
            busy and self._clock() - self._heard > self.facts.stall_seconds
        )

    # asking

    async def submit(self, sequences: list[Sequence], digest: str | None, uid: str | None) -> None:
        """Hands the sequences of one request over. Raises RequestError.

        `digest` is what the identity says: empty for the base model; `digest` and `uid` None in development.
        """
        if self.draining:
            raise RequestError("this replica is draining", status=503, code="draining", retry_after=1)
        most = self.facts.max_waiting
        if len(sequences) > most:
            raise RequestError(
                f"`n` and the prompts must ask for at most {most} answers at once, not {len(sequences)}",
                param="n",
            )
        if len(self._live) >= 2 * (self.facts.slots + self.facts.max_waiting):
            # the engine itself bounds what waits, but only between two steps
            raise RequestError(
                "too many requests are waiting here already", status=503, code="overloaded", retry_after=1
            )
        self._wake()
        ids = [sequence.id for sequence in sequences]
        self._live.update(ids)
        try:
            await self._call(lambda call: Submit(call, sequences, digest, uid))
        except BaseException:
            self._live.difference_update(ids)
            raise

    def abort(self, *ids: str) -> None:
        """Ends sequences soon; nothing more is heard of them."""
        self._live.difference_update(ids)
        self._send(Abort(list(ids)))

    async def ask(self, what: str, **arguments: Any) -> Any:
        """The answer to one of `Service`'s questions. Raises RequestError."""
        self._wake()
        return await self._call(lambda call: Ask(call, what, arguments))

    async def prepare(self, tenant: str, grammar: str) -> None:
        """Compiles a grammar for sequences that will ask for it. Raises RequestError."""
        await self.ask("prepare", tenant=tenant, grammar=grammar)

    async def names(self) -> tuple[list[str], list[str]]:
        """Served names of adapters that are registered, and those of them that are resident."""
        registered, resident = await self.ask("names")
        return registered, resident

    def _wake(self) -> None:
        """Silence counts from the moment at which there is something to hear."""
        if not self._live and not self._calls:
            self._heard = self._clock()

    async def _call(self, message: Callable[[int], ToEngine]) -> Any:
        if self.lost.is_set():
            raise _gone()
        self._last_call += 1
        call = self._last_call
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(call))
            return await future
        finally:
            self._calls.pop(call, None)

    def _send(self, message: ToEngine) -> None:
        if self.lost.is_set():
            return
        data = frame(message)
        if self._transport is None:
            self._unsent.append(data)
        else:
            self._transport.write(data)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        for data in self._unsent:
            self._transport.write(data)
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        self._heard = self._clock()
        try:
            for body in self._frames.push(data):
                self._take(to_http.decode(body))
        except (ValueError, msgspec.ValidationError):
            log.exception("the link to the engine failed")
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(_gone())
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                EngineError("the engine ended while it started; see its last words above")
            )
        live, self._live = self._live, set()
        self.listener([Happened(sequence_id, finish="error") for sequence_id in live])

    def _take(self, message: Ready | Refused | Reply | Step) -> None:
        if isinstance(message, Step):
            for event in message.events:
                if event.finish is not None:
                    self._live.discard(event.id)
            if message.ran is not None:
                self.observer(message.ran)
            self.listener(message.events)
        elif isinstance(message, Reply):
            future = self._calls.get(message.call)
            if future is None or future.done():
                return  # who asked has gone
            if message.fault is None:
                future.set_result(message.result)
            else:
                future.set_exception(message.fault.error())
        elif isinstance(message, Refused):
            if self._ready is not None:
                self._ready.set_exception(EngineError(message.message))
        elif self._ready is not None:
            self._ready.set_result(message.facts)


def _gone() -> RequestError:
    return RequestError(
        "the engine has ended; this replica restarts", status=503, code="engine_gone", retry_after=1
    )
