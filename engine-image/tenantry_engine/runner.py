"""Runs steps and chooses their tokens: what the engine's thread sees of the model, however many ranks hold it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tenantry_kernels import PagedAdapter

from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.executor import SCORED_ROWS, Executor
from tenantry_engine.parallel.leader import RankedLoader, Ranks
from tenantry_engine.rows import Plan, plan
from tenantry_engine.sampler import Choices, Sampler
from tenantry_engine.work import Work


class Runner:
    """One replica's model and pool, driven from rank 0. `ranks` None = this process holds all of the model."""

    def __init__(self, executor: Executor, sampler: Sampler, ranks: Ranks | None = None) -> None:
        self.model = executor.model
        self.memory = executor.memory
        self.sampler = sampler
        self.ranks = ranks
        self._executor = executor

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on each rank."""
        return self._executor.page_bytes

    def loader(self, store: BlobStore, host_bytes: int) -> PageLoader:
        """What brings adapters into the pool, on every rank."""
        cut = self.model.part.cut_lora
        if self.ranks is None:
            return PageLoader(store, self.memory, host_bytes, cut)
        return RankedLoader(self.ranks, store, self.memory, host_bytes // self.ranks.size, cut)

    def wipe(self, pages: tuple[int, ...]) -> None:
        """Zeroes pages that held an adapter."""
        if self.ranks is not None:
            self.ranks.wipe(pages)
        self._executor.wipe(pages)

    def close(self) -> None:
        """Lets the other ranks end."""
        if self.ranks is not None:
            self.ranks.close()

    def run(self, works: list[Work], paged: Callable[[str], PagedAdapter]) -> Choices:
        """Runs one step; the next token of every sequence that samples."""
        step = plan(works)
        if self.ranks is None:
            return self._run(step, paged)
        try:
            self.ranks.run(step.rows)
            return self._run(step, paged)
        except Exception:
            self.ranks.step_failed()
            raise

    @torch.inference_mode()
    def _run(self, step: Plan, paged: Callable[[str], PagedAdapter]) -> Choices:
        logits = self._executor.run(step.rows, paged)
        for scored in step.scored:
            for at in range(0, scored.count, SCORED_ROWS):
                self.sampler.score_prompt(scored.sequence, scored.position + at, next(logits))
        if not step.sampled:
            return Choices()
        return self.sampler.choose(next(logits), step.sampled)
