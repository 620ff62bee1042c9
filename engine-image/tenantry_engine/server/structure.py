"""From the fields of a request to the grammar that its answer is held to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tenantry_engine import grammar
from tenantry_engine.errors import RequestError
from tenantry_engine.server.conversation import (
    NamedTool,
    ObjectFormat,
    SchemaFormat,
    StructuredOutputs,
    ToolBody,
)
from tenantry_engine.server.schemas import ChatBody, Generation
from tenantry_engine.server.tools import Tool, ToolFormat

MAX_TOOL_BYTES = 256 << 10


@dataclass(frozen=True)
class Constraint:
    """A grammar, and the field that asked for it."""

    source: str
    param: str


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call, in the form of the model's family."""

    form: ToolFormat
    tools: Sequence[Tool]
    forced: bool  # the answer must be calls
    parallel: bool


def constraint(body: Generation, use: ToolUse | None) -> Constraint | None:
    """What the answer must be, if anything. Raises RequestError."""
    schema = _schema(body)
    if use is not None and use.forced:
        if schema is not None or body.structured_outputs is not None:
            raise RequestError(
                "`response_format` must be left out where `tool_choice` forces a call",
                param="response_format",
            )
        rules = "start: calls\n" + use.form.rules(use.tools, use.parallel)
        return Constraint(grammar.from_lark(rules), "tools")
    if body.structured_outputs is not None:
        if schema is not None:
            raise RequestError(
                "`structured_outputs` must not be given together with `response_format`",
                param="structured_outputs",
            )
        return _named(_structured(body.structured_outputs), "structured_outputs")
    if schema is not None:
        if use is None:
            return _named(lambda: grammar.from_schema(schema), "response_format")
        _named(lambda: grammar.from_schema(schema), "response_format")  # for its bounds
        content = json.dumps(grammar.with_json_options(schema))
        rules = f"start: content | calls\ncontent: %json {content}\n"
        rules += use.form.rules(use.tools, use.parallel)
        return Constraint(grammar.from_lark(rules), "response_format")
    if use is not None and any(tool.strict for tool in use.tools):
        return Constraint(grammar.from_lark(use.form.strict_rules(use.tools)), "tools")
    return None


def tool_use(body: ChatBody, form: ToolFormat | None) -> ToolUse | None:
    """The tools of a request, if it may call any. Raises RequestError."""
    choice = body.tool_choice
    names = [tool.function.name for tool in body.tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestError("`tool_choice` must name one of `tools`", param="tool_choice")
    if not body.tools:
        if choice == "required":
            raise RequestError("`tools` must be given where `tool_choice` is `required`", param="tools")
        return None
    if len(set(names)) < len(names):
        raise RequestError("`tools` must have different names", param="tools")
    if len(orjson.dumps([tool.model_dump() for tool in body.tools])) > MAX_TOOL_BYTES:
        raise RequestError(f"`tools` must be at most {MAX_TOOL_BYTES} bytes", param="tools")
    if choice == "none":
        return None
    if form is None:
        raise RequestError(
            "`tools` must be left out: this model's chat template teaches no form of tool calls that is served",
            code="unsupported_parameter",
            param="tools",
        )
    wanted = [
        Tool(tool.function.name, tool.function.parameters, tool.function.strict)
        for tool in body.tools
        if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
    ]
    for index, tool in enumerate(wanted):
        _named(lambda tool=tool: grammar.from_schema(tool.parameters), f"tools[{index}].function.parameters")
    forced = choice != "auto"
    return ToolUse(form, wanted, forced, body.parallel_tool_calls and not isinstance(choice, NamedTool))


def shown_tools(tools: Sequence[ToolBody]) -> list[dict[str, Any]]:
    """The tools as a chat template wants them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description,
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def _schema(body: Generation) -> dict[str, Any] | None:
    wanted = body.response_format
    if isinstance(wanted, SchemaFormat):
        return wanted.json_schema.schema_
    return {"type": "object"} if isinstance(wanted, ObjectFormat) else None


def _structured(asked: StructuredOutputs) -> Any:
    if asked.regex is not None:
        return lambda: grammar.from_regex(asked.regex or "")
    if asked.choice is not None:
        choices = asked.choice
        return lambda: grammar.from_choice(choices)
    if asked.json_object:
        return grammar.any_object
    return lambda: grammar.from_schema(_loaded(asked.json_))


def _loaded(schema: dict[str, Any] | str | None) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        value = orjson.loads(schema or "")
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise RequestError("a JSON schema must be a JSON object")
    return value


def _named(make: Any, param: str) -> Constraint:
    """The grammar that `make` makes; its errors name the field."""
    try:
        return Constraint(make(), param)
    except RequestError as error:
        raise named(error, param) from None


def named(error: RequestError, param: str) -> RequestError:
    """The error as one of a field."""
    return RequestError(
        f"`{param}`: {error.message}",
        status=error.status,
        code=error.code,
        param=param,
        retry_after=error.retry_after,
    )
