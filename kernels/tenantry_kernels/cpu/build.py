"""Builds the extension beside its source: `python -m tenantry_kernels.cpu.build [--sanitize]`.

One object per instruction set and those with the bindings: the library runs on any x86-64 (or other) machine and
picks its kernels when loaded. Needs a C++ compiler with C++20 (`$CXX`, else g++).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from tenantry_kernels.cpu import LIBRARY

_HERE = Path(__file__).parent
_COMMON = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-ffp-contract=fast")
_SANITIZE = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
_ISAS = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
}
_BINDINGS = ("sample", "lora", "ops")  # the longest last: it is compiled first


def build(jobs: int = 2, sanitize: bool = False, target: Path = LIBRARY) -> Path:
    """Compile and link. Raises CalledProcessError (the compiler says why on stderr), FileNotFoundError without one."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FileNotFoundError(
            "a C++ compiler must be installed (g++, or $CXX): the torch reference serves without"
        )
    common = (*_COMMON, *(_SANITIZE if sanitize else ()))
    x86 = platform.machine() in {"x86_64", "AMD64"}
    isas = _ISAS if x86 else {"generic": ()}
    torch_dir = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [
                compiler,
                *common,
                *flags,
                f"-DTENANTRY_ISA={name}",
                "-c",
                _HERE / "kernels.cpp",
                "-o",
                f"{folder}/{name}.o",
            ]
            for name, flags in isas.items()
        ]
        includes = [f"-isystem{path}" for path in include_paths()]
        only = [] if x86 else ["-DTENANTRY_GENERIC_ONLY"]
        commands += [
            [
                compiler,
                *common,
                abi,
                *only,
                *includes,
                "-c",
                _HERE / f"{name}.cpp",
                "-o",
                f"{folder}/{name}.o",
            ]
            for name in _BINDINGS
        ]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda command: subprocess.run(command, check=True), reversed(commands)))
        objects = [f"{folder}/{name}.o" for name in (*isas, *_BINDINGS)]
        made = target.with_suffix(".tmp")
        subprocess.run(
            [
                compiler,
                *common,
                "-shared",
                *objects,
                f"-L{torch_dir / 'lib'}",
                "-ltorch_cpu",
                "-lc10",
                "-o",
                made,
            ],
            check=True,
        )
        made.replace(target)  # a process that has the old library loaded keeps it
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the CPU kernels beside their source.")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan, for tests")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    try:
        path = build(chosen.jobs, chosen.sanitize)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"built {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
