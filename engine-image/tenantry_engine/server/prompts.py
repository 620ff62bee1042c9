"""From the text of a request to its tokens, and back. Long texts go to a thread, so that other answers flow on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import orjson

from tenantry_engine.errors import RequestError
from tenantry_engine.server.conversation import Message, ToolBody
from tenantry_engine.server.structure import shown_tools
from tenantry_engine.tokenizer import Tokenizer

_LONG_TEXT = 8192
"""Characters beyond which a text is long."""

T = TypeVar("T")


class Prompts:
    """The tokenizer as the routes use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolBody]) -> list[int]:
        """A conversation, ready for the model to answer. Raises RequestError for what the template does not know."""
        source = self._tokenizer.template_source
        for param, used, word in (
            ("tools", bool(tools), "tools"),
            ("messages", any(m.tool_calls for m in messages), "tool_calls"),
            ("messages", any(m.role == "tool" for m in messages), "tool"),
        ):
            if used and word not in source:
                raise RequestError(
                    f"`{param}` must hold no {word}: this model's chat template knows none",
                    code="unsupported_parameter",
                    param=param,
                )
        shown = shown_tools(tools)
        size = sum(message.size for message in messages) + (len(orjson.dumps(shown)) if shown else 0)
        plain = [message.plain() for message in messages]
        return await _threaded(size, partial(self._tokenizer.encode_chat, plain, shown))

    async def texts(self, prompt: str | list[int] | list[str]) -> list[list[int]]:
        """The prompts of a completion: texts, or one of token ids. Raises RequestError."""
        prompts = []
        for part in [prompt] if isinstance(prompt, str) else prompt:
            if isinstance(part, str):
                prompts.append(await self.text(part))
        if not prompts:
            prompts = [[part for part in prompt if isinstance(part, int)]]
        for tokens in prompts:
            if not tokens or max(tokens) >= self._tokenizer.vocab_size:
                raise RequestError("`prompt` must be at least one token of the vocabulary", param="prompt")
        return prompts

    async def text(self, text: str) -> list[int]:
        """One text with the model's own beginning."""
        return await _threaded(len(text), partial(self._tokenizer.encode, text))

    async def decode(self, tokens: list[int]) -> str:
        """Text of tokens. Raises RequestError."""
        size = self._tokenizer.vocab_size
        if tokens and max(tokens) >= size:
            raise RequestError(f"`tokens` must be of the vocabulary, 0 to {size - 1}", param="tokens")
        return await _threaded(len(tokens), partial(self._tokenizer.decode, tokens))


async def _threaded(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > _LONG_TEXT else work()
