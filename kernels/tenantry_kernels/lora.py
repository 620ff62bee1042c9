"""LoRA on paged adapter weights: shrink (x A^T) and expand (times B^T) for every segment of a mixed batch.

S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547) name the two halves; here both take true ranks per layer and
module, GQA widths, and weights that lie row by row in the unified pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tenantry_kernels import backend
from tenantry_kernels.linear import PackedWeight, linear
from tenantry_kernels.segments import BASE, Segments


def apply_lora(
    x: Tensor, out: Tensor, pool: Tensor, segments: Segments, layer: int, modules: Sequence[int]
) -> Tensor:
    """out[:, columns of m] += scale * (x A_m^T) B_m^T for each row's adapter and each m of `modules`, in place.

    x `[T, in]`: input of all `modules` (they share it); out `[T, sum(out_m)]`: the base layer's output, fused in the
    order of `modules`, rows contiguous; pool `[num_pages, page_elems]` of the same dtype. Sums in fp32, rounds once.
    Base rows and modules with rank 0 are not touched. A row's result depends on that row and its adapter alone.
    """
    if segments.max_rank == 0:
        return out
    if x.shape[0] != segments.tokens or out.shape[0] != segments.tokens:
        raise ValueError(
            f"`x` and `out` must have the step's {segments.tokens} rows, not {x.shape[0]} and {out.shape[0]}"
        )
    _check_pool(pool, segments)
    kind = backend.of(x)
    if kind == "cpu":
        from tenantry_kernels.cpu import ops

        return ops.apply_lora(x, out, pool, segments, layer, modules)
    if kind == "triton":
        from tenantry_kernels import triton_lora

        return triton_lora.apply_lora(x, out, pool, segments, layer, modules)
    return reference(x, out, pool, segments, layer, modules)


def linear_lora(
    x: Tensor, weight: PackedWeight, pool: Tensor, segments: Segments, layer: int, modules: Sequence[int]
) -> Tensor:
    """`linear(x, weight)` with `apply_lora` upon it; x `[T, in]` -> `[T, out]` of x's dtype.

    One pass on a CPU: base and adapter are summed in fp32 and rounded once, and what is read of B comes while the base
    is computed. Elsewhere the two follow each other.
    """
    if segments.max_rank == 0 or not weight.panels:
        return apply_lora(x, linear(x, weight), pool, segments, layer, modules)
    if x.shape[0] != segments.tokens:
        raise ValueError(f"`x` must have the step's {segments.tokens} rows, not {x.shape[0]}")
    _check_pool(pool, segments)
    from tenantry_kernels.cpu import ops

    return ops.linear_lora(x, weight, pool, segments, layer, modules)


def _check_pool(pool: Tensor, segments: Segments) -> None:
    if segments.reach > pool.numel():
        raise ValueError(
            f"`pool` must hold the pages of the step's adapters, {segments.reach} elements, not {pool.numel()}"
        )


def reference(
    x: Tensor, out: Tensor, pool: Tensor, segments: Segments, layer: int, modules: Sequence[int]
) -> Tensor:
    """The same in plain torch, segment by segment."""
    flat = pool.view(-1)
    for begin, end, slot in segments.spans:
        if slot == BASE:
            continue
        rows_x = x[begin:end].float()
        column = 0
        for module in modules:
            width_in, width_out = segments.shape.in_features[module], segments.shape.out_features[module]
            target = out[begin:end, column : column + width_out]
            column += width_out
            rank = int(segments.ranks[slot, layer, module])
            if rank == 0:
                continue
            first = int(segments.first[slot, layer, module])
            rows = segments.rows[first : first + 2 * rank]
            a = flat[rows[:rank, None] + torch.arange(width_in, device=x.device)].float()
            b = flat[rows[rank:, None] + torch.arange(width_out, device=x.device)].float()
            delta = (rows_x @ a.t()) * segments.scales[slot, layer, module] @ b
            target.copy_(target.float() + delta)
    return out
