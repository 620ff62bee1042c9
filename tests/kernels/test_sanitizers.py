"""The C++ extension under AddressSanitizer and UndefinedBehaviorSanitizer: its own tests, in a process of their own.

The sanitized library is built once per state of its sources, in the folder for temporary files.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tenantry_kernels.cpu import build

HERE = Path(__file__).parent
START = """
import sys
from pathlib import Path
from tenantry_kernels import cpu
cpu.LIBRARY = Path(sys.argv[1])  # before anything loads the other one
"""
TESTS = """
import pytest
sys.exit(pytest.main(["-q", "-x", "-s", "-p", "no:faulthandler", "-k", sys.argv[2], *sys.argv[3:]]))
"""
# A page beside the pool: what the sanitizer must see, else the other tests prove nothing.
CONTROL = """
import torch
from tenantry_kernels import KvShape, paged_attention
shape = KvShape(1, 1, 16)
pool = torch.zeros(4, shape.page_elems)
assert cpu.problem() == ""
table, starts, lens = (torch.tensor(v, dtype=torch.int32) for v in ([[4]], [0, 1], [3]))
paged_attention(torch.zeros(1, 1, 16), shape.view(pool), 0, table, starts, lens, 1.0)
"""
FILES = [str(HERE / f"test_{name}.py") for name in ("lora", "linear_lora", "attention", "rows", "sample")]
# A refusal throws, which ASan cannot follow here: Python loads libstdc++ after it.
LEAN = "not refused and (many_adapters or mixed_batch or nan or qk_norm or silu or rms or rope_rot or linear or draws)"


@pytest.fixture(scope="module")
def library() -> Path:
    """The sanitized extension."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(build.__file__).parent.glob("*.*[hpy]")))
    version = hashlib.sha256(sources + torch.__version__.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"tenantry-sanitized-{os.getuid()}" / version / "libtenantry_cpu.so"
    if not path.exists():
        shutil.rmtree(path.parent.parent, ignore_errors=True)
        path.parent.mkdir(parents=True, mode=0o700)
        build.build(sanitize=True, target=path)
    return path


def run(library: Path, program: str, *arguments: str, isa: str = "") -> subprocess.CompletedProcess[str]:
    runtime = subprocess.run(
        [os.environ.get("CXX", "g++"), "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=77",  # Python keeps much to its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
        **({"TENANTRY_CPU_ISA": isa} if isa else {}),
    }
    return subprocess.run(
        [sys.executable, "-c", START + program, str(library), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )


def test_a_read_beside_the_pool_is_seen(library: Path) -> None:
    done = run(library, CONTROL)
    assert done.returncode == 77, done.stderr[-3000:]
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize("isa", ["", "generic"], ids=["best", "generic"])
def test_no_test_of_the_kernels_touches_foreign_memory(library: Path, isa: str) -> None:
    done = run(library, TESTS, LEAN, *FILES, isa=isa)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
    assert "passed" in done.stdout
