"""RMSNorm (with the residual added in place) and rotary embedding (fused with the KV write)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tenantry_kernels import backend
from tenantry_kernels.kv_write import reference as kv_write_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight, over the last dimension; x `[T, hidden]`, rows contiguous, weight `[hidden]`.

    With `residual` `[T, hidden]`: residual += x in place first, and the sum is what is normalised. Sums in fp32.
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    kind = backend.of(x)
    if kind == "cpu":
        from tenantry_kernels.cpu import ops

        return ops.rms_norm(x, weight, eps, residual)
    if kind == "triton":
        from tenantry_kernels import triton_norm_rope

        return triton_norm_rope.rms_norm(x, weight, eps, residual)
    return rms_norm_reference(x, weight, eps, residual)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def qk_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, heads: int, kv_heads: int, head_dim: int
) -> None:
    """RMSNorm of every head of q and of k by itself, in place, before the rotation (Qwen3).

    qkv `[T, (heads + 2 * kv_heads) * head_dim]` contiguous, in the order q, k, v; the weights `[head_dim]` of its
    dtype. V is not touched. Sums in fp32. Raises ValueError where shapes do not fit.
    """
    width = (heads + 2 * kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width or not qkv.is_contiguous():
        raise ValueError(f"`qkv` must be contiguous [tokens, {width}], not {tuple(qkv.shape)}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if tuple(weight.shape) != (head_dim,) or weight.dtype != qkv.dtype:
            raise ValueError(
                f"`{name}` must be [{head_dim}] of {qkv.dtype}, not {tuple(weight.shape)} of {weight.dtype}"
            )
    kind = backend.of(qkv)
    if kind == "cpu":
        from tenantry_kernels.cpu import ops

        ops.qk_norm(qkv, q_weight, k_weight, eps, heads, kv_heads)
    elif kind == "triton":
        from tenantry_kernels import triton_norm_rope

        triton_norm_rope.qk_norm(qkv, q_weight, k_weight, eps, heads, kv_heads, head_dim)
    else:
        qk_norm_reference(qkv, q_weight, k_weight, eps, heads, kv_heads, head_dim)


def qk_norm_reference(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, heads: int, kv_heads: int, head_dim: int
) -> None:
    split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    for part, weight in ((split[:, :heads], q_weight), (split[:, heads : heads + kv_heads], k_weight)):
        part.copy_(rms_norm_reference(part, weight, eps))


def rope_table(
    head_dim: int,
    positions: int,
    theta: float,
    scaling: Mapping[str, object] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """float32 `[positions, 2, head_dim / 2]`: cos and sin of position * frequency, made once per model.

    scaling: `rope_scaling` of the model's configuration; types `default`, `linear` and `llama3` are served.
    Source: Su et al., arXiv 2104.09864; the llama3 rule is the one of Llama 3.1's reference code.
    """
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    rule = scaling or {}
    kind = rule.get("rope_type", rule.get("type", "default"))
    if kind == "linear":
        inv_freq = inv_freq / _number(rule, "factor")
    elif kind == "llama3":
        factor, low, high, original = (
            _number(rule, name)
            for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        wavelength = 2 * math.pi / inv_freq
        smooth = (original / wavelength - low) / (high - low)
        blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
        scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
        medium = (wavelength <= original / low) & (wavelength >= original / high)
        inv_freq = torch.where(medium, blended, scaled)
    elif kind != "default":
        raise ValueError(f"`rope_scaling.rope_type` must be one of default, linear, llama3, not {kind!r}")
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq[None, :]
    return torch.stack([angles.cos(), angles.sin()], dim=1).to(device)


def _number(rule: Mapping[str, object], name: str) -> float:
    value = rule.get(name)
    if not isinstance(value, (int, float)):
        raise ValueError(f"`rope_scaling.{name}` must be a number, not {value!r}")
    return float(value)


def rope_and_kv_write(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    heads: int,
) -> Tensor:
    """Rotate q and k in place and write k and v of each token into its page; returns q as a view of `qkv`.

    qkv `[T, (heads + 2 * kv_heads) * head_dim]` contiguous, the fused projection's output in the order q, k, v;
    positions int64 `[T]`; table from `rope_table`; kv `[num_pages, layers, 2, kv_heads, 16, head_dim]`;
    slots int64 `[T]`: page * 16 + offset, negative = padding row, nothing written. Result: q `[T, heads, head_dim]`.
    Halves are rotated (first half against second), as in the Hugging Face layout of Llama weights.
    """
    kind = backend.of(qkv)
    if kind == "cpu":
        from tenantry_kernels.cpu import ops

        return ops.rope_and_kv_write(qkv, positions, table, kv, layer, slots, heads)
    if kind == "triton":
        from tenantry_kernels import triton_norm_rope

        return triton_norm_rope.rope_and_kv_write(qkv, positions, table, kv, layer, slots, heads)
    return rope_and_kv_write_reference(qkv, positions, table, kv, layer, slots, heads)


def rope_and_kv_write_reference(
    qkv: Tensor, positions: Tensor, table: Tensor, kv: Tensor, layer: int, slots: Tensor, heads: int
) -> Tensor:
    kv_heads, head_dim = kv.shape[3], kv.shape[5]
    split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    rotated = split[:, : heads + kv_heads]
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    first, second = rotated.float().chunk(2, dim=-1)
    rotated.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    kv_write_reference(split[:, heads : heads + kv_heads], split[:, heads + kv_heads :], kv, layer, slots)
    return split[:, :heads]
