"""Objects as the store keeps them by the thousand: what many of them have in common lies in memory once.

Every document that is decoded brings its own copy of each name and value. Here equal texts, objects and lists become
one ("hash consing", Ershov 1958), from the leaves up: a tenant's conditions, its limits, the list of replicas that it
shares with many. So what comes out is shared, and must never be changed in place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from sys import intern
from typing import Any, Final, TypeVar

LONGEST: Final = 256
"""Longer texts are hardly ever the same."""
MOST: Final = 8192
"""Parts that are remembered, those used last."""

T = TypeVar("T")
Part = tuple[Any, Hashable]
"""A value out of shared parts, and what tells it from all others: the one object that stands for an object or a list
(by its id), else a text itself or a value with its type, since 1 and True are equal and not the same in JSON."""


class Compactor:
    """Rebuilds JSON values out of shared parts. Equal to what came in, but for its identity."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def value(self, value: T) -> T:
        found: T = self._part(value)[0]
        return found

    def _part(self, value: Any) -> Part:
        kind = type(value)
        if kind is str:
            return (intern(value) if len(value) <= LONGEST else value), value
        if kind is dict:
            made: dict[str, Any] = {}
            identity: list[Hashable] = [dict]
            for name, item in value.items():
                made[intern(name)], told = self._part(item)
                identity += (name, told)
            return self._shared(made, tuple(identity))
        if kind is list:
            parts = [self._part(item) for item in value]
            return self._shared([part[0] for part in parts], (list, *(part[1] for part in parts)))
        if kind is float:
            return value, (float, repr(value))  # zeros of both signs are equal
        return value, (kind, value)

    def _shared(self, made: Any, identity: Hashable) -> Part:
        known = self._known.get(identity)
        if known is None:
            known = self._known[identity] = made
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(identity)
        # Whatever remembers this id in an identity holds the object too, so no other can have it meanwhile.
        return known, id(known)
