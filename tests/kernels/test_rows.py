"""Kernels that take one token at a time, and linear layers: against torch, and the same bits in any batch."""

import pytest
import torch
from kernel_world import HEAD_DIM, HEADS, KV, KV_HEADS, TOLERANCE
from tenantry_kernels import (
    linear,
    pack_linear,
    qk_norm,
    rms_norm,
    rope_and_kv_write,
    rope_table,
    silu_and_mul,
)
from tenantry_kernels.activation import reference as silu_reference
from tenantry_kernels.norm_rope import qk_norm_reference, rms_norm_reference, rope_and_kv_write_reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])


@DTYPES
@pytest.mark.parametrize("width", [96, 100, 576, 7])
def test_rms_norm(dtype, width) -> None:
    torch.manual_seed(0)
    x, weight, residual = (
        torch.randn(9, width).to(dtype),
        torch.randn(width).to(dtype),
        torch.randn(9, width).to(dtype),
    )
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    kept, expected = residual.clone(), residual.clone()
    got = rms_norm(x, weight, 1e-5, kept)
    close(got, rms_norm_reference(x, weight, 1e-5, expected))
    assert torch.equal(kept, expected)
    assert torch.equal(rms_norm(x[4:5], weight, 1e-5, residual[4:5].clone()), got[4:5])


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 16), (4, 4, 64), (3, 1, 20), (8, 2, 128)])
def test_qk_norm(dtype, heads, kv_heads, head_dim) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(7, (heads + 2 * kv_heads) * head_dim).to(dtype)
    weights = torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)
    mine, theirs, one = qkv.clone(), qkv.clone(), qkv[3:4].clone()
    qk_norm(mine, *weights, 1e-6, heads, kv_heads, head_dim)
    qk_norm_reference(theirs, *weights, 1e-6, heads, kv_heads, head_dim)
    close(mine, theirs)
    # one head by hand, in float64
    k = qkv[:, heads * head_dim : (heads + 1) * head_dim].double()
    want = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[1].double()
    close(mine[:, heads * head_dim : (heads + 1) * head_dim], want.to(dtype))
    v = slice((heads + kv_heads) * head_dim, None)
    assert torch.equal(mine[:, v], qkv[:, v])  # V keeps its very bits
    qk_norm(one, *weights, 1e-6, heads, kv_heads, head_dim)
    assert torch.equal(one, mine[3:4])


def test_qk_norm_names_what_does_not_fit() -> None:
    qkv, weight = torch.randn(2, 10 * 16), torch.randn(16)
    with pytest.raises(ValueError, match="`qkv` must be contiguous"):
        qk_norm(qkv[:, :-1], weight, weight, 1e-6, 6, 2, 16)
    with pytest.raises(ValueError, match="`k_weight` must be"):
        qk_norm(qkv, weight, weight[:8], 1e-6, 6, 2, 16)


@DTYPES
@pytest.mark.parametrize("width", [96, 100, 3])
def test_silu_and_mul(dtype, width) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 2 * width) * 20).to(dtype)
    close(silu_and_mul(x), silu_reference(x))
    assert torch.equal(silu_and_mul(x[3:4].contiguous()), silu_and_mul(x)[3:4])


@DTYPES
def test_rope_rotates_and_writes_where_the_slot_says(dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, WIDTH).to(dtype)
    positions, slots = torch.tensor([0, 7, 300, 1, 2]), torch.tensor([16, 31, 47, -1, 0])
    table = rope_table(HEAD_DIM, 512, 10000.0)
    pools = [torch.full((4, KV.page_elems), float("nan"), dtype=dtype) for _ in range(2)]
    mine, theirs = qkv.clone(), qkv.clone()
    q = rope_and_kv_write(mine, positions, table, KV.view(pools[0]), 1, slots, HEADS)
    expected = rope_and_kv_write_reference(theirs, positions, table, KV.view(pools[1]), 1, slots, HEADS)
    close(q, expected)
    assert q.data_ptr() == mine.data_ptr()
    close(mine, theirs)
    assert torch.equal(torch.isnan(pools[0]), torch.isnan(pools[1]))  # nothing else was written
    close(pools[0].nan_to_num(), pools[1].nan_to_num())


def test_rope_table_equals_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rules = {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    for rule in rules.values():
        config = LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            max_position_embeddings=512,
            rope_parameters={**rule, "rope_theta": 50000.0},
        )
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
        table = rope_table(64, 512, 50000.0, rule)
        torch.testing.assert_close(table[:, 0], cos[0, :, :32], atol=1e-5, rtol=0)
        torch.testing.assert_close(table[:, 1], sin[0, :, :32], atol=1e-5, rtol=0)


def test_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`rope_scaling.rope_type` must be one of"):
        rope_table(64, 16, 10000.0, {"rope_type": "yarn"})
    with pytest.raises(ValueError, match=r"`rope_scaling.factor` must be a number"):
        rope_table(64, 16, 10000.0, {"rope_type": "linear"})


@DTYPES
@pytest.mark.parametrize(("out", "width"), [(96, 96), (100, 50), (1, 7), (257, 130)])
def test_linear(dtype, out, width) -> None:
    torch.manual_seed(0)
    weight, bias, x = (
        torch.randn(out, width).to(dtype),
        torch.randn(out).to(dtype),
        torch.randn(101, width).to(dtype),
    )
    packed = pack_linear(weight, bias)
    expected = x.double() @ weight.double().t() + bias.double()
    got = linear(x, packed, torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)
    rows = linear(x, packed)
    assert torch.equal(rows, got.to(dtype))
    for count in (1, 2, 3, 4, 5, 7, 13, 97):  # the same bits in a batch of any size
        assert torch.equal(linear(x[2 : 2 + count], packed), rows[2 : 2 + count])


def test_linear_without_the_extension(reference_only) -> None:
    weight, x = torch.randn(48, 96), torch.randn(40, 96)
    packed = pack_linear(weight)
    rows = linear(x, packed)
    torch.testing.assert_close(rows, x @ weight.t())
    assert linear(x[:1], packed).shape == (1, 48)


def test_nan_stays_nan_in_bf16() -> None:
    x = torch.full((1, 96), float("nan"), dtype=torch.bfloat16)
    assert torch.isnan(silu_and_mul(x)).all()
