"""One step's rows as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tenantry_kernels import PagedAdapter, SegmentBuilder, Segments
from torch import Tensor

from tenantry_engine.rows import Rows
from tenantry_engine.transfer import on_device


@dataclass(frozen=True)
class Batch:
    """T rows of B sequences."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: page * 16 + offset; negative = nothing is written
    page_tables: Tensor  # int32 [B, most pages]
    query_starts: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B]
    segments: Segments
    sampled_rows: Tensor  # int64 [S]


def build(
    rows: Rows,
    paged: Callable[[str], PagedAdapter],
    builder: SegmentBuilder,
    device: str,
    before: Tensor | None = None,
) -> Batch:
    """The tensors of the rows; `paged` knows the resident adapters.

    `before`: int64 tokens that the step before drew for its sampled rows, for those that only the device knows.
    """
    most = max(map(len, rows.tables))

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return on_device(values, dtype, device)

    tokens = tensor(rows.tokens, torch.int64)
    if before is not None:
        tokens = torch.where(tokens < 0, before[(-1 - tokens).clamp_min(0)], tokens)
    return Batch(
        tokens=tokens,
        positions=tensor(rows.positions, torch.int64),
        slots=tensor(rows.slots, torch.int64),
        page_tables=tensor([[*pages, *[0] * (most - len(pages))] for pages in rows.tables], torch.int32),
        query_starts=tensor(rows.starts, torch.int32),
        context_lens=tensor(rows.lengths, torch.int32),
        segments=builder.build([(paged(name) if name else None, count) for name, count in rows.runs]),
        sampled_rows=tensor(rows.sampled, torch.int64),
    )
