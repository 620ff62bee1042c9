"""Tool calls: which form a model's family writes them in, rules that enforce it, and a reader of what it wrote."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from tenantry_engine.server.calls import Call, Reader, Tool, ToolFormat, any_call, call_of, loads, overlap
from tenantry_engine.server.mistral import ARGUMENTS, BEGIN, Mistral

__all__ = ["Call", "Hermes", "Llama3", "Mistral", "Reader", "Tool", "ToolFormat", "find_format"]


def find_format(template: str, marks: Mapping[str, int]) -> ToolFormat | None:
    """The form that a chat template teaches; None when it is none that we read. `marks`: texts that are tokens."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return Hermes(as_tokens=Hermes.begin in marks and Hermes.end in marks)
    if BEGIN in template:
        return Mistral(marks, named=ARGUMENTS in template)
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
            + any_call(tools, "arguments")
        )

    def strict_rules(self, tools: Sequence[Tool]) -> str:
        lazy = "" if self._as_tokens else "[lazy]"
        return (
            f'start: (head "\\n" any_call "\\n" {self._end})* TEXT\n'
            + f"head{lazy}: TEXT {self._begin}\n"
            + "TEXT: /(.|\\n)*/\n"
            + any_call(tools, "arguments")
        )

    def reader(self, names: Collection[str]) -> Reader:
        return _HermesReader(names)


class Llama3:
    """{"name": ..., "parameters": ...} as the whole answer, several joined by `; `: Llama 3.1 and later."""

    def rules(self, tools: Sequence[Tool], parallel: bool) -> str:
        more = ' ("; " any_call)*' if parallel else ""
        return f"calls: any_call{more}\n" + any_call(tools, "parameters")

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
                keep = overlap(self._held, Hermes.begin)
                content += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                return content, calls
            content, self._held = content + self._held[:begin], self._held[begin:]
            end = self._held.find(Hermes.end)
            if end < 0:
                return content, calls
            inside = self._held[len(Hermes.begin) : end]
            whole, self._held = self._held[: end + len(Hermes.end)], self._held[end + len(Hermes.end) :]
            call = call_of(loads(inside), ("arguments",), self._names)
            if call is None:
                content += whole
            else:
                calls.append(call)

    def finish(self) -> tuple[str, list[Call]]:
        rest, self._held = self._held, ""
        # models end without the closing mark when their end-of-text token comes first
        call = call_of(loads(rest.removeprefix(Hermes.begin)), ("arguments",), self._names)
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
            call = call_of(value, ("parameters", "arguments"), self._names)
            if call is None:
                return held, []
            calls.append(call)
        return ("", calls) if calls else (held, [])
