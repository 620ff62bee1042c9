"""Request bodies. A field that is not listed here is refused by name: nothing is accepted and ignored."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, Field, ValidationError, field_validator

from tenantry_engine.errors import RequestError
from tenantry_engine.server.conversation import (
    MAX_TOOLS,
    Lenient,
    Message,
    NamedTool,
    ResponseFormat,
    Strict,
    StructuredOutputs,
    Text,
    ToolBody,
)

MAX_CHOICES = 64
MAX_SEQUENCES = 128
MAX_TOP = 20
Stop = Annotated[str, Field(min_length=1, max_length=256)]
M = TypeVar("M", bound=BaseModel)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Strict):
    """What both routes share. `None` = the model's or OpenAI's default."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] = {}
    stop: Annotated[list[Stop], Field(max_length=16)] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Annotated[str, Field(max_length=512)] | None = None  # a label of the client's own

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class ChatBody(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionBody(Generation):
    """`POST /v1/completions`. A prompt of token ids is taken as it is; only a gateway decides who may send one."""

    prompt: Text | TokenIds | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    echo: bool = False


class TokenizeBody(Strict):
    """`POST /tokenize`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] = []


class DetokenizeBody(Strict):
    """`POST /detokenize`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 20)]


class LoadBody(Strict):
    """`POST /v1/load_lora_adapter`, as vLLM has it."""

    lora_name: Annotated[str, Field(min_length=1, max_length=253)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadBody(Lenient):
    """`POST /v1/unload_lora_adapter`, as vLLM has it."""

    lora_name: Annotated[str, Field(min_length=1, max_length=253)]
    lora_int_id: int | None = None


class FenceBody(Strict):
    epoch: Annotated[int, Field(ge=0)]
    counter: Annotated[int, Field(ge=0)]


class AdapterBody(Strict):
    name: Annotated[str, Field(min_length=1, max_length=253)]
    digest: str
    tenant: str = ""
    pinned: bool = False


class DeclareBody(Strict):
    """`PUT /admin/v1/adapters`."""

    fence: FenceBody
    drainSeconds: Annotated[float, Field(ge=0, le=86400)] = 60  # noqa: N815 - the wire's name
    adapters: list[AdapterBody]


class SmokeBody(Strict):
    """`POST /admin/v1/smoke`."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    digest: Annotated[str, Field(max_length=71)]
    tenant: Annotated[str, Field(max_length=64)]


def parse(kind: type[M], raw: bytes) -> M:
    """The body as `kind`. Raises RequestError 400 that names the field. A field that is null counts as absent."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError("the body must be JSON", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate({name: item for name, item in value.items() if item is not None})
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> RequestError:
    # of a union's members, the one that got furthest is the one that was meant
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = max(found, key=lambda item: len(item["loc"]))
    loc = first["loc"]
    path = [
        part
        for before, part in zip((None, *loc), loc, strict=False)
        if isinstance(part, int) or not (_is_type_name(part) or before == "response_format")
    ]
    field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")[:120]
    if first["type"] == "extra_forbidden":
        return RequestError(
            f"`{field}` is not served here: leave it out", code="unsupported_parameter", param=field
        )
    if first["type"] == "missing":
        return RequestError(f"`{field}` must be given", code="missing_required_parameter", param=field)
    message = first["msg"].removeprefix("Value error, ")
    named = re.match(r"`(\w+)` must", message)
    if named:  # a check of several fields that names the one at fault
        field = f"{field}.{named[1]}".lstrip(".")
        message = message[named.end() :].lstrip()
        return RequestError(f"`{field}` must {message[:200]}", param=field)
    says = message if message.startswith("must ") else f"must be valid: {message}"
    return RequestError(f"`{field}` {says[:240]}", param=field)


def _is_type_name(part: str) -> bool:
    """Pydantic puts the name of a union's member into the path; clients know nothing of it."""
    return part in _TYPE_NAMES or "[" in part or "constrained" in part


_TYPE_NAMES = ("str", "float", "int", "dict", "NamedTool")
