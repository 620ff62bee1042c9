"""How many tokens one step may run, from how long steps took. Pure: the caller holds the clock.

A step that mixes prompts with running requests delays the next token of each of them, so its size is chosen such that
it stays under a target. Step time is modelled as a + b x tokens. The measurements are noisy (other processes, the first
call of a kernel), hence medians: of the last steps of about one size, then of the slopes between sizes (Theil and Sen).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median, median_low

_KEPT = 9  # measurements of one size
_FORGET = 512  # steps after which a measurement of a size no longer counts
_HEADROOM = 0.9  # half of the steps are slower than the median
_GROWTH = 1.25  # a size that was quick enough lets the next one be this much larger, whatever the model says
_QUICK = 0.7


@dataclass
class StepSize:
    """`target` seconds for a step that running requests wait for; at most `ceiling` tokens in any step."""

    target: float
    ceiling: int
    least: int = 16  # prompt tokens that every step may take: prompts go on, however slow the machine is
    _sizes: dict[int, deque[tuple[int, int, float]]] = field(default_factory=dict)  # (step, tokens, seconds)
    _steps: int = 0

    def __post_init__(self) -> None:
        if self.target <= 0:
            raise ValueError(f"`target` must be more than 0 seconds, not {self.target}")
        if self.ceiling < 1:
            raise ValueError(f"`ceiling` must be at least 1 token, not {self.ceiling}")

    def measured(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took `seconds`."""
        self._steps += 1
        kept = self._sizes.setdefault(tokens.bit_length(), deque(maxlen=_KEPT))
        kept.append((self._steps, tokens, seconds))

    def tokens(self, decoding: int) -> int:
        """Most tokens of a step in which `decoding` requests take one each. Without any, nobody waits for it."""
        if decoding == 0:
            return self.ceiling
        points = self._points()
        fits = self._fit(points)
        quick = [tokens for tokens, seconds in points if seconds <= _QUICK * self.target]
        proven = _GROWTH * max(quick, default=0)
        return min(self.ceiling, max(decoding + self.least, int(max(fits, proven))))

    def _points(self) -> list[tuple[float, float]]:
        """Tokens and seconds of each size that was measured lately."""
        points = []
        for kept in self._sizes.values():
            while kept and kept[0][0] <= self._steps - _FORGET:
                kept.popleft()
            if kept:
                points.append((median(t for _, t, _ in kept), median_low(s for _, _, s in kept)))
        return points

    def _fit(self, points: list[tuple[float, float]]) -> float:
        """Tokens for which the model predicts the target, less some headroom."""
        goal = _HEADROOM * self.target
        slopes = [(t - s) / (m - n) for (n, s), (m, t) in combinations(points, 2) if m != n]
        slope = median(slopes) if slopes else 0.0
        if (
            slope <= 0
        ):  # one size, or noise: as if all the time went into tokens, which errs on the small side
            return min((goal * n / s for n, s in points if s > 0), default=0.0)
        base = max(0.0, median(s - slope * n for n, s in points))
        return (goal - base) / slope
