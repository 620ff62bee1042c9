"""The declared set: which names this replica should serve, with which bytes, for whom, and which are leaving.

Host only, no I/O. Whatever runs once per step costs nothing for names that stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tenantry_engine.digest import is_digest
from tenantry_engine.errors import RequestError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,252}")

Fence = tuple[int, int]


@dataclass(frozen=True)
class Declaration:
    """One adapter that this replica should have. `tenant` is a uid; empty = any tenant (development)."""

    name: str
    digest: str
    tenant: str = ""
    pinned: bool = False


class DeclaredSet:
    """Served names. A name that is not declared any more is leaving until `remove`."""

    def __init__(self, model_name: str, limit: int) -> None:
        self.fence: Fence = (0, 0)
        self._model_name = model_name
        self._limit = limit
        self._names: dict[str, Declaration] = {}
        self._leaving: dict[str, float] = {}  # name -> when its requests are aborted
        self._users: Counter[str] = Counter()  # digest -> names, leaving ones too
        self._pinned: dict[str, None] = {}  # digests that a live name pins, in the order of their names

    def __iter__(self) -> Iterator[Declaration]:
        """All names, leaving ones too."""
        return iter(self._names.values())

    def replace(self, fence: Fence, wanted: list[Declaration], leave_until: float) -> None:
        """Makes `wanted` the whole set. Raises RequestError and changes nothing when it is not acceptable."""
        if fence < self.fence:
            raise RequestError(
                f"fence {list(fence)} must not be lower than {list(self.fence)}, which was seen before",
                status=409, code="fenced", param="fence",
            )  # fmt: skip
        self._accept(wanted)
        self.fence = fence
        names = {declaration.name for declaration in wanted}
        for name in self._names:
            if name not in names:
                self._leaving.setdefault(name, leave_until)
        for declaration in wanted:
            if declaration.name not in self._names:
                self._users[declaration.digest] += 1
            self._names[declaration.name] = declaration
            self._leaving.pop(declaration.name, None)
        self._pinned = {declaration.digest: None for declaration in wanted if declaration.pinned}

    def _accept(self, wanted: list[Declaration]) -> None:
        if len(wanted) > self._limit:
            raise RequestError(
                f"`adapters` must have at most {self._limit} entries (`maxRegistered`), not {len(wanted)}",
                code="too_many_adapters", param="adapters",
            )  # fmt: skip
        seen: set[str] = set()
        for declaration in wanted:
            name, digest = declaration.name, declaration.digest
            if not _NAME.fullmatch(name) or name == self._model_name or name in seen:
                raise RequestError(
                    f"`adapters[].name` must be a word of letters, digits and . _ + -, used once and not the base "
                    f"model's name: {name[:80]!r}",
                    param="adapters",
                )
            if not is_digest(digest):
                raise RequestError("`adapters[].digest` must be sha256: and 64 hex digits", param="adapters")
            known = self._names.get(name)
            if known is not None and known.digest != digest:
                raise RequestError(
                    f"`{name}` must keep its digest {known.digest}: new bytes need a new name",
                    status=409, code="name_taken", param="adapters",
                )  # fmt: skip
            seen.add(name)

    def live(self, name: str) -> Declaration | None:
        """The declaration of a name that is not leaving."""
        return None if name in self._leaving else self._names.get(name)

    def is_leaving(self, name: str) -> bool:
        """Whether the name is here only until its requests have ended."""
        return name in self._leaving

    def leaving(self) -> list[tuple[Declaration, float]]:
        """Names that leave, each with the time when its requests are aborted."""
        return [(self._names[name], until) for name, until in self._leaving.items()]

    def pinned(self) -> list[str]:
        """Digests that should be loaded ahead of requests and stay."""
        return list(self._pinned)

    def is_pinned(self, digest: str) -> bool:
        """Whether a live name pins the digest."""
        return digest in self._pinned

    def users(self, digest: str) -> int:
        """How many names have these bytes."""
        return self._users[digest]

    def remove(self, name: str) -> None:
        """A leaving name is gone."""
        del self._leaving[name]
        digest = self._names.pop(name).digest
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
