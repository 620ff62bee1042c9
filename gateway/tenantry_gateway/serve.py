"""A request's way, from its door to its end: identify, validate, order, queue, route, prompt, forward, account."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from tenantry.api import names

from .asgi import ClientGone, Receive, Scope, Send, Watch, header, read_body, respond
from .auth import Caller, client_address, identify
from .dispatch import Dispatcher, Grant
from .errors import ApiError
from .forward import Exchange, Forwarder
from .ledger import Ledger, LedgerError
from .limits import month_of
from .metrics import Metrics
from .prepare import Prepared, Preparer
from .record import Record
from .settings import Settings
from .sse import error_event
from .state import State


class Completions:
    """The two routes that run a model."""

    def __init__(
        self,
        *,
        settings: Settings,
        state: State,
        preparer: Preparer,
        dispatcher: Dispatcher,
        forwarder: Forwarder,
        ledger: Ledger,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._state = state
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._forwarder = forwarder
        self._ledger = ledger
        self._metrics = metrics
        self._open: dict[str, Record] = {}

    def places(self, tenant: str) -> dict[str, int]:
        """Requests of a tenant that are not over, by the uid of the pool where they run, wait or may be sent yet."""
        found: Counter[str] = Counter()
        for record in self._open.values():
            if record.caller is None or record.caller.tenant.name != tenant:
                continue
            if record.ticket is not None:
                found[record.ticket.pool.uid] += 1
            else:
                found.update(pool.uid for pool in record.caller.tenant.pools.values())
        return dict(found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = (scope.get("client") or ("",))[0]
        record = Record(
            route=scope["path"],
            client=client_address(peer, scope["headers"], self._settings.trusted_proxies),
            client_request_id=_label(header(scope, b"x-request-id")),
            conversation=_label(header(scope, names.CONVERSATION_HEADER.encode())),
        )
        try:
            await self._handle(record, scope, receive, send)
        except ClientGone:
            record.outcome = "client_gone"
        finally:
            self._open.pop(record.id, None)
            record.report(self._metrics)

    async def _handle(self, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        watch: Watch | None = None
        grant: Grant | None = None
        sent = _Sent(send)
        try:
            try:
                record.caller = identify(scope["headers"], self._state, time.time())
                raw = await read_body(
                    scope, receive, self._settings.max_body_bytes, self._settings.timeouts.body
                )
                record.caller = self._as_of_now(record.caller)
                self._open[record.id] = record
                watch = Watch(receive)
                async with asyncio.timeout(self._settings.timeouts.total):
                    prepared = await self._preparer.prepare(record, raw)
                    grant = await self._dispatcher.admit(prepared.ticket)
                    answer = await self._run(grant, record, prepared, sent, watch)
                if answer is not None:
                    watch.stop()
                    self._dispatcher.settle(grant, record.used)
                    record.status = 200
                    await respond(sent, 200, {**self._headers(record), **self._limit_headers(record)}, answer)
                    record.delivered = record.tokens.output
            except (ApiError, TimeoutError) as error:
                await self._fail(error, record, grant, sent, watch)
        except asyncio.CancelledError:
            gone = watch is not None and watch.gone
            record.outcome = "client_gone" if gone else "shutdown"
            record.status = record.status or 499
            task = asyncio.current_task()
            if not gone or task is None:
                raise
            task.uncancel()
        finally:
            if watch is not None:
                watch.stop()
            self._finish(grant, record)

    def _as_of_now(self, caller: Caller) -> Caller:
        """The same caller with the tenant's present route: a body may take its time, and the tenant move meanwhile."""
        tenant = self._state.tenants.get(caller.tenant.name)
        if tenant is None or tenant.uid != caller.tenant.uid:
            return caller
        return Caller(tenant, caller.key_name)

    async def _fail(
        self,
        error: ApiError | TimeoutError,
        record: Record,
        grant: Grant | None,
        sent: _Sent,
        watch: Watch | None,
    ) -> None:
        """Tell the client: as an answer, or as the last event of a stream that has begun."""
        if not isinstance(error, ApiError):
            record.outcome = "timeout"
            error = ApiError(504, "timeout", "the request took too long")
        if not sent.started:
            record.refuse(error)
        self._finish(grant, record)
        if watch is not None:
            watch.stop()
        if sent.started:
            last = {"type": "http.response.body", "body": error_event(error.message, error.code)}
            async with asyncio.timeout(1.0):
                await sent(last)
            return
        headers = {**self._limit_headers(record), **error.all_headers(), names.REQUEST_ID_HEADER: record.id}
        await respond(sent, error.status, headers, error.body())

    async def _run(
        self, grant: Grant, record: Record, prepared: Prepared, send: Send, watch: Watch
    ) -> bytes | None:
        record.queued_seconds = grant.queued_seconds
        record.opened = (
            True  # from here on there is a closing record, also when we are cancelled while opening
        )
        try:
            await self._ledger.open(record.as_opened())
        except LedgerError as error:
            raise ApiError(
                503, "ledger_unavailable", "the request cannot be accounted for", retry_after=5
            ) from error
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._headers(record),
            **self._limit_headers(record),
        }
        exchange = Exchange(grant, record, prepared.request.include_usage, headers, send, watch)
        return await self._forwarder.run(exchange, prepared.body)

    def _finish(self, grant: Grant | None, record: Record) -> None:
        """Settle limits, slot and ledger, once, without waiting for anything: it also runs while being cancelled."""
        if grant is None or record.closed:
            return
        record.closed = True
        if (
            record.outcome in ("client_gone", "shutdown", "timeout")
            and record.attempts
            and not record.tokens_seen
        ):
            self._charge_unseen(record)
        self._dispatcher.settle(grant, record.used)
        record.close(self._ledger, grant)

    @staticmethod
    def _charge_unseen(record: Record) -> None:
        """Nobody saw what the engine did: its input, and of a whole answer all that it may have made."""
        record.tokens.input = record.input_bound
        record.tokens.output = 0 if record.stream else record.output_bound
        record.estimated = True

    def _headers(self, record: Record) -> dict[str, str]:
        assert record.ticket is not None
        return {names.REQUEST_ID_HEADER: record.id, names.SERVED_HEADER: record.ticket.target.served_name}

    def _limit_headers(self, record: Record) -> dict[str, str]:
        """What is left now: after settling for a whole answer, with the reserve taken for a stream that begins."""
        limits = record.caller.tenant.limits if record.caller else None
        if record.caller is None or limits is None:
            return {}
        usage = self._dispatcher.limiter.usage(record.caller.tenant.uid, month_of(time.time()))
        now = time.monotonic()
        headers = {}
        for name, window, limit in (
            ("requests", usage.requests, limits.requests_per_minute),
            ("tokens", usage.tokens, limits.tokens_per_minute),
        ):
            level = window.level(limit, now)
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(limit - level)))
            headers[f"x-ratelimit-reset-{name}"] = f"{level * 60 / limit:.3f}s"
        return headers


class _Sent:
    """A `send` that remembers whether an answer began."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.started = True
        await self._send(message)


def _label(value: str) -> str:
    """A client's own request id, kept as a label only."""
    return value[:128] if value.isascii() and value.isprintable() else ""
