"""To an engine and back: signed identity, one retry before the first byte, nothing passed on but the answer."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

import orjson
from tenantry.api import names
from tenantry.api.identity import Signer

from .asgi import Send, Watch, start
from .dispatch import Destination, Dispatcher, Grant, no_endpoint
from .errors import ApiError
from .record import Record
from .replicas import FAILED_POLLS, Replica
from .settings import Timeouts
from .sse import DONE, EventTooLong, Filter, Splitter, TokenCount, error_event
from .state import Target
from .upstream import Answer, Upstream, UpstreamError

log = logging.getLogger(__name__)
TOKENIZE_PATH = "/tokenize"
ATTEMPTS = 2
MAX_ANSWER = 64 << 20
MAX_ERROR = 64 << 10
# What an engine says when another replica may still serve the request.
ELSEWHERE = (404, 429, 503)


class _Elsewhere(Exception):
    """This replica cannot serve the request; nothing was sent to the client yet. `otherwise`: when none can."""

    def __init__(self, message: str, otherwise: ApiError) -> None:
        super().__init__(message)
        self.otherwise = otherwise


@dataclass(frozen=True)
class Identities:
    """Signs who asks, for one engine, one path, one body."""

    signer: Signer
    salt_secret: bytes

    def salt(self, uid: str) -> str:
        """Root of the tenant's cache keys, 64 hex digits; cannot be guessed, never leaves gateway and engine."""
        return hmac.new(self.salt_secret, uid.encode(), hashlib.sha256).hexdigest()

    def headers(self, request_id: str, to: Destination, path: str, body: bytes) -> dict[str, str]:
        """All headers that go to an engine. None of them comes from the client."""
        assert to.tenant.limits is not None
        token = self.signer.sign(
            to.pool.uid,
            path,
            body,
            jti=request_id,
            tenant=to.tenant.name,
            uid=to.tenant.uid,
            weight=to.tenant.weight,
            cap=to.tenant.limits.max_in_flight,
            lane=to.lane.name,
            salt=self.salt(to.tenant.uid),
            model=to.target.served_name,
            digest=to.target.digest,
        )
        return {
            "content-type": "application/json",
            names.IDENTITY_HEADER: token,
            names.REQUEST_ID_HEADER: request_id,
        }


@dataclass(frozen=True)
class Exchange:
    """One granted request and its client. `headers` go with a stream; `watch` tells when the client leaves."""

    grant: Grant
    record: Record
    include_usage: bool
    headers: dict[str, str]
    send: Send
    watch: Watch


class Forwarder:
    """Runs granted requests on engines."""

    def __init__(
        self,
        *,
        upstream: Upstream,
        dispatcher: Dispatcher,
        identities: Identities,
        port: int,
        timeouts: Timeouts,
    ) -> None:
        self._upstream = upstream
        self._dispatcher = dispatcher
        self._identities = identities
        self._port = port
        self._timeouts = timeouts

    async def count(self, to: Destination, replica: Replica, content: dict[str, Any]) -> int | None:
        """Tokens of a prompt or of messages by the engine's own tokenizer; None when it cannot tell."""
        body = orjson.dumps({"model": to.target.served_name, **content})
        headers = self._identities.headers(str(uuid.uuid4()), to, TOKENIZE_PATH, body)
        try:
            answer = await self._upstream.request(
                "POST",
                (replica.host, self._port),
                TOKENIZE_PATH,
                headers=headers,
                body=body,
                head_timeout=self._timeouts.queue,
                server=replica.server,
            )
            raw = await answer.read_all(self._timeouts.queue, MAX_ANSWER)
            count = orjson.loads(raw)["count"] if answer.status == 200 else None
        except (UpstreamError, TimeoutError, ValueError, KeyError, TypeError):
            return None
        return count if isinstance(count, int) and count >= 0 else None

    async def run(self, exchange: Exchange, body: bytes) -> bytes | None:
        """Serve the request. A whole answer is returned, for the caller to send; of a stream nothing is left to send.

        Raises ApiError before the first byte. Fills the record; the caller settles and closes it.
        """
        grant, record = exchange.grant, exchange.record
        tried: set[str] = set()
        while True:
            record.attempts += 1
            tried.add(grant.replica.name)
            try:
                answer = await self._send(grant, record, body)
                try:
                    if record.stream:
                        await self._stream(answer, exchange)
                        return None
                    return await self._whole(answer, record)
                finally:
                    answer.abort()
            except (UpstreamError, _Elsewhere) as error:
                stale = isinstance(error, UpstreamError) and error.reused
                if isinstance(error, UpstreamError) and not stale:
                    grant.replica.failures = max(grant.replica.failures, FAILED_POLLS)
                log.warning(
                    "attempt failed",
                    extra={"id": record.id, "replica": grant.replica.name, "why": str(error)},
                )
                last = record.attempts == ATTEMPTS
                if last or not (self._dispatcher.move(grant, tried) or stale):
                    record.outcome = "unreachable"
                    raise getattr(error, "otherwise", no_endpoint(grant.ticket.target)) from error
            except TimeoutError as error:
                record.outcome = "timeout"
                raise ApiError(504, "upstream_timeout", "the model did not answer in time") from error

    async def _send(self, grant: Grant, record: Record, body: bytes) -> Answer:
        """An answer of status 200 by the right model, its head only."""
        ticket = grant.ticket
        headers = self._identities.headers(record.id, ticket.destination, record.route, body)
        answer = await self._upstream.request(
            "POST",
            (grant.replica.host, self._port),
            record.route,
            headers=headers,
            body=body,
            head_timeout=self._timeouts.first_byte,
            fresh=record.attempts > 1,
            server=grant.replica.server,
        )
        try:
            if answer.status != 200:
                await self._refuse(answer, ticket.target, record)
            served = answer.headers.get(names.SERVED_HEADER, "")
            if served != ticket.target.served_name:
                record.outcome = "mismatch"
                log.error(
                    "engine served another model; nothing was delivered",
                    extra={"id": record.id, "served": served[:253], "replica": grant.replica.name},
                )
                raise ApiError(
                    502,
                    "served_mismatch",
                    "another model than the requested one answered; its answer was dropped",
                )
        except BaseException:
            answer.abort()
            raise
        return answer

    async def _refuse(self, answer: Answer, target: Target, record: Record) -> None:
        if answer.status in ELSEWHERE:
            busy = ApiError(503, "no_capacity", "all replicas of the model are busy", retry_after=2)
            raise _Elsewhere(
                f"the engine answered {answer.status}", no_endpoint(target) if answer.status == 404 else busy
            )
        if answer.status == 401 and record.attempts > 1:
            # It had the first attempt, whose id it takes only once; what became of that is unknown.
            raise _Elsewhere("the engine had the request already", no_endpoint(target))
        raw = await answer.read_all(self._timeouts.idle, MAX_ERROR)
        if answer.status in (400, 413, 422):
            record.outcome = "rejected"
            raise _engines_error(raw)
        record.outcome = "upstream_error"
        log.error("engine failed", extra={"id": record.id, "status": answer.status})
        raise ApiError(502, "upstream_error", "the model failed to answer")

    async def _whole(self, answer: Answer, record: Record) -> bytes:
        tokens = TokenCount()
        raw = await answer.read_all(self._timeouts.first_byte, MAX_ANSWER)
        found: Any = None
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            record.take_usage(TokenCount(output=record.output_bound), "upstream_error")
            raise ApiError(502, "upstream_error", "the model's answer was not readable") from error
        usage = found.get("usage") if isinstance(found, dict) else None
        if isinstance(usage, dict):
            tokens.take(usage)
        if not tokens.told:
            tokens.output = record.output_bound
        record.take_usage(tokens, "done")
        record.first_byte = time.monotonic() - record.started
        return raw

    async def _stream(self, answer: Answer, exchange: Exchange) -> None:
        """Pass a stream on; the client's slowness is the engine's, since nothing is read ahead of what was sent."""
        grant, record, send = exchange.grant, exchange.record, exchange.send
        splitter, passed = Splitter(), Filter(exchange.include_usage)
        started = False
        problem: tuple[str, str, str] | None = None
        try:
            while True:
                data = await answer.read(self._timeouts.idle if started else self._timeouts.first_byte)
                if not data:
                    break
                out = b"".join(passed.pass_on(splitter.feed(data)))
                if out:
                    if not started:
                        await start(send, 200, exchange.headers)
                        started = True
                        record.first_byte, record.status = time.monotonic() - record.started, 200
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                    record.delivered = passed.tokens.output
                    self._dispatcher.alive(grant)
                if passed.done or passed.failed:
                    break
            if not (passed.done or passed.failed):
                problem = ("cut", "upstream_cut", "the model's answer was cut off")
        except (UpstreamError, EventTooLong) as error:
            if not started and isinstance(error, UpstreamError):
                raise
            problem = ("cut", "upstream_cut", "the model's answer was cut off")
        except TimeoutError:
            if not started:
                raise
            problem = ("timeout", "upstream_timeout", "the model stopped answering")
        finally:
            # Whatever ends it, also the client's leaving: this is what the engine made until then.
            if started or passed.tokens.output or passed.tokens.told:
                record.take_usage(passed.tokens, record.outcome or "client_gone")
        if not started and problem is not None:
            raise UpstreamError(problem[2])
        outcome = problem[0] if problem else "upstream_error" if passed.failed else "done"
        record.take_usage(passed.tokens, outcome)
        if not started:
            await start(send, 200, exchange.headers)
        if passed.done:
            await _finish_reading(answer)
        answer.abort()
        exchange.watch.stop()
        self._dispatcher.settle(grant, record.used)
        last = error_event(problem[2], problem[1]) if problem else DONE if passed.done else b""
        await send({"type": "http.response.body", "body": last})


async def _finish_reading(answer: Answer) -> None:
    """The end of the chunked body comes with the last event, as a rule; so the connection can be kept."""
    try:
        while await answer.read(0.05):
            pass
    except (UpstreamError, TimeoutError):
        answer.abort()


def _engines_error(raw: bytes) -> ApiError:
    """The engine's word on a bad request, if it is one; nothing else of its answer."""
    try:
        error = orjson.loads(raw)["error"]
        message, code, param = (
            str(error["message"])[:2000],
            str(error.get("code") or "invalid_value")[:64],
            error.get("param"),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, param = "the model refused the request", "invalid_value", None
    return ApiError(400, code, message, param if isinstance(param, str) else None)
