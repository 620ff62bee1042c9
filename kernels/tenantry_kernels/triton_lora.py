# Kernels are compiled by Triton: their arguments are pointers and scalars that Python's types cannot say.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
"""LoRA on a GPU: segmented shrink and expand over paged rows, one launch each for all modules that share an input.

Grids are chunks x tiles: no launch depends on the longest segment, and a program whose ranks or columns its adapter
does not have ends at once. Shrink splits the input over programs; their fp32 partials are summed in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tenantry_kernels.segments import Segments

_VARYING = [
    "tokens", "layer", "module", "max_rank", "hidden_stride", "chunks", "ranks", "scales", "first", "rows",
]  # fmt: skip
"""Arguments that change from call to call: nothing is compiled for their values or alignment."""

_SPLIT_WIDTH = 512
"""Inputs are split over programs of about this many columns each."""
_SPLIT_CHUNK = 16
"""Only steps with chunks this short are split: few programs leave a GPU idle, and many partials cost more than that."""


@triton.jit(do_not_specialize=_VARYING)
def _shrink(
    x,
    hidden,
    pool,
    chunks,
    ranks,
    scales,
    first,
    rows,
    layer,
    layers,
    modules,
    module,
    x_stride,
    width,
    tokens,
    max_rank,
    hidden_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """hidden[split, token, module * max_rank + rank] = scale * part of x A^T."""
    chunk = tl.program_id(0)
    tiles = tl.cdiv(max_rank, BLOCK_R)
    which = tl.program_id(1) // tiles
    split = tl.program_id(2)
    adapter = tl.load(chunks + chunk * 3 + 2).to(tl.int64)
    entry = (adapter * layers + layer) * modules + module + which
    rank = tl.load(ranks + entry)
    r = (tl.program_id(1) % tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    if (tl.program_id(1) % tiles) * BLOCK_R >= rank:
        return
    begin = tl.load(chunks + chunk * 3).to(tl.int64)
    count = tl.load(chunks + chunk * 3 + 1)
    t = tl.arange(0, BLOCK_T)
    a_rows = tl.load(rows + tl.load(first + entry) + r, mask=r < rank, other=0)
    acc = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for start in range(split * BLOCK_K, width, BLOCK_K * SPLIT):
        k = start + tl.arange(0, BLOCK_K)
        xs = tl.load(
            x + (begin + t)[:, None] * x_stride + k[None, :],
            mask=(t < count)[:, None] & (k < width)[None, :],
            other=0.0,
        )
        a = tl.load(
            pool + a_rows[None, :] + k[:, None], mask=(r < rank)[None, :] & (k < width)[:, None], other=0.0
        )
        if WIDE:
            acc += tl.dot(xs.to(tl.float32), a.to(tl.float32), input_precision="ieee")
        else:
            acc += tl.dot(xs, a)
    acc *= tl.load(scales + entry)
    to = (
        hidden
        + (split.to(tl.int64) * tokens + begin + t)[:, None] * hidden_stride
        + which * max_rank
        + r[None, :]
    )
    tl.store(to, acc, mask=(t < count)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=_VARYING)
def _expand(
    out,
    hidden,
    pool,
    chunks,
    ranks,
    first,
    rows,
    width_0,
    width_1,
    width_2,
    layer,
    layers,
    modules,
    module,
    out_stride,
    tokens,
    max_rank,
    hidden_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[token, column of module] += hidden B^T, the partials of `hidden` summed in order."""
    chunk = tl.program_id(0)
    which = tl.program_id(2)
    width = width_0
    column = 0
    if which == 1:
        width = width_1
        column = width_0
    if which == 2:
        width = width_2
        column = width_0 + width_1
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(1) * BLOCK_N >= width:
        return
    adapter = tl.load(chunks + chunk * 3 + 2).to(tl.int64)
    entry = (adapter * layers + layer) * modules + module + which
    rank = tl.load(ranks + entry)
    if rank == 0:
        return
    begin = tl.load(chunks + chunk * 3).to(tl.int64)
    count = tl.load(chunks + chunk * 3 + 1)
    t = tl.arange(0, BLOCK_T)
    b_first = tl.load(first + entry) + rank
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        shrunk = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for split in range(SPLIT):
            row = (begin + t + split * tokens)[:, None] * hidden_stride
            shrunk += tl.load(
                hidden + row + which * max_rank + r[None, :],
                mask=(t < count)[:, None] & (r < rank)[None, :],
                other=0.0,
            )
        b_rows = tl.load(rows + b_first + r, mask=r < rank, other=0)
        b = tl.load(
            pool + b_rows[:, None] + n[None, :], mask=(r < rank)[:, None] & (n < width)[None, :], other=0.0
        )
        if WIDE:
            acc += tl.dot(shrunk, b.to(tl.float32), input_precision="ieee")
        else:
            acc += tl.dot(shrunk.to(b.dtype), b)
    to = out + (begin + t)[:, None] * out_stride + column + n[None, :]
    mask = (t < count)[:, None] & (n < width)[None, :]
    tl.store(to, (tl.load(to, mask=mask).to(tl.float32) + acc).to(out.dtype.element_ty), mask=mask)


def apply_lora(
    x: Tensor, out: Tensor, pool: Tensor, segments: Segments, layer: int, modules: Sequence[int]
) -> Tensor:
    s = segments
    if list(modules) != list(range(modules[0], modules[0] + len(modules))) or len(modules) > 3:
        raise ValueError(f"`modules` must be at most three that follow one another, not {list(modules)}")
    widths = [s.shape.out_features[m] for m in modules]
    if out.shape[1] != sum(widths):
        raise ValueError(f"`out` must have {sum(widths)} columns, not {out.shape[1]}")
    width = s.shape.in_features[modules[0]]
    chunks = s.chunks.shape[0]
    block_t = max(16, s.chunk_tokens)
    block_r = min(64, max(16, triton.next_power_of_2(s.max_rank)))
    block_k, block_n = 64, 128
    split = min(8, max(1, width // _SPLIT_WIDTH)) if s.chunk_tokens <= _SPLIT_CHUNK else 1
    # dots of fp32 are exact; bf16 under the interpreter is upcast, since its bf16 dot is wrong
    wide = pool.dtype == torch.float32 or (pool.dtype == torch.bfloat16 and not pool.is_cuda)
    hidden = torch.empty((split, x.shape[0], len(modules) * s.max_rank), dtype=torch.float32, device=x.device)
    shared: dict[str, Any] = {
        "layer": layer,
        "layers": s.shape.layers,
        "modules": s.shape.modules,
        "module": int(modules[0]),
        "tokens": x.shape[0],
        "max_rank": s.max_rank,
        "hidden_stride": hidden.shape[2],
        "BLOCK_T": block_t,
        "BLOCK_R": block_r,
        "SPLIT": split,
        "WIDE": wide,
    }
    _shrink[(chunks, len(modules) * triton.cdiv(s.max_rank, block_r), split)](
        x, hidden, pool, s.chunks, s.ranks, s.scales, s.first, s.rows,
        x_stride=x.stride(0), width=width, BLOCK_K=block_k, **shared,
    )  # fmt: skip
    padded = [*widths, 0, 0]
    _expand[(chunks, triton.cdiv(max(widths), block_n), len(modules))](
        out, hidden, pool, s.chunks, s.ranks, s.first, s.rows, padded[0], padded[1], padded[2],
        out_stride=out.stride(0), BLOCK_N=block_n, **shared,
    )  # fmt: skip
    return out
