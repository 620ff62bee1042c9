"""What adapters must know of the base model that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from tenantry_kernels import LoraShape
from torch import Tensor

from tenantry_engine.adapters.tensors import EMBEDDING, HEAD

ReadWeight = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class Base:
    """`shape` has the widths of the whole model; `part` those that this process holds, where ranks share a model."""

    shape: LoraShape
    page_elems: int
    dtype: torch.dtype
    max_pages: int  # that one adapter may take of the pool
    tied: bool = False  # the head is the embeddings
    weight: ReadWeight = lambda module: None
    part: LoraShape | None = None

    @property
    def held(self) -> LoraShape:
        """The widths of an adapter's rows in this process."""
        return self.part or self.shape


def weights_of(folder: Path) -> ReadWeight:
    """Reads the weight of one module of a model's folder, as stored; None when there is no such tensor."""

    def read(module: str) -> Tensor | None:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                if f"{module}.weight" in file.keys():  # noqa: SIM118 - not a mapping
                    tensor: Tensor = file.get_tensor(f"{module}.weight")
                    return tensor
        return read(EMBEDDING) if module == HEAD else None

    return read
