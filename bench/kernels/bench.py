"""CPU kernels against bytes, multiply-adds and the torch reference: `python bench/kernels/bench.py [--quick]`.

One decode step of SmolLM2-135M's shapes in bf16: 16 sequences, contexts of 96 tokens, the rank cycle over all seven
projections. The last line is one JSON object; a dated copy goes to bench/results/. The GPU's bars need a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the engine's process has it; torch reads it once

import torch
from tenantry_kernels import (
    GATE_UP,
    QKV,
    KvShape,
    LoraShape,
    Module,
    PagedAdapter,
    SegmentBuilder,
    apply_lora,
    backend,
    cpu,
    describe,
    layout,
    linear,
    linear_lora,
    pack_linear,
    paged_attention,
    place,
    rms_norm,
    rope_and_kv_write,
    rope_table,
    silu_and_mul,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 30, 9, 3, 64, 576, 1536, 49152
BATCH, CONTEXT = 16, 96
CYCLE = (8, 16, 8, 16, 32, 8, 16, 64)
KV = KvShape(LAYERS, KV_HEADS, HEAD_DIM)
LORA = LoraShape(
    LAYERS,
    (HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN, FFN),
    (HIDDEN, 192, 192, HIDDEN, FFN, FFN, HIDDEN),
)
PROJECTIONS = {
    "qkv": (HIDDEN, HIDDEN + 384),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (HIDDEN, 2 * FFN),
    "down": (FFN, HIDDEN),
}
CALLS = {"qkv": QKV, "o": (Module.O,), "gate_up": GATE_UP, "down": (Module.DOWN,)}
DTYPE = torch.bfloat16

RANGES: dict[str, report.Bounds] = {
    "mixed_to_base_1": (0.90, 1.05),
    "mixed_to_base_8": (0.82, 1.05),
    "mixed_to_base_16": (0.72, 1.05),
    "added_8_times_bytes_over_bandwidth": (None, 1.6),
    "added_16_times_bytes_over_bandwidth": (None, 1.6),
    "linear_speedup_over_torch": (1.0, None),
    "attention_speedup_over_reference": (1.0, None),
    "lora_speedup_over_reference": (1.0, None),
}


def best(call: Callable[[], object], times: int) -> float:
    """Least seconds of some calls: what the machine does when nothing else runs."""
    call()
    least = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - begin)
    return least


class Decode:
    """One decode step: layers in sequence, every kernel as the engine calls it, weights of each layer its own."""

    def __init__(self, adapters: int) -> None:
        torch.manual_seed(0)
        plans = [layout(LORA, [[CYCLE[i % 8]] * 7] * LAYERS, KV.page_elems) for i in range(adapters)]
        blocks = CONTEXT // 16 + 1
        pages = BATCH * blocks + sum(plan.pages for plan in plans)
        self.pool = (torch.randn(pages, KV.page_elems) * 0.02).to(DTYPE)
        self.kv = KV.view(self.pool)
        self.adapters: list[PagedAdapter] = []
        at = BATCH * blocks
        for plan in plans:
            self.adapters.append(place(plan, range(at, at + plan.pages), [[1.0] * 7] * LAYERS))
            at += plan.pages
        self.plain = [
            {n: (torch.randn(out, width) * 0.02).to(DTYPE) for n, (width, out) in PROJECTIONS.items()}
            for _ in range(LAYERS)
        ]
        self.packed = [{n: pack_linear(w) for n, w in layer.items()} for layer in self.plain]
        self.head = pack_linear((torch.randn(VOCAB, HIDDEN) * 0.02).to(DTYPE))
        self.norm = torch.ones(HIDDEN, dtype=DTYPE)
        self.table = rope_table(HEAD_DIM, 2048, 10000.0)
        self.pages = torch.arange(BATCH * blocks, dtype=torch.int32).view(BATCH, blocks)
        self.starts = torch.arange(BATCH + 1, dtype=torch.int32)
        self.contexts = torch.full((BATCH,), CONTEXT, dtype=torch.int32)
        self.positions = torch.full((BATCH,), CONTEXT - 1)
        self.slots = self.pages[:, (CONTEXT - 1) // 16].long() * 16 + (CONTEXT - 1) % 16
        self.builder = SegmentBuilder(LORA)

    def segments(self, adapters: int) -> Any:
        """All rows of the batch shared out over so many adapters (0: base rows only)."""
        if adapters == 0:
            return self.builder.build([(None, BATCH)])
        return self.builder.build([(self.adapters[i], BATCH // adapters) for i in range(adapters)])

    def linears(self, x: dict[str, torch.Tensor], packed: bool) -> None:
        """All base products of a step without the head, by the extension or by torch."""
        for layer in range(LAYERS):
            for name in PROJECTIONS:
                if packed:
                    linear(x[name], self.packed[layer][name])
                else:
                    torch.nn.functional.linear(x[name], self.plain[layer][name])

    def attention(self, q: torch.Tensor, layers: int = LAYERS) -> None:
        for layer in range(layers):
            paged_attention(q, self.kv, layer, self.pages, self.starts, self.contexts, HEAD_DIM**-0.5)

    def step(self, segments: Any) -> torch.Tensor:
        x = torch.zeros(BATCH, HIDDEN, dtype=DTYPE)
        residual = torch.ones(BATCH, HIDDEN, dtype=DTYPE)
        for layer in range(LAYERS):
            weights = self.packed[layer]
            h = rms_norm(x, self.norm, 1e-5, residual)
            qkv = linear_lora(h, weights["qkv"], self.pool, segments, layer, QKV)
            q = rope_and_kv_write(qkv, self.positions, self.table, self.kv, layer, self.slots, HEADS)
            o = paged_attention(q, self.kv, layer, self.pages, self.starts, self.contexts, 0.125).view(
                BATCH, HIDDEN
            )
            x = linear_lora(o, weights["o"], self.pool, segments, layer, (Module.O,))
            h = rms_norm(x, self.norm, 1e-5, residual)
            gate_up = linear_lora(h, weights["gate_up"], self.pool, segments, layer, GATE_UP)
            act = silu_and_mul(gate_up)
            x = linear_lora(act, weights["down"], self.pool, segments, layer, (Module.DOWN,))
        return linear(rms_norm(x, self.norm, 1e-5, residual), self.head, torch.float32)


_MEMORY = torch.ones(64 * 1024 * 1024)


def reading_speed() -> float:
    """Bytes per second of one pass over 256 MiB, all threads."""
    return _MEMORY.numel() * 4 / best(_MEMORY.sum, 2)


def measure(quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    times = 3 if quick else 15
    figures: dict[str, float] = {}
    peers: dict[str, float] = {}

    def note(table: dict[str, float], name: str, value: float) -> None:
        table[name] = round(value, 3)
        sys.stderr.write(f"{name}: {table[name]}\n")

    bench = Decode(16)
    x = {n: (torch.randn(BATCH, width) * 0.1).to(DTYPE) for n, (width, _) in PROJECTIONS.items()}
    q = torch.randn(BATCH, HEADS, HEAD_DIM).to(DTYPE)

    macs = BATCH * LAYERS * sum(a * b for a, b in PROJECTIONS.values())
    seconds = best(lambda: bench.linears(x, packed=True), times)
    note(figures, "linear_ms", seconds * 1e3)
    note(figures, "linear_gflops", 2 * macs / seconds / 1e9)
    torch_seconds = best(lambda: bench.linears(x, packed=False), max(1, times // 5))
    note(peers, "torch_linear_ms", torch_seconds * 1e3)
    note(figures, "linear_speedup_over_torch", torch_seconds / seconds)

    attention = best(lambda: bench.attention(q), times)
    note(figures, "attention_ms", attention * 1e3)
    with backend.reference():
        # slow, so three layers stand for all
        reference = best(lambda: bench.attention(q, 3), 2) * LAYERS / 3
        note(peers, "reference_attention_ms", reference * 1e3)
        note(figures, "attention_speedup_over_reference", reference / attention)
        segments = bench.segments(8)
        reference = best(lambda: apply_reference(bench, x, segments, 3), 2) * LAYERS / 3
        note(peers, "reference_lora_8_ms", reference * 1e3)

    # in turns and often, and medians: what else the machine does falls on all alike, memory's speed among them
    speeds: list[float] = []
    taken: dict[int, list[float]] = {0: [], 1: [], 8: [], 16: []}
    for _ in range(4 * times):
        speeds.append(reading_speed())
        for count, seen in taken.items():
            segments = bench.segments(count)
            seen.append(best(lambda s=segments: bench.step(s), 1))  # type: ignore[misc]
    bandwidth = statistics.median(speeds)
    steps = {count: statistics.median(seen) for count, seen in taken.items()}
    note(figures, "read_gb_per_s", bandwidth / 1e9)
    for count, seconds in steps.items():
        note(figures, f"step_{count}_ms" if count else "step_base_ms", seconds * 1e3)
        if count:
            ranks = sum(CYCLE[i % 8] for i in range(count))
            size = DTYPE.itemsize * ranks * LAYERS * sum(LORA.in_features + LORA.out_features)
            added = seconds - steps[0]
            note(figures, f"mixed_to_base_{count}", steps[0] / seconds)
            note(figures, f"added_{count}_times_bytes_over_bandwidth", added * bandwidth / size)
    note(figures, "lora_speedup_over_reference", reference / max(1e-9, steps[8] - steps[0]))
    return figures, peers


def apply_reference(bench: Decode, x: dict[str, torch.Tensor], segments: Any, layers: int) -> None:
    """LoRA alone, in plain torch."""
    for layer in range(layers):
        for name, modules in CALLS.items():
            out = torch.zeros(BATCH, PROJECTIONS[name][1], dtype=DTYPE)
            apply_lora(x[name], out, bench.pool, segments, layer, modules)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions, for a smoke run")
    quick = parser.parse_args().quick
    sys.stderr.write(f"{describe('cpu', DTYPE)}\n")
    if problem := cpu.problem():
        sys.stderr.write(f"{problem}\n")
        return 1
    if not torch.cuda.is_available():
        sys.stderr.write("GPU bars: not measured, they need a GPU\n")
    figures, peers = measure(quick)
    details = {"torch": torch.__version__, "threads": torch.get_num_threads(), "isa": cpu.isa()}
    return report.finish(
        bench="kernels/bench", figures=figures, peers=peers, ranges=RANGES, keep=not quick, details=details
    )


if __name__ == "__main__":
    sys.exit(main())
