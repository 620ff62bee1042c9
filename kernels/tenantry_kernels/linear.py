"""Base linear layers: the weight packed once at load, then products that do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tenantry_kernels import backend

_SAFE_ROWS = 4
"""torch's fp32 product takes another path below this many rows, with other roundings: shorter batches are padded."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A linear layer's weight, ready for its backend."""

    in_features: int
    out_features: int
    data: Tensor  # [out, in], or the CPU extension's panels
    bias: Tensor | None  # [out]
    panels: bool  # `data` is in the CPU extension's order


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """weight `[out, in]` (fuse q,k,v and gate,up by concatenating along `out` before), bias `[out]` or None.

    The CPU extension makes its own copy in panels: drop the original if nothing else needs it.
    """
    out_features, in_features = weight.shape
    if backend.of(weight) == "cpu":
        from tenantry_kernels.cpu import ops

        return PackedWeight(
            in_features, out_features, ops.pack(weight), bias.float() if bias is not None else None, True
        )
    return PackedWeight(in_features, out_features, weight, bias, False)


def linear(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + bias; x `[T, in]`, rows contiguous -> `[T, out]` in `out_dtype`: x's, or float32 for logits.

    On a CPU a row's result is the same bits in any batch.
    """
    if weight.panels:
        from tenantry_kernels.cpu import ops

        return ops.linear(x, weight, out_dtype or x.dtype)
    rows = x.shape[0]
    if x.device.type == "cpu" and rows < _SAFE_ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, _SAFE_ROWS - rows))
    return torch.nn.functional.linear(x, weight.data, weight.bias)[:rows].to(out_dtype or x.dtype)
