"""Requests that are under way, by served name: an adapter leaves when it has none left, or ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Flight:
    """One request. `ended` is set when its adapter leaves under it."""

    tokens: int
    ended: asyncio.Event


class Flights:
    """All requests of one replica."""

    def __init__(self) -> None:
        self._flights: dict[str, set[Flight]] = {}
        self.outstanding = 0

    @contextmanager
    def take(self, name: str, tokens: int) -> Iterator[Flight]:
        """A request for a name that may still bring so many tokens."""
        flight = Flight(tokens, asyncio.Event())
        self._flights.setdefault(name, set()).add(flight)
        self.outstanding += tokens
        try:
            yield flight
        finally:
            self.outstanding -= tokens
            here = self._flights[name]
            here.discard(flight)
            if not here:
                del self._flights[name]

    def of(self, name: str) -> frozenset[Flight]:
        return frozenset(self._flights.get(name, ()))

    def abort(self, name: str) -> None:
        """Ends every request for the name."""
        for flight in self.of(name):
            flight.ended.set()
