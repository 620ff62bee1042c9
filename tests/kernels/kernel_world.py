"""A small model's shapes and random adapters in a real pool, with their dense weights as oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tenantry_kernels import KvShape, LoraShape, Module, PagedAdapter, layout, place, write_adapter
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, LAYERS = 6, 2, 16, 96, 144, 2
KV = KvShape(LAYERS, KV_HEADS, HEAD_DIM)
Q_WIDTH, KV_WIDTH = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
LORA = LoraShape(
    LAYERS,
    in_features=(HIDDEN, HIDDEN, HIDDEN, Q_WIDTH, HIDDEN, HIDDEN, FFN),
    out_features=(Q_WIDTH, KV_WIDTH, KV_WIDTH, HIDDEN, FFN, FFN, HIDDEN),
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass
class World:
    """A pool full of NaN (stale pages) with adapters in scattered pages, and their dense weights to compare with."""

    pool: Tensor
    adapters: list[PagedAdapter]
    dense: list[dict[tuple[int, int], tuple[Tensor, Tensor, float]]]  # (layer, module) -> A, B, scale
    shape: LoraShape = LORA

    @property
    def kv(self) -> Tensor:
        return KV.view(self.pool)

    def expected(
        self, x: Tensor, out: Tensor, runs: list[tuple[int | None, int]], layer: int, modules: Sequence[int]
    ) -> Tensor:
        """PEFT's formula on dense float64 weights: the oracle of every apply_lora."""
        result, row = out.double(), 0
        for which, count in runs:
            column = 0
            for module in modules:
                width = self.shape.out_features[module]
                if which is not None and (layer, module) in self.dense[which]:
                    a, b, scale = self.dense[which][layer, module]
                    wide = x[row : row + count].double()
                    result[row : row + count, column : column + width] += scale * (
                        wide @ a.double().t() @ b.double().t()
                    )
                column += width
            row += count
        return result


def make_world(
    ranks: Sequence[int | Callable[[int, int], int]],
    dtype: torch.dtype,
    seed: int = 0,
    spare: int = 24,
    device: str = "cpu",
    shape: LoraShape = LORA,
) -> World:
    """ranks: one entry per adapter, a number for all modules or a function (layer, module) -> rank."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plans = []
    for rank in ranks:
        table = [
            [rank(layer, m) if callable(rank) else rank for m in Module] for layer in range(shape.layers)
        ]
        plans.append(layout(shape, table, KV.page_elems))
    total = sum(plan.pages for plan in plans) + spare
    pool = torch.full((total, KV.page_elems), float("nan"), dtype=dtype, device=device)
    free = list(range(spare, total))
    rng.shuffle(free)
    adapters, dense = [], []
    for plan in plans:
        pages, free = free[: plan.pages], free[plan.pages :]
        scales = [[rng.choice([0.5, 1.0, 2.0]) for _ in Module] for _ in range(shape.layers)]
        adapter = place(plan, pages, scales)
        weights: dict[tuple[int, int], tuple[Tensor, Tensor, float]] = {}
        for layer in range(shape.layers):
            for m in Module:
                r = int(plan.ranks[layer, m])
                if r == 0:
                    continue
                a = (torch.randn(r, shape.in_features[m]) * shape.in_features[m] ** -0.5).to(dtype).to(device)
                b = (torch.randn(shape.out_features[m], r) * r**-0.5).to(dtype).to(device)
                write_adapter(pool, adapter, layer, m, a, b)
                weights[layer, m] = a, b, scales[layer][m]
        adapters.append(adapter)
        dense.append(weights)
    return World(pool, adapters, dense, shape)
