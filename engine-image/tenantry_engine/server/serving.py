"""The serving port: OpenAI's routes for the base model and its adapters."""

from __future__ import annotations

import asyncio
import hashlib
import math
import uuid
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tenantry_engine.defaults import Defaults
from tenantry_engine.errors import RequestError
from tenantry_engine.identity import GATEWAY, Identity, Verifier, read_identity
from tenantry_engine.ipc.link import EngineLink
from tenantry_engine.ipc.messages import Happened
from tenantry_engine.sequence import Sampling, Sequence
from tenantry_engine.server.answer import Answer, Shape, stream
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
from tenantry_engine.server.prompts import Prompts
from tenantry_engine.server.sampling import form_of, reseeded, sampling_of
from tenantry_engine.server.schemas import (
    MAX_SEQUENCES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    TokenizeBody,
    parse,
)
from tenantry_engine.server.structure import Constraint, ToolUse, constraint, named, tool_use
from tenantry_engine.server.text import Choice, Form
from tenantry_engine.server.tools import Reader, find_format
from tenantry_engine.server.vllm_lora import LoraEndpoints
from tenantry_engine.tokenizer import Tokenizer

_DEVELOPER = "dev"
"""The one tenant of `--dev-open`."""
SMOKE_SECONDS = 8.0
SMOKE_PROMPT = "Hello"


class Serving:
    """The application of the serving port. `verifier` None = `--dev-open`."""

    def __init__(
        self,
        engine: EngineLink,
        tokenizer: Tokenizer,
        defaults: Defaults,
        verifier: Verifier | None,
        metrics: Metrics,
        *,
        adapters: Path | None = None,
    ) -> None:
        """`adapters` is the folder below which vLLM's clients may load adapters (development)."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._verifier = verifier
        self._metrics = metrics
        self._prompts = Prompts(tokenizer)
        self._tool_format = find_format(tokenizer.template_source, tokenizer.special_tokens)
        self._live: dict[str, tuple[Answer, int]] = {}
        engine.listener = self._dispatch
        lora = LoraEndpoints(engine, adapters, open_to_all=verifier is None)
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", guarded(self._chat), methods=["POST"]),
                Route("/v1/completions", guarded(self._completions), methods=["POST"]),
                Route("/v1/models", guarded(self._models), methods=["GET"]),
                Route("/tokenize", guarded(self._tokenize), methods=["POST"]),
                Route("/detokenize", guarded(self._detokenize), methods=["POST"]),
                Route("/v1/load_lora_adapter", guarded(lora.load), methods=["POST"]),
                Route("/v1/unload_lora_adapter", guarded(lora.unload), methods=["POST"]),
            ]
        )

    @property
    def in_flight(self) -> int:
        """Sequences whose clients wait."""
        return len(self._live)

    async def smoke(self, served: str, digest: str, uid: str) -> int:
        """Run the adapter on a short prompt, past no limit of its tenant; how many tokens came.

        Raises RequestError: it is not served here, nothing came in time, or what came is no number.
        """
        prompt = await self._prompts.text(SMOKE_PROMPT)
        sampling = Sampling(temperature=0.0, max_tokens=2, logprobs=0)
        sequence = Sequence(f"smoke-{uuid.uuid4().hex}", uid, prompt, sampling, served)
        choice = Choice(0, self._tokenizer, Form())
        shape = Shape(False, True, self._tokenizer)
        answer = Answer(uuid.uuid4().hex, served, shape, len(prompt), [choice], per_prompt=1)
        flight = Flight(self._engine, self._live, self._metrics, answer, [sequence])
        try:
            async with asyncio.timeout(SMOKE_SECONDS):
                await self._engine.submit([sequence], digest, uid)
                await flight.rest()
        except TimeoutError as error:
            raise RequestError(
                f"the adapter gave no answer within {SMOKE_SECONDS:.0f} s", status=503, code="smoke_late"
            ) from error
        finally:
            flight.close()
        scores = [scored.scores for scored in choice.whole.scored if scored.scores is not None]
        if not all(math.isfinite(score.logprob) for score in scores):
            raise RequestError(
                "the adapter's answer has no probabilities: its weights must be finite",
                status=422, code="smoke_failed",
            )  # fmt: skip
        return choice.tokens

    def _dispatch(self, events: list[Happened]) -> None:
        for event in events:
            live = self._live.get(event.id)
            if live is not None:
                live[0].put(live[1], event)

    # routes

    async def _chat(self, request: Request) -> Response:
        raw = await read_body(request)
        identity = self._identify(request, raw)
        body = parse(ChatBody, raw)
        self._check_model(identity, body.model)
        use = tool_use(body, self._tool_format)
        rule = constraint(body, use)
        tokens = await self._prompts.chat(body.messages, body.tools if body.tool_choice != "none" else [])
        room = self._engine.max_model_len - len(tokens)
        asked = body.max_completion_tokens or body.max_tokens
        return await self._generate(
            request, body, identity, [tokens], asked or max(1, room), rule=rule, reader=self._readers(use)
        )

    async def _completions(self, request: Request) -> Response:
        raw = await read_body(request)
        identity = self._identify(request, raw)
        body = parse(CompletionBody, raw)
        self._check_model(identity, body.model)
        prompts = await self._prompts.texts(body.prompt)
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and not body.echo:
            raise RequestError(
                "`max_tokens` must be at least 1, or 0 together with `echo`", param="max_tokens"
            )
        return await self._generate(
            request, body, identity, prompts, max_tokens, rule=constraint(body, None), reader=lambda: None
        )

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
            tokens = await self._prompts.text(body.prompt)
        else:
            tokens = await self._prompts.chat(body.messages or [], body.tools)
        return json_response(
            {"count": len(tokens), "tokens": tokens, "max_model_len": self._engine.max_model_len},
            headers={SERVED_HEADER: body.model},
        )

    async def _detokenize(self, request: Request) -> Response:
        raw = await read_body(request)
        identity = self._identify(request, raw)
        body = parse(DetokenizeBody, raw)
        self._check_model(identity, body.model)
        text = await self._prompts.decode(body.tokens)
        return json_response({"prompt": text}, headers={SERVED_HEADER: body.model})

    # inside

    @staticmethod
    def _readers(use: ToolUse | None) -> Callable[[], Reader | None]:
        if use is None:
            return lambda: None
        names = frozenset(tool.name for tool in use.tools)
        return lambda: use.form.reader(names)

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

    async def _generate(
        self,
        request: Request,
        body: Generation,
        identity: Identity | None,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        rule: Constraint | None,
        reader: Callable[[], Reader | None],
    ) -> Response:
        chat = isinstance(body, ChatBody)
        limit = self._engine.max_model_len
        if len(prompts) * body.n > MAX_SEQUENCES:
            raise RequestError(
                f"`n` must be at most {MAX_SEQUENCES // len(prompts)} for {len(prompts)} prompts", param="n"
            )
        for tokens in prompts:
            if len(tokens) + max(1, max_tokens) > limit:
                raise RequestError(
                    f"the prompt's {len(tokens)} tokens and `max_tokens` {max_tokens} must together be at most {limit}",
                    code="context_length_exceeded",
                    param="messages" if chat else "prompt",
                )
        sampling = sampling_of(body, self._defaults, self._tokenizer.vocab_size, max_tokens, rule)
        form = form_of(body, sampling, max_tokens)
        if rule is not None:
            await self._prepare(identity, rule)
        request_id = uuid.uuid4().hex
        sequences = [
            self._sequence(f"{request_id}-{p}-{i}", body.model, tokens, reseeded(sampling, i), identity)
            for p, tokens in enumerate(prompts)
            for i in range(body.n)
        ]
        choices = [
            Choice(index, self._tokenizer, form, prompt=prompts[index // body.n], reader=reader())
            for index in range(len(sequences))
        ]
        shape = Shape(chat, sampling.logprobs is not None, self._tokenizer)
        answer = Answer(request_id, body.model, shape, sum(map(len, prompts)), choices, per_prompt=body.n)
        flight = Flight(self._engine, self._live, self._metrics, answer, sequences)
        headers = {SERVED_HEADER: body.model}
        try:
            digest, uid = (identity.digest, identity.uid) if identity else (None, None)
            # the choices of a prompt share its pages: the others come once the first has computed them
            await self._engine.submit(sequences[:: body.n], digest, uid)
            head = await or_gone(request, flight.next())
            if body.n > 1:
                others = [sequence for index, sequence in enumerate(sequences) if index % body.n]
                await self._engine.submit(others, digest, uid)
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

    async def _prepare(self, identity: Identity | None, rule: Constraint) -> None:
        try:
            await self._engine.prepare(identity.uid if identity else _DEVELOPER, rule.source)
        except RequestError as error:
            raise named(error, rule.param) from None

    def _sequence(
        self, sequence_id: str, served: str, tokens: list[int], sampling: Sampling, identity: Identity | None
    ) -> Sequence:
        if identity is None:
            return Sequence(sequence_id, _DEVELOPER, tokens.copy(), sampling, served, salt="")
        return Sequence(
            sequence_id,
            identity.uid,
            tokens.copy(),
            sampling,
            served,
            weight=identity.weight,
            cap=identity.cap,
            bulk=identity.lane == "bulk",
            salt=identity.salt,
        )
