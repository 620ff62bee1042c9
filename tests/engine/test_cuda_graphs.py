"""Which decode steps are replayed, and that padding to a recorded size changes nothing but the padding.

The recorder is the only part that needs a GPU; here another stands in, which runs the function again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import engine_world as world
import pytest
import torch
from tenantry_engine.batch import build
from tenantry_engine.cuda_graphs import BUCKETS, DecodeGraphs, Key, choose
from tenantry_engine.loader import Weights
from tenantry_engine.models import load_model
from tenantry_engine.rows import Rows
from tenantry_kernels import PagedAdapter, SegmentBuilder, layout, place, write_adapter
from torch import Tensor

PAGES = 40
LENGTHS = (5, 16, 33)  # tokens of the three sequences before the step


def step(names: list[str | None], lengths: tuple[int, ...] = LENGTHS) -> Rows:
    """One decode row for each; sequence i has pages 3 * i to 3 * i + 2, and token 10 + i."""
    return Rows(
        tokens=[10 + i for i in range(len(lengths))],
        positions=list(lengths),
        slots=[(3 * i + at // 16) * 16 + at % 16 for i, at in enumerate(lengths)],
        tables=[[3 * i, 3 * i + 1, 3 * i + 2] for i in range(len(lengths))],
        starts=list(range(len(lengths) + 1)),
        lengths=[at + 1 for at in lengths],
        runs=[(name, 1) for name in names],
        sampled=list(range(len(lengths))),
        scored=[],
    )


class World:
    """The tiny model, a pool of random numbers, and two adapters in it."""

    def __init__(self, tiny: world.TinyModel) -> None:
        with Weights(tiny.folder, torch.float32) as weights:
            self.model = load_model(weights)
        self.model.prepare(64)
        shape, elems = self.model.lora_shape, self.model.kv_shape.page_elems
        self.pool = torch.randn(PAGES, elems, generator=torch.Generator().manual_seed(1))
        self.adapters: dict[str, PagedAdapter] = {}
        page = 12
        for name, rank in (("a", 8), ("b", 3)):
            plan = layout(shape, [[rank] * 7] * 2, elems)
            paged = place(plan, range(page, page + plan.pages), [[0.5] * 7] * 2)
            page += plan.pages
            for layer in range(2):
                for module in range(7):
                    a = torch.randn(rank, shape.in_features[module])
                    write_adapter(
                        self.pool, paged, layer, module, a, torch.randn(shape.out_features[module], rank)
                    )
            self.adapters[name] = paged
        assert page <= PAGES
        self.builder = SegmentBuilder(shape)
        self.recorded = 0

    def run(self, rows: Rows, graphs: DecodeGraphs | None = None, pool: Tensor | None = None) -> Tensor:
        """Hidden states, by `graphs` or directly; `pool` is written to."""
        self.now = self.pool.clone() if pool is None else pool
        batch = build(rows, self.adapters.__getitem__, self.builder, "cpu")
        with torch.inference_mode():
            return self.forward(batch) if graphs is None else graphs.run(rows, batch)

    def forward(self, batch: object) -> Tensor:
        return self.model.forward(batch, self.now, self.model.kv_shape.view(self.now))  # type: ignore[arg-type]

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        return function

    def graphs(self, recorder: object = None) -> DecodeGraphs:
        return DecodeGraphs(
            self.forward,
            recorder or self.record,
            self.model.lora_shape,
            max_pages=4,
            max_rank=8,  # type: ignore[arg-type]
        )


@pytest.fixture
def tiny_world(tiny: world.TinyModel) -> World:
    torch.manual_seed(2)
    return World(tiny)


@pytest.mark.parametrize(
    "names", [[None, None, None], [None, "a", "b"], ["a", "a", "b"], ["b", "b", "b"]], ids=str
)
def test_padding_changes_nothing(tiny_world: World, names: list[str | None]) -> None:
    """Bit for bit the same hidden states and the same pool, also after other steps went through the same buffers."""
    rows = step(names)
    direct, pool = tiny_world.run(rows), tiny_world.now
    graphs = tiny_world.graphs()
    for before in ([None] * 4, ["a", "a", "b", "b"], ["a", None, "b"]):
        tiny_world.run(step(before, (40, 41, 3, 2)[: len(before)]), graphs)
    replayed = tiny_world.run(rows, graphs)
    assert torch.equal(replayed, direct)
    assert torch.equal(tiny_world.now, pool)


def test_one_recording_per_size_and_lora(tiny_world: World) -> None:
    graphs = tiny_world.graphs()
    for names in ([None] * 3, ["a", None, None], [None] * 4, ["a", "b", "b"], [None] * 2):
        tiny_world.run(step(names, (5, 6, 7, 8)[: len(names)]), graphs)
    assert tiny_world.recorded == 3  # sizes 4 and 2 without adapters, size 4 with them


@pytest.mark.parametrize("count", [1, 2, 3, 9, 17, 100, 128])
def test_the_next_size_serves(tiny_world: World, count: int) -> None:
    builder = tiny_world.builder
    rows = step([None] * count, (1,) * count)
    key = choose(rows, builder.build([(None, count)]))
    assert isinstance(key, Key)
    assert key.size >= count
    assert all(size < count for size in BUCKETS if size < key.size)
    assert not key.lora
    assert choose(rows, builder.build([(tiny_world.adapters["a"], count)])) == Key(key.size, True)


def test_reasons(tiny_world: World) -> None:
    builder = tiny_world.builder
    many = step([None] * 129, (1,) * 129)
    assert "128 sequences" in str(choose(many, builder.build([(None, 129)])))
    prompt = Rows([1, 2], [0, 1], [0, 1], [[0]], [0, 2], [2], [(None, 2)], [1], [])
    assert "prompts" in str(choose(prompt, builder.build([(None, 2)])))
    chunk = Rows([1], [0], [0], [[0]], [0, 1], [1], [(None, 1)], [], [])
    assert "prompts" in str(choose(chunk, builder.build([(None, 1)])))


def test_a_failed_recording_falls_back_and_says_so_once(
    tiny_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("out of memory")

    rows = step(["a", "b", None])
    direct = tiny_world.run(rows)
    graphs = tiny_world.graphs(fail)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert torch.equal(tiny_world.run(rows, graphs), direct)
    assert caplog.text.count("out of memory") == 1
