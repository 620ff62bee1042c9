"""Reads a base model's folder: config.json and safetensors, whole or in shards, only the parts that are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tenantry_engine.digest import INDEX_FILE
from tenantry_engine.errors import EngineError

WHOLE_FILE = "model.safetensors"
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_JSON_BYTES = 64 << 20
_FLOATS = ("BF16", "F16", "F32")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises EngineError when there is none."""
    return _read_object(folder / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, else the whole file, else every safetensors file.

    Other safetensors files may lie beside (the same weights under other names, as some publishers ship them).
    Raises EngineError when the index names anything but files of this folder.
    """
    if (folder / INDEX_FILE).is_file():
        where = _read_object(folder / INDEX_FILE).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise EngineError(f"`weight_map` in {INDEX_FILE} must map tensors to files")
        names = set(where.values()) if all(isinstance(name, str) for name in where.values()) else {""}
        for name in names:
            if not _SHARD.fullmatch(name):
                raise EngineError(
                    f"`weight_map` in {INDEX_FILE} must name *.safetensors files of the same folder, "
                    f"not {name[:80]!a}"
                )
            if not (folder / name).is_file():
                raise EngineError(f"`--model` must hold {name}, which {INDEX_FILE} names; it is missing")
        return sorted(folder / name for name in names)
    if (folder / WHOLE_FILE).is_file():
        return [folder / WHOLE_FILE]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise EngineError(f"`--model` must hold at least one *.safetensors file: {folder}")
    return found


class Weights:
    """The tensors of a folder, read one by one and cast to one dtype. A context manager: it keeps files open.

    `progress` is told the share that has been read, 0 to 1, after each tensor.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: str = "cpu",
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self._progress = progress
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = safe_open(str(path), framework="pt", device=device)
            except (SafetensorError, OSError) as error:
                raise EngineError(
                    f"`--model` must hold sound weights: {path.name} is damaged ({error}); fetch it again"
                ) from error
            self._files.append(file)
            for name in cast(list[str], file.keys()):  # type: ignore[no-untyped-call]
                if name in self._where:
                    raise EngineError(f"`--model` must hold each tensor once: `{name}` stands in two files")
                self._where[name] = file
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

    def get(
        self,
        name: str,
        *shape: int,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """One tensor, or its `rows` (first, last + 1), or its `columns`; only these bytes are read.

        `shape` is the whole tensor's. Raises EngineError when it is not there, or has another shape or no float dtype.
        """
        file = self._where.get(name)
        if file is None:
            raise EngineError(f"`--model` must hold the tensor `{name}`; it is missing")
        entry = file.get_slice(name)
        if list(entry.get_shape()) != list(shape):
            raise EngineError(f"`{name}` must have shape {list(shape)}, not {entry.get_shape()}")
        if entry.get_dtype() not in _FLOATS:
            raise EngineError(
                f"`{name}` must be of dtype {', '.join(_FLOATS)}, not {entry.get_dtype()}: "
                "serve quantised models from an AdapterPool with `spec.engine.type: VLLM`"
            )
        if columns is not None:
            tensor: Tensor = entry[:, columns[0] : columns[1]]
        elif rows is not None:
            tensor = entry[rows[0] : rows[1]]
        else:
            tensor = entry[:]
        self.unread.discard(name)
        self._progress(1 - len(self.unread) / len(self._where))
        return tensor.to(self.dtype)

    def check_all_read(self) -> None:
        """Raises EngineError when the folder holds weights that the model does not use: it would answer wrongly."""
        extra = sorted(n for n in self.unread if not n.endswith(("rotary_emb.inv_freq", "lm_head.weight")))
        if extra:
            raise EngineError(
                f"`--model` holds {len(extra)} tensors that this model family does not use, e.g. `{extra[0]}`; "
                "serve it from an AdapterPool with `spec.engine.type: VLLM`"
            )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_JSON_BYTES + 1)
        if len(raw) > _MAX_JSON_BYTES:
            raise EngineError(f"`--model` must have a {path.name} of at most {_MAX_JSON_BYTES} bytes")
        value = json.loads(raw, object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"`--model` must be a folder with a sound {path.name}: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"`--model` must hold a JSON object in {path.name}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a field stands twice in one object")
    return result
