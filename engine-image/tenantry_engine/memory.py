"""How many pages a replica gets, decided once at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tenantry_kernels import PAGE_TOKENS, LoraShape, layout

from tenantry_engine.config import PROJECTIONS, LoraConfig
from tenantry_engine.errors import EngineError

_SHARE_OF_HOST = 0.4
"""The HTTP process, the adapters' files in the page cache and whatever else runs there need the rest."""

_SHARE_OF_DEVICE = 0.8
"""Activations, captured graphs and what the allocator cannot join again need the rest."""


@dataclass(frozen=True)
class Sizes:
    """Pages of the pool, and the parts that decide its least size."""

    pages: int
    sequence_pages: int  # of one sequence of the greatest length
    adapter_pages: int  # of one of the greatest rank over all projections that may be adapted; 0 without LoRA

    @property
    def largest_adapter(self) -> int:
        """Pages that one adapter may take: half of what a sequence leaves, but always one of the greatest rank."""
        return max(self.adapter_pages, (self.pages - self.sequence_pages) // 2)

    @property
    def pin_limit(self) -> int:
        """Pages that may be pinned, so that a sequence of the greatest length finds room with any adapter."""
        return self.pages - self.sequence_pages - self.largest_adapter


def size_pool(
    *,
    shape: LoraShape,
    page_elems: int,
    page_bytes: int,
    lora: LoraConfig | None,
    max_model_len: int,
    slots: int,
    pool_bytes: int | None,
    budget: int,
) -> Sizes:
    """`pool_bytes` as told; else room for `slots` sequences and adapters of full size, within `budget` bytes.

    Raises EngineError when one sequence and one adapter of full size would not fit together.
    """
    sequence_pages = -(-max_model_len // PAGE_TOKENS) + 1
    adapter_pages = 0
    if lora is not None:
        ranks = [lora.max_rank if name in lora.target_modules else 0 for name in PROJECTIONS]
        adapter_pages = layout(shape, [ranks] * shape.layers, page_elems).pages
    least = sequence_pages + adapter_pages
    if pool_bytes is not None:
        pages = pool_bytes // page_bytes
        if pages < least:
            raise EngineError(
                f"`--pool-bytes` must be at least {least * page_bytes} for a sequence of {max_model_len} tokens "
                f"and one adapter of the greatest rank, not {pool_bytes}: "
                "raise it, or lower `--max-model-len` or `--max-rank`"
            )
        return Sizes(pages, sequence_pages, adapter_pages)
    ideal = slots * (sequence_pages + adapter_pages)
    return Sizes(max(least, min(ideal, budget // page_bytes)), sequence_pages, adapter_pages)


def pool_budget(
    device: str, ranks: int, device_memory: Callable[[str], tuple[int, int]] = torch.cuda.mem_get_info
) -> int:
    """Bytes that one rank's pool may take, once its weights are loaded, where nobody says how many.

    On a CPU the `ranks` share the machine's memory; on an accelerator each has a device of its own, whose free bytes
    (and all) `device_memory` tells.
    """
    if device == "cpu":
        return int(available_bytes() * _SHARE_OF_HOST) // ranks
    free, _ = device_memory(device)
    return int(free * _SHARE_OF_DEVICE)


def available_bytes() -> int:
    """Host memory that this process may still take: of the machine, or of its cgroup where that is less."""
    free = 1 << 32
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []
