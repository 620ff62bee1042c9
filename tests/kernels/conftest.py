"""Fixtures of the kernel tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tenantry_kernels import backend

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def extension() -> None:
    """These tests compare the C++ extension: without it they would compare the reference with itself."""
    from tenantry_kernels import cpu

    assert cpu.problem() == ""
    assert cpu.isa() == os.environ.get("TENANTRY_CPU_ISA", cpu.isa())


@pytest.fixture
def reference_only() -> Iterator[None]:
    """Plain torch serves everything."""
    with backend.reference():
        yield
