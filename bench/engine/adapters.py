"""What many adapters cost one replica: thousands registered, more in use than fit in its pages, and one loaded cold.

SmolLM2-135M in bf16 on a CPU, 16 concurrent requests of 64 tokens in and 48 out, over HTTP.

* registered: the same traffic over the same 64 adapters (rank cycle of workload.py), asked in turns of a replica that
  has these alone and of one that has 2,000. Equal adapters and rank bytes in a step, so only the names differ; the
  others are small files that nobody asks for.
* zipf: Zipf traffic over 8 to 64 adapters, asked in turns of a replica whose pages hold about 16 and of one whose
  pages hold all: what is lost to loading again, by the number of adapters in use. The curve is kept as figure data.
* cold load: see cold_load.py.

Takes ten to fifteen minutes on an idle machine of two cores. Whatever is compared runs in turns within one round;
reported are medians, and of ratios the median over rounds with the least and the most.

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
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from cold_load import look, measure_cold, shapes
from safetensors.torch import save_file
from tenantry_kernels import PAGE_TOKENS
from workload import CONCURRENT, RANKS, Replica, make_adapters, model_folder, prompts, replica

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report

MODEL_LEN = 512
POOL_BYTES = 1800 << 20  # holds all adapters that are asked, and what the prefix cache keeps of a round
LOSS = "registered: rate with 2,000 registered, to that with 64"
DISTINCT = "registered: distinct adapters in a step, 2,000 to 64"
BEYOND = "zipf: least rate beyond the pages, to that with all adapters in pages"
RANGES: dict[str, report.Bounds] = {LOSS: (0.95, None), DISTINCT: (0.95, 1.05), BEYOND: (0.5, None)}

_SEEDS = itertools.count(1000)
_BEGAN = time.monotonic()


@dataclass(frozen=True)
class Work:
    """How much is measured."""

    active: int = 64  # adapters that are asked, and requests of a round of `registered`
    registered: int = 2000
    fitting: int = 16  # adapters that the small pool holds, about
    in_use: tuple[int, ...] = (8, 16, 32, 64)
    requests: int = 48  # of a point of the curve
    rounds: int = 5
    zipf_rounds: int = 3
    loads: int = 15  # of each rank


QUICK = Work(
    active=16, registered=64, fitting=4, in_use=(4, 16), requests=16, rounds=1, zipf_rounds=1, loads=3
)


def main() -> int:
    """Measures the three, one after another."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--quick", action="store_true", help="fewer names and one short round, which judges nothing"
    )
    options.add_argument(
        "--rounds", type=int, default=Work.rounds, help="of registered (default: %(default)s)"
    )
    asked = options.parse_args()
    work = QUICK if asked.quick else Work(rounds=asked.rounds)
    model = model_folder()
    with tempfile.TemporaryDirectory(prefix="tenantry-bench-") as name:
        figures = measure(model, Path(name), work)
    for key, value in figures.items():
        say(f"{key}: {value}")
    return report.finish(
        bench="engine/adapters", figures=figures, peers={}, ranges={} if asked.quick else RANGES,
        keep=not asked.quick, details={"work": asdict(work)},
    )  # fmt: skip


def measure(model: Path, folder: Path, work: Work) -> dict[str, Any]:
    """All figures."""
    say(f"making {work.active} adapters to ask and {work.registered - work.active} to register")
    few, many = folder / "few", folder / "many"
    names = make_adapters(model, few, work.active)
    make_idle(model, many, work.registered - len(names))
    for name in names:
        (many / name).symlink_to(few / name)
    say("cold loads")
    cold = measure_cold(model, [few / name for name in names], folder / "data-cold", work.loads)
    small = small_pool(model, [few / name for name in names[: len(RANKS)]], work)
    with ExitStack() as stack:
        running = {}
        for label, adapters, pool in (
            ("few", few, POOL_BYTES),
            ("many", many, POOL_BYTES),
            ("small", few, small),
        ):
            say(f"starting the replica `{label}`")
            options = (
                "--adapters",
                str(adapters),
                "--max-model-len",
                str(MODEL_LEN),
                "--pool-bytes",
                str(pool),
            )
            running[label] = stack.enter_context(replica(model, folder / f"data-{label}", *options))
        for label, want in (("few", len(names)), ("many", work.registered), ("small", len(names))):
            wait_registered(running[label], want)
            say(f"replica `{label}`: {want} adapters are registered; asking each once, not counted")
            ask(running[label], names)  # fills caches, and pages with adapters
        registered = measure_registered(running["few"], running["many"], names, work)
        zipf = measure_zipf(running["small"], running["few"], names, work)
    return {**registered, **zipf, "zipf: pool bytes": small, **cold}


def say(text: str) -> None:
    """A line of progress."""
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {text}", file=sys.stderr, flush=True)


def ask(running: Replica, served: list[str]) -> float:
    """Output tokens per second of one run, with prompts that nobody has sent before."""
    return asyncio.run(running.generate(served, prompts(len(served), 49152, next(_SEEDS))))


def spread(values: list[float]) -> list[float]:
    """The least and the most."""
    return [min(values), max(values)]


# replicas and their adapters


def make_idle(model: Path, folder: Path, count: int) -> None:
    """Adapters of rank 1 on one projection, each with bytes of its own."""
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    module = "model.layers.0.self_attn.q_proj"
    a, b = torch.ones(1, hidden), torch.ones(hidden, 1)
    about = json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [module]})
    for index in range(count):
        path = folder / f"idle-{index:04d}"
        path.mkdir(parents=True)
        prefix = f"base_model.model.{module}"
        tensors = {f"{prefix}.lora_A.weight": a * (index + 1), f"{prefix}.lora_B.weight": b}
        save_file(tensors, str(path / "adapter_model.safetensors"))
        (path / "adapter_config.json").write_text(about)


def small_pool(model: Path, adapters: list[Path], work: Work) -> int:
    """Bytes of a pool for about `work.fitting` adapters (`adapters` are one cycle of ranks) and all requests."""
    _, kv = shapes(model)
    pages = [look(model, path)[0].plan.pages for path in adapters]
    fitting = sum(pages) * work.fitting // len(pages)
    sequences = CONCURRENT * (-(-128 // PAGE_TOKENS) + 1)
    least = max(pages) + -(-MODEL_LEN // PAGE_TOKENS) + 1
    return max(fitting + sequences, least) * kv.page_elems * torch.bfloat16.itemsize


def wait_registered(running: Replica, count: int) -> None:
    """Each adapter is checked once, in the background. RuntimeError when one is refused or it takes too long."""
    until = time.monotonic() + 600
    while True:
        answer = httpx.get(f"http://127.0.0.1:{running.admin}/admin/v1/adapters", timeout=60)
        adapters = answer.raise_for_status().json()["adapters"]
        for adapter in adapters:
            if adapter["state"] == "Failed":
                raise RuntimeError(
                    f"{adapter['name']} was refused: {adapter['reason']}: {adapter['message']}"
                )
        done = sum(adapter["state"] in ("Registered", "Resident") for adapter in adapters)
        if done >= count:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"only {done} of {count} adapters were registered within ten minutes")
        time.sleep(0.5)


# registered


def measure_registered(few: Replica, many: Replica, names: list[str], work: Work) -> dict[str, Any]:
    """The rate over the active adapters, in turns of a replica with few names and one with many."""
    seen: dict[str, list[float]] = {"few": [], "many": []}
    distinct: dict[str, list[float]] = {"few": [], "many": []}
    running = {"few": few, "many": many}
    for number in range(work.rounds):
        for label in ("few", "many") if number % 2 == 0 else ("many", "few"):
            rate, adapters = asked_steps(running[label], names)
            seen[label].append(rate)
            distinct[label].append(adapters)
            say(f"registered, round {number + 1} of {work.rounds}: {label} {rate:.1f} tok/s")
    ratios = [b / a for a, b in zip(seen["few"], seen["many"], strict=True)]
    return {
        LOSS: statistics.median(ratios),
        DISTINCT: statistics.median(distinct["many"]) / statistics.median(distinct["few"]),
        "registered: least and most of the ratio": spread(ratios),
        "registered: tok/s": {label: statistics.median(values) for label, values in seen.items()},
        "registered: least and most tok/s": {label: spread(values) for label, values in seen.items()},
        "registered: distinct adapters in a step": {k: statistics.median(v) for k, v in distinct.items()},
    }


def asked_steps(running: Replica, served: list[str]) -> tuple[float, float]:
    """The rate, and the mean number of distinct adapters in a step."""
    series = [f"tenantry_engine_step_adapters_{part}" for part in ("sum", "count")]
    before = [running.metric(name) for name in series]
    rate = ask(running, served)
    adapters, steps = (running.metric(name) - old for name, old in zip(series, before, strict=True))
    return rate, adapters / max(1.0, steps)


# zipf


def measure_zipf(small: Replica, large: Replica, names: list[str], work: Work) -> dict[str, Any]:
    """Rates and evictions by the number of adapters in use, in turns of a pool for some of them and one for all."""
    rates: dict[tuple[int, str], list[float]] = {
        (n, label): [] for n in work.in_use for label in ("small", "large")
    }
    evictions: dict[int, list[float]] = {n: [] for n in work.in_use}
    for number in range(work.zipf_rounds):
        for n in work.in_use:
            draw = random.Random(number)
            order = draw.sample(names, n)  # which names are popular differs by round, sizes with them
            served = draw.choices(order, [1 / (rank + 1) for rank in range(n)], k=work.requests)
            for label in ("small", "large") if number % 2 == 0 else ("large", "small"):
                running = small if label == "small" else large
                before = running.metric("tenantry_engine_adapter_evictions_total")
                rates[n, label].append(ask(running, served))
                if label == "small":
                    after = running.metric("tenantry_engine_adapter_evictions_total")
                    evictions[n].append((after - before) / len(served))
            pair = " and ".join(f"{label} {rates[n, label][-1]:.1f} tok/s" for label in ("small", "large"))
            say(f"zipf, round {number + 1} of {work.zipf_rounds}, {n} adapters: {pair}")
    curve: list[dict[str, Any]] = []
    for n in work.in_use:
        ratios = [a / b for a, b in zip(rates[n, "small"], rates[n, "large"], strict=True)]
        curve.append(
            {
                "adapters": n,
                "tok/s": statistics.median(rates[n, "small"]),
                "least and most tok/s": spread(rates[n, "small"]),
                "tok/s, all in pages": statistics.median(rates[n, "large"]),
                "ratio": statistics.median(ratios),
                "least and most ratio": spread(ratios),
                "evictions per request": statistics.median(evictions[n]),
            }
        )
    return {BEYOND: min(p["ratio"] for p in curve if p["adapters"] > work.fitting), "zipf: curve": curve}


if __name__ == "__main__":
    sys.exit(main())
