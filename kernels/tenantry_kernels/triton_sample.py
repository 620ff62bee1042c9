# Kernels are compiled by Triton: their arguments are pointers and scalars that Python's types cannot say.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
"""Sampling on a GPU without sorting the vocabulary: one program per row.

Tokens are ordered by logit, equal ones by id. A float's bits, read as an integer, keep that order, so every question
about the sorted row (which is the k-th logit? where does the mass cross top_p? whose is the drawn mass?) is a
bisection over 32 bits of "how many, or how much mass, lie above this value", each a pass over the row. Masses are
summed in float64 in a fixed order, so that the draw is the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_LOWEST: tl.constexpr = tl.constexpr(-(2**31))  # below the key of every number


@triton.jit
def _key(value):
    """Signed integers in the order of the floats; both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _count_above(row, vocab, key, BLOCK: tl.constexpr):
    """How many tokens lie above `key`."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(row + i, mask=i < vocab, other=0.0).to(tl.float32)
        count += ((i < vocab) & (_key(values) > key)).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _weight(value, best, temperature, floor):
    """Probability over that of the best token; 0 below `floor`."""
    weight = tl.exp((value - best) / temperature)
    return tl.where(weight < floor, 0.0, weight).to(tl.float64)


@triton.jit
def _mass_above(row, vocab, key, best, temperature, floor, BLOCK: tl.constexpr):
    """Weight of all tokens above `key`. With fixed order it never falls when `key` does."""
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(row + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        weight = _weight(values, best, temperature, floor)
        mass += tl.where((i < vocab) & (_key(values) > key), weight, 0.0)
    return tl.sum(mass)


@triton.jit
def _value(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _least(row, vocab, low, high, bound, STRICT: tl.constexpr, best, temperature, floor, BLOCK: tl.constexpr):
    """Least key in [low, high] above which the mass is at most `bound` (less than it, if STRICT)."""
    while low < high:
        middle = (low + high) >> 1
        mass = _mass_above(row, vocab, middle.to(tl.int32), best, temperature, floor, BLOCK)
        if (mass < bound) | ((mass == bound) & (not STRICT)):
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _mixed(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit(do_not_specialize=["chosen", "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "steps"])
def _sample(
    chosen,
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    steps,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0)
    row = logits + at.to(tl.int64) * stride
    best = float("-inf")
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.max(tl.load(row + i, mask=i < vocab, other=float("-inf")).to(tl.float32)))
    temperature = tl.load(temperatures + at)
    key = _key(best)
    nth = tl.zeros((), dtype=tl.int64)
    if temperature > 0:
        # top-k: the lowest key that stays, and how many of the tokens at it
        top_k = tl.load(top_ks + at)
        lowest = tl.full((), _LOWEST, dtype=tl.int64)
        ties = tl.zeros((), dtype=tl.int64)
        if (top_k > 0) & (top_k < vocab):
            high = key.to(tl.int64)
            while lowest < high:
                middle = (lowest + high + 1) >> 1
                if _count_above(row, vocab, (middle - 1).to(tl.int32), BLOCK) >= top_k:
                    lowest = middle
                else:
                    high = middle - 1
            ties = top_k - _count_above(row, vocab, lowest.to(tl.int32), BLOCK)
        # top-p counts what top-k has left; the token that crosses the border stays
        top_p = tl.load(top_ps + at).to(tl.float64)
        if top_p < 1:
            mass = _mass_above(row, vocab, lowest.to(tl.int32), best, temperature, 0.0, BLOCK)
            if ties > 0:
                mass += ties * _weight(_value(lowest.to(tl.int32)), best, temperature, 0.0)
            border = _least(
                row, vocab, lowest, key.to(tl.int64), top_p * mass, True, best, temperature, 0.0, BLOCK
            )
            above = _mass_above(row, vocab, border.to(tl.int32), best, temperature, 0.0, BLOCK)
            if border > lowest:
                ties = (
                    _count_above(row, vocab, (border - 1).to(tl.int32), BLOCK)
                    - _count_above(row, vocab, border.to(tl.int32), BLOCK)
                ).to(tl.int64)
            lowest = border
            if ties > 0:
                each = _weight(_value(lowest.to(tl.int32)), best, temperature, 0.0)
                if each > 0:
                    fitting = tl.ceil((top_p * mass - above) / each)
                    ties = tl.minimum(ties, tl.maximum(fitting, 1.0).to(tl.int64))
        floor = tl.load(min_ps + at)
        rest = tl.zeros((), dtype=tl.float64)
        if ties > 0:
            rest = ties * _weight(_value(lowest.to(tl.int32)), best, temperature, floor)
        mass = _mass_above(row, vocab, lowest.to(tl.int32), best, temperature, floor, BLOCK) + rest
        seed = tl.load(seeds + at).to(tl.uint64, bitcast=True)
        step = tl.load(steps + at).to(tl.uint64, bitcast=True)
        state = _mixed(seed + 0x9E3779B97F4A7C15) + (step + 1) * 0x9E3779B97F4A7C15
        uniform = (_mixed(state) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
        target = uniform * mass * (1.0 - 1e-15)  # less than the whole, whatever is rounded
        high = _least(row, vocab, lowest, key.to(tl.int64), target, False, best, temperature, floor, BLOCK)
        above = _mass_above(row, vocab, high.to(tl.int32), best, temperature, floor, BLOCK)
        if high > lowest:
            ties = (
                _count_above(row, vocab, (high - 1).to(tl.int32), BLOCK)
                - _count_above(row, vocab, high.to(tl.int32), BLOCK)
            ).to(tl.int64)
        key = high.to(tl.int32)
        nth = ((target - above) / _weight(_value(key), best, temperature, 0.0)).to(tl.int64)
        nth = tl.minimum(nth, ties - 1)
    # the nth token, by id, whose key this is
    found = tl.zeros((), dtype=tl.int64)
    before = tl.zeros((), dtype=tl.int64)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(row + i, mask=i < vocab, other=0.0).to(tl.float32)
        match = ((i < vocab) & (_key(values) == key)).to(tl.int64)
        rank = before + tl.cumsum(match, 0) - match
        found += tl.sum(tl.where((match > 0) & (rank == nth), i, 0).to(tl.int64))
        before += tl.sum(match)
    tl.store(chosen + at, found)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
) -> Tensor:
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    vocab = logits.shape[1]
    _sample[(logits.shape[0],)](
        chosen, logits, temperature, top_k, top_p, min_p, seeds, steps, vocab, logits.stride(0),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return chosen
