"""One step's rows as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tenantry_kernels import PagedAdapter, SegmentBuilder, Segments
from torch import Tensor

from tenantry_engine.rows import Rows


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


def build(rows: Rows, paged: Callable[[str], PagedAdapter], builder: SegmentBuilder, device: str) -> Batch:
    """The tensors of the rows; `paged` knows the resident adapters."""
    most = max(map(len, rows.tables))

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return Batch(
        tokens=tensor(rows.tokens, torch.int64),
        positions=tensor(rows.positions, torch.int64),
        slots=tensor(rows.slots, torch.int64),
        page_tables=tensor([[*pages, *[0] * (most - len(pages))] for pages in rows.tables], torch.int32),
        query_starts=tensor(rows.starts, torch.int32),
        context_lens=tensor(rows.lengths, torch.int32),
        segments=builder.build([(paged(name) if name else None, count) for name, count in rows.runs]),
        sampled_rows=tensor(rows.sampled, torch.int64),
    )
