# Kernels are compiled by Triton: their arguments are pointers and scalars that Python's types cannot say.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
"""Paged attention on a GPU: one launch for the prefill chunks and decodes of a step.

A program takes a block of query rows of one sequence and the heads that share one KV head, so K and V are read once
for the group. Which sequence a program serves is found by bisection of `query_starts`: nothing is synchronised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tenantry_kernels.paging import PAGE_TOKENS


@triton.jit(do_not_specialize=["layer", "sequences", "table_stride"])
def _attend(
    q,
    out,
    kv,
    page_tables,
    query_starts,
    context_lens,
    scale,
    layer,
    sequences,
    q_stride,
    table_stride,
    page_stride,
    layer_stride,
    v_offset,
    heads,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    # sequence s owns the blocks from query_starts[s] // BLOCK_Q + s on
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    begin = tl.load(query_starts + low)
    rows = tl.load(query_starts + low + 1) - begin
    first = (block - begin // BLOCK_Q - low) * BLOCK_Q
    if first >= rows:
        return
    context = tl.load(context_lens + low)

    m = tl.arange(0, BLOCK_Q * GROUP_PADDED)
    row = first + m // GROUP_PADDED
    head = m % GROUP_PADDED
    d = tl.arange(0, DIM_PADDED)
    live = (row < rows) & (head < GROUP)
    at = kv_head * GROUP + head
    position = context - rows + row
    qs = tl.load(
        q + (begin + row).to(tl.int64)[:, None] * q_stride + at[:, None] * HEAD_DIM + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    base = kv + layer.to(tl.int64) * layer_stride + kv_head * PAGE * HEAD_DIM
    top = tl.full((BLOCK_Q * GROUP_PADDED,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_Q * GROUP_PADDED,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_Q * GROUP_PADDED, DIM_PADDED), dtype=tl.float32)
    end = tl.minimum(context, context - rows + first + BLOCK_Q)
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        page = tl.load(page_tables + low.to(tl.int64) * table_stride + n // PAGE, mask=n < end, other=0)
        offset = page.to(tl.int64) * page_stride + n % PAGE * HEAD_DIM
        loaded = (n < end)[:, None] & (d < HEAD_DIM)[None, :]
        keys = tl.load(base + offset[:, None] + d[None, :], mask=loaded, other=0.0)
        values = tl.load(base + v_offset + offset[:, None] + d[None, :], mask=loaded, other=0.0)
        if WIDE:
            scores = tl.dot(qs.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="ieee")
        else:
            scores = tl.dot(qs, tl.trans(keys))
        scores = tl.where(n[None, :] <= position[:, None], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        new_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - new_top[:, None])
        shrunk = tl.exp(top - new_top)
        mass = mass * shrunk + tl.sum(weights, 1)
        if WIDE:
            part = tl.dot(weights, values.to(tl.float32), input_precision="ieee")
        else:
            part = tl.dot(weights.to(values.dtype), values)
        acc = acc * shrunk[:, None] + part
        top = new_top
    result = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(
        out + ((begin + row).to(tl.int64) * heads + at)[:, None] * HEAD_DIM + d[None, :],
        result.to(out.dtype.element_ty),
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
    )


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
    tokens, heads, head_dim = q.shape
    sequences = context_lens.shape[0]
    group = heads // kv.shape[3]
    padded = triton.next_power_of_2(group)
    decode = tokens <= sequences
    block_q = max((16 if decode else 64) // padded, 1)
    _attend[(tokens // block_q + sequences, kv.shape[3])](
        q,
        out,
        kv,
        page_tables,
        query_starts,
        context_lens,
        scale,
        layer,
        sequences,
        q.stride(0),
        page_tables.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        heads,
        GROUP=group,
        GROUP_PADDED=padded,
        HEAD_DIM=head_dim,
        DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        PAGE=PAGE_TOKENS,
        BLOCK_Q=block_q,
        BLOCK_N=64,
        WIDE=q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda),
    )
    return out
