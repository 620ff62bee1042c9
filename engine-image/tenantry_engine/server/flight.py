"""A request's hold on the engine: whatever way it ends, its sequences are aborted and forgotten exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, MutableMapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tenantry_engine.ipc.link import EngineLink
from tenantry_engine.sequence import Sequence
from tenantry_engine.server.answer import Answer
from tenantry_engine.server.http import until_gone
from tenantry_engine.server.metrics import Metrics
from tenantry_engine.server.text import Choice, Delta
from tenantry_engine.server.tracing import begin_span, end_span


class Flight:
    """Registers the sequences of one answer for events until it is closed."""

    def __init__(
        self,
        engine: EngineLink,
        live: MutableMapping[str, tuple[Answer, int]],
        metrics: Metrics,
        answer: Answer,
        sequences: list[Sequence],
    ) -> None:
        self.answer = answer
        self._engine = engine
        self._live = live
        self._metrics = metrics
        self._sequences = sequences
        self._closed = False
        self._span = begin_span(answer)
        for index, sequence in enumerate(sequences):
            live[sequence.id] = (answer, index)

    async def next(self) -> tuple[Choice, Delta]:
        """As `Answer.next`; a choice that a stop string ended stops costing steps at once."""
        choice, new = await self.answer.next()
        if choice.finish is not None:
            self._engine.abort(self._sequences[choice.index].id)
        return choice, new

    async def rest(self) -> None:
        """Until every choice is complete."""
        while not self.answer.done:
            await self.next()

    def close(self) -> None:
        """Ends what still runs."""
        if self._closed:
            return
        self._closed = True
        for sequence, choice in zip(self._sequences, self.answer.choices, strict=True):
            del self._live[sequence.id]
            if choice.finish is None:
                self._engine.abort(sequence.id)
        answer = self.answer
        seconds = time.monotonic() - answer.started
        reason = (answer.choices[0].finish or "abort") if answer.done else "abort"
        self._metrics.ended(answer, reason, seconds)
        end_span(self._span, answer, reason)


class EventStream(Response):
    """Server-sent events that end with the client: when it goes, so does the flight."""

    media_type = "text/event-stream"

    def __init__(
        self, request: Request, flight: Flight, events: AsyncIterator[bytes], headers: dict[str, str]
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._request = request
        self._flight = flight
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            gone = asyncio.ensure_future(until_gone(self._request))
            sending = asyncio.ensure_future(self._send(send))
            try:
                await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    with contextlib.suppress(OSError):
                        sending.result()
            finally:
                gone.cancel()
                sending.cancel()
        finally:
            self._flight.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
