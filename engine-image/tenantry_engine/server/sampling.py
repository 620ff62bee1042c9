"""From the fields of a request to what its sequences ask of the sampler and of the text."""

from __future__ import annotations

import secrets
from dataclasses import replace

from tenantry_engine.defaults import Defaults
from tenantry_engine.errors import RequestError
from tenantry_engine.sequence import Sampling
from tenantry_engine.server.schemas import ChatBody, CompletionBody, Generation
from tenantry_engine.server.structure import Constraint
from tenantry_engine.server.text import Form


def sampling_of(
    body: Generation, default: Defaults, vocab_size: int, max_tokens: int, rule: Constraint | None
) -> Sampling:
    """Raises RequestError that names the field at fault. `max_tokens` 0 runs one token that nobody is told."""
    for name, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
        if any(token >= vocab_size or token < 0 for token in ids):
            raise RequestError(
                f"`{name}` must use tokens of the vocabulary, 0 to {vocab_size - 1}", param=name
            )
    if body.min_tokens > max_tokens:
        raise RequestError(f"`min_tokens` must be at most `max_tokens` ({max_tokens})", param="min_tokens")
    scores = scores_of(body)
    top_k = default.top_k if body.top_k is None else body.top_k
    return Sampling(
        temperature=default.temperature if body.temperature is None else body.temperature,
        top_p=default.top_p if body.top_p is None else body.top_p,
        top_k=max(0, top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        min_tokens=body.min_tokens,
        max_tokens=max(1, max_tokens),
        stop_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else default.eos),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        grammar=rule.source if rule else None,
        logprobs=scores,
        prompt_logprobs=scores if isinstance(body, CompletionBody) and body.echo else None,
    )


def form_of(body: Generation, sampling: Sampling, max_tokens: int) -> Form:
    """What the request asks of its choices' text."""
    return Form(
        stops=tuple(body.stop),
        stop_ids=sampling.stop_ids,
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        echo=isinstance(body, CompletionBody) and body.echo,
        silent=max_tokens == 0,
    )


def scores_of(body: Generation) -> int | None:
    """How many of the most likely tokens are asked for beside each token; None = no scores. Raises RequestError."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError(
                "`top_logprobs` must be given together with `logprobs`: true", param="top_logprobs"
            )
        return (body.top_logprobs or 0) if body.logprobs else None
    return None


def reseeded(sampling: Sampling, choice: int) -> Sampling:
    """Each choice of a prompt draws its own numbers."""
    return sampling if choice == 0 else replace(sampling, seed=(sampling.seed + choice) % (1 << 63))
