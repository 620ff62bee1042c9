"""Tool calls, whatever form a family writes them in: what a form gives, and what all forms need."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tenantry_engine.grammar import with_json_options


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema of its arguments
    strict: bool = False


@dataclass(frozen=True)
class Call:
    """One call that the model made."""

    name: str
    arguments: str  # JSON object
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class Reader(Protocol):
    """Takes an answer's text as it comes and tells calls from content."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """More text -> content that is certain now, and calls that are complete."""

    def finish(self) -> tuple[str, list[Call]]:
        """The end of the text -> the rest of both."""


class ToolFormat(Protocol):
    """How one family writes calls."""

    def rules(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Lark rules of `calls`: one call or, if `parallel`, several."""

    def strict_rules(self, tools: Sequence[Tool]) -> str:
        """Lark rules of `start`: any text, with calls in it of this form alone."""

    def reader(self, names: Collection[str]) -> Reader:
        """For answers that may call these tools. What calls another is content."""


def call_of(value: Any, keys: Sequence[str], names: Collection[str]) -> Call | None:
    """The call that a JSON value is, its arguments under one of `keys`; None when it is none of a function in `names`.

    None too for what JSON cannot say again: halves of surrogate pairs, NaN, infinities.
    """
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = next((value[key] for key in keys if isinstance(value.get(key), dict)), None)
    if arguments is None:
        return Call(value["name"], "{}") if not value.keys() & set(keys) else None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return Call(value["name"], text)


def loads(text: str) -> Any:
    """The JSON value that a text is; None when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


def any_call(tools: Sequence[Tool], key: str) -> str:
    """Rules of one call's JSON, in the very form that the templates show to the model."""
    rules = ["any_call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ', ensure_ascii=True)
        schema = with_json_options({"type": "object", **tool.parameters})
        rules.append(f'call_{i}: {head} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(schema)}")
    return "\n".join(rules) + "\n"
