"""Mistral's tool calls: `[TOOL_CALLS]` and a JSON list, or for each call `[TOOL_CALLS]`, a name, `[ARGS]` and JSON."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tenantry_engine.grammar import with_json_options
from tenantry_engine.server.calls import Call, Reader, Tool, any_call, call_of, loads, overlap

BEGIN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"

_HEAD = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?(?:\[ARGS\])?\s*")
_LONGEST_HEAD = 256
"""Characters after the mark within which a call's JSON must begin."""


class Mistral:
    """Both forms are read; rules enforce the one that the template teaches."""

    def __init__(self, marks: Mapping[str, int], *, named: bool) -> None:
        """`marks`: texts that are tokens, and their ids. `named`: the newer form, without a list."""
        self._begin, self._arguments = (
            f"<[{marks[text]}]>" if text in marks else json.dumps(text) for text in (BEGIN, ARGUMENTS)
        )
        self._lazy = "" if BEGIN in marks else "[lazy]"
        self._named = named

    def rules(self, tools: Sequence[Tool], parallel: bool) -> str:
        more = f" ({self._begin} body)*" if parallel and self._named else ""
        return f"calls: {self._begin} body{more}\n" + self._body(tools, parallel)

    def strict_rules(self, tools: Sequence[Tool]) -> str:
        return (
            "start: (head body)* TEXT\n"
            + f"head{self._lazy}: TEXT {self._begin}\n"
            + "TEXT: /(.|\\n)*/\n"
            + self._body(tools, parallel=True)
        )

    def reader(self, names: Collection[str]) -> Reader:
        return _MistralReader(names)

    def _body(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Rules of what follows the mark."""
        if not self._named:
            more = ' (", " any_call)*' if parallel else ""
            return f'body: " "? "[" any_call{more} "]"\n' + any_call(tools, "arguments")
        rules = ["body: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            schema = with_json_options({"type": "object", **tool.parameters})
            rules.append(f"call_{i}: {json.dumps(tool.name)} {self._arguments} arguments_{i}")
            rules.append(f"arguments_{i}: %json {json.dumps(schema)}")
        return "\n".join(rules) + "\n"


class _MistralReader:
    """What begins like a call and turns out to be none is content, its mark too."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""  # from the mark on, once there is one
        self._span: _Span | None = None  # of the JSON that is awaited

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        content = ""
        calls: list[Call] = []
        while True:
            if self._span is None:
                begin = self._held.find(BEGIN)
                if begin < 0:
                    return content + self._let_go(len(self._held) - overlap(self._held, BEGIN)), calls
                content += self._let_go(begin)
                start = self._json_begins()
                if start is None:
                    return content, calls
                if start < 0:
                    content += self._let_go(len(BEGIN))
                    continue
                self._span = _Span(start)
            end = self._span.end(self._held)
            if end is None:
                return content, calls
            head, inside = self._held[len(BEGIN) : self._span.begin], self._held[self._span.begin : end]
            self._span = None
            whole = self._let_go(end)
            found = self._calls(head, loads(inside))
            calls += found
            content += "" if found else whole

    def finish(self) -> tuple[str, list[Call]]:
        return self._let_go(len(self._held)), []

    def _let_go(self, count: int) -> str:
        gone, self._held = self._held[:count], self._held[count:]
        return gone

    def _json_begins(self) -> int | None:
        """Where in the held text the JSON of a call begins; -1 when it is no call, None when that is not known yet."""
        body = self._held[len(BEGIN) :]
        brace = body.find("{", 0, _LONGEST_HEAD)
        if brace < 0:
            return None if len(body) < _LONGEST_HEAD else -1
        if body[:brace].strip() == "[":
            return len(BEGIN) + body.index("[")
        head = _HEAD.fullmatch(body, 0, brace)
        return len(BEGIN) + brace if head is not None and head[1] in self._names else -1

    def _calls(self, head: str, value: Any) -> list[Call]:
        """All calls of a list, or none when one of its members is none."""
        named = _HEAD.fullmatch(head)
        values = [{"name": named[1], "arguments": value}] if named else value
        found = [call_of(one, ("arguments",), self._names) for one in values or ()]
        # templates of this family refuse ids of any other form when they come back
        calls = [replace(call, id=uuid.uuid4().hex[:9]) for call in found if call is not None]
        return calls if len(calls) == len(found) else []


class _Span:
    """Finds the end of a JSON list or object in a text that grows, each character once. Its inside is not checked."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self._at = begin
        self._depth = 0
        self._quoted = False

    def end(self, text: str) -> int | None:
        """Where it ends, if the text goes as far."""
        while self._at < len(text):
            char = text[self._at]
            if char == "\\" and self._quoted:
                if self._at + 1 == len(text):
                    return None  # what it escapes is still to come
                self._at += 1
            elif char == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += (char in "[{") - (char in "]}")
            self._at += 1
            if self._depth == 0:
                return self._at
        return None
