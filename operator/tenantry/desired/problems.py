"""What is wrong with a spec, in words that name the field and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault of a spec. `field` is its path below `spec`; `message` says "must ..." and what to do."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"`{self.field}` {self.message}"


class SpecError(Exception):
    """A spec that cannot be served as it stands; it waits for an edit, not for a retry."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


def join(items: Iterable[str], limit: int = 5) -> str:
    """`a`, `b` and 3 more: bounded, for messages."""
    listed = list(items)
    text = ", ".join(f"`{item}`" for item in listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"
