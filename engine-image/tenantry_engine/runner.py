"""Runs steps and chooses their tokens: what the engine's thread sees of the model, however many ranks hold it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from tenantry_kernels import PagedAdapter
from torch import Tensor

from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.executor import SCORED_ROWS, Executor
from tenantry_engine.parallel.leader import RankedLoader, Ranks
from tenantry_engine.rows import Plan, plan
from tenantry_engine.sampler import Choices, Sampler
from tenantry_engine.sequence import Sequence
from tenantry_engine.transfer import Landing
from tenantry_engine.work import Work

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pending:
    """A step that the device may still run. `take` waits for what it chooses, and is called once."""

    take: Callable[[], Choices]
    ids: Tensor | None = None  # int64 [S] on the device: the tokens of its sampled rows
    rows: Mapping[Sequence, int] = field(default_factory=dict)  # where in `ids` each sequence's token is


class Runner:
    """One replica's model and pool, driven from rank 0. `ranks` None = this process holds all of the model."""

    def __init__(self, executor: Executor, sampler: Sampler, ranks: Ranks | None = None) -> None:
        self.model = executor.model
        self.memory = executor.memory
        self.sampler = sampler
        self.ranks = ranks
        self._executor = executor
        if self.memory.is_cuda and ranks is not None:
            log.info("every step waits for the one before: rank 0 alone has the tokens")

    @property
    def overlaps(self) -> bool:
        """Whether a step may be given while the one before it runs: not where the host itself runs them."""
        return self.memory.is_cuda and self.ranks is None

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

    def run(
        self, works: list[Work], paged: Callable[[str], PagedAdapter], before: Pending | None = None
    ) -> Pending:
        """Begins a step. `before`: the one that still runs, where its tokens are needed that the host does not know."""
        step = plan(works, before.rows if before else {})
        with self._in_step():
            if self.ranks is not None:
                self.ranks.run(step.rows)
            return self._begin(step, paged, before.ids if before else None)

    @torch.inference_mode()
    def _begin(self, step: Plan, paged: Callable[[str], PagedAdapter], before: Tensor | None) -> Pending:
        logits = self._executor.run(step.rows, paged, before)
        for scored in step.scored:
            for at in range(0, scored.count, SCORED_ROWS):
                self.sampler.score_prompt(scored.sequence, scored.position + at, next(logits))
        drawn = self.sampler.draw(next(logits), step.sampled) if step.sampled else None
        landing = Landing(self.memory.device, *(drawn.tensors if drawn else ()))

        def take() -> Choices:
            with self._in_step():
                landed = landing.take()
                return self.sampler.tell(drawn, landed) if drawn else Choices()

        rows = {sequence: row for row, sequence in enumerate(step.sampled)}
        return Pending(take, drawn.tensors[0] if drawn else None, rows)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Whatever fails here leaves the other ranks in a step that rank 0 does not run."""
        try:
            yield
        except Exception:
            if self.ranks is not None:
                self.ranks.step_failed()
            raise
