"""From a body to a ticket: everything that can be refused before a request waits in a queue.

Tokens of the input are bounded by its bytes, which costs nothing. Where that bound does not fit somewhere, an engine
counts exactly, with its own tokenizer; when no engine can, the bound stands.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from tenantry.api.tenant import EffectiveLimits

from .body import Request, forwarded, input_bound, parse
from .dispatch import Destination, Dispatcher, Ticket, no_endpoint
from .errors import ApiError, invalid
from .forward import Forwarder
from .limits import month_of
from .prompt import compose
from .record import Record
from .replicas import Replica, Replicas
from .routing import choose_lane, choose_replica, choose_target, find_model, session_of
from .state import Lane, Pool, Target, Tenant

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_COUNTED_PROMPTS = 8


@dataclass(frozen=True)
class _Route:
    pool: Pool
    lane: Lane
    target: Target


@dataclass(frozen=True)
class Prepared:
    """`body` is what goes to the engine."""

    request: Request
    ticket: Ticket
    body: bytes


@dataclass(frozen=True)
class _Asked:
    """A valid request of a tenant, with the prompt in place. `content` names the field that holds the input."""

    tenant: Tenant
    limits: EffectiveLimits
    request: Request
    messages: list[dict[str, Any]]
    session: str
    content: str


class Preparer:
    """Validates, counts and routes."""

    def __init__(self, replicas: Replicas, dispatcher: Dispatcher, forwarder: Forwarder) -> None:
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._forwarder = forwarder

    async def prepare(self, record: Record, raw: bytes) -> Prepared:
        """The ticket for a body. Fills the record. Raises ApiError."""
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
        _check_size(request, limits)
        wait = self._dispatcher.limiter.take_request(
            tenant.uid, limits, time.monotonic(), month_of(time.time())
        )
        if wait > 0:
            raise ApiError(429, "rate_requests", "your requests per minute are used up", retry_after=wait)
        asked = _Asked(
            tenant,
            limits,
            request,
            compose(tenant.prompt, request.messages),
            session_of(record.conversation, request, record.id),
            "messages" if chat else "prompt",
        )
        tokens = input_bound(request, asked.messages)
        if self._needs_count(asked, tokens):
            counted = await self._count(asked)
            tokens = min(tokens, counted) if counted is not None else tokens
        if tokens > limits.max_input_tokens:
            raise _too_long(asked.content, limits.max_input_tokens, tokens)
        route = await self._route(asked, tokens)
        max_tokens = self._output_cap(asked, route.pool, tokens)
        output = request.sequences * max_tokens
        if tokens + output > limits.tokens_per_minute:
            raise invalid(
                "max_tokens",
                f"must be so that input and output fit in your {limits.tokens_per_minute} tokens per minute; "
                f"they may take {tokens + output}",
            )
        record.input_bound, record.output_bound = tokens, output
        body = forwarded(request, asked.messages, route.target.served_name, max_tokens)
        record.ticket = Ticket(
            id=record.id,
            tenant=tenant,
            pool=route.pool,
            lane=route.lane,
            target=route.target,
            sequences=request.sequences,
            reserve=tokens + output,
        )
        return Prepared(request, record.ticket, body)

    def _needs_count(self, asked: _Asked, bound: int) -> bool:
        """Whether the bound by bytes does not fit somewhere where the true count might."""
        tenant, limits, request = asked.tenant, asked.limits, asked.request
        if len(request.prompts) > MAX_COUNTED_PROMPTS:
            return False
        pool = tenant.pools[find_model(tenant, request.model)[0].pool]
        lanes = [lane.max_input_tokens for lane in pool.lanes.values() if lane.max_input_tokens is not None]
        most_output = request.max_tokens or limits.max_output_tokens
        context = self._replicas.context(pool)
        if bound > min([limits.max_input_tokens, *lanes]):
            return True
        if context is not None and bound + most_output > context:
            return True
        usage = self._dispatcher.limiter.usage(tenant.uid, month_of(time.time()))
        left = usage.tokens.available(limits.tokens_per_minute, time.monotonic())
        return bound + request.sequences * most_output > left

    async def _count(self, asked: _Asked) -> int | None:
        """The exact count by the tokenizer of an engine that serves the model; None when none can tell."""
        tenant, request = asked.tenant, asked.request
        model, canary = find_model(tenant, request.model)
        pool, target = tenant.pools[model.pool], choose_target(model, canary, tenant.uid, asked.session)

        def serving() -> tuple[Lane, Replica] | None:
            for lane in pool.lanes.values():
                able = [r for r in self._replicas.of(pool, lane) if r.serves(target)]
                if (replica := choose_replica(able, target)) is not None:
                    return lane, replica
            return None

        found = await self._replicas.hear(pool, pool.lanes.values(), serving)
        if found is None:
            return None
        lane, replica = found
        to = Destination(tenant, pool, lane, target)
        total = 0
        contents: list[dict[str, Any]] = [{"prompt": prompt} for prompt in request.prompts]
        for content in contents or [{"messages": asked.messages}]:
            count = await self._forwarder.count(to, replica, content)
            if count is None:
                return None
            total += count
        # Tools are text that the template adds; no tokenizer route takes them.
        return total + (input_bound(request, []) if "tools" in request.fields else 0)

    async def _route(self, asked: _Asked, tokens: int) -> _Route:
        """Where the alias is served, or its fallback where the tenant names one. Raises ApiError."""
        model, canary = find_model(asked.tenant, asked.request.model)
        route = self._target(asked, model.name, canary, tokens)
        # A new version that replicas lost for a moment costs nobody an answer.
        routes = [route] if canary else [route, replace(route, target=model.targets[0])]
        found = await self._replicas.hear(route.pool, [route.lane], lambda: self._first(routes))
        if found is None and model.fallback is not None and model.fallback in asked.tenant.models:
            found = self._first([self._target(asked, model.fallback, False, tokens)])
        if found is None:
            raise no_endpoint(route.target)
        return found

    def _first(self, routes: list[_Route]) -> _Route | None:
        """The first that any replica could serve."""
        return next((r for r in routes if self._dispatcher.servable(r.pool, r.lane, r.target)), None)

    @staticmethod
    def _target(asked: _Asked, alias: str, canary: bool, tokens: int) -> _Route:
        model, _ = find_model(asked.tenant, alias)
        pool = asked.tenant.pools[model.pool]
        lane = choose_lane(asked.tenant.lane, pool, tokens, asked.content)
        return _Route(pool, lane, choose_target(model, canary, asked.tenant.uid, asked.session))

    def _output_cap(self, asked: _Asked, pool: Pool, tokens: int) -> int:
        """The client's cap on output; without one the tenant's, or what minute and context leave where that is less.

        Several prompts share no context; the engine judges each of them.
        """
        request, limits = asked.request, asked.limits
        context = self._replicas.context(pool) if len(request.prompts) <= 1 else None
        room = limits.max_output_tokens if context is None else context - tokens
        if room < 1:
            assert context is not None
            raise _too_long(asked.content, context - 1, tokens)
        if request.max_tokens is None:
            return min(
                limits.max_output_tokens,
                room,
                max(1, (limits.tokens_per_minute - tokens) // request.sequences),
            )
        if request.max_tokens > room:
            raise invalid(
                "max_tokens",
                f"must be at most {room}: {tokens} tokens of input leave no more",
                "context_length_exceeded",
            )
        return request.max_tokens


def _check_size(request: Request, limits: EffectiveLimits) -> None:
    """One request must not be a thousand."""
    if request.sequences > limits.max_in_flight:
        raise invalid(
            "n",
            f"must ask for at most {limits.max_in_flight} sequences in all; it asks for {request.sequences}",
        )
    if request.max_tokens is not None and request.max_tokens > limits.max_output_tokens:
        raise invalid("max_tokens", f"must be at most {limits.max_output_tokens}")


def _too_long(content: str, most: int, tokens: int) -> ApiError:
    return invalid(content, f"must have at most {most} tokens; it has {tokens}", "context_length_exceeded")
