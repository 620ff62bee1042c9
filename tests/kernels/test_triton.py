"""Triton's kernels against the references: natively on a GPU, else by Triton's interpreter on the CPU.

bf16 counts on a GPU only (the interpreter's bf16 dot is wrong); fp32 and fp16 run everywhere, over pairs of cases.
"""

import pytest
import torch
from kernel_world import HEAD_DIM, HEADS, KV, KV_HEADS, LORA, TOLERANCE, make_world
from tenantry_kernels import (
    QKV,
    KvShape,
    Module,
    SegmentBuilder,
    rope_table,
    triton_attention,
    triton_lora,
    triton_norm_rope,
    triton_sample,
)
from tenantry_kernels import activation as activation_module
from tenantry_kernels import attention as attention_module
from tenantry_kernels import norm_rope as norm_module
from tenantry_kernels import sample as sample_function
from tenantry_kernels.kv_write import reference as kv_write_reference
from test_attention import LENGTHS, MIXED, SCALE, Sequences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])], ids=str
)


def lora_equal(world, runs, modules, dtype, layer=1):
    torch.manual_seed(1)
    tokens = sum(n for _, n in runs)
    x = torch.randn(tokens, LORA.in_features[modules[0]]).to(dtype).to(DEVICE)
    out = torch.randn(tokens, sum(LORA.out_features[m] for m in modules)).to(dtype).to(DEVICE)
    segments = SegmentBuilder(LORA, DEVICE).build(
        [(None if w is None else world.adapters[w], n) for w, n in runs]
    )
    expected = world.expected(x, out, runs, layer, modules)
    got = triton_lora.apply_lora(x, out.clone(), world.pool, segments, layer, modules)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    row = 0
    for which, count in runs:
        if which is None:
            assert torch.equal(got[row : row + count], out[row : row + count])
        row += count


@DTYPES
def test_lora_partial_modules_and_many_adapters(dtype) -> None:
    world = make_world([lambda layer, m: 0 if m % 2 else 4, *([2] * 15)], dtype, device=DEVICE)
    lora_equal(world, [(i, 1) for i in range(16)], QKV, dtype)


def test_lora_split_over_the_input(monkeypatch) -> None:
    """A wide input is split over programs; the partials add up (the small model's inputs are not wide enough)."""
    world = make_world([8, 3], torch.float32, device=DEVICE)
    monkeypatch.setattr(triton_lora, "_SPLIT_WIDTH", 48)
    lora_equal(world, [(0, 3), (None, 1), (1, 2)], (Module.DOWN,), torch.float32)


def test_lora_refuses_modules_that_do_not_follow_one_another() -> None:
    world = make_world([2], torch.float32, device=DEVICE)
    with pytest.raises(ValueError, match="`modules` must be"):
        lora_equal(world, [(0, 1)], (Module.Q, Module.V), torch.float32)


@DTYPES
def test_attention_mixed_batch(dtype, monkeypatch) -> None:
    s = Sequences(LENGTHS, dtype, device=DEVICE)
    monkeypatch.setattr(attention_module.backend, "of", lambda tensor: "triton")
    got = s.run(MIXED)
    torch.testing.assert_close(got.double(), s.expected(MIXED), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_attention_decode_and_sequences_without_rows(monkeypatch) -> None:
    s = Sequences([19, 5, 33], torch.float32, device=DEVICE)
    monkeypatch.setattr(attention_module.backend, "of", lambda tensor: "triton")
    for spans in ([(18, 19), (4, 5), (32, 33)], [(18, 19), (3, 3), (32, 33)], [(0, 0), (0, 5), (0, 0)]):
        torch.testing.assert_close(s.run(spans).double(), s.expected(spans), atol=2e-5, rtol=2e-5)


@DTYPES
def test_attention_splits_long_decodes(dtype, monkeypatch) -> None:
    """Decodes beside a prefill chunk, split at 64 keys and at more where there would be too many parts."""
    lengths = [64, 65, 580, 128]
    s = Sequences(lengths, dtype, KvShape(2, 1, 24), 3, device=DEVICE)
    monkeypatch.setattr(attention_module.backend, "of", lambda tensor: "triton")
    whole = s.run([(0, 0), (0, 0), (579, 580), (0, 0)])  # below 512 * 2 keys: two parts
    monkeypatch.setattr(triton_attention, "_SPLIT_KEYS", 64)
    monkeypatch.setattr(triton_attention, "_MOST_SPLITS", 4)
    spans = [(63, 64), (64, 65), (579, 580), (110, 128)]
    got, expected = s.run(spans), s.expected(spans)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(whole.double(), expected[2:3], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    # the very bits with fewer neighbours: where a sequence is split does not depend on them. (A step of decodes alone
    # has tiles of fewer rows, for which the product that interprets it may add in another order.)
    assert torch.equal(s.run([(0, 0), (0, 0), (579, 580), (110, 128)])[0], got[2])
    decodes = s.run([(63, 64), (64, 65), (579, 580), (127, 128)])
    assert torch.equal(s.run([(0, 0), (0, 0), (579, 580), (0, 0)])[0], decodes[2])


def test_nan_behind_the_context_does_no_harm(monkeypatch) -> None:
    s = Sequences([19, 5], torch.float32, device=DEVICE)
    monkeypatch.setattr(attention_module.backend, "of", lambda tensor: "triton")
    assert torch.isfinite(s.run([(18, 19), (0, 5)])).all()
    assert SCALE == HEAD_DIM**-0.5


@DTYPES
def test_rows(dtype) -> None:
    torch.manual_seed(0)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    x, weight, residual = (torch.randn(*size).to(dtype).to(DEVICE) for size in ((3, 100), (100,), (3, 100)))
    torch.testing.assert_close(
        triton_norm_rope.rms_norm(x, weight, 1e-5, None),
        norm_module.rms_norm_reference(x, weight, 1e-5),
        **tolerance,
    )
    mine, theirs = residual.clone(), residual.clone()
    got = triton_norm_rope.rms_norm(x, weight, 1e-5, mine)
    torch.testing.assert_close(got, norm_module.rms_norm_reference(x, weight, 1e-5, theirs), **tolerance)
    assert torch.equal(mine, theirs)
    k, v = (torch.randn(4, 3 * KV_HEADS, HEAD_DIM).to(dtype).to(DEVICE) for _ in range(2))
    slots = torch.tensor([16, -1, 31, 47], device=DEVICE)
    pools = [torch.full((4, KV.page_elems), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
    for write, pool in zip((triton_norm_rope.kv_write, kv_write_reference), pools, strict=True):
        write(k[:, KV_HEADS:-KV_HEADS], v[:, :KV_HEADS], KV.view(pool), 1, slots)
    assert torch.equal(pools[0].nan_to_num(7.0), pools[1].nan_to_num(7.0))
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * 20).to(dtype).to(DEVICE)
    gains = [torch.randn(20).to(dtype).to(DEVICE) for _ in range(2)]
    mine, theirs = qkv.clone(), qkv.clone()
    triton_norm_rope.qk_norm(mine, *gains, 1e-6, HEADS, KV_HEADS, 20)
    norm_module.qk_norm_reference(theirs, *gains, 1e-6, HEADS, KV_HEADS, 20)
    torch.testing.assert_close(mine, theirs, **tolerance)
    gate_up = torch.randn(3, 300).to(dtype).to(DEVICE)
    torch.testing.assert_close(
        triton_norm_rope.silu_and_mul(gate_up), activation_module.reference(gate_up), **tolerance
    )
    qkv = torch.randn(4, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype).to(DEVICE)
    positions, slots = (
        torch.tensor([0, 7, 300, 1], device=DEVICE),
        torch.tensor([16, 31, 47, -1], device=DEVICE),
    )
    table = rope_table(HEAD_DIM, 512, 10000.0, device=DEVICE)
    pools = [torch.full((4, KV.page_elems), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
    mine, theirs = qkv.clone(), qkv.clone()
    q = triton_norm_rope.rope_and_kv_write(mine, positions, table, KV.view(pools[0]), 1, slots, HEADS)
    expected = norm_module.rope_and_kv_write_reference(
        theirs, positions, table, KV.view(pools[1]), 1, slots, HEADS
    )
    torch.testing.assert_close(q, expected, **tolerance)
    torch.testing.assert_close(mine, theirs, **tolerance)
    torch.testing.assert_close(pools[0], pools[1], equal_nan=True, **tolerance)


def test_sampling_draws_what_the_reference_draws() -> None:
    """Every filter alone and together, with equal logits, forbidden tokens and greedy rows."""
    torch.manual_seed(0)
    logits = torch.randn(9, 300) * 3
    logits[::2] = logits[::2].round()  # many equal ones
    logits[2:5, 100:250] = float("-inf")
    logits[5] = -logits[5].abs()
    logits[5, :2] = torch.tensor([-0.0, 0.0])  # one value with two bit patterns
    logits[7, :4], logits[7, 4:] = 1.0, float("-inf")  # top-p keeps two of four equal ones
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.0, 1.0, 0.5, 1.0, 1.0, 1.5])
    top_k = torch.tensor([0, 0, 3, 150, 300, 2, 0, 900, 7])
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.0, 0.99, 1.0, 0.5, 0.5, 0.8])
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.02, 0.0, 0.3, 1.0, 0.0])
    call = (logits, temperature, top_k, top_p, min_p, torch.arange(9) * 79 - 5, torch.arange(9) % 3)
    got = triton_sample.sample(*(tensor.to(DEVICE) for tensor in call))
    assert torch.equal(got.cpu(), sample_function(*call))
