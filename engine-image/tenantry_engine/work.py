"""What a step runs of a sequence, and what came of it: the words between the scheduler and those who run steps."""

from __future__ import annotations

from dataclasses import dataclass

from tenantry_engine.sequence import Scores, Sequence


@dataclass(frozen=True)
class Work:
    """`count` tokens of a sequence from `start` on; `samples` = the step yields its next token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class Event:
    """Something happened to a sequence: a token, its end, or both.

    `finish`: stop, length, abort, deadline, error, or grammar (its structure became too complex to follow).
    """

    sequence: Sequence
    token: int | None = None
    finish: str | None = None
    scores: Scores | None = None  # of the token
    prompt_scores: list[Scores] | None = (
        None  # of the prompt's tokens from the second on, with the first token
    )
