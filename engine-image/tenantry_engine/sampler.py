"""Chooses the next token of every sampled row; a row's choice depends on that row and its seed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import torch
from tenantry_kernels import sample
from torch import Tensor

from tenantry_engine.sequence import Sequence


def choose(logits: Tensor, sequences: Rows[Sequence]) -> list[int]:
    """logits float32 [B, vocab], changed in place -> B token ids."""
    for row, sequence in enumerate(sequences):
        if sequence.sampling.edits_logits:
            _edit(logits[row], sequence)
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


def _edit(row: Tensor, sequence: Sequence) -> None:
    """Penalties on what was generated, biases, and no end before `min_tokens`; row [vocab]."""
    asked = sequence.sampling
    if asked.presence_penalty or asked.frequency_penalty:
        counts = Counter(sequence.tokens[sequence.prompt_len :])
        if counts:
            ids = torch.tensor(list(counts), device=row.device)
            times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= asked.presence_penalty + asked.frequency_penalty * times
    if asked.logit_bias:
        ids = torch.tensor(list(asked.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(asked.logit_bias.values()), dtype=row.dtype, device=row.device)
    if sequence.generated < asked.min_tokens and asked.stop_ids:
        row[torch.tensor(list(asked.stop_ids), device=row.device)] = float("-inf")
