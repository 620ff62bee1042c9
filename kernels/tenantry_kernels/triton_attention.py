# Kernels are compiled by Triton: their arguments are pointers and scalars that Python's types cannot say.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
"""Paged attention on a GPU: one launch for the prefill chunks and decodes of a step, one more to join what was split.

A program takes a block of query rows of one sequence and the heads that share one KV head, so K and V are read once
for the group. Which sequence a program serves is found by bisection of `query_starts`: nothing is synchronised.

A decode over a long context is split over programs by position (flash-decoding, Dao et al. 2023). Where it is split
depends on that sequence's own length alone, and the parts are joined in their order: the batch changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tenantry_kernels.paging import PAGE_TOKENS

_SPLIT_KEYS = 512
"""Fewest keys of a part of a decode; a shorter context is not split."""
_MOST_SPLITS = 32
_BLOCK_KEYS = 64


@triton.jit
def _keys_per_split(context, SPLIT_KEYS: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    even = tl.cdiv(tl.cdiv(context, MOST_SPLITS), BLOCK_N) * BLOCK_N
    return tl.maximum(even, SPLIT_KEYS)


@triton.jit(
    do_not_specialize=[
        "page_tables", "query_starts", "context_lens", "parts", "layer", "sequences", "table_stride",
    ]
)  # fmt: skip
def _attend(
    q,
    out,
    kv,
    page_tables,
    query_starts,
    context_lens,
    parts,
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
    SPLIT_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One part of one block of rows; `parts` float32 [splits, sequences, heads, head_dim + 2]: sums, top, mass."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
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
    divided = (rows == 1) & (context > SPLIT_KEYS)
    end = tl.minimum(context, context - rows + first + BLOCK_Q)
    keys_begin = 0
    keys_end = end
    if divided:
        span = _keys_per_split(context, SPLIT_KEYS, MOST_SPLITS, BLOCK_N)
        keys_begin = split * span
        keys_end = tl.minimum(end, keys_begin + span)
    elif split > 0:
        return
    if keys_begin >= end:
        return

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
    for start in range(keys_begin, keys_end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        page = tl.load(page_tables + low.to(tl.int64) * table_stride + n // PAGE, mask=n < keys_end, other=0)
        offset = page.to(tl.int64) * page_stride + n % PAGE * HEAD_DIM
        loaded = (n < keys_end)[:, None] & (d < HEAD_DIM)[None, :]
        keys = tl.load(base + offset[:, None] + d[None, :], mask=loaded, other=0.0)
        # a stale NaN behind the context would spoil the sum, its weight of zero notwithstanding: V is masked too
        values = tl.load(base + v_offset + offset[:, None] + d[None, :], mask=loaded, other=0.0)
        if WIDE:
            scores = tl.dot(qs.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="ieee")
        else:
            scores = tl.dot(qs, tl.trans(keys))
        seen = (n[None, :] <= position[:, None]) & (n < keys_end)[None, :]
        scores = tl.where(seen, scores * scale, float("-inf"))
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
    written = live[:, None] & (d < HEAD_DIM)[None, :]
    if divided:
        to = parts + ((split.to(tl.int64) * sequences + low) * heads + at) * (HEAD_DIM + 2)
        tl.store(to[:, None] + d[None, :], acc, mask=written)
        tl.store(to + HEAD_DIM, top, mask=live)
        tl.store(to + HEAD_DIM + 1, mass, mask=live)
    else:
        result = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(
            out + ((begin + row).to(tl.int64) * heads + at)[:, None] * HEAD_DIM + d[None, :],
            result.to(out.dtype.element_ty),
            mask=written,
        )


@triton.jit(do_not_specialize=["query_starts", "context_lens", "parts", "sequences"])
def _join(
    out,
    query_starts,
    context_lens,
    parts,
    sequences,
    heads,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """out of a split decode: its parts, in order, each scaled to the greatest score so far."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_starts + sequence)
    context = tl.load(context_lens + sequence)
    if (tl.load(query_starts + sequence + 1) - row != 1) | (context <= SPLIT_KEYS):
        return
    d = tl.arange(0, DIM_PADDED)
    span = _keys_per_split(context, SPLIT_KEYS, MOST_SPLITS, BLOCK_N)
    top = float("-inf")
    mass = 0.0
    acc = tl.zeros((DIM_PADDED,), dtype=tl.float32)
    for split in range(tl.cdiv(context, span)):
        part = parts + ((split * sequences + sequence).to(tl.int64) * heads + head) * (HEAD_DIM + 2)
        part_top = tl.load(part + HEAD_DIM)
        new_top = tl.maximum(top, part_top)
        shrunk = tl.exp(top - new_top)
        scale = tl.exp(part_top - new_top)
        mass = mass * shrunk + tl.load(part + HEAD_DIM + 1) * scale
        acc = acc * shrunk + tl.load(part + d, mask=d < HEAD_DIM, other=0.0) * scale
        top = new_top
    to = out + (row.to(tl.int64) * heads + head) * HEAD_DIM + d
    tl.store(to, (acc / mass).to(out.dtype.element_ty), mask=d < HEAD_DIM)


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
    # the table's width bounds every context, and the host knows it without asking the device
    splits = min(_MOST_SPLITS, max(1, triton.cdiv(page_tables.shape[1] * PAGE_TOKENS, _SPLIT_KEYS)))
    size = splits * sequences * heads * (head_dim + 2) if splits > 1 else 1
    parts = torch.empty(size, dtype=torch.float32, device=q.device)
    shared = {
        "HEAD_DIM": head_dim,
        "DIM_PADDED": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_N": _BLOCK_KEYS,
        "SPLIT_KEYS": _SPLIT_KEYS,
        "MOST_SPLITS": _MOST_SPLITS,
    }
    _attend[(tokens // block_q + sequences, kv.shape[3], splits)](
        q,
        out,
        kv,
        page_tables,
        query_starts,
        context_lens,
        parts,
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
        PAGE=PAGE_TOKENS,
        BLOCK_Q=block_q,
        WIDE=q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda),
        **shared,
    )
    if splits > 1:
        _join[(sequences, heads)](out, query_starts, context_lens, parts, sequences, heads, **shared)
    return out
