"""The rules by which waiting requests are admitted within one step. Pure.

Whose turn it is, is decided elsewhere (by least service). Here: which request of a tenant's line may start, and how
long others may go ahead of one that cannot. A request is passed over while it waits for pages, or for its adapter to be
loaded when as many loads are under way as may be. Both have an end: after `OVERTAKERS` admissions, or `PATIENCE` steps,
nobody goes ahead of it any more; pages and loads that come free are then its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tenantry_engine.lines import Line
from tenantry_engine.sequence import Sequence

OVERTAKERS = 8
PATIENCE = 64
LOADS = 4
"""Adapters that are loaded at a time for waiting requests: each holds a slot and pages meanwhile."""


def may_be_overtaken(sequence: Sequence, step: int) -> bool:
    """Whether others may still go ahead of a request that cannot start."""
    patient = sequence.passed_at is None or step - sequence.passed_at < PATIENCE
    return patient and sequence.overtaken < OVERTAKERS


@dataclass
class Round:
    """The admissions of step number `step`. `can_load` says whether a request's adapter is here or may be loaded."""

    step: int
    can_load: Callable[[Sequence], bool]
    _passed: list[Sequence] = field(default_factory=list)
    _held_back: set[str] = field(default_factory=set)  # tenants

    def candidate(self, line: Line) -> Sequence | None:
        """The request of a line that may start next, in order of arrival."""
        if line.tenant in self._held_back or len(line.admitted) >= line.cap:
            return None
        if any(not may_be_overtaken(s, self.step) for s in self._passed):
            return None
        for sequence in line.waiting:
            if self.can_load(sequence):
                return sequence
            if not may_be_overtaken(sequence, self.step):
                return None
        return None

    def hold_back(self, tenant: str) -> None:
        """None of the tenant's requests is admitted in this step any more."""
        self._held_back.add(tenant)

    def pass_over(self, sequence: Sequence) -> None:
        """It was its turn, but there are not enough pages or slots. Its tenant's line waits with it."""
        self._passed.append(sequence)
        self.hold_back(sequence.tenant)
        if sequence.passed_at is None:
            sequence.passed_at = self.step

    def admitted(self, sequence: Sequence, line: Line) -> None:
        """It went ahead of those that were passed over, and of those before it in its line."""
        earlier = [s for s in line.waiting if s.arrival < sequence.arrival]
        for other in [*self._passed, *earlier]:
            other.overtaken += 1
            if other.passed_at is None:
                other.passed_at = self.step
