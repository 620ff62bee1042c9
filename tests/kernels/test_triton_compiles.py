"""Triton's kernels compile for a GPU, which their interpreter does not show. Needs no GPU, only Triton's compiler."""

import os
import subprocess
import sys

PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from tenantry_kernels import triton_attention as attention, triton_lora as lora, triton_norm_rope as rows
from tenantry_kernels import triton_sample

D = "*bf16"
POINTERS = dict(
    x=D, out=D, pool=D, q=D, kv=D, residual=D, weight=D, q_weight=D, k_weight=D, y=D, gate_up=D, qkv=D, k=D, v=D,
    hidden="*fp32", scales="*fp32",
    table="*fp32", chunks="*i32", ranks="*i32", page_tables="*i32", query_starts="*i32", context_lens="*i32",
    parts="*fp32", logits="*fp32", temperatures="*fp32", top_ps="*fp32", min_ps="*fp32",
    chosen="*i64", top_ks="*i64", seeds="*i64", steps="*i64", first="*i64",
    rows="*i64", positions="*i64", slots="*i64", scale="fp32", eps="fp32",
)
TILE = dict(BLOCK_T=16, BLOCK_R=16, SPLIT=2, WIDE=False)
SPLITS = dict(HEAD_DIM=64, DIM_PADDED=64, BLOCK_N=64, SPLIT_KEYS=512, MOST_SPLITS=32)
GROUP = dict(GROUP=3, GROUP_PADDED=4, BLOCK_Q=4, PAGE=16, WIDE=False)
CALLS = (
    (lora._shrink, dict(BLOCK_K=64, **TILE)),
    (lora._expand, dict(BLOCK_N=128, **TILE)),
    (attention._attend, dict(**SPLITS, **GROUP)),
    (attention._join, SPLITS),
    (triton_sample._sample, dict(BLOCK=2048)),
    (rows._rms_norm, dict(ADD=True, BLOCK=1024)),
    (rows._qk_norm, dict(HEAD_DIM=64, BLOCK=64)),
    (rows._kv_write, dict(HEAD_DIM=64, BLOCK=64, PAGE=16)),
    (rows._silu_and_mul, dict(BLOCK=1024)),
    (rows._rope_and_kv_write, dict(HEAD_DIM=64, HALF_PADDED=32, PAGE=16)),
)
for kernel, constants in CALLS:
    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    built = compile(ASTSource(kernel, kinds, values), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, len(built.asm["ptx"]) > 0)
"""


def test_all_kernels_compile(tmp_path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("True") == 10
