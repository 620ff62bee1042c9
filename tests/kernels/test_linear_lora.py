"""A base layer with its rows' adapters in one pass: against dense float64 sums, and the same bits in any crowd."""

import random

import pytest
import torch
from kernel_world import LAYERS, LORA, TOLERANCE, make_world
from tenantry_kernels import GATE_UP, QKV, LoraShape, Module, SegmentBuilder, linear, linear_lora, pack_linear

GROUPS = (QKV, (Module.O,), GATE_UP, (Module.DOWN,))
CALLS = pytest.mark.parametrize("modules", GROUPS, ids=["qkv", "o", "gate_up", "down"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

# widths that no vector divides: modules begin and end in the middle of a panel
ODD = LoraShape(LAYERS, in_features=(39, 39, 39, 53, 39, 39, 71), out_features=(53, 21, 11, 39, 71, 71, 39))


def layer_of(modules, dtype, shape=LORA, bias=False, seed=2):
    torch.manual_seed(seed)
    width = shape.in_features[modules[0]]
    out = sum(shape.out_features[m] for m in modules)
    weight = (torch.randn(out, width) * width**-0.5).to(dtype)
    return weight, torch.randn(out).to(dtype) if bias else None


def check(world, runs, modules, dtype, *, bias=False, layer=1):
    weight, offset = layer_of(modules, dtype, world.shape, bias)
    tokens = sum(n for _, n in runs)
    x = torch.randn(tokens, world.shape.in_features[modules[0]]).to(dtype)
    base = x.double() @ weight.double().t()
    if offset is not None:
        base += offset.double()
    expected = world.expected(x, base, runs, layer, modules)
    built = SegmentBuilder(world.shape).build(
        [(None if w is None else world.adapters[w], n) for w, n in runs]
    )
    packed = pack_linear(weight, offset)
    got = linear_lora(x, packed, world.pool, built, layer, modules)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return x, packed, got


MANY = [(None, 2), (0, 1), (1, 4), (2, 1), (None, 1), (3, 20), (4, 1), (5, 0), (6, 3), (7, 2), (None, 3)]


@CALLS
@DTYPES
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_many_adapters_and_base_rows(modules, dtype, bias) -> None:
    world = make_world([8, 16, 3, 1, 32, 8, 5, 64], dtype)
    x, packed, got = check(world, MANY, modules, dtype, bias=bias)
    base = [0, 1, 8, *range(x.shape[0] - 3, x.shape[0])]
    assert torch.equal(got[base], linear(x, packed)[base])  # the very bits of the base model


@CALLS
@DTYPES
def test_modules_that_begin_within_a_panel(modules, dtype) -> None:
    check(make_world([8, 16, 3, 1, 32, 8, 5, 64], dtype, shape=ODD), MANY, modules, dtype)


@CALLS
@DTYPES
def test_rank_by_layer_and_module(modules, dtype) -> None:
    partial = make_world([lambda layer, m: 0 if m % 2 else 4, lambda layer, m: 1 + layer * 5 + m, 8], dtype)
    for layer in range(LAYERS):
        check(partial, [(0, 3), (1, 2), (2, 4), (None, 1)], modules, dtype, layer=layer)


@DTYPES
def test_long_prompts(dtype) -> None:
    check(make_world([8, 16], dtype), [(None, 40), (0, 150), (1, 70)], QKV, dtype)


@CALLS
@DTYPES
def test_same_bits_alone_and_in_any_crowd(modules, dtype) -> None:
    world = make_world([8, 16, 3, 1, 32, 5, 64, 7], dtype)
    rng = random.Random(3)
    builder = SegmentBuilder(LORA)
    packed = pack_linear(layer_of(modules, dtype)[0])
    torch.manual_seed(1)
    x = torch.randn(40, LORA.in_features[modules[0]]).to(dtype)
    owner = [rng.choice([None, *range(8)]) for _ in range(40)]
    adapters = [None if w is None else world.adapters[w] for w in owner]
    alone = torch.cat(
        [
            linear_lora(x[i : i + 1], packed, world.pool, builder.build([(a, 1)]), 1, modules)
            for i, a in enumerate(adapters)
        ]
    )
    for _ in range(4):
        some = rng.sample(range(40), rng.randint(2, 40))
        some.sort(key=lambda i: (-1 if owner[i] is None else owner[i], rng.random()))
        segments = builder.build([(adapters[i], 1) for i in some])
        assert torch.equal(linear_lora(x[some], packed, world.pool, segments, 1, modules), alone[some])


@DTYPES
def test_reference_agrees(dtype, reference_only) -> None:
    world = make_world([8, 3], dtype)
    for modules in GROUPS:
        check(world, [(None, 1), (0, 3), (1, 2)], modules, dtype)


def test_batch_of_the_wrong_size_is_refused() -> None:
    world = make_world([8], torch.float32)
    segments = SegmentBuilder(LORA).build([(world.adapters[0], 3)])
    packed = pack_linear(layer_of(QKV, torch.float32)[0])
    with pytest.raises(ValueError, match="must have the step's 3 rows, not 2"):
        linear_lora(torch.zeros(2, 96), packed, world.pool, segments, 0, QKV)


def test_a_weight_of_other_modules_is_refused() -> None:
    world = make_world([8], torch.float32)
    segments = SegmentBuilder(LORA).build([(world.adapters[0], 3)])
    packed = pack_linear(layer_of((Module.O,), torch.float32)[0])
    with pytest.raises(RuntimeError, match="`out` must have 160 columns for these modules, not 96"):
        linear_lora(torch.zeros(3, 96), packed, world.pool, segments, 0, QKV)
