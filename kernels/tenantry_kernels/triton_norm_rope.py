# Kernels are compiled by Triton: their arguments are pointers and scalars that Python's types cannot say.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
"""RMSNorm with residual, Q/K norm, rotary embedding, KV write and SwiGLU's gate on a GPU: one row per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tenantry_kernels.paging import PAGE_TOKENS


@triton.jit
def _rms_norm(
    x, residual, weight, y, x_stride, residual_stride, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < width
    values = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        kept = residual + row * residual_stride + i
        total = (values + tl.load(kept, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(kept, total, mask=mask)
        values = total.to(tl.float32)  # what was stored is what is normalised
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / width + eps)
    gain = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + i, (values * scale * gain).to(y.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    width = x.shape[1]
    y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    kept = x if residual is None else residual
    _rms_norm[(x.shape[0],)](
        x,
        kept,
        weight,
        y,
        x.stride(0),
        kept.stride(0),
        width,
        eps,
        ADD=residual is not None,
        BLOCK=triton.next_power_of_2(width),
    )
    return y


@triton.jit
def _qk_norm(
    qkv,
    q_weight,
    k_weight,
    eps,
    heads,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    mask = i < HEAD_DIM
    vector = qkv + (row * (heads + 2 * kv_heads) + head) * HEAD_DIM
    values = tl.load(vector + i, mask=mask, other=0.0).to(tl.float32)
    if head < heads:
        gain = tl.load(q_weight + i, mask=mask, other=0.0).to(tl.float32)
    else:
        gain = tl.load(k_weight + i, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / HEAD_DIM + eps)
    tl.store(vector + i, (values * scale * gain).to(qkv.dtype.element_ty), mask=mask)


def qk_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, heads: int, kv_heads: int, head_dim: int
) -> None:
    _qk_norm[(qkv.shape[0], heads + kv_heads)](
        qkv,
        q_weight,
        k_weight,
        eps,
        heads,
        kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _silu_and_mul(gate_up, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + i, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_and_mul[(rows, triton.cdiv(width, block))](gate_up, y, width, BLOCK=block)
    return y


@triton.jit(do_not_specialize=["positions", "slots", "layer"])
def _rope_and_kv_write(
    qkv,
    positions,
    table,
    kv,
    slots,
    layer,
    heads,
    kv_heads,
    page_stride,
    layer_stride,
    v_offset,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, HALF_PADDED)
    mask = i < half
    vector = qkv + (row * (heads + 2 * kv_heads) + head) * HEAD_DIM
    first = tl.load(vector + i, mask=mask, other=0.0)
    second = tl.load(vector + half + i, mask=mask, other=0.0)
    if head < heads + kv_heads:
        angles = table + tl.load(positions + row) * HEAD_DIM
        cosine = tl.load(angles + i, mask=mask, other=0.0)
        sine = tl.load(angles + half + i, mask=mask, other=0.0)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        first = (a * cosine - b * sine).to(qkv.dtype.element_ty)
        second = (b * cosine + a * sine).to(qkv.dtype.element_ty)
        tl.store(vector + i, first, mask=mask)
        tl.store(vector + half + i, second, mask=mask)
    slot = tl.load(slots + row)
    if (head >= heads) & (slot >= 0):
        kind = (head - heads) // kv_heads  # 0 is K, 1 is V
        to = kv + slot // PAGE * page_stride + layer.to(tl.int64) * layer_stride + kind * v_offset
        to += ((head - heads) % kv_heads * PAGE + slot % PAGE) * HEAD_DIM
        tl.store(to + i, first, mask=mask)
        tl.store(to + half + i, second, mask=mask)


def rope_and_kv_write(
    qkv: Tensor, positions: Tensor, table: Tensor, kv: Tensor, layer: int, slots: Tensor, heads: int
) -> Tensor:
    kv_heads, head_dim = kv.shape[3], kv.shape[5]
    _rope_and_kv_write[(qkv.shape[0], heads + 2 * kv_heads)](
        qkv,
        positions,
        table,
        kv,
        slots,
        layer,
        heads,
        kv_heads,
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        HEAD_DIM=head_dim,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        PAGE=PAGE_TOKENS,
    )
    return qkv.view(qkv.shape[0], -1, head_dim)[:, :heads]


@triton.jit(do_not_specialize=["slots", "layer"])
def _kv_write(
    k,
    v,
    kv,
    slots,
    layer,
    k_stride,
    v_stride,
    page_stride,
    layer_stride,
    v_offset,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    i = tl.arange(0, BLOCK)
    mask = i < HEAD_DIM
    to = kv + slot // PAGE * page_stride + layer.to(tl.int64) * layer_stride
    to += (head * PAGE + slot % PAGE) * HEAD_DIM
    tl.store(to + i, tl.load(k + row * k_stride + head * HEAD_DIM + i, mask=mask), mask=mask)
    tl.store(to + v_offset + i, tl.load(v + row * v_stride + head * HEAD_DIM + i, mask=mask), mask=mask)


def kv_write(k: Tensor, v: Tensor, kv: Tensor, layer: int, slots: Tensor) -> None:
    kv_heads, head_dim = kv.shape[3], kv.shape[5]
    _kv_write[(k.shape[0], kv_heads)](
        k,
        v,
        kv,
        slots,
        layer,
        k.stride(0),
        v.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        PAGE=PAGE_TOKENS,
    )
