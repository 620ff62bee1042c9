"""Fixtures of the engine's tests: tiny random models made on the spot, and the real example model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import engine_world as world
import families

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> world.TinyModel:
    """A random Llama of two layers with a byte-level tokenizer and a chat template."""
    return world.TinyModel.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as safetensors; converted from the package once, kept in the user's cache."""
    folder = Path(os.environ.get("TENANTRY_MODEL_DIR", Path.home() / ".cache/tenantry/models/smollm2-135m"))
    if not (folder / "model.safetensors").is_file():
        subprocess.run(
            [sys.executable, str(REPOSITORY / "examples/models/convert_smollm2.py")], check=True, timeout=300
        )
    return folder


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[world.Engines]:
    """Makes engines that end with the test; their books are checked then."""
    made = world.Engines(tmp_path)
    yield made
    made.close()


MATRIX: set[families.Cell] = set()
"""What the matrix tests of this run have seen to be right."""


@pytest.fixture(scope="session")
def matrix() -> set[families.Cell]:
    """Tests add the cells that they have checked."""
    return MATRIX


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> families.Models:
    """Tiny random models of every family with adapters of every kind, made when first asked for."""
    return families.Models(tmp_path_factory.mktemp("families"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The correctness matrix: what really ran and was right."""
    if MATRIX:
        terminalreporter.section("engine against transformers + PEFT")
        for line in families.table(MATRIX):
            terminalreporter.line(line)
