"""The extension's operators with the signatures of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenantry_kernels.segments import Segments

if TYPE_CHECKING:
    from tenantry_kernels.linear import PackedWeight

_ops = torch.ops.tenantry_cpu


def pack(weight: Tensor) -> Tensor:
    """weight `[out, in]` -> panels `[ceil(out / panel), in, panel]`, the panel's width by instruction set."""
    panels: Tensor = _ops.pack(weight.contiguous())
    return panels


def linear(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> Tensor:
    wide = out_dtype == torch.float32 and x.dtype != torch.float32
    out: Tensor = _ops.linear(x, weight.data, weight.out_features, weight.bias, wide)
    return out


def linear_lora(
    x: Tensor, weight: PackedWeight, pool: Tensor, segments: Segments, layer: int, modules: Sequence[int]
) -> Tensor:
    s = segments
    out: Tensor = _ops.linear_lora(
        x, weight.data, weight.out_features, weight.bias, pool, s.starts, s.adapter, s.ranks, s.scales, s.first,
        s.rows, layer, modules, s.shape.out_features,
    )  # fmt: skip
    return out


def apply_lora(
    x: Tensor, out: Tensor, pool: Tensor, segments: Segments, layer: int, modules: Sequence[int]
) -> Tensor:
    s = segments
    _ops.apply_lora(
        x,
        out,
        pool,
        s.starts,
        s.adapter,
        s.ranks,
        s.scales,
        s.first,
        s.rows,
        layer,
        modules,
        s.shape.out_features,
    )
    return out


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    _ops.paged_attention(q, kv, layer, page_tables, query_starts, context_lens, scale, out)
    return out


def rope_and_kv_write(
    qkv: Tensor, positions: Tensor, table: Tensor, kv: Tensor, layer: int, slots: Tensor, heads: int
) -> Tensor:
    _ops.rope_and_kv_write(qkv, positions, table, kv, layer, slots, heads)
    return qkv.view(qkv.shape[0], -1, kv.shape[5])[:, :heads]


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    out: Tensor = _ops.rms_norm(x, weight, eps, residual)
    return out


def qk_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, heads: int, kv_heads: int) -> None:
    _ops.qk_norm(qkv, q_weight, k_weight, eps, heads, kv_heads)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    out: Tensor = _ops.silu_and_mul(gate_up)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
) -> Tensor:
    chosen = torch.empty(logits.shape[0], dtype=torch.int64)
    _ops.sample(logits, temperature, top_k, top_p, min_p, seeds, steps, chosen)
    return chosen
