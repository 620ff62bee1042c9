"""Every rank from 1 to 96 in one batch beside base rows: no rank has a path that only it takes."""

from __future__ import annotations

import pytest
import torch
from kernel_world import TOLERANCE, make_world
from tenantry_kernels import (
    GATE_UP,
    QKV,
    LoraShape,
    Module,
    SegmentBuilder,
    apply_lora,
    linear_lora,
    pack_linear,
)

# widths that no vector divides
SHAPE = LoraShape(1, (40, 40, 40, 56, 40, 40, 72), (56, 20, 12, 40, 72, 72, 40))
RANKS = range(1, 97)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_rank_at_once(dtype: torch.dtype) -> None:
    world = make_world(list(RANKS), dtype, shape=SHAPE)
    runs = [(None, 1), *((index, 1 + index % 2) for index in range(len(RANKS))), (None, 1)]
    segments = SegmentBuilder(SHAPE).build([(None if w is None else world.adapters[w], n) for w, n in runs])
    tokens = segments.tokens
    torch.manual_seed(1)
    for modules in (QKV, (Module.O,), GATE_UP, (Module.DOWN,)):
        width, columns = SHAPE.in_features[modules[0]], sum(SHAPE.out_features[m] for m in modules)
        x, out = torch.randn(tokens, width).to(dtype), torch.randn(tokens, columns).to(dtype)
        weight = (torch.randn(columns, width) * width**-0.5).to(dtype)
        upon = apply_lora(x, out.clone(), world.pool, segments, 0, modules)
        fused = linear_lora(x, pack_linear(weight), world.pool, segments, 0, modules)
        for got, base in ((upon, out.double()), (fused, x.double() @ weight.double().t())):
            expected = world.expected(x, base, runs, 0, modules)
            torch.testing.assert_close(
                got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype],
                msg=lambda text, modules=modules: f"{modules}: {text}",
            )  # fmt: skip
        assert torch.equal(upon[[0, -1]], out[[0, -1]])
