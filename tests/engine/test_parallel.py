"""A model held by 1, 2 or 4 processes answers as transformers + PEFT do; and the loss of one process ends it."""

from __future__ import annotations

import itertools
import os
import queue
import re
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import engine_world as world
import families
import psutil
import pytest
import torch
from replica_process import running
from tenantry_engine.config import EngineConfig
from tenantry_engine.errors import AdapterError, EngineError
from tenantry_engine.models.config import DecoderConfig
from tenantry_engine.models.split import cut_vocab, split
from tenantry_engine.parallel import leader
from tenantry_engine.parallel.leader import Ranks
from tenantry_engine.parallel.messages import Failed, Filled, encode
from tenantry_engine.sequence import Sampling

PROMPTS = [[1, 10, 20, 30], list(range(40, 75)), [7]]
COUNT = 8
SCORED = Sampling(temperature=0, max_tokens=COUNT, logprobs=0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_kind_alone_and_mixed(
    family: str,
    size: int,
    models: families.Models,
    matrix: set[families.Cell],
    engines: world.Engines,
) -> None:
    replica = engines.replica(
        models.folder(family), adapters=models.adapters(family), max_model_len=128, step_tokens=24,
        tensor_parallel_size=size, prefix_cache=False,
    )  # fmt: skip
    client = families.ScoringClient(replica.engine)
    kinds = ["base", *models.kinds(family)]

    def check(kind: str, index: int, sequence: str) -> None:
        tokens, logprobs = client.tokens[sequence], client.logprobs[sequence]
        assert len(tokens) == len(logprobs) == COUNT
        families.assert_right(models.oracle(family, kind), PROMPTS[index], tokens, logprobs)

    for kind in kinds:
        for index, prompt in enumerate(PROMPTS[:2]):
            sequence = client.submit(prompt, families.served(kind), sampling=SCORED)
            client.wait(sequence)
            check(kind, index, sequence)
        matrix.add((family, kind, "alone", size))
    asked = {
        (kind, index): client.submit(prompt, families.served(kind), sampling=SCORED)
        for kind in kinds
        for index, prompt in enumerate(PROMPTS)
    }
    client.wait(*asked.values())
    for (kind, index), sequence in asked.items():
        check(kind, index, sequence)
    matrix.update((family, kind, "mixed", size) for kind in kinds)
    answers = {tuple(client.tokens[asked[kind, 1]]) for kind in kinds}
    assert len(answers) == len(kinds), "the adapters must speak differently for this test to mean anything"


def test_adapters_add_no_collective(
    models: families.Models, engines: world.Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums per layer and one join per step, with adapters as without."""
    calls: list[str] = []
    for name in ("all_reduce", "all_gather", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
        original = getattr(torch.distributed, name)

        def counted(*args: object, name: str = name, original: object = original, **more: object) -> object:
            calls.append(name)
            return original(*args, **more)  # type: ignore[operator]

        monkeypatch.setattr(torch.distributed, name, counted)
    client = engines.client(
        models.folder("llama"), adapters=models.adapters("llama"), max_model_len=64, tensor_parallel_size=2
    )
    client.settle()
    for kind in ("base", "rsLoRA", "vocabulary"):
        calls.clear()
        client.wait(client.submit([5, 6, 7], families.served(kind), count=4))
        assert calls == (["all_reduce"] * 4 + ["all_gather"]) * 4, kind


def test_evicted_and_loaded_again_on_every_rank(models: families.Models, engines: world.Engines) -> None:
    """An adapter's parts are cut from its bytes each time, never from parts."""
    kinds = ["attention", "mlp, odd rank", "rsLoRA"]
    page = 2 * 2 * 1 * 16 * 16 * 4  # bytes of a rank: layers, K and V, KV heads, tokens, head size, fp32
    replica = engines.replica(
        models.folder("qwen3"),
        adapters=[(families.served(k), models.adapter("qwen3", k)) for k in kinds],
        max_model_len=64, tensor_parallel_size=2, pool_bytes=30 * page, lora=world.LoraConfig(max_rank=16),
        prefix_cache=False,
    )  # fmt: skip
    client = families.ScoringClient(replica.engine)
    for kind in kinds * 3:
        sequence = client.submit(PROMPTS[1], families.served(kind), sampling=SCORED)
        client.wait(sequence)
        families.assert_right(
            models.oracle("qwen3", kind), PROMPTS[1], client.tokens[sequence], client.logprobs[sequence]
        )
    assert replica.engine.registry.evictions >= 3, "the pool must be small enough for this test"


def test_a_lost_rank_ends_the_replica(models: families.Models, engines: world.Engines) -> None:
    replica = engines.replica(models.folder("llama"), max_model_len=512, tensor_parallel_size=2)
    client = world.Client(replica.engine)
    ranks = replica.engine._runner.ranks
    assert ranks is not None
    reasons: list[str] = []
    lost = threading.Event()

    def note(reason: str) -> None:
        reasons.append(reason)
        lost.set()

    ranks.lost = note
    sequence = client.submit([5, 6, 7], count=500)
    client.wait_tokens(sequence, 3)
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert lost.wait(timeout=60)
    assert reasons == [f"rank 1 of the model (process {ranks.pids[0]}) has ended"]
    client.wait(sequence)
    assert client.finish[sequence] == "error"


def test_the_process_ends_with_its_rank(models: families.Models, tmp_path: Path) -> None:
    """As an operator sees it: every process of the replica is gone, and the log says why."""
    flags = ("--tensor-parallel-size", "2", "--max-model-len", "64")
    with running(models.folder("llama"), tmp_path, *flags) as replica:
        found = re.search(r"rank 1: process (\d+) has its part of the model", replica.said)
        assert found is not None
        family = psutil.Process(replica.process.pid).children(recursive=True)
        assert int(found[1]) in [process.pid for process in family]
        os.kill(int(found[1]), signal.SIGKILL)
        assert replica.process.wait(timeout=120) != 0
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        assert f"rank 1 of the model (process {found[1]}) has ended" in replica.said
        assert "Traceback" not in replica.said


def config(**changes: int) -> DecoderConfig:
    sizes = {
        "hidden": 64,
        "intermediate": 96,
        "layers": 2,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 16,
        **changes,
    }
    return DecoderConfig(
        **sizes, vocab=283, positions=512, eps=1e-6, rope_theta=1e4, rope_scaling=None, tied=False,
        qkv_bias=False, qk_norm=False,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_cover_the_model(size: int) -> None:
    parts = [split(config(), rank, size) for rank in range(size)]
    assert len({part.lora_shape for part in parts}) == 1, "one layout must serve all ranks"
    for name, end in (("q", 128), ("inner", 96)):
        ranges = [getattr(part, name) for part in parts]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == end
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    for part in parts:  # every query head finds its KV head on its own rank, in its own place
        first = part.q[0] // 16
        for head in range(part.heads):
            own = part.kv[0] // 16 + head * part.kv_heads // part.heads
            assert own == (first + head) * 2 // 8
    head = torch.cat([cut_vocab(torch.arange(1.0, 284.0)[:, None], part.vocab) for part in parts])
    assert torch.equal(head[:283, 0], torch.arange(1.0, 284.0))
    assert not head[283:].any()


def test_lora_is_cut_as_its_layer() -> None:
    a, b = torch.randn(4, 64), torch.randn(128, 4)
    parts = [split(config(), rank, 4) for rank in range(4)]
    cut = [part.cut_lora(0, a, b) for part in parts]  # q: column-parallel
    assert all(torch.equal(half, a) for half, _ in cut)
    assert torch.equal(torch.cat([half for _, half in cut]), b)
    a, b = torch.randn(4, 128), torch.randn(64, 4)
    cut = [part.cut_lora(3, a, b) for part in parts]  # o: row-parallel
    assert torch.equal(torch.cat([half for half, _ in cut], dim=1), a)
    assert all(torch.equal(half, b) for _, half in cut)
    b = torch.randn(32, 4)
    cut = [part.cut_lora(1, torch.randn(4, 64), b) for part in parts]  # k: two ranks hold each KV head
    assert torch.equal(torch.cat([cut[0][1], cut[2][1]]), b)
    assert torch.equal(cut[0][1], cut[1][1])


@pytest.mark.parametrize(
    ("changes", "size", "field"),
    [
        ({"heads": 9, "kv_heads": 3}, 2, "num_attention_heads"),
        ({"intermediate": 97}, 2, "intermediate_size"),
        ({"heads": 12, "kv_heads": 3}, 2, "num_key_value_heads"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(changes: dict[str, int], size: int, field: str) -> None:
    with pytest.raises(EngineError, match=rf"`--tensor-parallel-size` must .*`{field}`"):
        split(config(**changes), 0, size)


def test_a_follower_that_cannot_load_says_why(models: families.Models, tmp_path: Path) -> None:
    """The reason of the rank reaches whoever starts the replica."""
    ranks = Ranks(
        EngineConfig(tmp_path / "nothing", "base", tmp_path / "data", torch.float32, tensor_parallel_size=2)
    )
    reasons: list[str] = []
    ranks.lost = reasons.append
    with pytest.raises(EngineError, match="rank 1 of the model failed: `--model` must hold"):
        ranks.join()  # fails itself where the other rank ends while the two connect
        ranks.allocate(10, 64)
    ranks.close()


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Connection]]:
    """The far ends of the links to ranks that no process stands for."""
    far: list[Connection] = []

    def follower() -> Connection:
        ours, theirs = socket.socketpair()
        far.append(Connection(theirs.detach()))
        return Connection(ours.detach())

    monkeypatch.setattr(leader.nursery, "follower", follower)
    monkeypatch.setattr(leader.torch, "set_num_threads", lambda count: None)
    yield far
    for link in far:
        link.close()


@pytest.fixture
def three(links: list[Connection], tmp_path: Path) -> Iterator[tuple[Ranks, queue.SimpleQueue[str]]]:
    """Rank 0 of three, and the reasons for which it was lost."""
    ranks = Ranks(EngineConfig(tmp_path, "base", tmp_path, torch.float32, tensor_parallel_size=3))
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    ranks.lost = reasons.put
    for link in links:
        assert link.recv_bytes(), "the first message"
    yield ranks, reasons
    ranks.close()
    assert reasons.empty(), "a link that is closed on purpose is no loss"


def test_the_first_loss_alone_is_told(
    three: tuple[Ranks, queue.SimpleQueue[str]], links: list[Connection]
) -> None:
    ranks, reasons = three
    links[1].close()
    assert reasons.get(timeout=60) == "rank 2 of the model (process starting) has ended"
    links[0].close()
    for follower in ranks._followers:
        follower._reader.join(timeout=60)
    ranks.step_failed()
    assert reasons.empty()


def test_a_link_that_breaks_before_all_was_read_is_a_loss(
    three: tuple[Ranks, queue.SimpleQueue[str]], links: list[Connection]
) -> None:
    """A rank that is killed leaves what it had not read: its link then ends in an error, not in an end of file."""
    ranks, reasons = three
    ranks.wipe([1])
    links[0].close()
    assert reasons.get(timeout=60) == "rank 1 of the model (process starting) has ended"


def test_a_step_that_fails_here_alone_ends_the_replica(
    three: tuple[Ranks, queue.SimpleQueue[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait in a collective that will not come."""
    ranks, reasons = three
    monkeypatch.setattr(leader, "_MOMENT", 0.0)
    ranks.step_failed()
    assert reasons.get(timeout=60) == "a step failed on rank 0"


def test_whoever_asks_a_rank_that_has_failed_hears_why_each_time(
    three: tuple[Ranks, queue.SimpleQueue[str]], links: list[Connection]
) -> None:
    ranks, reasons = three
    links[0].send_bytes(encode(Failed("no memory")))
    links[0].close()
    assert reasons.get(timeout=60) == "rank 1 of the model (process starting) failed: no memory"
    [first, _] = ranks._followers
    for _ in range(2):
        with pytest.raises(EngineError, match="rank 1 of the model failed: no memory"):
            first.heard()
        assert not first._answers.empty()


def test_an_adapter_is_resident_when_every_rank_has_its_part(
    three: tuple[Ranks, queue.SimpleQueue[str]], links: list[Connection]
) -> None:
    ranks, _ = three

    def answer(*problems: str) -> None:
        for link, problem in zip(links, problems, strict=True):
            link.send_bytes(encode(Filled(problem)))

    answer("", "no disk")
    with pytest.raises(AdapterError, match="rank 2: no disk"):
        ranks.fill("d", [1], lambda: None)

    def broken() -> None:
        raise OSError

    answer("", "of another fill")
    with pytest.raises(OSError):
        ranks.fill("d", [1], broken)
    answer("", "")
    ranks.fill("d", [1], lambda: None)
