"""Request bodies. A field that is not listed here is refused by name: nothing is accepted and ignored."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tenantry_engine.errors import RequestError

MAX_CHOICES = 64
MAX_TOP = 20
MAX_TOOLS = 128
Text = Annotated[str, Field(max_length=4 << 20)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lenient(Strict):
    """A null inside counts as absent: clients send back what they received, nulls and all."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class TextPart(Strict):
    type: Literal["text"]
    text: Text


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Label = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionCall(Strict):
    name: FunctionName
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, value: str) -> str:
        found = _json_or_none(value)
        if not isinstance(found, dict):
            raise ValueError("must be the text of a JSON object")
        if not _is_shallow(found):
            raise ValueError("must be nested less deeply")
        return value


class ToolCall(Lenient):
    id: Label
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int = 0  # a client that joined a stream may send it back


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256)] = ""
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] = []
    tool_call_id: Label | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] = []  # part of what OpenAI's client sends back

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("`content` must be given")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("`tool_calls` must stand in messages of the role assistant alone")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("`tool_call_id` must be given with the role tool, and with no other")
        return self

    def plain(self) -> dict[str, Any]:
        """As the chat template wants it."""
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _json_or_none(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message

    @property
    def size(self) -> int:
        """Characters, about."""
        content = sum(len(p if isinstance(p, str) else p.text) for p in self.content)
        return content + sum(len(call.function.arguments) for call in self.tool_calls)


class FunctionBody(Lenient):
    name: FunctionName
    description: Annotated[str, Field(max_length=16 << 10)] = ""
    parameters: dict[str, Any] = {}
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _shallow(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not _is_shallow(value):
            raise ValueError("must be nested less deeply")
        return value


class ToolBody(Strict):
    type: Literal["function"]
    function: FunctionBody


class FunctionChoice(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionChoice


class NamedSchema(Lenient):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool = True  # a schema that is not strict is kept to all the same


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Lenient):
    """vLLM's field. Exactly one of its members."""

    json_: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("exactly one of `json`, `regex`, `choice` and `json_object` must be given")
        return self


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


def _is_shallow(value: Any) -> bool:
    """Whether the encoder, which allows about 250 levels, can write it; whoever walks through it later can as well."""
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def _json_or_none(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
