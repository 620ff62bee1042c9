"""Fixtures of the engine's tests: tiny random models made on the spot, and the real example model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import engine_world as world

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
