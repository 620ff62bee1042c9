"""A tenant that floods is told so; its neighbour on the same pod is served."""

from __future__ import annotations

from stack import promises
from stack.install import Stack


def test_the_flooder_gets_429_with_retry_after_and_the_neighbour_is_served(
    stack: Stack, seen: list[str]
) -> None:
    flood = promises.flood(stack)
    seen.append(
        f"flood of {flood.sent}: {dict(flood.outcomes)}; its neighbour was served {flood.neighbour_ok} times of "
        f"{flood.neighbour_sent}, p50 {flood.neighbour_p50:.2f} s"
    )
    assert flood.shed > 0, flood.outcomes
    assert flood.retry_after is not None
    assert int(flood.retry_after) >= 1
    assert set(flood.outcomes) <= {
        "200",
        "429 queue_full",
        "429 rate_requests",
        "429 rate_tokens",
        "429 queue_timeout",
    }
    assert flood.neighbour_ok == flood.neighbour_sent
