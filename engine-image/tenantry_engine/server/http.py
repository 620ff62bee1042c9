"""Small things that both ports share: bodies with a limit, errors in OpenAI's shape, tokens in headers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Set
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tenantry_engine.errors import RequestError
from tenantry_engine.identity import Verifier
from tenantry_engine.server.tracing import caller_of

log = logging.getLogger(__name__)

IDENTITY_HEADER = "x-tenantry-identity"
SERVED_HEADER = "x-tenantry-served"
MAX_BODY = 8 << 20
BODY_SECONDS = 60

Handler = Callable[[Request], Awaitable[Response]]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as JSON."""
    return Response(orjson.dumps(value), status, headers, "application/json")


def error_response(error: RequestError) -> Response:
    """The error as an answer, with Retry-After exactly when waiting helps."""
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else None
    return json_response(error.body(), error.status, headers)


def guarded(handler: Handler) -> Handler:
    """The handler with its errors turned into answers. Input never makes a 500; a fault of ours says no detail."""

    async def run(request: Request) -> Response:
        try:
            with caller_of(request.headers):
                return await handler(request)
        except RequestError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            return error_response(RequestError("the engine failed", status=500, code="internal_error"))

    return run


async def read_body(request: Request, limit: int = MAX_BODY) -> bytes:
    """The whole body. Raises RequestError 413 beyond `limit` bytes, 408 when it does not come in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise RequestError(
                        f"the body must be at most {limit} bytes", status=413, code="body_too_large"
                    )
    except TimeoutError as error:
        raise RequestError(
            f"the body must be here within {BODY_SECONDS} s", status=408, code="body_too_slow"
        ) from error
    return bytes(body)


def bearer(request: Request) -> str:
    """The token of `Authorization: Bearer`. Raises RequestError 401."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not token:
        raise RequestError("a bearer token is needed here", status=401, code="invalid_identity")
    return token.strip()


def authorize(
    verifier: Verifier | None,
    request: Request,
    issuers: Set[str],
    body: bytes = b"",
    body_sha256: str | None = None,
) -> None:
    """Checks an admin call's bearer token; without a verifier (development) everyone may."""
    if verifier is not None:
        digest = body_sha256 or hashlib.sha256(body).hexdigest()
        verifier.verify(bearer(request), issuers, request.url.path, digest)


async def until_gone(request: Request) -> None:
    """Returns when the client has gone. The body must have been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def or_gone(request: Request, work: Awaitable[Any]) -> Any:
    """`work`'s result. Raises ClientDisconnect, with `work` cancelled, when the client goes first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
