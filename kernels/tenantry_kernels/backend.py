"""Which implementation serves a tensor: the C++ extension, Triton, or the torch reference, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["cpu", "triton", "reference"]

_FORCE = "TENANTRY_KERNELS"
"""Environment variable: `reference` makes plain torch serve everything (to compare, to debug)."""

_asked = [os.environ.get(_FORCE, "")]  # read once: a step asks hundreds of times


def of(tensor: Tensor) -> Backend:
    """The backend for tensors like this one (device and dtype decide)."""
    return _choose(tensor.device.type, tensor.dtype, _asked[-1])[0]


def describe(device: torch.device | str, dtype: torch.dtype) -> str:
    """One line for the start of the log: which backend serves and why."""
    kind, why = _choose(torch.device(device).type, dtype, _asked[-1])
    return f"kernels: {kind} ({why})"


@contextmanager
def reference() -> Iterator[None]:
    """Within it plain torch serves everything, as with the environment variable."""
    _asked.append("reference")
    try:
        yield
    finally:
        _asked.pop()


@cache
def _choose(device: str, dtype: torch.dtype, forced: str) -> tuple[Backend, str]:
    if forced == "reference":
        return "reference", f"asked for, e.g. by {_FORCE}=reference"
    if device == "cuda":
        return "triton", "tensors are on a GPU"
    if device != "cpu":
        return "reference", f"no kernels for {device} tensors"
    from tenantry_kernels import cpu

    if dtype not in (torch.float32, torch.bfloat16):
        return "reference", f"the C++ extension serves float32 and bfloat16, not {dtype}"
    problem = cpu.problem()
    if problem:
        return "reference", problem
    return "cpu", f"C++ extension, {cpu.isa()}"
