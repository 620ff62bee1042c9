"""Host memory between disk and pages, on every rank: parts are never cut twice, and nothing stays of what has left."""

from __future__ import annotations

import queue
from pathlib import Path

import engine_world as world
import families
import pytest
import torch
from tenantry_engine import engine as engine_module
from tenantry_engine.adapters.base import Base
from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import LoraConfig
from tenantry_engine.parallel import leader
from tenantry_engine.parallel.leader import RankedLoader
from tenantry_engine.parallel.messages import Fill, Filled
from tenantry_engine.parallel.parts import Parts
from test_registry import KV, SHAPE, World, ready

PROMPT = list(range(40, 75))


def test_what_comes_back_from_host_memory_is_as_it_was_at_first(
    models: families.Models, engines: world.Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks whose host tiers hold all images: from disk, from host memory, and again, the same answers."""
    for module in (engine_module, leader):
        monkeypatch.setattr(module, "host_budget", lambda accelerator, asked, available: 1 << 24)
    kinds = ["attention", "mlp, odd rank", "rsLoRA"]
    page = 2 * 2 * 1 * 16 * 16 * 4  # bytes of a rank: layers, K and V, KV heads, tokens, head size, fp32
    replica = engines.replica(
        models.folder("qwen3"),
        adapters=[(families.served(k), models.adapter("qwen3", k)) for k in kinds],
        max_model_len=64, tensor_parallel_size=2, pool_bytes=30 * page, lora=LoraConfig(max_rank=16),
        prefix_cache=False,
    )  # fmt: skip
    engine = replica.engine
    client = families.ScoringClient(engine)
    first: dict[str, tuple[list[int], list[float]]] = {}
    scored = world.Sampling(temperature=0, max_tokens=8, logprobs=0)
    for kind in kinds * 3:
        sequence = client.submit(PROMPT, families.served(kind), sampling=scored)
        client.wait(sequence)
        answer = client.tokens[sequence], client.logprobs[sequence]
        if kind not in first:
            families.assert_right(models.oracle("qwen3", kind), PROMPT, *answer)
        assert answer == first.setdefault(kind, answer), kind
    assert engine.registry.evictions >= 5, "the pool must be small enough for this test"
    host = engine.registry.loader.host
    assert host.used
    engine.call(lambda: engine.registry.declare((0, 0), [], 0.0)).result()
    world.wait_for(lambda: not world.reports(engine))
    assert host.used == 0


def test_a_rank_forgets_what_has_left(tmp_path: Path) -> None:
    """An adapter's image leaves the host memory of every rank, not that of rank 0 alone."""
    made = World(tmp_path, host_bytes=1 << 20)
    [digest] = ready(made, 7)
    answers: queue.SimpleQueue[Filled] = queue.SimpleQueue()
    memory = torch.zeros(4, KV.page_elems)
    loader = PageLoader(made.store, memory, 1 << 20)
    base = Base(SHAPE, KV.page_elems, torch.float32, 4)
    parts = Parts(made.store, loader, base, LoraConfig(), answers.put)
    parts.fill(Fill(digest, [2]))
    assert answers.get(timeout=60) == Filled()
    assert memory.view(-1)[parts.paged(digest).rows[0]] == 7
    assert digest in loader.host

    class Ranks:
        """As rank 0 tells the others."""

        forget = staticmethod(parts.forget)

    store = BlobStore(tmp_path)
    RankedLoader(Ranks(), store, memory, 1 << 20, lambda module, a, b: (a, b)).forget(digest)  # type: ignore[arg-type]
    assert digest not in loader.host
    assert loader.host.used == 0
    parts.wiped([3])
    assert parts.paged(digest)
    parts.wiped([1, 2])
    with pytest.raises(KeyError):
        parts.paged(digest)


def test_what_leaves_while_it_is_brought_closer_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last request goes, and the name with it, while its bytes are on their way to host memory."""
    made = World(tmp_path, host_bytes=1 << 20)
    [digest] = ready(made, 7)
    write = made.loader._write

    def leaves(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        made.declare()
        made.registry.sweep(1.0, {})

    monkeypatch.setattr(made.loader, "_write", leaves)
    made.registry.prefetch(digest)
    made.work()
    assert made.ran["prefetch"] == 1
    assert not made.registry.reports({})
    assert digest not in made.loader.host
    assert made.loader.host.used == 0
