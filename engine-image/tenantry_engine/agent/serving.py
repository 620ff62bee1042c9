"""The serving port: checks who asks for what, sets what no client may set, and passes vLLM's answer on.

The body that vLLM gets is made from what our own schemas read, so a field that they do not know never reaches it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tenantry_engine.agent.backend import Backend
from tenantry_engine.agent.flights import Flight
from tenantry_engine.agent.vllm import Vllm, gone
from tenantry_engine.errors import RequestError
from tenantry_engine.identity import GATEWAY, Identity, Verifier, read_identity
from tenantry_engine.server.http import (
    IDENTITY_HEADER,
    SERVED_HEADER,
    Handler,
    guarded,
    json_response,
    or_gone,
    read_body,
)
from tenantry_engine.server.schemas import (
    MAX_SEQUENCES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)

Body = ChatBody | CompletionBody | TokenizeBody | DetokenizeBody

_SERVED: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


class Serving:
    """The application of the serving port."""

    def __init__(self, backend: Backend, vllm: Vllm, verifier: Verifier) -> None:
        self._backend = backend
        self._vllm = vllm
        self._verifier = verifier
        routes = [
            Route(path, guarded(self._serve(path, kind)), methods=["POST"]) for path, kind in _SERVED.items()
        ]
        self.app = Starlette(routes=[*routes, Route("/v1/models", guarded(self._models), methods=["GET"])])

    async def _models(self, request: Request) -> Response:
        if not self._backend.serves:
            raise gone()
        model = {
            "id": self._backend.facts.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "tenantry",
            "max_model_len": self._backend.max_model_len,
        }
        return json_response({"object": "list", "data": [model]})

    def _serve(self, path: str, kind: type[Body]) -> Handler:
        async def handler(request: Request) -> Response:
            raw = await read_body(request)
            identity = self._identify(request, raw)
            body = parse(kind, raw)
            if body.model != identity.model:
                raise RequestError(
                    "`model` must be the one that the identity is signed for",
                    status=401,
                    code="invalid_identity",
                    param="model",
                )
            self._refuse_special_tokens(body)
            self._backend.check(identity)
            return await self._pass_on(request, path, body, identity)

        return handler

    def _identify(self, request: Request, body: bytes) -> Identity:
        token = request.headers.get(IDENTITY_HEADER)
        if not token:
            raise RequestError("the request carries no identity", status=401, code="invalid_identity")
        claims = self._verifier.verify(token, {GATEWAY}, request.url.path, hashlib.sha256(body).hexdigest())
        return read_identity(claims)

    def _refuse_special_tokens(self, body: Body) -> None:
        """vLLM reads them in any text, and so would let a message close the tenant's prompt and open another."""
        if isinstance(body, DetokenizeBody):
            return
        field = "messages" if isinstance(body, ChatBody) or getattr(body, "messages", None) else "prompt"
        if (
            isinstance(body, CompletionBody)
            and isinstance(body.prompt, list)
            and isinstance(body.prompt[0], int)
        ):
            raise RequestError("`prompt` must be text here, not token ids", param="prompt")
        tokens = self._backend.special_tokens
        for text in _texts(body.model_dump(mode="json", include={"messages", "tools", "prompt"})):
            found = next((token for token in tokens if token in text), None)
            if found is not None:
                raise RequestError(
                    f"`{field}` must not hold the special token {found!r}: this engine would take it as such",
                    code="special_token",
                    param=field,
                )

    async def _pass_on(self, request: Request, path: str, body: Body, identity: Identity) -> Response:
        sequences, tokens = 0, 0
        wire = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if isinstance(body, (ChatBody, CompletionBody)):
            sequences, tokens = _sizes(body, self._backend.max_model_len)
            wire["cache_salt"] = salt(identity)
        async with AsyncExitStack() as stack:
            if sequences:
                hold = self._backend.caps.hold(identity.uid, identity.cap, sequences)
                await or_gone(request, stack.enter_async_context(hold))
                self._backend.check(identity)  # it may have left while the request waited
            flight = stack.enter_context(self._backend.flights.take(identity.model, sequences * tokens))
            answer = self._vllm.answer(path, orjson.dumps(wire))
            response = await or_gone(request, _or_ended(flight, stack.enter_async_context(answer)))
            headers = {SERVED_HEADER: identity.model}
            if getattr(body, "stream", False):
                return Events(stack.pop_all(), _stream(flight, response), headers)
            try:
                content = await or_gone(request, _or_ended(flight, response.read()))
            except (aiohttp.ClientError, OSError) as error:
                raise gone() from error
        return Response(content, headers=headers, media_type="application/json")


def salt(identity: Identity) -> str:
    """The root of the tenant's cache keys in vLLM, where salts and names of adapters share one space of keys.

    64 hex digits, so never a served name; of tenant and bytes, so that neither's blocks are found by another's.
    """
    text = f"tenantry-vllm\0{identity.salt}\0{identity.digest}"
    return hashlib.sha256(text.encode()).hexdigest()


def _sizes(body: ChatBody | CompletionBody, limit: int) -> tuple[int, int]:
    """Sequences of a request, and tokens that each may bring. Raises RequestError."""
    prompts = len(body.prompt) if isinstance(body, CompletionBody) and isinstance(body.prompt, list) else 1
    if prompts * body.n > MAX_SEQUENCES:
        raise RequestError(f"`n` must be at most {MAX_SEQUENCES // prompts} for {prompts} prompts", param="n")
    asked = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return prompts * body.n, asked or body.max_tokens or limit


async def _or_ended(flight: Flight, work: Any) -> Any:
    """`work`'s result. Raises RequestError when the adapter leaves first."""
    task, ended = asyncio.ensure_future(work), asyncio.ensure_future(flight.ended.wait())
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ended()
        return task.result()
    finally:
        ended.cancel()
        task.cancel()


def _ended() -> RequestError:
    return RequestError("the adapter was withdrawn while it answered", status=503, code="engine_error")


class Events(StreamingResponse):
    """A streamed answer that gives back what it holds, also when its client has gone before it began."""

    def __init__(self, held: AsyncExitStack, events: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _stream(flight: Flight, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """vLLM's events as they come. A cut answer ends in an event that says so, never as if it were whole."""
    last = b""
    try:
        while chunk := await _or_ended(flight, response.content.readany()):
            last = (last + chunk)[-64:]
            yield chunk
        error = None if last.rstrip().endswith(b"data: [DONE]") else gone()
    except RequestError as ended:
        error = ended
    except (aiohttp.ClientError, OSError):
        error = gone()
    if error is not None:
        yield b"\n\ndata: " + orjson.dumps(error.body()) + b"\n\n"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
