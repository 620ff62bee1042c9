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
from tenantry_engine.transfer import on_device
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


@dataclass(frozen=True)
class Drawn:
    """What was drawn for the sampled rows of one step, as tensors on the device."""

    sequences: Rows[Sequence]
    tensors: tuple[Tensor, ...]  # int64 [B] tokens, then what `_measure` gives for those that ask for scores
    prompts: dict[Sequence, list[Scores]]


class Sampler:
    """The edits of logits and the draws. What it remembers of a sequence goes with the sequence."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._matching: WeakKeyDictionary[Sequence, Matching] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Sequence, _Seen] = WeakKeyDictionary()
        self._prompts: WeakKeyDictionary[Sequence, list[Scores]] = WeakKeyDictionary()

    def choose(self, logits: Tensor, sequences: Rows[Sequence]) -> Choices:
        """logits float32 [B, vocab] of B sequences, changed in place -> their next tokens, at once."""
        drawn = self.draw(logits, sequences)
        return self.tell(drawn, drawn.tensors)

    def draw(self, logits: Tensor, sequences: Rows[Sequence]) -> Drawn:
        """logits float32 [B, vocab] of B sequences, changed in place -> their next tokens, which the host need not wait
        for unless grammars or penalties are asked for: then `tell` must have told the tokens before.

        Scores are of the model's own distribution, before penalties, biases, temperature and filters.
        """
        asked = _asked(sequences)
        rows = on_device(asked, torch.int64, logits.device) if asked else None
        own = logits[rows].log_softmax(-1) if rows is not None else None
        self._edit(logits, sequences)
        tensors = [_draw(logits, sequences)]
        if own is not None:
            most = max(sequences[row].sampling.logprobs or 0 for row in asked)
            tensors += _measure(own, tensors[0][rows], most)
        prompts = {s: self._prompts.pop(s) for s in sequences if s in self._prompts and not s.generated}
        return Drawn(sequences, tuple(tensors), prompts)

    def tell(self, drawn: Drawn, tensors: Rows[Tensor]) -> Choices:
        """What was drawn, by its tensors on the host."""
        sequences = drawn.sequences
        choices = Choices(dict(zip(sequences, tensors[0].tolist(), strict=True)), prompts=drawn.prompts)
        for sequence, token in choices.tokens.items():
            matching = self._matching.get(sequence)
            end = matching.read(token) if matching is not None else None
            if end is not None:
                choices.ends[sequence] = end
        scored = [sequences[row] for row in _asked(sequences)]
        if scored:
            found = _scores(tensors[1:], [s.sampling.logprobs or 0 for s in scored])
            choices.scores = dict(zip(scored, found, strict=True))
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
            most = sequence.sampling.prompt_logprobs or 0
            ids = on_device(after, torch.int64, rows.device)
            known += _scores(_measure(rows, ids, most), [most] * len(after))

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
            ids = on_device(list(asked.logit_bias), torch.int64, row.device)
            row[ids] += on_device(list(asked.logit_bias.values()), row.dtype, row.device)
        if sequence.generated < asked.min_tokens and asked.stop_ids:
            row[on_device(list(asked.stop_ids), torch.int64, row.device)] = float("-inf")


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


def _asked(sequences: Rows[Sequence]) -> list[int]:
    """Rows of the sequences that ask for scores."""
    return [row for row, s in enumerate(sequences) if s.sampling.logprobs is not None]


def _draw(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    if all(s.sampling.temperature == 0 for s in sequences):
        return logits.argmax(-1)

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return on_device(values, dtype, logits.device)

    asked = [s.sampling for s in sequences]
    return sample(
        logits,
        column([a.temperature for a in asked], torch.float32),
        column([a.top_k for a in asked], torch.int64),
        column([a.top_p for a in asked], torch.float32),
        column([a.min_p for a in asked], torch.float32),
        column([a.seed for a in asked], torch.int64),
        column([s.generated for s in sequences], torch.int64),
    )


def _measure(logprobs: Tensor, ids: Tensor, most: int) -> list[Tensor]:
    """logprobs float32 [N, vocab], ids int64 [N] -> those of the ids [N]; the largest `most`, and whose [N, most]."""
    best = logprobs.topk(most, dim=-1)
    return [logprobs.gather(1, ids[:, None]).squeeze(1), best.values, best.indices]


def _scores(measured: Rows[Tensor], tops: Rows[int]) -> list[Scores]:
    """What `_measure` gave, on the host -> of each row, its token and its most likely `tops` tokens."""
    own, values, names = (tensor.tolist() for tensor in measured)
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
