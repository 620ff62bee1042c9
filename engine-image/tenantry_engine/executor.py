"""One rank's part of the work: its part of the model, its pool, and one step on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tenantry_kernels import PAGE_TOKENS, PagedAdapter, SegmentBuilder, spans_of_rows
from torch import Tensor

from tenantry_engine.batch import Batch, build
from tenantry_engine.cuda_graphs import CudaRecorder, DecodeGraphs
from tenantry_engine.models import Model
from tenantry_engine.rows import Rows

SCORED_ROWS = 64
"""Rows of a prompt whose logits are in memory at once."""


class Executor:
    """Every rank has one, and runs the same rows at the same time."""

    def __init__(self, model: Model, pages: int, device: str, *, positions: int, max_rank: int) -> None:
        """`positions`: tokens of the longest sequence; `max_rank`: the greatest one of an adapter."""
        self.model = model
        self.device = device
        self.memory = torch.zeros(pages, model.kv_shape.page_elems, dtype=model.dtype, device=device)
        self._kv = model.kv_shape.view(self.memory)
        self._builder = SegmentBuilder(model.lora_shape, device)
        self._graphs: DecodeGraphs | None = None
        if self.memory.is_cuda:
            self._graphs = DecodeGraphs(
                self._forward,
                CudaRecorder(),
                model.lora_shape,
                max_pages=-(-positions // PAGE_TOKENS),
                max_rank=max_rank,
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.model.kv_shape.page_elems * self.model.dtype.itemsize

    def wipe(self, pages: tuple[int, ...]) -> None:
        """Zeroes pages that held an adapter."""
        if pages:
            self.memory[list(pages)] = 0

    @torch.inference_mode()
    def run(
        self, rows: Rows, paged: Callable[[str], PagedAdapter], before: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Runs one step. Returns float32 logits `[n, vocab]`: of each scored prompt by `SCORED_ROWS` rows, then of the
        sampled rows. They are made as they are taken, and every rank must take them: each may be a collective.
        `before`: as in `build`."""
        batch = build(rows, paged, self._builder, self.device, before)
        hidden = self._forward(batch) if self._graphs is None else self._graphs.run(rows, batch)
        return self._logits(rows, batch, hidden)

    def _forward(self, batch: Batch) -> Tensor:
        return self.model.forward(batch, self.memory, self._kv)

    @torch.inference_mode()
    def _logits(self, rows: Rows, batch: Batch, hidden: Tensor) -> Iterator[Tensor]:
        for row, count in rows.scored:
            for at in range(row, row + count, SCORED_ROWS):
                chosen = range(at, min(at + SCORED_ROWS, row + count))
                spans = spans_of_rows(batch.segments.head, chosen)
                yield self.model.logits(hidden[chosen.start : chosen.stop], self.memory, spans)
        if rows.sampled:
            spans = spans_of_rows(batch.segments.head, rows.sampled)
            yield self.model.logits(hidden[batch.sampled_rows], self.memory, spans)
