"""The serving port: OpenAI's routes for the base model and its adapters."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tenantry_engine.errors import RequestError
from tenantry_engine.identity import GATEWAY, Identity, Verifier, read_identity
from tenantry_engine.ipc.link import EngineLink
from tenantry_engine.ipc.messages import Happened
from tenantry_engine.sequence import Sampling, Sequence
from tenantry_engine.server.answer import Answer, stream
from tenantry_engine.server.flight import EventStream, Flight
from tenantry_engine.server.http import (
    IDENTITY_HEADER,
    SERVED_HEADER,
    guarded,
    json_response,
    or_gone,
    read_body,
)
from tenantry_engine.server.metrics import Metrics
from tenantry_engine.server.schemas import ChatBody, CompletionBody, Generation, TokenizeBody, parse
from tenantry_engine.server.text import Choice
from tenantry_engine.tokenizer import Tokenizer

_LONG_TEXT = 8192
"""Characters beyond which a prompt is tokenised in a thread, so that other answers flow on."""


@dataclass(frozen=True)
class Defaults:
    """What the model's generation_config.json says, and where its answers end."""

    eos: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Serving:
    """The application of the serving port. `verifier` None = `--dev-open`."""

    def __init__(
        self,
        engine: EngineLink,
        tokenizer: Tokenizer,
        defaults: Defaults,
        verifier: Verifier | None,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._verifier = verifier
        self._metrics = metrics
        self._live: dict[str, tuple[Answer, int]] = {}
        engine.listener = self._dispatch
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", guarded(self._chat), methods=["POST"]),
                Route("/v1/completions", guarded(self._completions), methods=["POST"]),
                Route("/v1/models", guarded(self._models), methods=["GET"]),
                Route("/tokenize", guarded(self._tokenize), methods=["POST"]),
            ]
        )

    @property
    def in_flight(self) -> int:
        """Sequences whose clients wait."""
        return len(self._live)

    def _dispatch(self, events: list[Happened]) -> None:
        for event in events:
            live = self._live.get(event.id)
            if live is not None:
                live[0].put(live[1], event.token, event.finish)

    # routes

    async def _chat(self, request: Request) -> Response:
        raw = await read_body(request)
        identity = self._identify(request, raw)
        body = parse(ChatBody, raw)
        self._check_model(identity, body.model)
        messages = [message.plain() for message in body.messages]
        size = sum(len(m["content"]) for m in messages)
        tokens = await self._threaded(size, partial(self._tokenizer.encode_chat, messages))
        room = self._engine.max_model_len - len(tokens)
        asked = body.max_completion_tokens or body.max_tokens
        return await self._generate(request, body, identity, [tokens], asked or max(1, room), chat=True)

    async def _completions(self, request: Request) -> Response:
        raw = await read_body(request)
        identity = self._identify(request, raw)
        body = parse(CompletionBody, raw)
        self._check_model(identity, body.model)
        prompts = []
        for prompt in [body.prompt] if isinstance(body.prompt, str) else body.prompt:
            if isinstance(prompt, str):
                prompts.append(await self._threaded(len(prompt), partial(self._tokenizer.encode, prompt)))
        if isinstance(body.prompt, list) and isinstance(body.prompt[0], int):
            prompts = [[int(token) for token in body.prompt]]
        for tokens in prompts:
            if not tokens or max(tokens) >= self._tokenizer.vocab_size:
                raise RequestError("`prompt` must be at least one token of the vocabulary", param="prompt")
        return await self._generate(request, body, identity, prompts, body.max_tokens or 16, chat=False)

    async def _models(self, request: Request) -> Response:
        names = [self._engine.model_name]
        if self._verifier is None:
            registered, _ = await self._engine.names()
            names += registered
        return json_response(
            {
                "object": "list",
                "data": [
                    {
                        "id": name,
                        "object": "model",
                        "created": 0,
                        "owned_by": "tenantry",
                        "max_model_len": self._engine.max_model_len,
                    }
                    for name in names
                ],
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        raw = await read_body(request)
        identity = self._identify(request, raw)
        body = parse(TokenizeBody, raw)
        self._check_model(identity, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("`prompt` or `messages` must be given, not both", param="prompt")
        if body.prompt is not None:
            tokens = await self._threaded(len(body.prompt), partial(self._tokenizer.encode, body.prompt))
        else:
            messages = [message.plain() for message in body.messages or []]
            size = sum(len(m["content"]) for m in messages)
            tokens = await self._threaded(size, partial(self._tokenizer.encode_chat, messages))
        return json_response(
            {"count": len(tokens), "tokens": tokens, "max_model_len": self._engine.max_model_len},
            headers={SERVED_HEADER: body.model},
        )

    # inside

    def _identify(self, request: Request, body: bytes) -> Identity | None:
        if self._verifier is None:
            return None
        token = request.headers.get(IDENTITY_HEADER)
        if not token:
            raise RequestError("the request carries no identity", status=401, code="invalid_identity")
        claims = self._verifier.verify(token, {GATEWAY}, request.url.path, hashlib.sha256(body).hexdigest())
        return read_identity(claims)

    @staticmethod
    def _check_model(identity: Identity | None, model: str) -> None:
        if identity is not None and identity.model != model:
            raise RequestError(
                "`model` must be the one that the identity is signed for",
                status=401, code="invalid_identity", param="model",
            )  # fmt: skip

    @staticmethod
    async def _threaded(size: int, work: Any) -> list[int]:
        tokens: list[int] = await asyncio.to_thread(work) if size > _LONG_TEXT else work()
        return tokens

    def _sampling(self, body: Generation, max_tokens: int) -> Sampling:
        default = self._defaults
        size = self._tokenizer.vocab_size
        for field, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
            if any(token >= size or token < 0 for token in ids):
                raise RequestError(
                    f"`{field}` must use tokens of the vocabulary, 0 to {size - 1}", param=field
                )
        if body.min_tokens > max_tokens:
            raise RequestError(
                f"`min_tokens` must be at most `max_tokens` ({max_tokens})", param="min_tokens"
            )
        top_k = default.top_k if body.top_k is None else body.top_k
        return Sampling(
            temperature=default.temperature if body.temperature is None else body.temperature,
            top_p=default.top_p if body.top_p is None else body.top_p,
            top_k=max(0, top_k),
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.logit_bias,
            min_tokens=body.min_tokens,
            max_tokens=max_tokens,
            stop_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else default.eos),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
        )

    async def _generate(
        self,
        request: Request,
        body: Generation,
        identity: Identity | None,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        chat: bool,
    ) -> Response:
        limit = self._engine.max_model_len
        for tokens in prompts:
            if len(tokens) + max_tokens > limit:
                raise RequestError(
                    f"the prompt's {len(tokens)} tokens and `max_tokens` {max_tokens} must together be at most {limit}",
                    code="context_length_exceeded",
                    param="messages" if chat else "prompt",
                )
        sampling = self._sampling(body, max_tokens)
        request_id = uuid.uuid4().hex
        sequences = [
            self._sequence(f"{request_id}-{p}-{i}", body.model, tokens, _reseeded(sampling, i), identity)
            for p, tokens in enumerate(prompts)
            for i in range(body.n)
        ]
        choices = [
            Choice(index, self._tokenizer, body.stop, sampling.stop_ids) for index in range(len(sequences))
        ]
        answer = Answer(request_id, body.model, chat, sum(map(len, prompts)), choices)
        flight = Flight(self._engine, self._live, self._metrics, answer, sequences)
        headers = {SERVED_HEADER: body.model}
        try:
            digest, uid = (identity.digest, identity.uid) if identity else (None, None)
            await self._engine.submit(sequences, digest, uid)
            head = await or_gone(request, flight.next())
            if not body.stream:
                await or_gone(request, flight.rest())
                return json_response(answer.whole(), headers=headers)
        except BaseException:
            flight.close()
            raise
        finally:
            if not body.stream:
                flight.close()
        options = body.stream_options
        return EventStream(
            request,
            flight,
            stream(
                flight,
                head,
                usage=bool(options and options.include_usage),
                continuous=bool(options and options.continuous_usage_stats),
            ),
            headers,
        )

    def _sequence(
        self, sequence_id: str, served: str, tokens: list[int], sampling: Sampling, identity: Identity | None
    ) -> Sequence:
        if identity is None:
            return Sequence(sequence_id, "dev", tokens.copy(), sampling, served)
        return Sequence(
            sequence_id,
            identity.uid,
            tokens.copy(),
            sampling,
            served,
            weight=identity.weight,
            cap=identity.cap,
            bulk=identity.lane == "bulk",
        )


def _reseeded(sampling: Sampling, choice: int) -> Sampling:
    """Each choice of a prompt draws its own numbers."""
    return sampling if choice == 0 else replace(sampling, seed=(sampling.seed + choice) % (1 << 63))
