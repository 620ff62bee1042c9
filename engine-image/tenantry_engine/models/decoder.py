"""A decoder of shared layers: what every family is made of, and the two halves of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tenantry_kernels import VocabularySpans, embed_lora, rms_norm, rope_table
from torch import Tensor

from tenantry_engine.batch import Batch
from tenantry_engine.loader import Weights
from tenantry_engine.models.config import Family, read_decoder
from tenantry_engine.models.layers import Attention, Head, Mlp, Step
from tenantry_engine.models.split import split
from tenantry_engine.parallel.group import SOLO, Group


@dataclass(frozen=True)
class _Block:
    attention_norm: Tensor  # [hidden]
    attention: Attention
    mlp_norm: Tensor  # [hidden]
    mlp: Mlp


class Decoder:
    """One rank's part of a model: embedding and norms whole, everything else cut (see `split`)."""

    def __init__(self, family: Family, raw: Mapping[str, Any], weights: Weights, group: Group = SOLO) -> None:
        config = self.config = read_decoder(raw, family)
        part = self.part = split(config, group.rank, group.size)
        self.group = group
        self.dtype = weights.dtype
        self.max_positions = config.positions
        self.vocab_size = config.vocab
        self.kv_shape = part.kv_shape
        self.lora_shape = part.lora_shape
        self._embedding = weights.get("model.embed_tokens.weight", config.vocab, config.hidden)
        self._blocks = [self._block(weights, index) for index in range(config.layers)]
        self._head = Head.load(weights, self._embedding, part)
        self._rope = torch.empty(0)
        weights.check_all_read()

    def _block(self, weights: Weights, index: int) -> _Block:
        prefix, hidden = f"model.layers.{index}", self.config.hidden
        return _Block(
            weights.get(f"{prefix}.input_layernorm.weight", hidden),
            Attention.load(weights, f"{prefix}.self_attn", index, self.part),
            weights.get(f"{prefix}.post_attention_layernorm.weight", hidden),
            Mlp.load(weights, f"{prefix}.mlp", index, self.part),
        )

    def prepare(self, positions: int) -> None:
        """Makes the rotary table for sequences of at most `positions` tokens."""
        c = self.config
        self._rope = rope_table(c.head_dim, positions, c.rope_theta, c.rope_scaling, self._embedding.device)

    def forward(self, batch: Batch, pool: Tensor, kv: Tensor) -> Tensor:
        """Runs all layers; writes K and V. -> hidden states [T, hidden], before the last norm."""
        step, eps = Step(batch, pool, kv, self._rope, self.group), self.config.eps
        residual = self._embedding[batch.tokens]  # [T, hidden]
        embed_lora(batch.tokens, residual, pool, batch.segments.embed)
        x: Tensor | None = None  # [T, hidden], what the last block adds to the residual
        for block in self._blocks:
            if x is None:
                h = rms_norm(residual, block.attention_norm, eps)
            else:
                h = rms_norm(x, block.attention_norm, eps, residual)
            x = block.attention.forward(h, step)
            x = block.mlp.forward(rms_norm(x, block.mlp_norm, eps, residual), step)
        return residual if x is None else residual.add_(x)

    def logits(self, hidden: Tensor, pool: Tensor, spans: VocabularySpans) -> Tensor:
        """hidden [S, hidden] of some rows, spans of those whose adapter changes the head -> float32 [S, vocab]."""
        return self._head.forward(hidden, pool, spans, self.group)
