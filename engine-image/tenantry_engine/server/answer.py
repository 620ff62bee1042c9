"""One request in flight: from its sequences' events to OpenAI's answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from tenantry_engine.errors import RequestError
from tenantry_engine.ipc.messages import Happened
from tenantry_engine.server.logprobs import chat_logprobs, completion_logprobs
from tenantry_engine.server.text import Choice, Delta
from tenantry_engine.server.tools import Call
from tenantry_engine.tokenizer import Tokenizer

_ENDED_BY_US = {
    "abort": (503, "the request was ended by the engine", "aborted"),
    "unloaded": (503, "the adapter was withdrawn while the request ran", "adapter_withdrawn"),
    "deadline": (503, "the request took longer than it may", "deadline"),
    "error": (503, "the engine could not run the request", "engine_error"),
    "grammar": (
        400,
        "the structure asked for must be simpler: it grew beyond what is followed",
        "too_complex",
    ),
}


@dataclass(frozen=True)
class Shape:
    """How an answer is written."""

    chat: bool
    scored: bool  # with logprobs
    tokenizer: Tokenizer


class Answer:
    """Collects the events of a request's sequences. Lives on the event loop."""

    def __init__(
        self,
        request_id: str,
        served: str,
        shape: Shape,
        prompt_tokens: int,
        choices: Sequence[Choice],
        *,
        per_prompt: int,
    ) -> None:
        """`per_prompt` choices each belong to one prompt, in order."""
        self.id = f"{'chatcmpl' if shape.chat else 'cmpl'}-{request_id}"
        self.served = served
        self.prompt_tokens = prompt_tokens
        self.choices = choices
        self.started = time.monotonic()
        self.first_token: float | None = None
        self._shape = shape
        self._per_prompt = per_prompt
        self._cached = 0
        self._created = int(time.time())
        self._events: asyncio.Queue[tuple[int, Happened]] = asyncio.Queue()

    @property
    def chat(self) -> bool:
        """Whether it answers a chat."""
        return self._shape.chat

    def put(self, index: int, event: Happened) -> None:
        """An event of the sequence of choice `index`."""
        self._events.put_nowait((index, event))

    @property
    def done(self) -> bool:
        """Whether every choice is complete."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return sum(choice.tokens for choice in self.choices)

    async def next(self) -> tuple[Choice, Delta]:
        """The next choice that changed, and what is new. Raises RequestError when the engine ended a sequence."""
        while True:
            index, event = await self._events.get()
            choice = self.choices[index]
            if choice.finish is not None:
                continue  # a stop string ended it one token ago
            if event.finish in _ENDED_BY_US:
                status, message, code = _ENDED_BY_US[event.finish]
                raise RequestError(message, status=status, code=code)
            if self.first_token is None:
                self.first_token = time.monotonic() - self.started
            if index % self._per_prompt == 0:
                self._cached += event.cached
            return choice, choice.take(event.token, event.finish, event.scores, event.prompt_scores)

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt_tokens + self.generated,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            {
                "index": choice.index,
                "finish_reason": choice.finish,
                "logprobs": self._logprobs(choice.whole),
                **({"message": _message(choice.whole)} if self._shape.chat else {"text": choice.whole.text}),
            }
            for choice in self.choices
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage()}

    def chunk(self, choice: Choice, new: Delta, *, first: bool, with_usage: bool) -> bytes:
        """One event of a stream; `new` is the latest of the choice."""
        if self._shape.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if new.text or first:
                delta["content"] = new.text
            if new.calls:
                told = len(choice.whole.calls) - len(new.calls)
                delta["tool_calls"] = [
                    {"index": at, **_call(call)} for at, call in enumerate(new.calls, start=told)
                ]
            body: dict[str, Any] = {"delta": delta}
        else:
            body = {"text": new.text}
        value = {
            **self._head("chat.completion.chunk"),
            "choices": [
                {
                    "index": choice.index,
                    **body,
                    "logprobs": self._logprobs(new) if new.scored else None,
                    "finish_reason": choice.finish,
                }
            ],
        }
        if with_usage:
            value["usage"] = self.usage()
        return event(value)

    def usage_chunk(self) -> bytes:
        """The last event of a stream that asked for usage."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()})

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._shape.scored:
            return None
        render = chat_logprobs if self._shape.chat else completion_logprobs
        return render(self._shape.tokenizer, delta.scored)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind if self._shape.chat else "text_completion",
            "created": self._created,
            "model": self.served,
        }


def _message(whole: Delta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
    if whole.calls:
        message["content"] = whole.text if whole.text.strip() else None
        message["tool_calls"] = [_call(call) for call in whole.calls]
    return message


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Source(Protocol):
    """Where the changes of an answer come from."""

    answer: Answer

    async def next(self) -> tuple[Choice, Delta]:
        """The next choice that changed, and what is new. Raises RequestError."""


async def stream(
    source: Source, head: tuple[Choice, Delta], *, usage: bool, continuous: bool
) -> AsyncIterator[bytes]:
    """The events of a stream; `head` was read before, so that errors before the first token keep their status.

    An error after that ends the stream with an error event, never with a clean end.
    """
    answer = source.answer
    begun: set[int] = set()
    choice, new = head
    while True:
        if new or choice.finish is not None or continuous:
            yield answer.chunk(choice, new, first=choice.index not in begun, with_usage=continuous)
            begun.add(choice.index)
        if answer.done:
            break
        try:
            choice, new = await source.next()
        except RequestError as error:
            yield event(error.body())
            return
    if usage:
        yield answer.usage_chunk()
    yield DONE
