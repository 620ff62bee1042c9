"""The fair queue of one lane: token-weighted deficit round robin over tenants, first in first out inside a tenant.

Pure: it knows neither time nor limits; the caller judges each head of line. M. Shreedhar and G. Varghese, "Efficient
Fair Queueing using Deficit Round Robin" (1995), with two additions: a tenant whose head cannot run now is passed over
without gaining anything, and rounds in which nobody could run are taken in one step, so that a pop costs O(tenants).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

QUANTUM = 512

Item = TypeVar("Item")


class Verdict(Enum):
    """What the caller says of a head of line."""

    RUN = "run"
    WAIT = "wait"
    DROP = "drop"


@dataclass
class _Entry(Generic[Item]):
    item: Item
    cost: int


@dataclass
class _Flow(Generic[Item]):
    weight: int
    deficit: float = 0.0
    entries: deque[_Entry[Item]] = field(default_factory=deque)


class FairQueue(Generic[Item]):
    """Backlogged tenants share in proportion to their weights, counted in cost. Items are told apart by identity."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._flows: OrderedDict[str, _Flow[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(flow.entries) for flow in self._flows.values())

    def length(self, tenant: str) -> int:
        flow = self._flows.get(tenant)
        return len(flow.entries) if flow else 0

    def tenants(self) -> set[str]:
        """Those that have something waiting."""
        return set(self._flows)

    def push(self, tenant: str, weight: int, cost: int, item: Item) -> None:
        """Append to the tenant's line. A tenant that was idle starts without credit, behind the others."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow(weight)
        flow.weight = weight
        flow.entries.append(_Entry(item, max(1, cost)))

    def remove(self, tenant: str, item: Item) -> bool:
        """Take an item out that will not run. False when it is not there."""
        flow = self._flows.get(tenant)
        if flow is None:
            return False
        for index, entry in enumerate(flow.entries):
            if entry.item is item:
                del flow.entries[index]
                self._drop_if_empty(tenant, flow)
                return True
        return False

    def refund(self, tenant: str, amount: float) -> None:
        """The tenant used less than was counted. Only the backlogged have an account; the idle keep nothing."""
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.deficit += amount

    def pop(self, judge: Callable[[Item], Verdict]) -> tuple[Verdict, Item] | None:
        """The next item to run, or one to drop; None when every head of line has to wait."""
        waiting: set[str] = set()
        while len(waiting) < len(self._flows):
            short: dict[str, float] = {}
            for tenant in list(self._flows):
                flow = self._flows[tenant]
                if tenant in waiting:
                    self._flows.move_to_end(tenant)
                    continue
                entry = flow.entries[0]
                verdict = judge(entry.item)
                if verdict is Verdict.WAIT:
                    waiting.add(tenant)
                    self._flows.move_to_end(tenant)
                    continue
                if verdict is Verdict.RUN and flow.deficit < entry.cost:
                    short[tenant] = (entry.cost - flow.deficit) / (self._quantum * flow.weight)
                    self._flows.move_to_end(tenant)
                    continue
                flow.entries.popleft()
                if verdict is Verdict.RUN:
                    flow.deficit -= entry.cost
                self._drop_if_empty(tenant, flow)
                return verdict, entry.item
            if short:
                rounds = max(1, math.ceil(min(short.values())))
                for tenant in short:
                    self._flows[tenant].deficit += rounds * self._quantum * self._flows[tenant].weight
        return None

    def drain(self) -> list[Item]:
        """All items, in no order; the queue is empty then."""
        items = [entry.item for flow in self._flows.values() for entry in flow.entries]
        self._flows.clear()
        return items

    def _drop_if_empty(self, tenant: str, flow: _Flow[Item]) -> None:
        if not flow.entries:
            del self._flows[tenant]
