"""SwiGLU's gate: silu(gate) * up, on the fused output of both projections."""

from __future__ import annotations

import torch
from torch import Tensor

from tenantry_kernels import backend


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up `[T, 2 * ffn]` contiguous, gate first -> `[T, ffn]`. Source: Shazeer, arXiv 2002.05202."""
    kind = backend.of(gate_up)
    if kind == "cpu":
        from tenantry_kernels.cpu import ops

        return ops.silu_and_mul(gate_up)
    if kind == "triton":
        from tenantry_kernels import triton_norm_rope

        return triton_norm_rope.silu_and_mul(gate_up)
    return reference(gate_up)


def reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
