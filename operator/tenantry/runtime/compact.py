"""Objects as the store keeps them: what thousands of them have in common lies in memory once.

Every JSON document that is decoded brings its own copy of each name and value. Names and short texts are interned, and
small objects that hold nothing but plain values (a condition, a guarantee, a reference) are kept once. So what comes
out of the store is shared: it must never be changed in place.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final

from tenantry.cluster.resources import Obj

LONGEST: Final = 64
"""Longer texts are hardly ever the same."""
MOST: Final = 8192
"""Small objects that are remembered, those used last."""


class Compactor:
    """Rebuilds JSON values out of shared parts. Equal to what came in, but for its identity."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Obj] = OrderedDict()

    def object(self, value: Obj) -> Obj:
        plain = True
        made: Obj = {}
        for name, item in value.items():
            if isinstance(item, dict | list | float):
                plain = False
            made[sys.intern(name)] = self.value(item)
        return self._shared(made) if plain and made else made

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return sys.intern(value) if len(value) <= LONGEST else value
        if isinstance(value, dict):
            return self.object(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value

    def _shared(self, made: Obj) -> Obj:
        # 1 and True are equal and hash alike but not the same in JSON; so are zeros of floats, which are left alone
        identity = tuple((name, item, type(item)) for name, item in made.items())
        known = self._known.get(identity)
        if known is not None:
            self._known.move_to_end(identity)
            return known
        self._known[identity] = made
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return made
