"""Causal attention over paged KV: prefill chunks and decodes of one batch in one call, grouped-query heads."""

from __future__ import annotations

import torch
from torch import Tensor

from tenantry_kernels import backend
from tenantry_kernels.paging import PAGE_TOKENS


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v for every query row; each sees the keys at its own position and before.

    q `[T, heads, head_dim]`, last dimension contiguous (a view into the fused qkv is fine);
    kv `[num_pages, layers, 2, kv_heads, 16, head_dim]` (`KvShape.view(pool)`), heads a multiple of kv_heads;
    page_tables int32 `[B, max_pages]`: page of each block of 16 tokens of sequence b (entries beyond are not read);
    query_starts int32 `[B + 1]`: rows of q of sequence b; sequences without rows are allowed;
    context_lens int32 `[B]`: keys of sequence b *including* this step's, so that its last row is the last position;
    out `[T, heads, head_dim]` contiguous, made where not given. K and V of this step must have been written before.
    Loads beyond a row's context are masked: stale NaN there does no harm. Sums in fp32, keys in the order of positions.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kind = backend.of(q)
    if kind == "cpu":
        from tenantry_kernels.cpu import ops

        return ops.paged_attention(q, kv, layer, page_tables, query_starts, context_lens, scale, out)
    if kind == "triton":
        from tenantry_kernels import triton_attention

        return triton_attention.paged_attention(
            q, kv, layer, page_tables, query_starts, context_lens, scale, out
        )
    return reference(q, kv, layer, page_tables, query_starts, context_lens, scale, out)


def reference(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    """The same in plain torch, sequence by sequence."""
    groups = q.shape[1] // kv.shape[3]
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for b, length in enumerate(lengths):
        begin, end = starts[b], starts[b + 1]
        if begin == end:
            continue
        pages = page_tables[b, : -(-length // PAGE_TOKENS)].long()
        # [pages, 2, kv_heads, 16, head_dim] -> [2, heads, length, head_dim]
        block = kv[pages, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].float()
        keys, values = block.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,hkd->hqk", q[begin:end].float(), keys) * scale
        positions = torch.arange(length - (end - begin), length, device=q.device)
        future = torch.arange(length, device=q.device)[None, :] > positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,hkd->qhd", weights, values).to(out.dtype)
    return out
