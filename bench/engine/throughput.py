"""Output tokens per second of one CPU replica: base model and mixes of adapters, beside transformers and PEFT.

SmolLM2-135M in bf16, 16 concurrent requests of 64 tokens in and 48 out, over HTTP. The floor is the base model's linear
layers alone, by the engine's own kernels. transformers runs a static batch of 16 without HTTP, in bf16 and in fp32.
Rounds are interleaved, and within a round Tenantry's own figures are taken twice, the second time in reverse order, so
that a machine whose speed drifts does less harm; reported are medians, and the median of each round's ratio to its own
base. Peers take minutes a round and vary little: they are part of the first two. What LoRA costs while nobody uses it
is less than what two processes of one program differ by, by where their memory lies: it is taken before all else, over
several starts of a replica with LoRA and one without. The last line is JSON, also left in bench/results. `--peers` adds
vLLM's CPU build, in an environment of its own (see vllm_peer.py), which takes long.

    python bench/engine/throughput.py [--quick] [--rounds N] [--peers | --no-peers]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm_peer
from tenantry_kernels import cpu
from workload import (
    CONCURRENT,
    INPUT,
    OUTPUT,
    RANKS,
    Replica,
    Server,
    make_adapters,
    model_folder,
    prompts,
    replica,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report

AIMS = {1: 0.90, 8: 0.82, 64: 0.72}
BASE_OF_FLOOR = 0.70
_SEEDS = itertools.count()
PEERS = {"transformers": ("transformers fp32", "transformers bf16"), "vLLM": ("vLLM",)}
PEER_ROUNDS = 2
TIMES_PEER = {"transformers": 1.8, "vLLM": 3.0}
# Where the processor multiplies bf16: vLLM does so too, and the floor itself is but twice as fast.
VLLM_IN_PAIRS = 1.2
UNUSED = 0.98  # of the base without LoRA, when LoRA is on and nobody uses it
UNUSED_STARTS, UNUSED_PAIRS = 6, 4


def main() -> None:
    """Runs everything and prints a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--quick", action="store_true", help="one short round, transformers in one precision"
    )
    options.add_argument("--rounds", type=int, default=5)
    peers = options.add_mutually_exclusive_group()
    peers.add_argument("--peers", action="store_true", help="vLLM's CPU build beside transformers and PEFT")
    peers.add_argument("--no-peers", action="store_true", help="Tenantry and its floor alone")
    asked = options.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    model = model_folder()
    with tempfile.TemporaryDirectory(prefix="tenantry-bench-") as name:
        folder = Path(name)
        print("making 64 adapters ...", flush=True)
        names = make_adapters(model, folder / "adapters", 64)
        chosen = ("vllm",) if asked.peers else ()
        if not asked.no_peers:
            chosen = ("transformers", *chosen)
        result = measure(model, folder, names, rounds, peers=chosen, quick=asked.quick)
    sys.exit(verdict(result, keep=not asked.quick))


def measure(
    model: Path, folder: Path, names: list[str], rounds: int, *, peers: tuple[str, ...], quick: bool
) -> dict[str, Any]:
    """Interleaved rounds of every contender."""
    requests = CONCURRENT if quick else 2 * CONCURRENT  # short turns: the machine drifts within minutes
    contenders: dict[str, Callable[[], float]] = {}
    distinct: dict[str, float] = {}
    arguments = (
        "--adapters",
        str(folder / "adapters"),
        "--max-model-len",
        "512",
        "--pool-bytes",
        str(2400 << 20),
    )
    beside_none = unused(model, folder, arguments, 1 if quick else UNUSED_STARTS)
    with ExitStack() as stack:
        running = stack.enter_context(replica(model, folder / "data", *arguments, log=folder / "engine.log"))
        print((folder / "engine.log").read_text().splitlines()[0].split("INFO ")[-1], flush=True)
        contenders["floor"] = floor(model)
        contenders["base"] = lambda: ask(running, ["base"] * requests)
        for count in AIMS:
            contenders[f"lora {count}"] = _lora(running, names[:count], max(requests, count), distinct)
        ours = list(contenders)
        if "transformers" in peers:
            contenders |= transformers_contenders(model, folder / "adapters", names, quick)
        if "vllm" in peers:
            contenders |= stack.enter_context(vllm_peer.contenders(model, folder, names, ask))
        seen: dict[str, list[float]] = {name: [] for name in contenders}
        while running.metric("tenantry_engine_adapters", 'state="registered"') < len(names):
            time.sleep(0.5)  # each adapter is checked once in the background
        # not counted: fills caches, loads every adapter into pages
        ask(running, ["base"] * CONCURRENT + names)
        for number in range(rounds):
            got: dict[str, list[float]] = {}
            peers_too = contenders if number < PEER_ROUNDS else ours
            for name in [*peers_too, *reversed(ours)]:
                got.setdefault(name, []).append(contenders[name]())
                print(f"round {number + 1}: {name:36s} {got[name][-1]:8.1f} tok/s", flush=True)
            for name, rates in got.items():
                seen[name].append(statistics.harmonic_mean(rates))
    medians = {name: statistics.median(values) for name, values in seen.items()}
    of_base = {
        name: statistics.median(value / base for value, base in zip(values, seen["base"], strict=False))
        for name, values in seen.items()
    }
    return {
        "medians": medians,
        "of_base": of_base,
        "rounds": seen,
        "distinct_adapters_per_step": distinct,
        "unused": beside_none,
    }


def unused(model: Path, folder: Path, arguments: tuple[str, ...], starts: int) -> list[list[float]]:
    """Base requests with LoRA on, over those with LoRA off: the ratios of pairs of turns, by start of the two."""
    found = []
    for number in range(starts):
        made: dict[str, Replica] = {}
        ratios = []
        with ExitStack() as stack:
            for name in ("on", "off") if number % 2 == 0 else ("off", "on"):
                own = arguments if name == "on" else ("--no-lora", *arguments[2:])
                made[name] = stack.enter_context(replica(model, folder / f"unused-{name}-{number}", *own))
            adapters = len(list(Path(arguments[1]).iterdir()))
            while made["on"].metric("tenantry_engine_adapters", 'state="registered"') < adapters:
                time.sleep(0.5)
            for running in made.values():
                ask(running, ["base"] * CONCURRENT)
            for pair in range(UNUSED_PAIRS):
                order = ("on", "off") if pair % 2 == 0 else ("off", "on")
                rates = {name: ask(made[name], ["base"] * CONCURRENT) for name in order}
                ratios.append(rates["on"] / rates["off"])
        found.append(ratios)
        print(f"start {number + 1}: LoRA on / off", *(f"{ratio:.3f}" for ratio in ratios), flush=True)
    return found


def ask(running: Server, served: list[str]) -> float:
    """One run over HTTP, with prompts that no run before had: a prefix cache must not help."""
    return asyncio.run(running.generate(served, prompts(len(served), 49152, seed=next(_SEEDS))))


def _lora(
    running: Replica, names: list[str], requests: int, distinct: dict[str, float]
) -> Callable[[], float]:
    def run() -> float:
        sums = [running.metric(f"tenantry_engine_step_adapters_{part}") for part in ("sum", "count")]
        rate = ask(running, [names[i % len(names)] for i in range(requests)])
        now = [running.metric(f"tenantry_engine_step_adapters_{part}") for part in ("sum", "count")]
        distinct[f"lora {len(names)}"] = (now[0] - sums[0]) / max(1.0, now[1] - sums[1])
        return rate

    return run


def floor(model: Path) -> Callable[[], float]:
    """The linear layers of the same work: 48 steps of 16 rows, the prompts' 1,024 rows, and 48 times the head."""
    from tenantry_kernels import linear, pack_linear

    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_dim"]
    shapes = [(width, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    layers = [
        [pack_linear(torch.randn(shape, dtype=torch.bfloat16)) for shape in shapes]
        for _ in range(config["num_hidden_layers"])
    ]
    head = pack_linear(torch.randn(config["vocab_size"], hidden, dtype=torch.bfloat16))

    def run() -> float:
        decode = {n: torch.randn(CONCURRENT, n, dtype=torch.bfloat16) for n in (hidden, inner)}
        prefill = {n: torch.randn(256, n, dtype=torch.bfloat16) for n in (hidden, inner)}
        started = time.perf_counter()
        for _ in range(CONCURRENT * INPUT // 256):
            for layer in layers:
                for weight in layer:
                    linear(prefill[weight.in_features], weight)
        for _ in range(OUTPUT):
            for layer in layers:
                for weight in layer:
                    linear(decode[weight.in_features], weight)
            linear(decode[hidden], head, torch.float32)
        return CONCURRENT * OUTPUT / (time.perf_counter() - started)

    return run


def transformers_contenders(
    model: Path, adapters: Path, names: list[str], quick: bool
) -> dict[str, Callable[[], float]]:
    """A static batch of 16 in transformers, alone and with PEFT (one adapter; eight mixed)."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor(prompts(CONCURRENT, 49152))

    def generate(network: Any, **more: Any) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            network.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=OUTPUT,
                min_new_tokens=OUTPUT, do_sample=False, pad_token_id=0, eos_token_id=None, **more,
            )  # fmt: skip
        return CONCURRENT * OUTPUT / (time.perf_counter() - started)

    found: dict[str, Callable[[], float]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if quick and name == "bf16":
            continue
        base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        base.eval()
        found[f"transformers {name}"] = partial(generate, base)
        if name == "fp32":
            wrapped: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            tuned: Any = PeftModel.from_pretrained(wrapped, adapters / names[0], adapter_name=names[0])
            for other in names[1 : len(RANKS)]:
                tuned.load_adapter(str(adapters / other), adapter_name=other)
            tuned.eval()
            mixed = [names[i % len(RANKS)] for i in range(CONCURRENT)]

            def one(tuned: Any = tuned) -> float:
                tuned.set_adapter(names[0])
                return generate(tuned)

            found["transformers + PEFT, 1 (fp32)"] = one
            found["transformers + PEFT, 8 mixed (fp32)"] = partial(generate, tuned, adapter_names=mixed)
    gc.collect()
    return found


def verdict(result: dict[str, Any], keep: bool) -> int:
    """Prints the table and what the ranges say of it."""
    medians: dict[str, float] = result["medians"]
    of_base: dict[str, float] = result["of_base"]
    print(f"\n{'':40s}{'tok/s':>8s}{'of base':>9s}")
    for name, value in medians.items():
        print(f"{name:40s}{value:8.1f}{of_base[name]:9.2f}")
    for name, value in result["distinct_adapters_per_step"].items():
        print(f"{name}: {value:.1f} distinct adapters in a step")
    ours = {name: medians[name] for name in ("floor", "base", *(f"lora {n}" for n in AIMS))}
    figures = {f"{name} tok/s": round(value, 1) for name, value in ours.items()}
    figures |= {f"lora {n} / base": round(of_base[f"lora {n}"], 3) for n in AIMS}
    figures["base / floor"] = round(1 / of_base["floor"], 3)
    peers = {f"{name} tok/s": round(value, 1) for name, value in medians.items() if name not in ours}
    ranges: dict[str, report.Bounds] = {f"lora {n} / base": (aim, None) for n, aim in AIMS.items()}
    ranges["base / floor"] = (BASE_OF_FLOOR, 1.0)
    every = [ratio for ratios in result["unused"] for ratio in ratios]
    figures["base / base, LoRA off"] = round(statistics.median(every), 3)
    ranges["base / base, LoRA off"] = (UNUSED, None)
    for peer, names in PEERS.items():
        static = [of_base[name] for name in names if name in of_base]
        if static:
            figures[f"base / {peer}"] = round(1 / max(static), 2)
            pairs = peer == "vLLM" and not cpu.problem() and cpu.isa() == "avx512bf16"
            ranges[f"base / {peer}"] = (VLLM_IN_PAIRS if pairs else TIMES_PEER[peer], None)
    work = {"concurrent": CONCURRENT, "input": INPUT, "output": OUTPUT, "torch": torch.__version__}
    return report.finish(
        bench="engine/throughput", figures=figures, peers=peers, ranges=ranges, keep=keep,
        details={
            **work,
            "rounds": result["rounds"],
            "distinct": result["distinct_adapters_per_step"],
            "unused": result["unused"],
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
