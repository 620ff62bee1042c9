"""Server-sent events (WHATWG HTML) of a completion, told apart however they were cut into packets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

MAX_EVENT = 1 << 20
# One line end each; atomic, so that one CRLF never counts as two.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
DONE = b"data: [DONE]\n\n"


class EventTooLong(Exception):
    """More than MAX_EVENT bytes without an end."""


class Splitter:
    """Bytes in, whole events out, without the blank line that ends each."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. Raises EventTooLong."""
        *events, self._buffer = _BLANK_LINE.split(self._buffer + data)
        if len(self._buffer) > MAX_EVENT:
            raise EventTooLong(f"an event is longer than {MAX_EVENT} bytes")
        return [event for event in (e.strip(b"\r\n") for e in events) if event]


def data_of(event: bytes) -> bytes | None:
    """The payload of an event, None for comments and events without data."""
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


@dataclass
class TokenCount:
    """Tokens of one answer. `told`: the engine said so; else counted by chunks."""

    input: int = 0
    cached: int = 0
    output: int = 0
    told: bool = False

    def take(self, usage: dict[str, Any]) -> None:
        """Read an OpenAI `usage` object; what is not a count is ignored."""
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(completion, int) and prompt >= 0 and completion >= 0:
            self.input, self.output, self.told = prompt, max(self.output, completion), True
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int) and 0 <= cached <= self.input:
            self.cached = cached


class Filter:
    """Events as the client asked for them, and what they say of usage.

    The engine is asked for usage in every chunk. A client that asked for usage gets it in the last chunk as OpenAI
    sends it (null before), others never see it.
    """

    def __init__(self, include_usage: bool) -> None:
        self._include_usage = include_usage
        self.tokens = TokenCount()
        self.done = False
        self.failed = False

    def pass_on(self, events: list[bytes]) -> Iterator[bytes]:
        """What goes to the client, each with its blank line; `[DONE]` is kept back until `done` is acted on."""
        for event in events:
            data = data_of(event)
            if data is None:
                yield event + b"\n\n"
            elif data == b"[DONE]":
                self.done = True
                return
            elif passed := self._chunk(data):
                yield b"data: " + passed + b"\n\n"

    def _chunk(self, data: bytes) -> bytes | None:
        if b'"usage"' not in data and b'"error"' not in data:
            self._count_one()
            return data
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return data
        if not isinstance(chunk, dict):
            return data
        if "error" in chunk:
            self.failed = True
            return data
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.tokens.take(usage)
        elif chunk.get("choices"):
            self._count_one()
        if "usage" not in chunk:
            return data
        last = not chunk.get("choices")
        if self._include_usage:
            if last:
                return data
            chunk["usage"] = None
        elif last:
            return None
        else:
            del chunk["usage"]
        return orjson.dumps(chunk)

    def _count_one(self) -> None:
        if not self.tokens.told:
            self.tokens.output += 1


def error_event(message: str, code: str) -> bytes:
    """An error in the middle of a stream; the client's SDK raises it."""
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
    return b"data: " + orjson.dumps(body) + b"\n\n"
