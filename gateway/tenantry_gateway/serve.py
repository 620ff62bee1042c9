"""A request's way, from its door to its end: identify, validate, order, queue, route, prompt, forward, account."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from tenantry.api import names
from tenantry.api.tenant import EffectiveLimits

from .asgi import ClientGone, Receive, Scope, Send, Watch, header, read_body, respond
from .auth import client_address, identify
from .body import Request, forwarded, input_bound, parse
from .dispatch import Dispatcher, Grant, Ticket, no_endpoint
from .errors import ApiError, invalid
from .forward import Forwarder
from .ledger import Ledger, LedgerError
from .limits import month_of
from .metrics import Metrics
from .prompt import compose
from .record import Record
from .replicas import Replicas
from .routing import choose_lane, choose_replica, choose_target, find_model
from .settings import Settings
from .sse import error_event
from .state import Lane, Pool, State, Target, Tenant

log = logging.getLogger(__name__)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_COUNTED_PROMPTS = 8


@dataclass(frozen=True)
class Route:
    pool: Pool
    lane: Lane
    target: Target


class Completions:
    """The two routes that run a model."""

    def __init__(
        self,
        settings: Settings,
        state: State,
        replicas: Replicas,
        dispatcher: Dispatcher,
        forwarder: Forwarder,
        ledger: Ledger,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._state = state
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._forwarder = forwarder
        self._ledger = ledger
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = (scope.get("client") or ("",))[0]
        record = Record(
            route=scope["path"],
            client=client_address(peer, scope["headers"], self._settings.trusted_proxies),
            client_request_id=_label(header(scope, b"x-request-id")),
        )
        try:
            await self._handle(record, scope, receive, send)
        except ClientGone:
            record.outcome = "client_gone"
        finally:
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
                watch = Watch(receive)
                async with asyncio.timeout(self._settings.timeouts.total):
                    request, ticket, body = await self._prepare(record, raw)
                    grant = await self._dispatcher.admit(ticket)
                    answer = await self._run(grant, record, request, body, sent, watch)
                if answer is not None:
                    self._finish(grant, record)
                    watch.stop()
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

    async def _prepare(self, record: Record, raw: bytes) -> tuple[Request, Ticket, bytes]:
        """Everything that can be refused without a queue. Raises ApiError."""
        assert record.caller is not None
        tenant, limits = record.caller.tenant, record.caller.tenant.limits
        chat = record.route == CHAT
        request = parse(raw, chat)
        record.model, record.stream = request.model, request.stream
        if limits is None:
            raise ApiError(
                503, "not_placed", "nothing serves the tenant yet; see `kubectl get tenants`", retry_after=5
            )
        if tenant.prompt and not chat:
            raise ApiError(400, "completions_off", f"this route is off for tenants with a prompt; use {CHAT}")
        find_model(tenant, request.model)
        if request.sequences > limits.max_in_flight:
            raise invalid(
                "n",
                f"must ask for at most {limits.max_in_flight} sequences in all; it asks for {request.sequences}",
            )
        if request.max_tokens is not None and request.max_tokens > limits.max_output_tokens:
            raise invalid("max_tokens", f"must be at most {limits.max_output_tokens}")
        wait = self._dispatcher.limiter.take_request(
            tenant.uid, limits, time.monotonic(), month_of(time.time())
        )
        if wait > 0:
            raise ApiError(429, "rate_requests", "your requests per minute are used up", retry_after=wait)
        messages = compose(tenant.prompt, request.messages)
        tokens = input_bound(request, messages)
        session = request.user or record.id
        if self._needs_count(tenant, limits, request, tokens):
            counted = await self._count(tenant, request, messages, session)
            tokens = min(tokens, counted) if counted is not None else tokens
        content = "messages" if chat else "prompt"
        if tokens > limits.max_input_tokens:
            raise invalid(
                content,
                f"must have at most {limits.max_input_tokens} tokens; it has {tokens}",
                "context_length_exceeded",
            )
        route = self._route(tenant, request.model, session, tokens, content)
        max_tokens = _output_cap(request, limits, tokens)
        reserve = tokens + request.sequences * max_tokens
        if reserve > limits.tokens_per_minute:
            raise invalid(
                "max_tokens",
                f"must be so that input and output fit in your {limits.tokens_per_minute} tokens per minute; they may take {reserve}",
            )
        record.input_bound, record.output_bound = tokens, request.sequences * max_tokens
        body = forwarded(request, messages, route.target.served_name, max_tokens)
        ticket = Ticket(record.id, tenant, route.pool, route.lane, route.target, request.sequences, reserve)
        record.ticket = ticket
        return request, ticket, body

    def _needs_count(self, tenant: Tenant, limits: EffectiveLimits, request: Request, bound: int) -> bool:
        """Whether the bound by bytes does not fit somewhere where the true count might."""
        lanes = [lane.max_input_tokens for pool in tenant.pools.values() for lane in pool.lanes.values()]
        usage = self._dispatcher.limiter.usage(tenant.uid, month_of(time.time()))
        left = usage.tokens.available(limits.tokens_per_minute, time.monotonic())
        output = request.sequences * (request.max_tokens or limits.max_output_tokens)
        ceiling = min([limits.max_input_tokens, *(most for most in lanes if most is not None)])
        return len(request.prompts) <= MAX_COUNTED_PROMPTS and (bound > ceiling or bound + output > left)

    async def _count(
        self, tenant: Tenant, request: Request, messages: list[dict[str, object]], session: str
    ) -> int | None:
        """The exact count by the tokenizer of an engine that serves the model; None when none can tell."""
        model, canary = find_model(tenant, request.model)
        pool, target = tenant.pools[model.pool], choose_target(model, canary, tenant.uid, session)
        for lane in pool.lanes.values():
            replica = choose_replica([r for r in self._replicas.of(pool, lane) if r.serves(target)], target)
            if replica is None:
                continue
            contents: list[dict[str, object]] = [{"prompt": p} for p in request.prompts] or [
                {"messages": messages}
            ]
            counts = [
                await self._forwarder.count(tenant, pool, lane, target, replica, content)
                for content in contents
            ]
            known = [count for count in counts if count is not None]
            if len(known) < len(counts):
                return None
            extra = {name: request.fields[name] for name in ("tools",) if name in request.fields}
            return sum(known) + (input_bound(request, []) if extra else 0)
        return None

    def _route(self, tenant: Tenant, alias: str, session: str, tokens: int, content: str) -> Route:
        """Where the alias is served, or its fallback where the tenant names one. Raises ApiError."""
        model, canary = find_model(tenant, alias)
        route = self._target(tenant, model.name, canary, session, tokens, content)
        if self._dispatcher.servable(route.pool, route.lane, route.target):
            return route
        if model.fallback is not None and model.fallback in tenant.models:
            other = self._target(tenant, model.fallback, False, session, tokens, content)
            if self._dispatcher.servable(other.pool, other.lane, other.target):
                return other
        raise no_endpoint(route.target)

    @staticmethod
    def _target(tenant: Tenant, alias: str, canary: bool, session: str, tokens: int, content: str) -> Route:
        model, _ = find_model(tenant, alias)
        pool = tenant.pools[model.pool]
        lane = choose_lane(tenant.lane, pool, tokens, content)
        return Route(pool, lane, choose_target(model, canary, tenant.uid, session))

    async def _run(
        self, grant: Grant, record: Record, request: Request, body: bytes, send: Send, watch: Watch
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
        return await self._forwarder.run(
            grant, record, record.route, body, request.include_usage, headers, send, watch
        )

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


def _output_cap(request: Request, limits: EffectiveLimits, tokens: int) -> int:
    """The client's cap; without one the tenant's, or what its minute allows where that is less."""
    if request.max_tokens is not None:
        return request.max_tokens
    window = (limits.tokens_per_minute - tokens) // request.sequences
    return min(limits.max_output_tokens, max(1, window))


def _label(value: str) -> str:
    """A client's own request id, kept as a label only."""
    return value[:128] if value.isascii() and value.isprintable() else ""
