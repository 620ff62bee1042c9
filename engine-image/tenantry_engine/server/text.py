"""The text of one choice as its tokens come: incremental decoding, stop strings, tool calls, scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tenantry_engine.sequence import Scores
from tenantry_engine.server.logprobs import Scored
from tenantry_engine.server.tools import Call, Reader
from tenantry_engine.tokenizer import TextStream, Tokenizer


class StopScanner:
    """Finds stop strings in text that comes in pieces; holds back what may still become one.

    The one that is complete first counts, wherever the pieces are cut; of several, the one that begins first.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string was reached (part of the text if `include`)."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, begin = min(found)
            return text[: end if self._include else begin], True
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


@dataclass(frozen=True)
class Form:
    """What a request asks of the text of all its choices."""

    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    min_tokens: int = 0  # stop strings count after so many tokens
    echo: bool = False
    silent: bool = False  # nothing of the output is told: the prompt alone was asked for


@dataclass
class Delta:
    """What is new in a choice."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.scored)

    def add(self, more: Delta) -> None:
        """Appends what came after."""
        self.text += more.text
        self.calls += more.calls
        self.scored += more.scored


class Choice:
    """One choice of an answer: collects what its sequence yields."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        form: Form,
        *,
        prompt: Sequence[int] = (),
        reader: Reader | None = None,
    ) -> None:
        """`prompt` is what `form.echo` repeats; `reader` finds tool calls."""
        self.index = index
        self.tokens = 0
        self.whole = Delta()
        self.finish: str | None = None
        self._tokenizer = tokenizer
        self._form = form
        self._stream = TextStream(tokenizer)
        self._scanner = StopScanner(form.stops, form.include_stop)
        self._reader = reader
        self._waiting: list[Scored] = []  # scores of tokens whose text is not out yet
        self._decoded = 0  # characters of all tokens so far
        self._shown = 0  # of these, the ones that are out
        self._prompt: Sequence[int] | None = prompt if form.echo else None

    def take(
        self,
        token: int | None,
        finish: str | None,
        scores: Scores | None = None,
        prompt_scores: Sequence[Scores] | None = None,
    ) -> Delta:
        """A token, an end, or both -> what is new. Sets `finish` when the choice is complete."""
        new = Delta()
        if self._prompt is not None:
            new = self._echo(self._prompt, prompt_scores)
            self._prompt = None
        if self._form.silent:
            self.finish = finish
        else:
            new.add(self._take(token, finish, scores))
        if self._reader is not None:
            self._read(self._reader, new)
        self.whole.add(new)
        return new

    def _take(self, token: int | None, finish: str | None, scores: Scores | None) -> Delta:
        piece = ""
        if token is not None:
            self.tokens += 1
            form = self._form
            if form.include_stop or not (finish == "stop" and token in form.stop_ids):
                piece = self._stream.push(token)
                if scores is not None:
                    self._waiting.append(Scored(token, scores, self._decoded))
            self._decoded += len(piece)
        if self.tokens <= self._form.min_tokens:
            text, stopped = piece, False
        else:
            text, stopped = self._scanner.push(piece)
        if stopped:
            self.finish = "stop"
        elif finish is not None:
            rest, stopped = self._scanner.push(self._stream.finish())
            text += rest if stopped else rest + self._scanner.finish()
            self.finish = "stop" if stopped else finish
        self._shown += len(text)
        return Delta(text, scored=self._ripe(stopped))

    def _ripe(self, stopped: bool) -> list[Scored]:
        """Scores of the tokens whose text is out; of those that a stop string cut off, none."""
        if self.finish is not None and not stopped:
            ripe, self._waiting = self._waiting, []
            return ripe
        count = next(
            (i for i, item in enumerate(self._waiting) if item.offset >= self._shown), len(self._waiting)
        )
        ripe, self._waiting = self._waiting[:count], self._waiting[count:]
        return ripe

    def _echo(self, prompt: Sequence[int], scores: Sequence[Scores] | None) -> Delta:
        stream, delta = TextStream(self._tokenizer), Delta()
        for place, token in enumerate(prompt):
            if scores is not None:
                delta.scored.append(Scored(token, scores[place - 1] if place else None, len(delta.text)))
            delta.text += stream.push(token)
        delta.text += stream.finish()
        self._decoded = self._shown = len(delta.text)
        return delta

    def _read(self, reader: Reader, new: Delta) -> None:
        new.text, new.calls = reader.push(new.text)
        if self.finish is not None:
            text, calls = reader.finish()
            new.text += text
            new.calls += calls
        if self.finish == "stop" and (new.calls or self.whole.calls):
            self.finish = "tool_calls"
