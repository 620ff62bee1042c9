"""The ASGI applications: the OpenAI API on one port, health and metrics on another."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import orjson
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from tenantry.api import names

from .asgi import Receive, Scope, Send, respond
from .auth import Caller, client_address, identify
from .dispatch import Dispatcher
from .errors import ApiError, model_not_found
from .ledger import Ledger, LedgerError
from .limits import Limiter, month_of, month_start, until_next_month
from .metrics import Metrics
from .prepare import CHAT, COMPLETIONS
from .record import Record
from .replicas import Replicas
from .serve import Completions
from .settings import Settings
from .state import State

log = logging.getLogger(__name__)
MODELS = "/v1/models"
USAGE = "/v1/usage"
ROLLOUTS = names.ROLLOUT_METRICS_PATH
PLACES = "/tenants/"


class Api:
    """Routes of the tenants' port."""

    def __init__(
        self, settings: Settings, state: State, completions: Completions, ledger: Ledger, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._state = state
        self._completions = completions
        self._ledger = ledger
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in (CHAT, COMPLETIONS):
            if method == "POST":
                await self._completions(scope, receive, send)
            else:
                await _refuse(send, _method("POST"))
        elif path in (MODELS, USAGE) or path.startswith(f"{MODELS}/"):
            if method == "GET":
                await self._read(scope, send)
            else:
                await _refuse(send, _method("GET"))
        else:
            await _refuse(
                send,
                ApiError(404, "not_found", "the path must be one of the OpenAI API's that are served here"),
            )

    async def _read(self, scope: Scope, send: Send) -> None:
        peer = (scope.get("client") or ("",))[0]
        path = scope["path"]
        record = Record(
            route=USAGE if path == USAGE else MODELS,
            client=client_address(peer, scope["headers"], self._settings.trusted_proxies),
            client_request_id="",
        )
        headers = {names.REQUEST_ID_HEADER: record.id}
        try:
            record.caller = identify(scope["headers"], self._state, time.time())
            body = await self._usage(record.caller) if path == USAGE else _models(record.caller, path)
            record.status, record.outcome = 200, "done"
            await respond(send, 200, headers, orjson.dumps(body))
        except ApiError as error:
            record.refuse(error)
            await respond(send, error.status, {**headers, **error.all_headers()}, error.body())
        finally:
            record.report(self._metrics)

    async def _usage(self, caller: Caller) -> dict[str, object]:
        """This month's use of the caller, from the ledger."""
        now = time.time()
        since = month_start(month_of(now))
        try:
            await self._ledger.flush()
            models = await self._ledger.usage(caller.tenant.uid, since)
        except LedgerError as error:
            raise ApiError(503, "ledger_unavailable", "the ledger cannot be read", retry_after=5) from error
        limits = caller.tenant.limits
        total = sum(row["input_tokens"] + row["output_tokens"] for row in models)
        return {
            "object": "usage",
            "tenant": caller.tenant.name,
            "start_time": int(since),
            "end_time": int(now + until_next_month(now)),
            "total_tokens": total,
            "monthly_tokens": limits.monthly_tokens if limits else None,
            "models": models,
        }


def _models(caller: Caller, path: str) -> dict[str, object]:
    """Exactly what the caller may call. Raises the one 404."""
    entries = [
        {"id": name, "object": "model", "created": 0, "owned_by": caller.tenant.name}
        for name in sorted(caller.tenant.models)
    ]
    if path == MODELS:
        return {"object": "list", "data": entries}
    name = path.removeprefix(f"{MODELS}/")
    for entry in entries:
        if entry["id"] == name:
            return entry
    raise model_not_found(name)


async def _refuse(send: Send, error: ApiError) -> None:
    await respond(send, error.status, error.all_headers(), error.body())


def _method(allowed: str) -> ApiError:
    return ApiError(405, "method_not_allowed", f"the method must be {allowed}", headers={"allow": allowed})


class Parts(Protocol):
    """What health and metrics look at."""

    state: State
    replicas: Replicas
    dispatcher: Dispatcher
    limiter: Limiter
    ledger: Ledger
    metrics: Metrics
    completions: Completions
    draining: bool


class Health:
    """Routes of the cluster's port: health, metrics, those of rollouts, and where a tenant's requests are."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/healthz":
            await respond(send, 200, {}, b"ok\n", "text/plain")
        elif path == "/readyz":
            reason = (
                "draining"
                if self._parts.draining
                else ""
                if self._parts.state.ready
                else "tenants and endpoints not read yet"
            )
            await respond(send, 503 if reason else 200, {}, f"{reason or 'ok'}\n".encode(), "text/plain")
        elif path == "/metrics":
            self._refresh()
            metrics = self._parts.metrics
            text = generate_latest(metrics.registry) + generate_latest(metrics.rollouts.registry)
            await respond(send, 200, {}, text, CONTENT_TYPE_LATEST)
        elif path == ROLLOUTS:
            # Served names are public in answers; nothing else stands here.
            self._parts.metrics.rollouts.forget_others(self._parts.state.tenants.values())
            text = generate_latest(self._parts.metrics.rollouts.registry)
            await respond(send, 200, {}, text, CONTENT_TYPE_LATEST)
        elif path.startswith(PLACES):
            await respond(send, 200, {}, orjson.dumps(self._places(path.removeprefix(PLACES))))
        else:
            await respond(send, 404, {}, b"not found\n", "text/plain")

    def _places(self, name: str) -> dict[str, object]:
        """Pools (by uid) that this gateway's route of the tenant names, and its requests there that are not over."""
        tenant = self._parts.state.tenants.get(name)
        routes = sorted(pool.uid for pool in tenant.pools.values()) if tenant is not None else []
        return {"routes": routes, "requests": self._parts.completions.places(name)}

    def _refresh(self) -> None:
        """Gauges are read when asked for, so they cannot drift."""
        parts, metrics = self._parts, self._parts.metrics
        replicas = parts.replicas.all()
        metrics.in_flight.set(parts.limiter.in_flight())
        metrics.oldest_lease.set(parts.limiter.stalest(time.monotonic()))
        metrics.queued.set(parts.dispatcher.queued())
        answering = sum(1 for replica in replicas if replica.answers)
        metrics.replicas.labels("answering").set(answering)
        metrics.replicas.labels("silent").set(len(replicas) - answering)
        metrics.rejected_objects.set(parts.state.rejected)
        metrics.ledger_failures.set(parts.ledger.failures)
        metrics.state_ready.set(parts.state.ready)
        metrics.rollouts.forget_others(parts.state.tenants.values())
