"""vLLM's own series, passed on."""

from __future__ import annotations

from typing import Any


class Passed:
    """What the admin port renders."""

    def __init__(self) -> None:
        self._text = ""

    def look(self, numbers: dict[str, Any]) -> None:
        self._text = str(numbers["text"])

    def render(self) -> bytes:
        return self._text.encode()
