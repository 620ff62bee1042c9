"""LoRA of mixed batches: every backend against dense float64 PEFT arithmetic, and the same bits in any crowd."""

import random

import pytest
import torch
from kernel_world import LORA, TOLERANCE, make_world
from tenantry_kernels import GATE_UP, QKV, Module, SegmentBuilder, apply_lora

GROUPS = (QKV, (Module.O,), GATE_UP, (Module.DOWN,))
CALLS = pytest.mark.parametrize("modules", GROUPS, ids=["qkv", "o", "gate_up", "down"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def inputs(modules, tokens, dtype, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(tokens, LORA.in_features[modules[0]]).to(dtype)
    out = torch.randn(tokens, sum(LORA.out_features[m] for m in modules)).to(dtype)
    return x, out


def check(world, runs, modules, dtype, layer=1):
    x, out = inputs(modules, sum(n for _, n in runs), dtype)
    segments = SegmentBuilder(LORA).build([(None if w is None else world.adapters[w], n) for w, n in runs])
    expected = world.expected(x, out, runs, layer, modules)
    got = apply_lora(x, out.clone(), world.pool, segments, layer, modules)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return x, out, got


@CALLS
@DTYPES
@pytest.mark.parametrize("rank", [1, 2, 3, 7, 8, 13, 16, 32, 33, 64])
def test_every_rank(modules, dtype, rank) -> None:
    check(make_world([rank], dtype), [(0, 5)], modules, dtype)


@CALLS
@DTYPES
def test_many_adapters_base_rows_and_one_token_segments(modules, dtype) -> None:
    world = make_world([8, 16, 3, 1, 32, 8, 5, 64], dtype)
    runs = [(None, 2), (0, 1), (1, 4), (2, 1), (None, 1), (3, 20), (4, 1), (5, 0), (6, 3), (7, 2), (None, 3)]
    x, out, got = check(world, runs, modules, dtype)
    base = [0, 1, 8, *range(x.shape[0] - 3, x.shape[0])]
    assert torch.equal(got[base], out[base])  # the very bits: base rows are not touched


@CALLS
@DTYPES
def test_rank_by_layer_and_module(modules, dtype) -> None:
    partial = make_world([lambda layer, m: 0 if m % 2 else 4, lambda layer, m: 1 + layer * 5 + m, 8], dtype)
    check(partial, [(0, 3), (1, 2), (2, 4), (None, 1)], modules, dtype, layer=0)
    _, out, got = check(partial, [(0, 3), (1, 2), (2, 4), (None, 1)], modules, dtype, layer=1)
    column = 0
    for m in modules:  # a module that is not targeted keeps its very bits
        if m % 2:
            width = LORA.out_features[m]
            assert torch.equal(got[:3, column : column + width], out[:3, column : column + width])
        column += LORA.out_features[m]


@CALLS
@DTYPES
def test_same_bits_alone_and_in_any_crowd(modules, dtype) -> None:
    world = make_world([8, 16, 3, 1, 32, 5, 64, 7], dtype)
    rng = random.Random(3)
    builder = SegmentBuilder(LORA)
    x, out = inputs(modules, 40, dtype)
    owner = [rng.choice([None, *range(8)]) for _ in range(40)]
    adapters = [None if w is None else world.adapters[w] for w in owner]
    alone = torch.cat(
        [
            apply_lora(x[i : i + 1], out[i : i + 1].clone(), world.pool, builder.build([(a, 1)]), 1, modules)
            for i, a in enumerate(adapters)
        ]
    )
    for _ in range(4):
        some = rng.sample(range(40), rng.randint(2, 40))
        some.sort(key=lambda i: (-1 if owner[i] is None else owner[i], rng.random()))
        segments = builder.build([(adapters[i], 1) for i in some])
        mixed = apply_lora(x[some], out[some].clone(), world.pool, segments, 1, modules)
        assert torch.equal(mixed, alone[some])


@DTYPES
def test_reference_agrees(dtype, reference_only) -> None:
    world = make_world([8, 3], dtype)
    for modules in GROUPS:
        check(world, [(None, 1), (0, 3), (1, 2)], modules, dtype)


def test_batch_of_the_wrong_size_is_refused() -> None:
    world = make_world([8], torch.float32)
    x, out = inputs(QKV, 4, torch.float32)
    with pytest.raises(ValueError, match="must have the step's 3 rows"):
        apply_lora(x, out, world.pool, SegmentBuilder(LORA).build([(world.adapters[0], 3)]), 0, QKV)
    segments = SegmentBuilder(LORA).build([(world.adapters[0], 4)])
    with pytest.raises(RuntimeError, match="`out` must have"):
        apply_lora(x, out[:, :8], world.pool, segments, 0, QKV)


def test_groups_that_begin_with_one_module_are_kept_apart() -> None:
    world = make_world([8, 3], torch.float32)
    segments = SegmentBuilder(LORA).build([(world.adapters[0], 2), (world.adapters[1], 1)])
    for modules in (QKV, (Module.Q,), QKV):
        x, out = inputs(modules, 3, torch.float32)
        fresh = SegmentBuilder(LORA).build([(world.adapters[0], 2), (world.adapters[1], 1)])
        expected = apply_lora(x, out.clone(), world.pool, fresh, 0, modules)
        assert torch.equal(apply_lora(x, out.clone(), world.pool, segments, 0, modules), expected)


def test_the_same_rows_need_no_new_tables() -> None:
    world = make_world([8, 3], torch.float32)
    builder = SegmentBuilder(LORA)
    runs = [(world.adapters[0], 2), (None, 1)]
    first = builder.build(runs)
    assert builder.build(list(runs)) is first
    assert builder.build([(world.adapters[0], 3)]).tokens == 3
    assert builder.build([(world.adapters[1], 2), (None, 1)]) is not first
