"""Smoke requests: no version gets traffic from a replica before that very process has answered one with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from tenantry.cluster import Key
from tenantry.engines import EngineError, Replica
from tenantry.promotion.machine import Fault

from .world import World

RETRY_SECONDS = 30.0
AT_ONCE = 8
# The replica is busy, starting or out of reach: it may answer the next time.
_NOT_YET = frozenset({None, 401, 429, 503})


@dataclass(frozen=True)
class Question:
    """One version on one process of one replica. `tenant` is the Tenant's uid."""

    replica: Key
    process: str
    name: str
    digest: str
    tenant: str


@dataclass(frozen=True)
class _Outcome:
    fault: Fault | None
    at: float


class Smokes:
    """What replicas answered, by adapter. In memory: after a restart of the operator everybody is asked again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[Key, dict[Question, _Outcome]] = {}

    def answered(self, adapter: Key, question: Question) -> bool:
        outcome = self._known.get(adapter, {}).get(question)
        return outcome is not None and outcome.fault is None

    def fault(self, adapter: Key, question: Question) -> Fault | None:
        """How the replica failed to answer."""
        outcome = self._known.get(adapter, {}).get(question)
        return outcome.fault if outcome is not None else None

    def forget(self, adapter: Key) -> None:
        self._known.pop(adapter, None)

    async def ask(self, adapter: Key, questions: Iterable[tuple[Question, Replica]]) -> bool:
        """Ask what has no good answer yet; all else is forgotten. Whether somebody has not answered in any way."""
        now = self._world.clock()
        before = self._known.get(adapter, {})
        kept: dict[Question, _Outcome] = {}
        open_: list[tuple[Question, Replica]] = []
        for question, replica in questions:
            outcome = before.get(question)
            if outcome is not None and (outcome.fault is None or now - outcome.at < RETRY_SECONDS):
                kept[question] = outcome
            else:
                open_.append((question, replica))
        gate = asyncio.Semaphore(AT_ONCE)
        outcomes = await asyncio.gather(*(self._one(gate, question, peer) for question, peer in open_))
        silent = False
        for (question, _), outcome in zip(open_, outcomes, strict=True):
            if outcome is None:
                silent = True
            else:
                kept[question] = outcome
        if kept:
            self._known[adapter] = kept
        else:
            self.forget(adapter)
        return silent

    async def _one(self, gate: asyncio.Semaphore, question: Question, replica: Replica) -> _Outcome | None:
        driver = self._world.driver
        if driver is None:
            return None
        async with gate:
            try:
                await driver.smoke(replica, question.name, question.digest, question.tenant)
            except EngineError as error:
                if error.status in _NOT_YET:
                    return None
                return _Outcome(Fault("SmokeFailed", str(error)), self._world.clock())
        return _Outcome(None, self._world.clock())
