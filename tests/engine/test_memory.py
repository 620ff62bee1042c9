"""What a step works with is known before pages are given away: buffers of LoRA too, and however long a prompt is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import engine_world as world
import pytest
import torch
from tenantry_engine import memory
from tenantry_engine.config import EngineConfig, LoraConfig
from tenantry_engine.executor import Executor
from tenantry_engine.loader import Weights
from tenantry_engine.memory import step_bytes
from tenantry_engine.models import load_model
from tenantry_engine.replica import Replica
from tenantry_engine.rows import Rows
from tenantry_kernels import PAGE_TOKENS, PagedAdapter, layout, place, write_adapter

STEP, RANK, LONG = 256, 64, 9000


@dataclass
class Steps:
    """A tiny model with room for one long sequence, and an adapter of great rank on all of it."""

    executor: Executor
    adapter: PagedAdapter

    def peak(self, at: int, adapter: str | None, rows: int = STEP) -> int:
        """Most bytes that torch held for a step of `rows` tokens behind `at` others."""
        tokens = at + rows
        step = Rows(
            tokens=[1] * rows, positions=list(range(at, tokens)), slots=list(range(at, tokens)),
            tables=[list(range(-(-tokens // PAGE_TOKENS)))], starts=[0, rows], lengths=[tokens],
            runs=[(adapter, rows)], sampled=[rows - 1], scored=[],
        )  # fmt: skip

        def run() -> None:
            for _ in self.executor.run(step, lambda name: self.adapter):
                pass

        run()
        return most_allocated(run)


def most_allocated(run: Callable[[], None]) -> int:
    """Bytes that torch's allocator gave out and had not yet back, at most."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    model = world.TinyModel.make(tmp_path_factory.mktemp("long"), max_position_embeddings=2 * LONG)
    with Weights(model.folder, torch.float32) as weights:
        network = load_model(weights)
    network.prepare(2 * LONG)
    shape = network.lora_shape
    plan = layout(shape, [[RANK] * 7] * shape.layers, network.kv_shape.page_elems)
    first = 2 * LONG // PAGE_TOKENS
    executor = Executor(network, first + plan.pages, "cpu", positions=2 * LONG, max_rank=RANK)
    adapter = place(plan, range(first, first + plan.pages), [[1.0] * 7] * shape.layers)
    for layer in range(shape.layers):
        for module in range(7):
            a, b = torch.randn(RANK, shape.in_features[module]), torch.randn(shape.out_features[module], RANK)
            write_adapter(executor.memory, adapter, layer, module, a, b)
    return Steps(executor, adapter)


@pytest.mark.parametrize("adapter", [None, "a"], ids=["base", "adapter"])
def test_a_long_prompt_takes_no_more_than_a_short_one(steps: Steps, adapter: str | None) -> None:
    short, long = steps.peak(0, adapter), steps.peak(LONG, adapter)
    assert short > 0
    assert long - short < 16 * LONG, "its page table alone"


@pytest.mark.parametrize("adapter", [None, "a"], ids=["base", "adapter"])
@pytest.mark.parametrize("rows", [1, 40, STEP])
def test_what_a_step_takes_is_within_what_was_counted(steps: Steps, adapter: str | None, rows: int) -> None:
    part = steps.executor.model.part
    counted = step_bytes(part, torch.float32, step_tokens=rows, logit_rows=1, max_rank=RANK)
    assert steps.peak(0, adapter, rows) <= counted + 4096  # and small tables


def test_buffers_of_lora_are_counted(steps: Steps) -> None:
    """The shrunk rows of q, k and v in fp32, and the partial sums of short steps."""
    part = steps.executor.model.part

    def of(rank: int, tokens: int = 2048) -> int:
        return step_bytes(part, torch.bfloat16, step_tokens=tokens, logit_rows=64, max_rank=rank)

    assert of(64) - of(0) >= 2048 * 3 * 64 * 4
    assert of(256, 128) - of(0, 128) >= 8 * 128 * 3 * 256 * 4
    assert of(0, 4096) - of(0) >= 2048 * 2 * 3 * 96


def test_pages_are_given_of_what_a_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 << 20)
    whole = memory.pool_budget("cpu", 2)
    assert memory.pool_budget("cpu", 2, working=25 << 20) == whole // 2
    assert memory.pool_budget("cpu", 2, working=60 << 20) == 0

    def of(device: str) -> tuple[int, int]:
        return 10 << 30, 80 << 30

    assert memory.pool_budget("cuda:0", 2, of, working=5 << 30) == memory.pool_budget("cuda:0", 2, of) // 2


def test_the_replica_counts_its_own_step(
    tiny: world.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 20)

    def pages(**config: object) -> int:
        settings = {"slots": 100, "step_tokens": 8192, "max_model_len": 512, "lora": LoraConfig(8), **config}
        made = Replica.load(EngineConfig(tiny.folder, "base", tmp_path, torch.float32, **settings), None)
        made.close()
        return made.engine.pool.total

    small = pages(step_tokens=128)
    assert pages() < small, "larger steps leave less"
    assert pages(lora=LoraConfig(64)) < pages(), "so do larger ranks"
