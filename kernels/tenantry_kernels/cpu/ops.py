"""The extension's operators with the signatures of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenantry_kernels.paging import GATE_UP, QKV, Module
from tenantry_kernels.segments import Segments

if TYPE_CHECKING:
    from tenantry_kernels.linear import PackedWeight

_ops = torch.ops.tenantry_cpu

_FOLLOWING: tuple[tuple[Sequence[int], int], ...] = (
    ((Module.O,), 0), ((), 0), ((), 0), (GATE_UP, 0), ((Module.DOWN,), 0), ((), 0), (QKV, 1),
)  # fmt: skip
"""By a call's first module: the modules of the call after it, and how many layers on. A decoder layer's order; where it
does not hold, memory is asked for in vain."""


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
    follows, step = _FOLLOWING[modules[0]]
    out: Tensor = _ops.linear_lora(
        x, weight.data, weight.out_features, weight.bias, pool, _plan(segments, modules), layer,
        _plan(segments, follows) if follows else None, layer + step,
    )  # fmt: skip
    return out


def apply_lora(
    x: Tensor, out: Tensor, pool: Tensor, segments: Segments, layer: int, modules: Sequence[int]
) -> Tensor:
    _ops.apply_lora(x, out, pool, _plan(segments, modules), layer)
    return out


def _plan(segments: Segments, modules: Sequence[int]) -> Tensor:
    """What the extension has to do for these modules in any layer, made at the step's first call."""
    known = segments.plans[modules[0]] if segments.plans else None
    if known is not None and known[0] == modules:
        return known[1]
    s = segments
    plan: Tensor = _ops.lora_plan(
        s.starts,
        s.adapter,
        s.ranks,
        s.scales,
        s.first,
        s.rows,
        modules,
        s.shape.in_features,
        s.shape.out_features,
    )
    if segments.plans:
        segments.plans[modules[0]] = (modules, plan)
    return plan


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
