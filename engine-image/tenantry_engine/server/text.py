"""The text of one choice as its tokens come: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from tenantry_engine.tokenizer import TextStream, Tokenizer


class StopScanner:
    """Finds the first of some strings in text that comes in pieces; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string was reached (it is not part of the text)."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back, since no more comes."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` begins with."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if stop.startswith(text[-size:]):
                return size
        return 0


class Choice:
    """One choice of an answer: collects what its sequence yields."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], stop_ids: frozenset[int]
    ) -> None:
        self.index = index
        self.text = ""
        self.tokens = 0
        self.finish: str | None = None
        self._stream = TextStream(tokenizer)
        self._scanner = StopScanner(stops)
        self._stop_ids = stop_ids

    def take(self, token: int | None, finish: str | None) -> str:
        """A token, an end, or both -> the new text. Sets `finish` when the choice is complete."""
        piece = ""
        if token is not None:
            self.tokens += 1
            if not (finish == "stop" and token in self._stop_ids):
                piece = self._stream.push(token)
        new, stopped = self._scanner.push(piece)
        if stopped:
            self.finish = "stop"
        elif finish is not None:
            rest, stopped = self._scanner.push(self._stream.finish())
            new += rest if stopped else rest + self._scanner.finish()
            self.finish = "stop" if stopped else finish
        self.text += new
        return new
