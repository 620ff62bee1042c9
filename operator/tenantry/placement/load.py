"""What tenants put on replicas, and what a replica may take: the numbers that placement compares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Load(NamedTuple):
    """Of one tenant on one replica, or of all on it: sum of weights, tenants, registered adapters, pinned pages."""

    weight: int = 0
    tenants: int = 0
    adapters: int = 0
    pages: int = 0

    def plus(self, other: Load, times: int = 1) -> Load:
        """Never below zero: what was never counted in cannot be counted out."""
        return Load(
            max(0, self.weight + times * other.weight),
            max(0, self.tenants + times * other.tenants),
            max(0, self.adapters + times * other.adapters),
            max(0, self.pages + times * other.pages),
        )


NO_LOAD = Load()


@dataclass(frozen=True)
class Limits:
    """What one replica of a pool may take. `adapters` is 0 where the pool serves base models only."""

    tenants: int
    adapters: int = 0


@dataclass(frozen=True)
class Wish:
    """One tenant to place on a lane: on `count` replicas, with so much load on each of them.

    `adapters` are registered there, `pages` are those of its pinned adapters as far as replicas reported them.
    """

    tenant: str
    weight: int
    count: int
    adapters: int = 0
    pages: int = 0

    @property
    def load(self) -> Load:
        return Load(self.weight, 1, self.adapters, self.pages)


def load_of(placed: Iterable[tuple[Load, Sequence[str]]]) -> dict[str, Load]:
    """Load of each replica, by name, from that of each tenant."""
    loads: dict[str, Load] = {}
    for load, replicas in placed:
        count(loads, load, replicas)
    return loads


def count(loads: dict[str, Load], load: Load, replicas: Iterable[str], times: int = 1) -> None:
    """Count one tenant in (or out, with `times` -1) on each of its replicas."""
    for replica in replicas:
        loads[replica] = loads.get(replica, NO_LOAD).plus(load, times)


def without(loads: Mapping[str, Load], load: Load, replicas: Iterable[str]) -> dict[str, Load]:
    """What all others put there."""
    others = dict(loads)
    count(others, load, replicas, -1)
    return others
