"""Regular expressions that came from a tenant, under one time limit.

They run on a thread of their own kind (the one that checks adapters) and without Python's global lock, so that a slow
one holds up neither the engine's steps nor anybody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]

from tenantry_engine.adapters.hostile import shown, unsupported

_MAX_PATTERNS = 4096
_MAX_PATTERN = 1024
_PATTERN_SECONDS = 2.0

Match = Callable[[str], bool]


class Patterns:
    """The regular expressions of one configuration. All methods raise AdapterError UnsupportedConfig."""

    def __init__(self) -> None:
        self._until = time.monotonic() + _PATTERN_SECONDS
        self._count = 0

    def compile(self, field: str, text: str) -> Any:
        """A compiled pattern, for `match`."""
        self._count += 1
        if len(text) > _MAX_PATTERN or self._count > _MAX_PATTERNS:
            raise unsupported(
                f"`{field}` must have at most {_MAX_PATTERNS} patterns of at most {_MAX_PATTERN} characters"
            )
        try:
            return regex.compile(text, cache_pattern=False)
        except (
            regex.error,
            RecursionError,
            OverflowError,
            MemoryError,
            ValueError,
            KeyError,
            IndexError,
        ) as error:
            raise unsupported(f"`{field}` must be a valid regular expression: {shown(text)}") from error

    def match(self, pattern: Any, text: str, whole: bool = False) -> Any:
        """The match at the start of `text` (of all of it), or None."""
        left = self._until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            found = (pattern.fullmatch if whole else pattern.match)(text, timeout=left, concurrent=True)
        except (TimeoutError, MemoryError) as error:
            raise unsupported(
                f"its patterns must match within {_PATTERN_SECONDS:g} s: write simpler ones"
            ) from error
        return found

    def full(self, field: str, text: str) -> Match:
        """Whether a module's whole path matches."""
        pattern = self.compile(field, text)
        return lambda module: self.match(pattern, module, whole=True) is not None

    def lookup(self, field: str, keys: Sequence[str]) -> Callable[[str], str | None]:
        """The first key that matches the end of a module's path."""
        compiled = [(key, self.compile(field, rf"(.*\.)?({key})$")) for key in keys]

        def find(module: str) -> str | None:
            return next((key for key, pattern in compiled if self.match(pattern, module) is not None), None)

        return find


def suffix(names: Sequence[str]) -> Match:
    """Whether a module's path is one of `names` or ends with one of them as whole words between dots."""
    exact = set(names)
    endings = tuple(f".{name}" for name in names)
    return lambda module: module in exact or module.endswith(endings)
