"""What one step runs, as tensors: rows sorted by adapter, so that each adapter's rows are one segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tenantry_kernels import PAGE_TOKENS, PagedAdapter, SegmentBuilder, Segments
from torch import Tensor

from tenantry_engine.scheduler import Work
from tenantry_engine.sequence import Sequence


@dataclass(frozen=True)
class Scored:
    """`count` rows from `row` on, which hold a sequence's prompt from `position` on."""

    sequence: Sequence
    row: int
    position: int
    count: int


@dataclass(frozen=True)
class Batch:
    """T rows of B sequences, of which some are sampled."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: page * 16 + offset
    page_tables: Tensor  # int32 [B, most pages]
    query_starts: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B]
    segments: Segments
    sampled_rows: Tensor  # int64 [S]
    sampled: tuple[Sequence, ...]  # S sequences, in the order of the rows
    scored: tuple[Scored, ...] = ()  # prompts whose tokens are to be scored


def build(
    works: list[Work], paged: Callable[[str], PagedAdapter], builder: SegmentBuilder, device: str
) -> Batch:
    """Base rows come first, then adapter by adapter."""
    ordered = sorted(works, key=lambda w: (w.sequence.adapter or "", w.sequence.arrival))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    lengths: list[int] = []
    runs: list[tuple[PagedAdapter | None, int]] = []
    rows: list[int] = []
    sampled: list[Sequence] = []
    scored: list[Scored] = []
    for work in ordered:
        sequence, begin, end = work.sequence, work.start, work.start + work.count
        pages = sequence.pages
        tokens += sequence.tokens[begin:end]
        positions += range(begin, end)
        slots += [pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS for at in range(begin, end)]
        starts.append(len(tokens))
        lengths.append(end)
        runs.append((paged(sequence.adapter) if sequence.adapter else None, work.count))
        if sequence.sampling.prompt_logprobs is not None and begin < sequence.prompt_len:
            scored.append(Scored(sequence, starts[-2], begin, work.count))
        if work.samples:
            rows.append(len(tokens) - 1)
            sampled.append(sequence)
    most = max(-(-length // PAGE_TOKENS) for length in lengths)
    tables = [
        [*pages[:most], *[0] * (most - len(pages))] for pages in (work.sequence.pages for work in ordered)
    ]

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return Batch(
        tokens=tensor(tokens, torch.int64),
        positions=tensor(positions, torch.int64),
        slots=tensor(slots, torch.int64),
        page_tables=tensor(tables, torch.int32),
        query_starts=tensor(starts, torch.int32),
        context_lens=tensor(lengths, torch.int32),
        segments=builder.build(runs),
        sampled_rows=tensor(rows, torch.int64),
        sampled=tuple(sampled),
        scored=tuple(scored),
    )
