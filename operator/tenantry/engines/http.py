"""One signed JSON call between our own processes; what goes wrong becomes an EngineError."""

from __future__ import annotations

import json
from typing import TypeVar

import httpx
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from pydantic import TypeAdapter, ValidationError

from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry.api.streams import TooLong, read_bounded
from tenantry.api.tls import Credentials

from .base import INVALID_ANSWER, TIMEOUT, UNREACHABLE, EngineError
from .peers import PerPeer

MAX_ANSWER_BYTES = 16 << 20
MAX_CAUSE = 512
DEFAULT_TIMEOUT = httpx.Timeout(10.0, connect=3.0)

_tracer = trace.get_tracer("tenantry.operator")

T = TypeVar("T")


def new_client(
    timeout: httpx.Timeout = DEFAULT_TIMEOUT, credentials: Credentials | None = None
) -> httpx.AsyncClient:
    """A client for peers inside the cluster: no proxies from the environment, no redirects.

    `credentials`: what it shows, and whom it believes, where a peer's URL is `https`.
    """
    verify = httpx.create_ssl_context(trust_env=False) if credentials is None else credentials.client()
    return httpx.AsyncClient(
        transport=PerPeer(verify), timeout=timeout, follow_redirects=False, trust_env=False
    )


def expects(url: str, audience: str) -> dict[str, str]:
    """httpx extensions of a request: by TLS, the peer's certificate must be for the name of its audience."""
    return {"sni_hostname": names.tls_name(audience)} if url.startswith("https://") else {}


async def call(
    client: httpx.AsyncClient,
    signer: Signer,
    *,
    method: str,
    base: str,
    path: str,
    audience: str,
    peer: str,
    answer: TypeAdapter[T],
    payload: object | None = None,
) -> T:
    """Send a signed request and parse the answer. Raises EngineError."""
    name = f"{method} {path}"
    body = b"" if payload is None else json.dumps(payload, separators=(",", ":")).encode()
    headers = {"authorization": f"Bearer {signer.sign(audience, path, body)}"}
    if body:
        headers["content-type"] = "application/json"
    status: int | None = None
    about = {"http.request.method": method, "url.path": path, "server.address": peer}
    try:
        with _tracer.start_as_current_span(method, kind=SpanKind.CLIENT, attributes=about) as span:
            async with client.stream(
                method,
                base.rstrip("/") + path,
                content=body,
                headers=headers,
                extensions=expects(base, audience),
            ) as response:
                status = response.status_code
                span.set_attribute("http.response.status_code", status)
                raw = await read_bounded(response.aiter_bytes(), MAX_ANSWER_BYTES)
    except TooLong as error:
        raise EngineError(name, peer, status, INVALID_ANSWER, str(error)) from error
    except httpx.TimeoutException as error:
        # An error status stays the news even when the rest of its body never came.
        code = TIMEOUT if status is None or status < 400 else f"http_{status}"
        raise EngineError(name, peer, status, code, _text(error) or "no answer in time") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        code = UNREACHABLE if status is None or status < 400 else f"http_{status}"
        raise EngineError(name, peer, status, code, _text(error)) from error
    if not 200 <= status < 300:
        raise _refused(name, peer, status, raw)
    try:
        return answer.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise EngineError(name, peer, status, INVALID_ANSWER, f"`{where}`: {first['msg']}") from error


def _refused(name: str, peer: str, status: int, raw: bytes) -> EngineError:
    """The peer's own code and message where it sent them, else the start of what it sent."""
    try:
        error = json.loads(raw)["error"]
        code, message = error["code"], error["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        code, message = None, raw[:MAX_CAUSE].decode(errors="replace").strip()
    code = code if isinstance(code, str) and code else f"http_{status}"
    cause = message if isinstance(message, str) and message else "no cause given"
    return EngineError(name, peer, status, code[:64], cause[:MAX_CAUSE])


def _text(error: Exception) -> str:
    """Never empty: some transport errors carry no text, but their class says what happened."""
    return (str(error) or type(error).__name__)[:MAX_CAUSE]
