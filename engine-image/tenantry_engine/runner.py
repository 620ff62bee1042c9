"""Executes steps: owns the model and the memory that the page books describe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tenantry_kernels import PagedAdapter, SegmentBuilder
from torch import Tensor

from tenantry_engine.batch import Scored, build
from tenantry_engine.models import Model
from tenantry_engine.sampler import Choices, Sampler
from tenantry_engine.scheduler import Work

_SCORED_ROWS = 64
"""Rows of a prompt whose logits are in memory at once."""


class Runner:
    """One model, one pool."""

    def __init__(self, model: Model, pages: int, device: str, sampler: Sampler) -> None:
        self.model = model
        self.sampler = sampler
        self.device = device
        self.memory = torch.zeros(pages, model.kv_shape.page_elems, dtype=model.dtype, device=device)
        self._kv = model.kv_shape.view(self.memory)
        self._builder = SegmentBuilder(model.lora_shape, device)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.model.kv_shape.page_elems * self.model.dtype.itemsize

    def wipe(self, pages: tuple[int, ...]) -> None:
        """Zeroes pages that held an adapter."""
        if pages:
            self.memory[list(pages)] = 0

    @torch.inference_mode()
    def run(self, works: list[Work], paged: Callable[[str], PagedAdapter]) -> Choices:
        """Runs one step; the next token of every sequence that samples."""
        batch = build(works, paged, self._builder, self.device)
        hidden = self.model.forward(batch, self.memory, self._kv)
        for scored in batch.scored:
            self._score(scored, hidden)
        if not batch.sampled:
            return Choices()
        return self.sampler.choose(self.model.logits(hidden[batch.sampled_rows]), batch.sampled)

    def _score(self, scored: Scored, hidden: Tensor) -> None:
        for at in range(0, scored.count, _SCORED_ROWS):
            rows = hidden[scored.row + at : scored.row + min(at + _SCORED_ROWS, scored.count)]
            self.sampler.score_prompt(scored.sequence, scored.position + at, self.model.logits(rows))
