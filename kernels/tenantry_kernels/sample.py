"""Choosing the next token: greedy, temperature, top-k, top-p, min-p, with a seed per row."""

from __future__ import annotations

import torch
from torch import Tensor

from tenantry_kernels import backend

_MIX = (-4658895280553007687, -7723592293110705685)  # multipliers of splitmix64, as signed 64-bit numbers
_GOLDEN = -7046029254386353131


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
) -> Tensor:
    """Next token ids int64 `[B]`.

    logits `[B, vocab]` (penalties and biases already applied; -inf = forbidden); temperature float32 `[B]`, 0 = greedy;
    top_k int64 `[B]`, 0 = all; top_p float32 `[B]`, 1 = all; min_p float32 `[B]`, 0 = all; seeds int64 `[B]`;
    steps int64 `[B]`: how many tokens the request has drawn before, so that (seed, step) fixes the draw.
    Filters apply in the order top-k, top-p, min-p; equal logits are ordered by id. A row's token depends on that row
    alone, never on its neighbours.
    """
    kind = backend.of(logits)
    if kind == "cpu":
        from tenantry_kernels.cpu import ops

        return ops.sample(logits.float(), temperature, top_k, top_p, min_p, seeds, steps)
    if kind == "triton":
        from tenantry_kernels import triton_sample

        return triton_sample.sample(logits, temperature, top_k, top_p, min_p, seeds, steps)
    return reference(logits, temperature, top_k, top_p, min_p, seeds, steps)


def reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
) -> Tensor:
    """The same in plain torch, on the sorted rows."""
    chosen = logits.argmax(-1)
    drawn = (temperature > 0).nonzero().squeeze(1)
    if drawn.numel() == 0:
        return chosen
    rows, order = logits[drawn].float().sort(dim=-1, descending=True, stable=True)
    # probability over that of the best token, summed in double: the draw is the same however sums are arranged
    weights = ((rows - rows[:, :1]) / temperature[drawn, None]).exp()
    rank = torch.arange(weights.shape[1], device=weights.device)
    limit = torch.where(top_k[drawn] > 0, top_k[drawn], weights.shape[1])
    weights = weights.masked_fill(rank >= limit[:, None], 0.0)
    # top-p counts what top-k has left; the token that crosses the border stays
    mass = weights.double().cumsum(-1)
    crossed = mass - weights >= top_p[drawn, None].double() * mass[:, -1:]
    weights = weights.masked_fill(crossed & (top_p[drawn, None] < 1) & (rank > 0), 0.0)
    weights = weights.masked_fill(weights < min_p[drawn, None], 0.0)
    mass = weights.double().cumsum(-1)
    target = uniform(seeds[drawn], steps[drawn])[:, None] * mass[:, -1:]
    picked = torch.searchsorted(mass, target, right=True).clamp_max(weights.shape[1] - 1)
    # rounding may step onto a token without mass at the very end: the last one with mass is right then
    last = (weights > 0).sum(-1, keepdim=True) - 1
    chosen[drawn] = order.gather(1, torch.minimum(picked, last)).squeeze(1)
    return chosen


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:
    """float64 in [0, 1) from (seed, step), counter based: splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = _mixed(seeds.long() + _GOLDEN) + (steps.long() + 1) * _GOLDEN
    return _shift(_mixed(state), 11).double() / float(1 << 53)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed 64-bit tensor."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _MIX[0]
    value = (value ^ _shift(value, 27)) * _MIX[1]
    return value ^ _shift(value, 31)
