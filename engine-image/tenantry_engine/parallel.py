"""The ranks of one replica that hold a model together, and the two collectives that its layers need."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """What the layers know of the other ranks."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """x of all ranks added up, in place; returns x. One collective per row-parallel layer."""

    def join_columns(self, x: Tensor) -> Tensor:
        """x `[rows, columns]` of all ranks side by side: `[rows, size * columns]`. One collective per step."""


class Solo:
    """A model held by one process."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def join_columns(self, x: Tensor) -> Tensor:
        return x


SOLO = Solo()
