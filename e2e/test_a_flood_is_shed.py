"""A tenant that floods is told so; its neighbour on the same pod is served."""

from __future__ import annotations

from stack import promises
from stack.install import Stack


def test_the_flooder_gets_429_with_retry_after_and_the_neighbour_is_served(stack: Stack) -> None:
    seen = promises.flood(stack)
    assert seen.shed > 0, seen.outcomes
    assert seen.retry_after is not None
    assert int(seen.retry_after) >= 1
    assert set(seen.outcomes) <= {
        "200",
        "429 queue_full",
        "429 rate_requests",
        "429 rate_tokens",
        "429 queue_timeout",
    }
    assert seen.neighbour_ok == seen.neighbour_sent
