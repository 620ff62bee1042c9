"""One request in flight: from its sequences' events to OpenAI's answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import orjson

from tenantry_engine.errors import RequestError
from tenantry_engine.server.text import Choice

_ENDED_BY_US = {
    "abort": ("the request was ended by the engine", "aborted"),
    "unloaded": ("the adapter was withdrawn while the request ran", "adapter_withdrawn"),
    "deadline": ("the request took longer than it may", "deadline"),
    "error": ("the engine could not run the request", "engine_error"),
}


class Answer:
    """Collects the events of a request's sequences. Lives on the event loop."""

    def __init__(
        self, request_id: str, served: str, chat: bool, prompt_tokens: int, choices: Sequence[Choice]
    ) -> None:
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        self.served = served
        self.prompt_tokens = prompt_tokens
        self.choices = choices
        self.started = time.monotonic()
        self.first_token: float | None = None
        self._chat = chat
        self._created = int(time.time())
        self._events: asyncio.Queue[tuple[int, int | None, str | None]] = asyncio.Queue()

    def put(self, index: int, token: int | None, finish: str | None) -> None:
        """An event of the sequence of choice `index`."""
        self._events.put_nowait((index, token, finish))

    @property
    def done(self) -> bool:
        """Whether every choice is complete."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return sum(choice.tokens for choice in self.choices)

    async def next(self) -> tuple[Choice, str]:
        """The next choice that changed, and its new text. Raises RequestError when the engine ended a sequence."""
        while True:
            index, token, finish = await self._events.get()
            choice = self.choices[index]
            if choice.finish is not None:
                continue  # a stop string ended it one token ago
            if finish in _ENDED_BY_US:
                message, code = _ENDED_BY_US[finish]
                raise RequestError(message, status=503, code=code)
            if self.first_token is None:
                self.first_token = time.monotonic() - self.started
            return choice, choice.take(token, finish)

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt_tokens + self.generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            {
                "index": choice.index,
                "finish_reason": choice.finish,
                "logprobs": None,
                **(
                    {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
                    if self._chat
                    else {"text": choice.text}
                ),
            }
            for choice in self.choices
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage()}

    def chunk(self, choice: Choice, text: str, *, first: bool, with_usage: bool) -> bytes:
        """One event of a stream."""
        if self._chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if text or first:
                delta["content"] = text
            body: dict[str, Any] = {"delta": delta}
        else:
            body = {"text": text}
        value = {
            **self._head("chat.completion.chunk"),
            "choices": [{"index": choice.index, **body, "logprobs": None, "finish_reason": choice.finish}],
        }
        if with_usage:
            value["usage"] = self.usage()
        return event(value)

    def usage_chunk(self) -> bytes:
        """The last event of a stream that asked for usage."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind if self._chat else "text_completion",
            "created": self._created,
            "model": self.served,
        }


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Source(Protocol):
    """Where the changes of an answer come from."""

    answer: Answer

    async def next(self) -> tuple[Choice, str]:
        """The next choice that changed, and its new text. Raises RequestError."""


async def stream(
    source: Source, head: tuple[Choice, str], *, usage: bool, continuous: bool
) -> AsyncIterator[bytes]:
    """The events of a stream; `head` was read before, so that errors before the first token keep their status.

    An error after that ends the stream with an error event, never with a clean end.
    """
    answer = source.answer
    begun: set[int] = set()
    choice, text = head
    while True:
        if text or choice.finish is not None or continuous:
            yield answer.chunk(choice, text, first=choice.index not in begun, with_usage=continuous)
            begun.add(choice.index)
        if answer.done:
            break
        try:
            choice, text = await source.next()
        except RequestError as error:
            yield event(error.body())
            return
    if usage:
        yield answer.usage_chunk()
    yield DONE
