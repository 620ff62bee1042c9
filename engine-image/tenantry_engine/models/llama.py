"""Llama and what shares its shape (SmolLM2, Llama 3): grouped-query attention, rotary positions, gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tenantry_kernels import (
    GATE_UP,
    QKV,
    KvShape,
    LoraShape,
    Module,
    PackedWeight,
    apply_lora,
    linear,
    pack_linear,
    paged_attention,
    rms_norm,
    rope_and_kv_write,
    rope_table,
    silu_and_mul,
)
from torch import Tensor

from tenantry_engine.batch import Batch
from tenantry_engine.errors import EngineError
from tenantry_engine.loader import Weights


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of config.json that matter. Anything that this file does not compute is refused."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool

    @classmethod
    def read(cls, raw: dict[str, Any]) -> LlamaConfig:
        """From config.json, old and new spelling of the rotary fields."""
        for name, want in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
            if raw.get(name, want) != want:
                raise EngineError(f"`{name}` in config.json must be {want!r}, not {raw[name]!r}")
        if raw.get("quantization_config"):
            raise EngineError(
                "`quantization_config` in config.json must be absent: quantised models are served by pools "
                "with `spec.engine.type: VLLM`"
            )
        rope = raw.get("rope_parameters") or {}
        scaling = rope if rope else raw.get("rope_scaling")
        try:
            heads = int(raw["num_attention_heads"])
            return cls(
                hidden=int(raw["hidden_size"]),
                intermediate=int(raw["intermediate_size"]),
                layers=int(raw["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
                vocab=int(raw["vocab_size"]),
                positions=int(raw["max_position_embeddings"]),
                eps=float(raw["rms_norm_eps"]),
                rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
                rope_scaling=scaling,
                tied=bool(raw.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"config.json must describe a Llama model: {error!r}") from error


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor  # [hidden]
    qkv: PackedWeight
    o: PackedWeight
    mlp_norm: Tensor  # [hidden]
    gate_up: PackedWeight
    down: PackedWeight


class Llama:
    """The weights, packed, and the two halves of a step."""

    def __init__(self, raw: dict[str, Any], weights: Weights) -> None:
        config = self.config = LlamaConfig.read(raw)
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, inner = config.hidden, config.intermediate
        self.dtype = weights.dtype
        self.max_positions = config.positions
        self.vocab_size = config.vocab
        self.kv_shape = KvShape(config.layers, config.kv_heads, config.head_dim)
        self.lora_shape = LoraShape(
            config.layers,
            in_features=(hidden, hidden, hidden, width, hidden, hidden, inner),
            out_features=(width, kv_width, kv_width, hidden, inner, inner, hidden),
        )
        self._embedding = weights.get("model.embed_tokens.weight", config.vocab, hidden)  # [vocab, hidden]
        self._layers = [self._layer(weights, index) for index in range(config.layers)]
        self._norm = weights.get("model.norm.weight", hidden)
        head = self._embedding if config.tied else weights.get("lm_head.weight", config.vocab, hidden)
        self._head = pack_linear(head)
        self._scale = config.head_dim**-0.5
        self._rope = torch.empty(0)
        weights.check_all_read()

    def _layer(self, weights: Weights, index: int) -> _Layer:
        c = self.config
        width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
        prefix = f"model.layers.{index}."

        def read(name: str, *shape: int) -> Tensor:
            return weights.get(f"{prefix}{name}.weight", *shape)

        return _Layer(
            attention_norm=read("input_layernorm", c.hidden),
            qkv=pack_linear(
                torch.cat(
                    [
                        read("self_attn.q_proj", width, c.hidden),
                        read("self_attn.k_proj", kv_width, c.hidden),
                        read("self_attn.v_proj", kv_width, c.hidden),
                    ]
                )
            ),
            o=pack_linear(read("self_attn.o_proj", c.hidden, width)),
            mlp_norm=read("post_attention_layernorm", c.hidden),
            gate_up=pack_linear(
                torch.cat(
                    [
                        read("mlp.gate_proj", c.intermediate, c.hidden),
                        read("mlp.up_proj", c.intermediate, c.hidden),
                    ]
                )
            ),
            down=pack_linear(read("mlp.down_proj", c.hidden, c.intermediate)),
        )

    def prepare(self, positions: int) -> None:
        """Makes the rotary table for sequences of at most `positions` tokens."""
        c = self.config
        self._rope = rope_table(c.head_dim, positions, c.rope_theta, c.rope_scaling, self._embedding.device)

    def forward(self, batch: Batch, pool: Tensor, kv: Tensor) -> Tensor:
        """Runs all layers; writes K and V. -> hidden states [T, hidden], before the last norm."""
        c = self.config
        residual = self._embedding[batch.tokens]  # [T, hidden]
        x: Tensor | None = None  # [T, hidden], what the last block adds to the residual
        for index, layer in enumerate(self._layers):
            if x is None:
                h = rms_norm(residual, layer.attention_norm, c.eps)
            else:
                h = rms_norm(x, layer.attention_norm, c.eps, residual)
            qkv = linear(h, layer.qkv)  # [T, width + 2 * kv_width]
            apply_lora(h, qkv, pool, batch.segments, index, QKV)
            q = rope_and_kv_write(qkv, batch.positions, self._rope, kv, index, batch.slots, c.heads)
            attended = paged_attention(
                q, kv, index, batch.page_tables, batch.query_starts, batch.context_lens, self._scale
            ).view(-1, c.heads * c.head_dim)
            x = linear(attended, layer.o)
            apply_lora(attended, x, pool, batch.segments, index, (Module.O,))
            h = rms_norm(x, layer.mlp_norm, c.eps, residual)
            gate_up = linear(h, layer.gate_up)  # [T, 2 * intermediate]
            apply_lora(h, gate_up, pool, batch.segments, index, GATE_UP)
            inner = silu_and_mul(gate_up)
            x = linear(inner, layer.down)
            apply_lora(inner, x, pool, batch.segments, index, (Module.DOWN,))
        return residual if x is None else residual.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, hidden] of the rows that are sampled -> float32 [B, vocab]."""
        return linear(rms_norm(hidden, self._norm, self.config.eps), self._head, torch.float32)
