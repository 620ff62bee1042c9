"""The CPU path: one C++ extension, built beside its source by `python -m tenantry_kernels.cpu.build`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "libtenantry_cpu.so"


@cache
def problem() -> str:
    """Why the extension cannot serve here, or an empty string where it does."""
    if not LIBRARY.exists():
        return "the C++ extension is not built; run `python -m tenantry_kernels.cpu.build`"
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the C++ extension does not load ({error}); build it again for this torch"
    return ""


def isa() -> str:
    """Instruction set that the extension chose on this machine."""
    return str(torch.ops.tenantry_cpu.isa())
