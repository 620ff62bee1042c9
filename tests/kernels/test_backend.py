"""Which backend serves is chosen by device and dtype, said with its reason, and never a silent surprise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tenantry_kernels import backend, cpu, describe


def test_extension_serves_cpu_tensors() -> None:
    assert backend.of(torch.zeros(1)) == "cpu"
    assert describe("cpu", torch.bfloat16).startswith("kernels: cpu (C++ extension, ")


def test_other_dtypes_and_a_forced_reference_say_why() -> None:
    assert describe("cpu", torch.float16) == (
        "kernels: reference (the C++ extension serves float32 and bfloat16, not torch.float16)"
    )
    with backend.reference():
        assert describe("cpu", torch.float32) == (
            "kernels: reference (asked for, e.g. by TENANTRY_KERNELS=reference)"
        )
    assert backend.of(torch.zeros(1)) == "cpu"


def test_the_environment_forces_the_reference() -> None:
    code = "from tenantry_kernels import backend; import torch; print(backend.of(torch.zeros(1)))"
    environment = {**os.environ, "TENANTRY_KERNELS": "reference"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    assert done.stdout.strip() == "reference"


def test_without_a_library_the_reference_serves(monkeypatch, tmp_path) -> None:
    def forget() -> None:
        cpu.problem.cache_clear()
        backend._choose.cache_clear()

    try:
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "LIBRARY", tmp_path / "none.so")
            forget()
            assert describe("cpu", torch.float32) == (
                "kernels: reference (the C++ extension is not built; run `python -m tenantry_kernels.cpu.build`)"
            )
            cpu.LIBRARY.write_bytes(b"not a library")
            forget()
            assert "reference (the C++ extension does not load" in describe("cpu", torch.float32)
            assert backend.of(torch.zeros(1)) == "reference"
    finally:
        forget()


# From the least to what the newest processors have.
ISAS = ("generic", "avx2", "avx512", "avx512bf16")


@pytest.mark.parametrize("isa", () if cpu.problem() else ISAS[: ISAS.index(cpu.isa())])
def test_what_lesser_machines_run_agrees(isa: str) -> None:
    """The same tests in their own process, since the choice is made once (a fixture checks that it was made)."""
    files = [
        str(Path(__file__).with_name(f"test_{name}.py"))
        for name in ("lora", "linear_lora", "attention", "rows")
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-k",
        "bf16 and (crowd or many or 16-6 or linear or silu)",
    ]
    environment = {**os.environ, "TENANTRY_CPU_ISA": isa}
    done = subprocess.run(
        command + files, capture_output=True, text=True, timeout=250, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
