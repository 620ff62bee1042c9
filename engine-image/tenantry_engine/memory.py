"""How many pages a replica gets, decided once at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tenantry_kernels import PAGE_TOKENS, LoraShape, layout

from tenantry_engine.config import PROJECTIONS, LoraConfig
from tenantry_engine.errors import EngineError
from tenantry_engine.models.split import Split

_SHARE_OF_HOST = 0.4
"""The HTTP process, the adapters' files in the page cache and whatever else runs there need the rest."""

_SHARE_OF_DEVICE = 0.8
"""Captured graphs and what the allocator cannot join again need the rest."""

_LOGITS = 4
"""Copies of a step's logits: as computed, edited, sorted, and as probabilities."""

_SPLITS, _SPLIT_ROWS = 8, 128
"""The LoRA kernels of a GPU keep so many partial sums for steps of at most so many rows."""


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
    device: str,
    ranks: int,
    device_memory: Callable[[str], tuple[int, int]] = torch.cuda.mem_get_info,
    *,
    working: int = 0,
) -> int:
    """Bytes that one rank's pool may take, once its weights are loaded, where nobody says how many.

    On a CPU the `ranks` share the machine's memory; on an accelerator each has a device of its own, whose free bytes
    (and all) `device_memory` tells. `working` bytes of each rank's part are left to its steps (`step_bytes`).
    """
    if device == "cpu":
        return int(max(0, available_bytes() // ranks - working) * _SHARE_OF_HOST)
    free, _ = device_memory(device)
    return int(max(0, free - working) * _SHARE_OF_DEVICE)


def step_bytes(part: Split, dtype: torch.dtype, *, step_tokens: int, logit_rows: int, max_rank: int) -> int:
    """Memory that the largest step works with on one rank, beside weights and pages; LoRA's buffers are a part of it.

    `logit_rows`: most rows whose logits are there at once; `max_rank` 0 = no adapters. Nothing of it grows with the
    length of a prompt: longer ones come in chunks.
    """
    config, rows = part.config, step_tokens
    hidden, q = config.hidden, part.q[1] - part.q[0]
    kv, inner = part.kv[1] - part.kv[0], part.inner[1] - part.inner[0]
    half = max(2 * q + 2 * kv, 3 * inner)  # elements of a row within attention or MLP
    widened = max(hidden, q, inner)  # a CPU's products read their input in fp32
    shrunk = 3 * max_rank * max(rows, _SPLITS * min(rows, _SPLIT_ROWS))  # q, k and v at once, in fp32
    embedded = max_rank * rows * (dtype.itemsize + 12)  # of the tokens' columns: where, as stored, in fp32
    logits = _LOGITS * logit_rows * config.vocab
    of_layers = rows * (
        (4 * hidden + half) * dtype.itemsize + 4 * widened
    )  # 4: the residual and what becomes of it
    return of_layers + 4 * (shrunk + logits) + embedded


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
