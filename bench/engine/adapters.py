"""What many adapters cost one replica: thousands registered, more in use than fit in its pages, and one loaded cold.

SmolLM2-135M in bf16 on a CPU, 16 concurrent requests of 64 tokens in and 48 out, over HTTP.

* registered: the same traffic over the same 64 adapters (rank cycle of workload.py), asked in turns of a replica that
  has these alone and of one that has 2,000. Equal adapters and rank bytes in a step, so only the names differ; the
  others are small files that nobody asks for.
* zipf: Zipf traffic over 8 to 64 adapters in a pool whose pages hold about 16 of them: the rate, and how many adapters
  had to be loaded, by the number of adapters in use. The curve is kept as figure data.
* cold load: an adapter from its mapped file (in the page cache) into pages, its SHA-256 verified, beside the time that
  a plain copy of as many bytes takes.

    python bench/engine/adapters.py [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tenantry_engine.adapters.base import Base
from tenantry_engine.adapters.check import CheckedAdapter, check
from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import LoraConfig
from tenantry_engine.digest import folder_blob, folder_digest
from tenantry_kernels import PAGE_TOKENS, KvShape, LoraShape
from workload import CONCURRENT, RANKS, Replica, make_adapters, model_folder, prompts, replica

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report

MODEL_LEN = 512
LOSS = "registered: rate with 2,000 registered, to that with 64"
DISTINCT = "registered: distinct adapters in a step, 2,000 to 64"
BEYOND = "zipf: least rate beyond the pages, to the rate within"
RANGES: dict[str, report.Bounds] = {LOSS: (0.95, None), DISTINCT: (0.95, 1.05), BEYOND: (0.4, None)}

_SEEDS = itertools.count(1000)


@dataclass(frozen=True)
class Work:
    """How much is measured."""

    active: int = 64  # adapters that are asked, and requests of a round
    registered: int = 2000
    fitting: int = 16  # adapters that the small pool holds, about
    in_use: tuple[int, ...] = (8, 16, 24, 32, 48, 64)
    rounds: int = 5


QUICK = Work(active=16, registered=64, fitting=4, in_use=(4, 16), rounds=1)


def main() -> int:
    """Measures the three, one after another."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a smoke run: fewer names, one short round")
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    work = QUICK if asked.quick else Work(rounds=asked.rounds)
    model = model_folder()
    with tempfile.TemporaryDirectory(prefix="tenantry-bench-") as name:
        folder = Path(name)
        print(f"making {work.active} adapters ...", flush=True)
        names = make_adapters(model, folder / "few", work.active)
        cold = measure_cold(model, folder, names[: len(RANKS)], work.rounds)
        registered = measure_registered(model, folder, names, work)
        zipf = measure_zipf(model, folder, names, work)
    figures: dict[str, Any] = {**registered, **zipf, **cold}
    for key, value in figures.items():
        print(f"{key}: {value}")
    return report.finish(
        bench="engine/adapters", figures=figures, peers={}, ranges=RANGES, keep=not asked.quick,
        details={"work": asdict(work)},
    )  # fmt: skip


# registered


def make_idle(model: Path, folder: Path, count: int) -> None:
    """Adapters of rank 1 on one projection, each with bytes of its own."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(1, hidden),
        f"{module}.lora_B.weight": torch.ones(hidden, 1),
    }
    for index in range(count):
        path = folder / f"idle-{index:04d}"
        path.mkdir(parents=True)
        save_file({k: v * (index + 1) for k, v in tensors.items()}, str(path / "adapter_model.safetensors"))
        (path / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [module]})
        )


def measure_registered(model: Path, folder: Path, names: list[str], work: Work) -> dict[str, Any]:
    """The rate over the active adapters, in turns of a replica with few names and one with many."""
    many = folder / "many"
    make_idle(model, many, work.registered - len(names))
    for name in names:
        (many / name).symlink_to(folder / "few" / name)
    options = ("--max-model-len", str(MODEL_LEN), "--pool-bytes", str(2400 << 20))
    seen: dict[str, list[float]] = {"few": [], "many": []}
    distinct: dict[str, list[float]] = {"few": [], "many": []}
    with (
        replica(model, folder / "data-few", "--adapters", str(folder / "few"), *options) as few,
        replica(model, folder / "data-many", "--adapters", str(many), *options) as much,
    ):
        running = {"few": few, "many": much}
        for label, want in (("few", len(names)), ("many", work.registered)):
            wait_registered(running[label], want)
            ask(running[label], names)  # not counted: fills caches, loads every adapter into pages
        for number in range(work.rounds):
            for label in ("few", "many") if number % 2 == 0 else ("many", "few"):
                rate, others = asked_steps(running[label], names)
                seen[label].append(rate)
                distinct[label].append(others)
                print(f"round {number + 1}: registered, {label}: {rate:.1f} tok/s", flush=True)
    return {
        LOSS: statistics.median(b / a for a, b in zip(seen["few"], seen["many"], strict=True)),
        DISTINCT: statistics.median(distinct["many"]) / statistics.median(distinct["few"]),
        "registered: names": work.registered,
        "registered: tok/s": {label: statistics.median(values) for label, values in seen.items()},
        "registered: distinct adapters in a step": {k: statistics.median(v) for k, v in distinct.items()},
    }


def ask(running: Replica, served: list[str]) -> float:
    """Output tokens per second of one run, with prompts that nobody has sent before."""
    return asyncio.run(running.generate(served, prompts(len(served), 49152, next(_SEEDS))))


def asked_steps(running: Replica, served: list[str]) -> tuple[float, float]:
    """The rate, and the mean number of distinct adapters in a step."""
    before = [running.metric(f"tenantry_engine_step_adapters_{part}") for part in ("sum", "count")]
    rate = ask(running, served)
    after = [running.metric(f"tenantry_engine_step_adapters_{part}") for part in ("sum", "count")]
    return rate, (after[0] - before[0]) / max(1.0, after[1] - before[1])


def wait_registered(running: Replica, count: int) -> None:
    """Each adapter is checked once, in the background."""
    until = time.monotonic() + 600
    while running.metric("tenantry_engine_adapters", 'state="registered"') < count:
        if time.monotonic() > until:
            raise RuntimeError(f"fewer than {count} adapters were registered within ten minutes")
        time.sleep(0.5)


# zipf


def measure_zipf(model: Path, folder: Path, names: list[str], work: Work) -> dict[str, Any]:
    """Rate and loads by the number of adapters in use, in a pool that holds about `work.fitting` of them."""
    shape, kv = shapes(model)
    checked = [look(shape, kv, folder / "few" / name)[0] for name in names[: len(RANKS)]]
    fitting = sum(c.plan.pages for c in checked) * work.fitting // len(checked)
    sequences = CONCURRENT * (-(-128 // PAGE_TOKENS) + 1)
    largest = max(c.plan.pages for c in checked) + -(-MODEL_LEN // PAGE_TOKENS) + 1
    pool = max(fitting + sequences, largest) * kv.page_elems * torch.bfloat16.itemsize
    rates: dict[int, list[float]] = {n: [] for n in work.in_use}
    loads: dict[int, list[float]] = {n: [] for n in work.in_use}
    options = (
        "--max-model-len",
        str(MODEL_LEN),
        "--pool-bytes",
        str(pool),
        "--adapters",
        str(folder / "few"),
    )
    with replica(model, folder / "data-zipf", *options) as running:
        wait_registered(running, len(names))
        ask(running, names[: work.fitting])
        for number in range(work.rounds):
            for n in work.in_use:
                draw = random.Random(number)
                order = draw.sample(names, n)  # which names are popular differs by round, sizes with them
                served = draw.choices(order, [1 / (rank + 1) for rank in range(n)], k=work.active)
                before = running.metric("tenantry_engine_adapter_evictions_total")
                rates[n].append(ask(running, served))
                loads[n].append(
                    (running.metric("tenantry_engine_adapter_evictions_total") - before) / len(served)
                )
                print(f"round {number + 1}: zipf over {n}: {rates[n][-1]:.1f} tok/s", flush=True)
    curve = [
        {
            "adapters": n,
            "tok/s": statistics.median(rates[n]),
            "evictions per request": statistics.median(loads[n]),
        }
        for n in work.in_use
    ]
    within = max(statistics.median(rates[n]) for n in work.in_use if n <= work.fitting)
    beyond = min(statistics.median(rates[n]) for n in work.in_use if n > work.fitting)
    return {BEYOND: beyond / within, "zipf: curve": curve, "zipf: pool bytes": pool}


# cold load


@dataclass(frozen=True)
class Cold:
    """One adapter loaded cold. Seconds, bytes of its pages."""

    rank: int
    size: int
    whole: float
    copy: float


def shapes(model: Path) -> tuple[LoraShape, KvShape]:
    """What the pages of this model hold."""
    c = json.loads((model / "config.json").read_text())
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    width, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shape = LoraShape(
        c["num_hidden_layers"], (hidden, hidden, hidden, width, hidden, hidden, inner),
        (width, kv, kv, hidden, inner, inner, hidden), c["vocab_size"],
    )  # fmt: skip
    return shape, KvShape(c["num_hidden_layers"], c["num_key_value_heads"], head)


def look(shape: LoraShape, kv: KvShape, folder: Path) -> tuple[CheckedAdapter, bytes]:
    """An adapter as the registry knows it, and its blob."""
    blob = b"".join(folder_blob(folder))
    base = Base(shape, kv.page_elems, torch.bfloat16, 1 << 20)
    return check(memoryview(blob), base, LoraConfig()), blob


def measure_cold(model: Path, folder: Path, names: list[str], rounds: int) -> dict[str, Any]:
    """From the mapped file into pages, by rank."""
    shape, kv = shapes(model)
    store = BlobStore(folder / "data-cold")
    memory = torch.zeros(256, kv.page_elems, dtype=torch.bfloat16)
    loader = PageLoader(store, memory)
    found: list[Cold] = []
    for rank, name in dict(zip(RANKS, names, strict=True)).items():
        checked, blob = look(shape, kv, folder / "few" / name)
        digest = folder_digest(folder / "few" / name)
        with store.receive(digest, len(blob)) as incoming:
            incoming.write(blob)
            incoming.commit()
        pages = list(range(checked.plan.pages))
        source, target = torch.zeros(2, len(pages), kv.page_elems, dtype=torch.bfloat16).unbind()
        times: dict[str, list[float]] = {"whole": [], "copy": []}
        for _ in range(max(3, rounds)):
            started = time.perf_counter()
            loader.fill(digest, checked, pages, loader.settled())
            times["whole"].append(time.perf_counter() - started)
            started = time.perf_counter()
            target.copy_(source)
            times["copy"].append(time.perf_counter() - started)
        found.append(Cold(rank, source.nbytes, *(statistics.median(times[k]) for k in ("whole", "copy"))))
    return {
        "cold load": [
            {
                "rank": c.rank,
                "bytes": c.size,
                "ms": c.whole * 1e3,
                "copy ms": c.copy * 1e3,
                "GB/s": c.size / c.whole / 1e9,
            }
            for c in sorted(found, key=lambda c: c.rank)
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
