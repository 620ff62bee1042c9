"""What requests are made of: messages, tools, and the forms that an answer may be held to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_TOOLS = 128
Text = Annotated[str, Field(max_length=4 << 20)]


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
