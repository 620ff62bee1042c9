"""Nothing is compiled in steady state: batches of all shapes reuse the variants that a few warm-up steps made."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import random, sys
import torch
import triton, triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# A device that takes launches and does nothing: what is compiled, and when, is decided before a launch.
class Device:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

class Compiled:
    function = packed_metadata = None
    def launch_metadata(self, *arguments): return None
    def run(self, *arguments): pass

driver.set_active(Device())
triton.compiler.compile = lambda *arguments, **options: Compiled()

from kernel_world import HEADS, KV, KV_HEADS, LORA, HEAD_DIM, make_world
from tenantry_kernels import GATE_UP, QKV, Module, SegmentBuilder, compilations, rope_table
from tenantry_kernels import triton_attention, triton_lora, triton_norm_rope as rows, triton_sample
from tenantry_kernels.linear import PackedWeight

dtype = torch.bfloat16
triton_lora._SPLIT_WIDTH = 48  # the small model's inputs are split too
rng = random.Random(1)
world = make_world([1, 8, 16, 17, 32, 33, 64, 100], dtype)
builder = SegmentBuilder(LORA)
table = rope_table(HEAD_DIM, 4096, 1e4)

def step(lengths, adapters, context, shift):
    tokens = sum(lengths)
    small = torch.zeros(4 * tokens + 8 * len(lengths) + 64, dtype=torch.int32)
    cut = lambda n: small[shift : shift + n]  # of one staging buffer, so at any alignment
    segments = builder.build([(None if a is None else world.adapters[a], n) for a, n in zip(adapters, lengths)])
    x, residual = torch.zeros(tokens, 96, dtype=dtype), torch.zeros(tokens, 96, dtype=dtype)
    weight = torch.ones(96, dtype=dtype)
    rows.rms_norm(x, weight, 1e-5, None)
    rows.rms_norm(x, weight, 1e-5, residual)
    qkv = torch.zeros(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    for layer in range(2):
        for modules in (QKV, (Module.O,), GATE_UP, (Module.DOWN,)):
            if segments.max_rank:
                x = torch.zeros(tokens, LORA.in_features[modules[0]], dtype=dtype)
                out = torch.zeros(tokens, sum(LORA.out_features[m] for m in modules), dtype=dtype)
                triton_lora.apply_lora(x, out, world.pool, segments, layer, modules)
        rows.qk_norm(qkv, weight[:16], weight[:16], 1e-6, HEADS, KV_HEADS, HEAD_DIM)
        slots = torch.zeros(tokens + 8, dtype=torch.int64)[shift % 8 : shift % 8 + tokens]
        q = rows.rope_and_kv_write(qkv, slots, table, world.kv, layer, slots, HEADS)
        tables = torch.zeros(len(lengths), context // 16 + 1, dtype=torch.int32)
        starts = torch.zeros(len(lengths) + 9, dtype=torch.int32)[shift % 8 : shift % 8 + len(lengths) + 1]
        triton_attention.paged_attention(
            q, world.kv, layer, tables, starts, cut(len(lengths)), 0.25, torch.empty_like(q)
        )
    rows.silu_and_mul(torch.zeros(tokens, 288, dtype=dtype))
    B = len(lengths)
    f = lambda d: torch.zeros(B + 8, dtype=d)[shift % 8 : shift % 8 + B]
    triton_sample.sample(
        torch.zeros(B, 1000), f(torch.float32), f(torch.int64), f(torch.float32), f(torch.float32),
        f(torch.int64), f(torch.int64),
    )

# warm-up: short, middle and long steps, prefill and decode, with the least and the most rank of each tile
for length in (1, 2, 300, 2000):
    for adapter in (None, 0, 3, 5):
        step([length], [adapter], 100, 0)
        step([length], [adapter], 5000, 0)
warm = compilations()
print("warm", sum(warm.values()), warm)
for _ in range(int(sys.argv[1])):
    count = rng.randint(1, 70)
    lengths = [1] * count if rng.random() < 0.4 else [rng.choice([1, 1, 2, 17, 90, 513]) for _ in range(count)]
    some = rng.randint(1, 8)  # the largest rank differs from step to step
    adapters = sorted(
        (rng.choice([None, *range(some)]) for _ in lengths), key=lambda a: -1 if a is None else a
    )
    step(lengths, adapters, rng.randint(1, 20000), rng.randint(0, 15))
assert compilations() == warm, compilations()
print("steady")
"""


def test_batches_of_all_shapes_compile_nothing_new() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "25"],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "steady" in done.stdout
    print(done.stdout)
