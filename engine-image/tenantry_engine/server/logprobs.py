"""Scores of tokens in the two shapes that OpenAI's routes give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenantry_engine.sequence import Scores
from tenantry_engine.tokenizer import Tokenizer

_LEAST = -9999.0
"""What stands for minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class Scored:
    """A token of a choice. `scores` None = the first of a prompt, which nothing comes before."""

    token: int
    scores: Scores | None
    offset: int  # characters of the choice's text before it


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    return {
        "content": [
            {
                **entry(item.token, item.scores.logprob),
                "top_logprobs": [entry(token, logprob) for token, logprob in item.scores.top],
            }
            for item in scored
            if item.scores is not None
        ],
        "refusal": None,
    }


def completion_logprobs(tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, Any]:
    """`logprobs` of a completion's choice."""
    return {
        "tokens": [_name(tokenizer, item.token) for item in scored],
        "token_logprobs": [_finite(item.scores.logprob) if item.scores else None for item in scored],
        "top_logprobs": [
            {_name(tokenizer, token): _finite(logprob) for token, logprob in item.scores.top}
            if item.scores
            else None
            for item in scored
        ],
        "text_offset": [item.offset for item in scored],
    }


def _name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; where it is no whole text, its bytes, so that different tokens have different names."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
