"""Puts K and V of a step's tokens into their pages."""

from __future__ import annotations

from torch import Tensor

from tenantry_kernels import backend
from tenantry_kernels.paging import PAGE_TOKENS


def kv_write(k: Tensor, v: Tensor, kv: Tensor, layer: int, slots: Tensor) -> None:
    """k, v `[T, kv_heads, head_dim]`, heads of a row contiguous; kv `[num_pages, layers, 2, kv_heads, 16, head_dim]`.

    slots int64 `[T]`: page * 16 + offset in the page; a negative slot is a padding row that writes nothing.
    A model's step has this fused with the rotation (`rope_and_kv_write`).
    """
    if backend.of(k) == "triton":
        from tenantry_kernels import triton_norm_rope

        triton_norm_rope.kv_write(k, v, kv, layer, slots)
    else:
        reference(k, v, kv, layer, slots)


def reference(k: Tensor, v: Tensor, kv: Tensor, layer: int, slots: Tensor) -> None:
    """The same in plain torch."""
    live = slots >= 0
    page, offset = slots[live] // PAGE_TOKENS, slots[live] % PAGE_TOKENS
    kv[page, layer, 0, :, offset] = k[live].to(kv.dtype)
    kv[page, layer, 1, :, offset] = v[live].to(kv.dtype)
