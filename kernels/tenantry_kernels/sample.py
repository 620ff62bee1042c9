"""Choosing the next token: greedy, temperature, top-k, top-p, min-p, with a seed per row."""

from __future__ import annotations

import torch
from torch import Tensor

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
    A row's token depends on that row alone, never on its neighbours.
    """
    chosen = logits.argmax(-1)
    drawn = (temperature > 0).nonzero().squeeze(1)
    if drawn.numel() == 0:
        return chosen
    rows = logits[drawn].float() / temperature[drawn, None]
    probs, order = rows.softmax(-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    limit = torch.where(top_k[drawn] > 0, top_k[drawn], probs.shape[1])
    probs = probs.masked_fill(rank >= limit[:, None], 0.0)
    # top-p counts what top-k has left; the token that crosses the border stays
    total = probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before >= top_p[drawn, None] * total) & (rank > 0), 0.0)
    probs = probs.masked_fill(probs < min_p[drawn, None] * probs[:, :1], 0.0)
    mass = probs.double().cumsum(-1)
    target = uniform(seeds[drawn], steps[drawn])[:, None] * mass[:, -1:]
    picked = torch.searchsorted(mass, target, right=True).clamp_max(probs.shape[1] - 1)
    # rounding may step onto a token without mass at the very end: the last one with mass is right then
    last = (probs > 0).sum(-1, keepdim=True) - 1
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
