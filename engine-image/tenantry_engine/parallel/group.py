"""The ranks that hold a model together, as its layers see them: two collectives."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

_TIMEOUT = timedelta(minutes=5)
"""Of one collective, for first steps that compile kernels. A rank that has ended is noticed at once by its link."""


class Group(Protocol):
    """What the layers know of the other ranks."""

    @property
    def rank(self) -> int:
        """This process's place, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

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


class Joined:
    """This process among the ranks that meet at `meeting`, a file that one run of one replica uses.

    NCCL on GPUs, gloo on CPUs, over the loopback interface: the ranks of a replica share a machine. Which rank adds
    first depends on the place in the buffer, so sums of more than two ranks may differ in the last bit between batches.
    """

    def __init__(self, rank: int, size: int, meeting: Path, device: str) -> None:
        self.rank = rank
        self.size = size
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo",
            store=FileStore(str(meeting), size),
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
        )

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def join_columns(self, x: Tensor) -> Tensor:
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather(list(parts.unbind()), x.contiguous())
        return parts.transpose(0, 1).reshape(x.shape[0], -1)

    def leave(self) -> None:
        """The group is of no more use."""
        dist.destroy_process_group()
