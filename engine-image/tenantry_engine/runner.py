"""Executes steps: owns the model and the memory that the page books describe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tenantry_kernels import PagedAdapter, SegmentBuilder

from tenantry_engine.batch import build
from tenantry_engine.models import Model
from tenantry_engine.sampler import choose
from tenantry_engine.scheduler import Work
from tenantry_engine.sequence import Sequence


class Runner:
    """One model, one pool."""

    def __init__(self, model: Model, pages: int, device: str = "cpu") -> None:
        self.model = model
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
    def run(self, works: list[Work], paged: Callable[[str], PagedAdapter]) -> dict[Sequence, int]:
        """Runs one step; the next token of every sequence that samples."""
        batch = build(works, paged, self._builder, self.device)
        hidden = self.model.forward(batch, self.memory, self._kv)
        if not batch.sampled:
            return {}
        logits = self.model.logits(hidden[batch.sampled_rows])
        return dict(zip(batch.sampled, choose(logits, batch.sampled), strict=True))
