"""Chooses the next token of every sampled row; a row's choice depends on that row and its seed alone."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from tenantry_kernels import sample
from torch import Tensor

from tenantry_engine.grammar import Grammars, Matching
from tenantry_engine.sequence import Sampling, Scores, Sequence
from tenantry_engine.work import Event


@dataclass
class Choices:
    """What one step chose for its sampled rows."""

    tokens: dict[Sequence, int] = field(default_factory=dict)
    ends: dict[Sequence, str] = field(
        default_factory=dict
    )  # sequences whose grammar ends them: stop, grammar
    scores: dict[Sequence, Scores] = field(default_factory=dict)  # of the tokens, where asked for
    prompts: dict[Sequence, list[Scores]] = field(
        default_factory=dict
    )  # of a prompt's tokens from the second on

    def told(self, event: Event) -> Event:
        """The event of a sequence with its scores, where it has some."""
        if event.sequence not in self.scores and event.sequence not in self.prompts:
            return event
        own, prompt = self.scores.get(event.sequence), self.prompts.get(event.sequence)
        return replace(event, scores=own, prompt_scores=prompt)


class Sampler:
    """The edits of logits and the draws. What it remembers of a sequence goes with the sequence."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._matching: WeakKeyDictionary[Sequence, Matching] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Sequence, _Seen] = WeakKeyDictionary()
        self._prompts: WeakKeyDictionary[Sequence, list[Scores]] = WeakKeyDictionary()

    def choose(self, logits: Tensor, sequences: Rows[Sequence]) -> Choices:
        """logits float32 [B, vocab] of B sequences, changed in place -> their next tokens.

        Scores are of the model's own distribution, before penalties, biases, temperature and filters.
        """
        asked = [row for row, s in enumerate(sequences) if s.sampling.logprobs is not None]
        own = logits[asked].log_softmax(-1) if asked else None
        self._edit(logits, sequences)
        tokens = _draw(logits, sequences)
        choices = Choices(dict(zip(sequences, tokens, strict=True)))
        for sequence, token in choices.tokens.items():
            matching = self._matching.get(sequence)
            end = matching.read(token) if matching is not None else None
            if end is not None:
                choices.ends[sequence] = end
        if own is not None:
            scored = [sequences[row] for row in asked]
            tops = [s.sampling.logprobs or 0 for s in scored]
            found = scores(own, [tokens[row] for row in asked], tops)
            choices.scores = dict(zip(scored, found, strict=True))
        for sequence in sequences:
            if sequence in self._prompts and not sequence.generated:
                choices.prompts[sequence] = self._prompts.pop(sequence)
        return choices

    def score_prompt(self, sequence: Sequence, first: int, logits: Tensor) -> None:
        """logits float32 [N, vocab] at the sequence's positions `first` and on: scores of the tokens that follow.

        A prompt that is computed again after preemption is not scored again.
        """
        known = self._prompts.setdefault(sequence, [])
        begin = max(first, len(known))
        after = sequence.tokens[begin + 1 : min(first + logits.shape[0] + 1, sequence.prompt_len)]
        if after:
            rows = logits[begin - first : begin - first + len(after)].log_softmax(-1)
            known += scores(rows, after, [sequence.sampling.prompt_logprobs or 0] * len(after))

    def _edit(self, logits: Tensor, sequences: Rows[Sequence]) -> None:
        masked: list[tuple[int, Matching]] = []
        for row, sequence in enumerate(sequences):
            asked = sequence.sampling
            if asked.grammar is not None:
                matching = self._matching.get(sequence)
                if matching is None:
                    matching = self.grammars.start(sequence.tenant, asked.grammar)
                    self._matching[sequence] = matching
                masked.append((row, matching))
            if asked.edits_logits:
                self._edit_row(logits[row], sequence, asked)
        if not masked:
            return
        bits = [matching.allowed() for _, matching in masked]
        allowed = _unpack(bits, logits.shape[1], logits.device)
        for index, (row, matching) in enumerate(masked):
            if not matching.failed:
                # what the client forbade must not leave a structure that cannot go on: the grammar has the last word
                forbidden = torch.isneginf(logits[row]) & allowed[index]
                if bool((forbidden == allowed[index]).all()):
                    logits[row].masked_fill_(forbidden, 0.0)
                logits[row].masked_fill_(~allowed[index], float("-inf"))

    def _edit_row(self, row: Tensor, sequence: Sequence, asked: Sampling) -> None:
        """Penalties, biases, and no end before `min_tokens`; row [vocab]."""
        if asked.counts_tokens:
            seen = self._seen.get(sequence)
            if seen is None:
                seen = self._seen[sequence] = _Seen(row, sequence)
            seen.penalise(row, sequence, asked)
        if asked.logit_bias:
            ids = torch.tensor(list(asked.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(asked.logit_bias.values()), dtype=row.dtype, device=row.device)
        if sequence.generated < asked.min_tokens and asked.stop_ids:
            row[torch.tensor(list(asked.stop_ids), device=row.device)] = float("-inf")


class _Seen:
    """How often each token stands in a sequence's output, and which stand in its prompt."""

    def __init__(self, like: Tensor, sequence: Sequence) -> None:
        self._counts = torch.zeros_like(like)  # [vocab], output only
        self._known = torch.zeros_like(like, dtype=torch.bool)  # [vocab], prompt and output
        self._known[torch.tensor(sequence.tokens[: sequence.prompt_len], device=like.device)] = True
        self._read = sequence.prompt_len

    def penalise(self, row: Tensor, sequence: Sequence, asked: Sampling) -> None:
        """Repetition (CTRL, arXiv 1909.05858) over prompt and output; frequency and presence over the output."""
        fresh = sequence.tokens[self._read :]
        if fresh:
            ids = torch.tensor(fresh, device=row.device)
            self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=row.dtype))
            self._known[ids] = True
            self._read = len(sequence.tokens)
        if asked.repetition_penalty != 1:
            factor = asked.repetition_penalty
            row.copy_(torch.where(self._known, torch.where(row > 0, row / factor, row * factor), row))
        if asked.presence_penalty or asked.frequency_penalty:
            row -= asked.frequency_penalty * self._counts + asked.presence_penalty * (self._counts > 0)


def _draw(logits: Tensor, sequences: Rows[Sequence]) -> list[int]:
    if all(s.sampling.temperature == 0 for s in sequences):
        greedy: list[int] = logits.argmax(-1).tolist()
        return greedy
    device = logits.device

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    asked = [s.sampling for s in sequences]
    drawn: list[int] = sample(
        logits,
        column([a.temperature for a in asked], torch.float32),
        column([a.top_k for a in asked], torch.int64),
        column([a.top_p for a in asked], torch.float32),
        column([a.min_p for a in asked], torch.float32),
        column([a.seed for a in asked], torch.int64),
        column([s.generated for s in sequences], torch.int64),
    ).tolist()
    return drawn


def scores(logprobs: Tensor, tokens: Rows[int], tops: Rows[int]) -> list[Scores]:
    """logprobs float32 [N, vocab] -> of each row, that of its token and its most likely `tops` tokens."""
    ids = torch.tensor(tokens, device=logprobs.device)
    own = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
    best = logprobs.topk(max(tops), dim=-1) if max(tops) else None
    values = best.values.tolist() if best else [[]] * len(tops)
    names = best.indices.tolist() if best else [[]] * len(tops)
    return [
        Scores(own[row], tuple(zip(names[row][:top], values[row][:top], strict=True)))
        for row, top in enumerate(tops)
    ]


def _unpack(masks: list[bytes], vocab: int, device: torch.device) -> Tensor:
    """Bits, least significant first -> bool [rows, vocab]."""
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(masks), -1).to(device)
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    flat = bits.flatten(1)[:, :vocab].bool()
    return torch.nn.functional.pad(flat, (0, vocab - flat.shape[1]))
