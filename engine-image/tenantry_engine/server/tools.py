"""Tool calls: which form a model's family writes them in, rules that enforce it, and a reader of what it wrote."""

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


def find_format(template: str, marks: Collection[str]) -> ToolFormat | None:
    """The form that a chat template teaches; None when it is none that we read. `marks`: texts that are tokens."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return Hermes(as_tokens=Hermes.begin in marks and Hermes.end in marks)
    if '"parameters"' in template and ("ipython" in template or "python_tag" in template):
        return Llama3()
    return None


class Hermes:
    """`<tool_call>` {"name": ..., "arguments": ...} `</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM."""

    begin, end = "<tool_call>", "</tool_call>"

    def __init__(self, *, as_tokens: bool) -> None:
        """`as_tokens`: the marks are tokens of their own, as in Qwen's vocabulary."""
        self._begin = self.begin if as_tokens else f'"{self.begin}"'
        self._end = self.end if as_tokens else f'"{self.end}"'
        self._as_tokens = as_tokens

    def rules(self, tools: Sequence[Tool], parallel: bool) -> str:
        more = ' ("\\n" call)*' if parallel else ""
        return (
            f"calls: call{more}\n"
            + f'call: {self._begin} "\\n" any_call "\\n" {self._end}\n'
            + _any_call(tools, "arguments")
        )

    def strict_rules(self, tools: Sequence[Tool]) -> str:
        lazy = "" if self._as_tokens else "[lazy]"
        return (
            f'start: (head "\\n" any_call "\\n" {self._end})* TEXT\n'
            + f"head{lazy}: TEXT {self._begin}\n"
            + "TEXT: /(.|\\n)*/\n"
            + _any_call(tools, "arguments")
        )

    def reader(self, names: Collection[str]) -> Reader:
        return _HermesReader(names)


class Llama3:
    """{"name": ..., "parameters": ...} as the whole answer, several joined by `; `: Llama 3.1 and later."""

    def rules(self, tools: Sequence[Tool], parallel: bool) -> str:
        more = ' ("; " any_call)*' if parallel else ""
        return f"calls: any_call{more}\n" + _any_call(tools, "parameters")

    def strict_rules(self, tools: Sequence[Tool]) -> str:
        return "start: calls | TEXT\nTEXT: /[^{\\s](.|\\n)*/\n" + self.rules(tools, parallel=True)

    def reader(self, names: Collection[str]) -> Reader:
        return _Llama3Reader(names)


class _HermesReader:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        content = ""
        calls: list[Call] = []
        while True:
            begin = self._held.find(Hermes.begin)
            if begin < 0:
                keep = _overlap(self._held, Hermes.begin)
                content += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                return content, calls
            content, self._held = content + self._held[:begin], self._held[begin:]
            end = self._held.find(Hermes.end)
            if end < 0:
                return content, calls
            inside = self._held[len(Hermes.begin) : end]
            whole, self._held = self._held[: end + len(Hermes.end)], self._held[end + len(Hermes.end) :]
            call = _call(_loads(inside), ("arguments",), self._names)
            if call is None:
                content += whole
            else:
                calls.append(call)

    def finish(self) -> tuple[str, list[Call]]:
        rest, self._held = self._held, ""
        # models end without the closing mark when their end-of-text token comes first
        call = _call(_loads(rest.removeprefix(Hermes.begin)), ("arguments",), self._names)
        return ("", [call]) if call is not None and rest.startswith(Hermes.begin) else (rest, [])


class _Llama3Reader:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._plain = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        if self._plain:
            return text, []
        self._held += text
        begun = self._held.lstrip()
        if begun and not begun.startswith("{"):
            self._plain = True
            held, self._held = self._held, ""
            return held, []
        return "", []  # perhaps calls, perhaps JSON that was asked for: known at the end

    def finish(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        calls: list[Call] = []
        at, decoder = 0, json.JSONDecoder()
        while held[at:].strip():
            at += len(held[at:]) - len(held[at:].lstrip(" \n;"))
            try:
                value, at = decoder.raw_decode(held, at)
            except (ValueError, RecursionError):
                return held, []
            call = _call(value, ("parameters", "arguments"), self._names)
            if call is None:
                return held, []
            calls.append(call)
        return ("", calls) if calls else (held, [])


def _call(value: Any, keys: Sequence[str], names: Collection[str]) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    for key in keys:
        if isinstance(value.get(key), dict):
            return Call(value["name"], json.dumps(value[key], ensure_ascii=False))
    return Call(value["name"], "{}") if not value.keys() & set(keys) else None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


def _any_call(tools: Sequence[Tool], key: str) -> str:
    """Rules of one call's JSON, in the very form that the templates show to the model."""
    rules = ["any_call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ', ensure_ascii=True)
        schema = with_json_options({"type": "object", **tool.parameters})
        rules.append(f'call_{i}: {head} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(schema)}")
    return "\n".join(rules) + "\n"
