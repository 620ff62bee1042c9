"""The order of planning, running and completing steps: one after another, or with the host one step ahead.

Where the model runs on a device of its own, step n + 1 is planned and queued while step n runs there. What is certain
about n counts by then: which tokens are computed, which pages are taken, who is charged, who reaches its length. A
token that n draws is not known yet: the device itself puts it into n + 1. When n has ended, it is completed on the
host, while the device is busy with n + 1. A sequence that ends in n then has one row too many in n + 1; what becomes of
that row is dropped, and its pages are given back when n + 1 has ended.

Some steps wait for the one before all the same; `_reason` says which.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tenantry_kernels import PagedAdapter

from tenantry_engine.runner import Pending
from tenantry_engine.scheduler import Scheduler
from tenantry_engine.work import Event, Work

log = logging.getLogger(__name__)


class Steps(Protocol):
    """Runs steps in the order in which they are given."""

    @property
    def overlaps(self) -> bool:
        """Whether a step may be given while the one before it runs."""

    def run(
        self, works: list[Work], paged: Callable[[str], PagedAdapter], before: Pending | None, /
    ) -> Pending:
        """Begins a step. `before`: the one that runs, when its tokens are not known yet."""


@dataclass(frozen=True)
class Done:
    """A step that has ended."""

    events: list[Event]
    seconds: float
    rows: int
    adapters: int  # distinct ones


@dataclass(frozen=True)
class _Flight:
    """A step that was begun and not completed."""

    works: list[Work]
    pending: Pending
    planned: float  # when its planning began
    begun: float  # when its running began


class Pipeline:
    """Drives one scheduler's steps. `paged` knows the resident adapters."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Steps,
        paged: Callable[[str], PagedAdapter],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._paged = paged
        self._clock = clock
        self._depth = 1 if runner.overlaps else 0
        self._flights: deque[_Flight] = deque()  # at most one more than `_depth`
        self._ended = 0.0  # when the last step ended
        self._told: set[str] = set()

    def turn(self, now: float) -> Done | None:
        """Completes one step, and begins the next ones if need be; None = nothing can run."""
        while len(self._flights) <= self._depth and self._may_plan():
            works = self._scheduler.plan()
            if not works:
                break
            begun = self._clock()
            before = self._flights[-1].pending if self._flights else None
            self._flights.append(_Flight(works, self._runner.run(works, self._paged, before), now, begun))
            self._scheduler.began(works)
        return self._complete() if self._flights else None

    def abandon(self) -> None:
        """Every sequence has ended: waits for the steps that still run, and drops what comes of them."""
        while self._flights:
            flight = self._flights.popleft()
            with contextlib.suppress(
                Exception
            ):  # it is this failure, or one after it, that ended the sequences
                flight.pending.take()
            self._scheduler.complete(flight.works, {})

    def _complete(self) -> Done:
        flight, before = self._flights[0], self._ended
        choices = flight.pending.take()
        self._flights.popleft()
        self._ended = self._clock()
        seconds = self._ended - max(flight.begun, before)
        events = self._scheduler.complete(flight.works, choices.tokens, choices.ends, seconds)
        return Done(
            [choices.told(event) for event in events],
            self._clock() - max(flight.planned, before),
            sum(work.count for work in flight.works),
            len({work.sequence.adapter for work in flight.works} - {None}),
        )

    def _may_plan(self) -> bool:
        if not self._flights:
            return True
        reason = self._reason(self._flights[-1].works)
        if reason is not None and reason not in self._told:
            self._told.add(reason)  # each once: which steps wait, and why
            log.info("some steps wait for the one before: %s", reason)
        return reason is None

    def _reason(self, running: list[Work]) -> str | None:
        """Why the next step cannot be planned before the running one has ended."""
        if self._scheduler.held_up:
            return "when pages or slots run short, nobody gives way while it runs"
        for sampling in (work.sequence.sampling for work in running):
            if sampling.grammar is not None:
                return "a grammar is followed on the host"
            if sampling.counts_tokens:
                return "penalties count tokens on the host"
        return None
