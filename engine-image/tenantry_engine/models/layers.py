"""The layers that all families share: attention, gated MLP and language-model head, each with its LoRA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tenantry_kernels import (
    GATE_UP,
    QKV,
    Module,
    PackedWeight,
    VocabularySpans,
    head_lora,
    linear,
    linear_lora,
    pack_linear,
    paged_attention,
    qk_norm,
    rms_norm,
    rope_and_kv_write,
    silu_and_mul,
)
from torch import Tensor

from tenantry_engine.batch import Batch
from tenantry_engine.loader import Weights
from tenantry_engine.models.split import Split, cut_vocab
from tenantry_engine.parallel.group import Group


@dataclass(frozen=True)
class Step:
    """What every layer of one step works on."""

    batch: Batch
    pool: Tensor  # [pages, page_elems]
    kv: Tensor  # [pages, layers, 2, kv_heads, 16, head_dim], the same memory
    rope: Tensor  # [positions, 2, head_dim / 2]
    group: Group


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over paged KV, heads cut over the ranks."""

    index: int
    part: Split
    qkv: PackedWeight
    o: PackedWeight
    norms: tuple[Tensor, Tensor] | None  # of q's and k's heads, each [head_dim]

    @classmethod
    def load(cls, weights: Weights, prefix: str, index: int, part: Split) -> Attention:
        """Reads `{prefix}.q_proj` and so on, this rank's part of each."""
        c = part.config
        widths = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
        rows = {"q": part.q, "k": part.kv, "v": part.kv}
        weight = [
            weights.get(f"{prefix}.{n}_proj.weight", width, c.hidden, rows=rows[n])
            for n, width in widths.items()
        ]
        bias = None
        if c.qkv_bias:
            bias = torch.cat(
                [weights.get(f"{prefix}.{n}_proj.bias", width, rows=rows[n]) for n, width in widths.items()]
            )
        norms = None
        if c.qk_norm:
            norms = (
                weights.get(f"{prefix}.q_norm.weight", c.head_dim),
                weights.get(f"{prefix}.k_norm.weight", c.head_dim),
            )
        o = weights.get(f"{prefix}.o_proj.weight", c.hidden, widths["q"], columns=part.q)
        return cls(index, part, pack_linear(torch.cat(weight), bias), pack_linear(o), norms)

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """h [T, hidden] -> [T, hidden]; writes K and V."""
        part, batch, index = self.part, step.batch, self.index
        head_dim = part.config.head_dim
        # [T, (heads + 2 * kv_heads) * head_dim]
        qkv = linear_lora(h, self.qkv, step.pool, batch.segments, index, QKV)
        if self.norms is not None:
            qk_norm(qkv, *self.norms, part.config.eps, part.heads, part.kv_heads, head_dim)
        q = rope_and_kv_write(qkv, batch.positions, step.rope, step.kv, index, batch.slots, part.heads)
        attended = paged_attention(
            q, step.kv, index, batch.page_tables, batch.query_starts, batch.context_lens, head_dim**-0.5
        ).view(-1, part.heads * head_dim)
        return step.group.sum(linear_lora(attended, self.o, step.pool, batch.segments, index, (Module.O,)))


@dataclass(frozen=True)
class Mlp:
    """down(silu(gate) * up), inner width cut over the ranks."""

    index: int
    gate_up: PackedWeight
    down: PackedWeight

    @classmethod
    def load(cls, weights: Weights, prefix: str, index: int, part: Split) -> Mlp:
        """Reads `{prefix}.gate_proj` and so on, this rank's part of each."""
        hidden, inner = part.config.hidden, part.config.intermediate
        gate, up = (
            weights.get(f"{prefix}.{name}_proj.weight", inner, hidden, rows=part.inner)
            for name in ("gate", "up")
        )
        down = weights.get(f"{prefix}.down_proj.weight", hidden, inner, columns=part.inner)
        return cls(index, pack_linear(torch.cat([gate, up])), pack_linear(down))

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """h [T, hidden] -> [T, hidden]."""
        segments, index = step.batch.segments, self.index
        gate_up = linear_lora(h, self.gate_up, step.pool, segments, index, GATE_UP)  # [T, 2 * inner]
        inner = silu_and_mul(gate_up)
        return step.group.sum(linear_lora(inner, self.down, step.pool, segments, index, (Module.DOWN,)))


@dataclass(frozen=True)
class Head:
    """Last norm and logits. The vocabulary is cut over the ranks, since the head is the largest matrix of a decode
    step and each rank then reads its part alone; the logits of the sampled rows are joined by one collective."""

    part: Split
    norm: Tensor  # [hidden]
    weight: PackedWeight

    @classmethod
    def load(cls, weights: Weights, embedding: Tensor, part: Split) -> Head:
        """`lm_head`, or the embedding [vocab, hidden] where they are tied."""
        c = part.config
        if c.tied:
            rows = cut_vocab(embedding, part.vocab)
        else:
            whole = (min(part.vocab[0], c.vocab), min(part.vocab[1], c.vocab))
            held = weights.get("lm_head.weight", c.vocab, c.hidden, rows=whole)
            rows = cut_vocab(held, (0, part.vocab[1] - part.vocab[0]))
        return cls(part, weights.get("model.norm.weight", c.hidden), pack_linear(rows))

    def forward(self, hidden: Tensor, pool: Tensor, spans: VocabularySpans, group: Group) -> Tensor:
        """hidden [S, hidden], LoRA of the head by spans of its rows -> float32 [S, vocab].

        LoRA of embeddings and head is held whole by every rank, as few adapters have it.
        """
        c = self.part.config
        h = rms_norm(hidden, self.norm, c.eps)
        logits = group.join_columns(linear(h, self.weight, torch.float32))[:, : c.vocab]
        return head_lora(h, logits, pool, spans)
