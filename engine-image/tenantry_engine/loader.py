"""Reads a base model's folder: config.json and safetensors, whole or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from tenantry_engine.errors import EngineError


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises EngineError when there is none."""
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"`--model` must be a folder with a config.json: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"`--model` must hold a JSON object in {path}")
    return value


class Weights:
    """The tensors of a folder, read one by one and cast to one dtype. A context manager: it keeps files open."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(str(path), framework="pt", device=device)
            self._files.append(file)
            for name in cast(list[str], file.keys()):  # type: ignore[no-untyped-call]
                if name in self._where:
                    raise EngineError(f"`--model` must hold each tensor once: `{name}` stands in two files")
                self._where[name] = file
        if not self._files:
            raise EngineError(f"`--model` must hold at least one *.safetensors file: {folder}")
        self.unread = set(self._where)

    def __enter__(self) -> Weights:
        for file in self._files:
            file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.__exit__(kind, error, trace)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str, *shape: int) -> Tensor:
        """One tensor. Raises EngineError when it is not there or has another shape."""
        file = self._where.get(name)
        if file is None:
            raise EngineError(f"`--model` must hold the tensor `{name}`; it is missing")
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise EngineError(f"`{name}` must have shape {list(shape)}, not {list(tensor.shape)}")
        self.unread.discard(name)
        return tensor.to(self.dtype)

    def check_all_read(self) -> None:
        """Raises EngineError when the folder holds weights that the model does not use: it would answer wrongly."""
        extra = sorted(n for n in self.unread if not n.endswith(("rotary_emb.inv_freq", "lm_head.weight")))
        if extra:
            raise EngineError(
                f"`--model` holds {len(extra)} tensors that this model family does not use, e.g. `{extra[0]}`; "
                "serve it from an AdapterPool with `spec.engine.type: VLLM`"
            )
