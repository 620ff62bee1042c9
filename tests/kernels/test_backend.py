"""Which backend serves is chosen by device and dtype, said with its reason, and never a silent surprise."""

import subprocess
import sys

import pytest
import torch
from tenantry_kernels import backend, cpu, describe


def test_extension_serves_cpu_tensors() -> None:
    assert backend.of(torch.zeros(1)) == "cpu"
    assert describe("cpu", torch.bfloat16).startswith("kernels: cpu (C++ extension, ")


def test_other_dtypes_and_a_forced_reference_say_why(monkeypatch) -> None:
    assert describe("cpu", torch.float16) == (
        "kernels: reference (the C++ extension serves float32 and bfloat16, not torch.float16)"
    )
    monkeypatch.setenv("TENANTRY_KERNELS", "reference")
    assert describe("cpu", torch.float32) == "kernels: reference (TENANTRY_KERNELS=reference is set)"


def test_without_a_library_the_reference_serves(monkeypatch, tmp_path) -> None:
    code = (
        "import pathlib, torch\n"
        "from tenantry_kernels import cpu, describe\n"
        f"cpu.LIBRARY = pathlib.Path({str(tmp_path / 'none.so')!r})\n"
        "print(describe('cpu', torch.float32))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert "reference (the C++ extension is not built; run `python -m tenantry_kernels.cpu.build`)" in said
    broken = tmp_path / "none.so"
    broken.write_bytes(b"not a library")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert "reference (the C++ extension does not load" in said


@pytest.mark.parametrize("isa", ["generic"])
def test_other_instruction_sets_agree(isa) -> None:
    """The fallback for machines without AVX2 passes the same tests (in its own process: the choice is made once)."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=200", "-o", "addopts=--import-mode=importlib"]
    files = [str(p) for name in ("lora", "attention", "rows") for p in [__file__.replace("test_backend", f"test_{name}")]]
    import os

    env = {**os.environ, "TENANTRY_CPU_ISA": isa}
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=280, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    said = subprocess.run(
        [sys.executable, "-c", "from tenantry_kernels import cpu; assert not cpu.problem(); print(cpu.isa())"],
        capture_output=True, text=True, timeout=120, env=env, check=True,
    ).stdout
    assert said.strip() == isa
    assert cpu.isa() != ""
