"""LoRA on Triton over ranks, adapters, slices, widths, segments and dtypes: every pair of them, or all combinations.

`make test-kernels-full` (TENANTRY_KERNELS_FULL=1) runs the whole grid and every rank from 1 to 256.
"""

import os
import random
from itertools import combinations, product

import pytest
import torch
from kernel_world import TOLERANCE, make_world
from tenantry_kernels import GATE_UP, QKV, LoraShape, Module, SegmentBuilder, triton_lora

FULL = os.environ.get("TENANTRY_KERNELS_FULL") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RANKS = {
    "tiny": [1, 2, 3, 4, 5, 6, 7],
    "cycle": [8, 16, 8, 16, 32, 8, 16, 64],
    "odd": [9, 13, 31, 33, 63, 65],
    "high": [100, 127, 128, 129, 255, 256],
    "all": [1, 256, 17, 64, 3, 128],
}
ADAPTERS = {"1": 1, "2": 2, "9": 9, "24": 24, **({"128": 128} if FULL else {})}
SLICES = {"o": (Module.O,), "down": (Module.DOWN,), "gate_up": GATE_UP, "qkv": QKV}
WIDTHS = {
    "even": LoraShape(1, (80, 80, 80, 64, 80, 80, 144), (64, 16, 16, 80, 144, 144, 80)),
    "odd": LoraShape(1, (77, 77, 77, 39, 77, 77, 131), (39, 13, 13, 77, 131, 131, 77)),
}
BATCHES = {
    "one_token": lambda n: [(i, 1) for i in range(n)],
    "base_rows": lambda n: [
        (None, 2),
        *((None if i % 3 == 2 else i, 1 + i % 2) for i in range(n)),
        (None, 1),
    ],
    "empty": lambda n: [(i, 0 if i % 2 else 3) for i in range(n)],
    "chunks_of_32": lambda n: [(0, 150), *((i, 1) for i in range(1, n))],
    "chunks_of_128": lambda n: [(0, 900), (None, 129), *((i, 1) for i in range(1, n))],
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
# true ranks by module: all the same, or different ones with modules left out
TARGETS = {"all": lambda rank, m: rank, "some": lambda rank, m: (rank, 0, max(1, rank // 2))[m % 3]}
AXES = (RANKS, ADAPTERS, SLICES, WIDTHS, BATCHES, DTYPES, TARGETS)


def pairwise():
    """Cases in which every two values of different axes meet."""
    rng = random.Random(0)
    missing = {
        frozenset(((i, a), (j, b)))
        for i, j in combinations(range(len(AXES)), 2)
        for a, b in product(AXES[i], AXES[j])
    }
    while missing:
        case = dict(min(missing, key=sorted))
        for axis in rng.sample(range(len(AXES)), len(AXES)):
            if axis not in case:
                case[axis] = max(
                    AXES[axis], key=lambda v: sum(frozenset(((axis, v), o)) in missing for o in case.items())
                )
        missing -= {frozenset(pair) for pair in combinations(case.items(), 2)}
        yield tuple(case[axis] for axis in range(len(AXES)))


CASES = list(product(*AXES) if FULL else pairwise())
EVERY_RANK = range(1, 257) if FULL else (127,)


def check(ranks, shape, runs, modules, dtype):
    world = make_world(ranks, dtype, seed=len(runs), device=DEVICE, shape=shape)
    tokens = sum(n for _, n in runs)
    x = torch.randn(tokens, shape.in_features[modules[0]]).to(dtype).to(DEVICE)
    out = torch.randn(tokens, sum(shape.out_features[m] for m in modules)).to(dtype).to(DEVICE)
    segments = SegmentBuilder(shape, DEVICE).build(
        [(None if w is None else world.adapters[w], n) for w, n in runs]
    )
    expected = world.expected(x, out, runs, 0, modules)
    got = triton_lora.apply_lora(x, out.clone(), world.pool, segments, 0, modules)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    base = torch.cat([torch.full((n,), w is None) for w, n in runs])
    assert torch.equal(got[base.to(DEVICE)], out[base.to(DEVICE)])  # base rows keep their very bits


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_lora(case, monkeypatch) -> None:
    ranks, adapters, slices, widths, batch, dtype, targets = (
        axis[name] for axis, name in zip(AXES, case, strict=True)
    )
    monkeypatch.setattr(triton_lora, "_SPLIT_WIDTH", 40)  # the widest of these inputs are split in three
    shift = CASES.index(case)  # so that one adapter alone meets other ranks in other cases
    each = [ranks[(i + shift) % len(ranks)] for i in range(adapters)]
    tables = [lambda layer, m, rank=rank: targets(rank, m) for rank in each]
    check(tables, widths, batch(adapters), slices, dtype)


def test_128_adapters() -> None:
    ranks = [RANKS["all"][i % 6] for i in range(128)]
    check(ranks, WIDTHS["odd"], [(i, 1) for i in range(128)], SLICES["o"], torch.float32)


@pytest.mark.parametrize("rank", EVERY_RANK)
def test_every_rank(rank) -> None:
    for modules in SLICES.values():
        check([rank], WIDTHS["odd"], [(0, 2), (None, 1)], modules, torch.float32)
