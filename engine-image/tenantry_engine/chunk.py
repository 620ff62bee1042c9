"""How much of a prompt one step may run, from how long steps took. Pure: the caller holds the clock.

A step that mixes prompts with running requests delays the next token of each of them, so its size is chosen such that
it stays under a target; where running requests alone take most of that, prompts still get a share of the time. Step
time is modelled as a + b x tokens + c x pairs, where pairs are those of a query and a key: deep in a long prompt,
attention is most of the work. The measurements are noisy (other processes, the first call of a kernel), hence medians
of the last steps of about one size, and a fit that gives outliers little weight.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_low

import numpy as np

_KEPT = 9  # measurements of one size
_FORGET = 512  # steps after which a measurement of a size no longer counts
_HALVES = 16  # steps after which a size's last measurement counts half: the machine may have become slower
_REFIT = 8  # steps between two fits
_HEADROOM = 0.9  # half of the steps are slower than the median
_OWED = 0.25  # of the target, or of the step without prompts: what prompts may take in any case
_GENTLE = 0.15  # of a full step without prompts: what prompts may take beside a tenant that they shall not slow down
_UNKNOWN = 16  # tokens of a prompt in a step while nothing was measured
_GROWTH = 1.25  # a size that was quick enough lets the next one be this much larger, whatever the model says; no more
_QUICK = 0.7
_SIMPLER = 0.9  # of its errors must be left for one more part to be taken into the model


def pairs_of(start: int, count: int) -> int:
    """Pairs of a query and a key for `count` tokens of one sequence from position `start` on."""
    return count * start + count * (count + 1) // 2


@dataclass(frozen=True)
class Load:
    """What a step does: its tokens, and its pairs of a query and a key."""

    tokens: int = 0
    pairs: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.tokens + other.tokens, self.pairs + other.pairs)

    @staticmethod
    def of(start: int, count: int) -> Load:
        """`count` tokens of one sequence from position `start` on."""
        return Load(count, pairs_of(start, count))


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: `fixed` + `token` x tokens + `pair` x pairs."""

    fixed: float
    token: float
    pair: float

    def of(self, load: Load) -> float:
        """Seconds of a step."""
        return self.fixed + self.token * load.tokens + self.pair * load.pairs

    def fits(self, seconds: float, load: Load, start: int) -> float:
        """Tokens from position `start` on that may join `load` within `seconds`. May be negative or infinite."""
        left = seconds - self.of(load)
        linear, square = self.token + self.pair * (start + 0.5), self.pair / 2
        if left <= 0 or linear == 0:
            return -1.0 if left <= 0 else math.inf
        # square x n^2 + linear x n = left, in the form that is exact for a square near 0
        return 2 * left / (linear + math.sqrt(linear * linear + 4 * square * left))


@dataclass(frozen=True)
class _Point:
    """What steps of about one size take, and how many steps ago there was one."""

    tokens: float
    pairs: float
    seconds: float
    age: int


@dataclass
class StepSize:
    """`target` seconds for a step that running requests wait for; at most `ceiling` tokens in any step."""

    target: float
    ceiling: int
    _sizes: dict[tuple[int, int], deque[tuple[int, Load, float]]] = field(
        default_factory=dict
    )  # of (step, …, seconds)
    _steps: int = 0
    _points: list[_Point] = field(default_factory=list)
    _cost: Cost | None = None

    def __post_init__(self) -> None:
        if self.target <= 0:
            raise ValueError(f"`target` must be more than 0 seconds, not {self.target}")
        if self.ceiling < 1:
            raise ValueError(f"`ceiling` must be at least 1 token, not {self.ceiling}")

    def measured(self, load: Load, seconds: float) -> None:
        """A step took `seconds`."""
        self._steps += 1
        size = (load.tokens.bit_length(), load.pairs.bit_length())
        fresh = size not in self._sizes
        self._sizes.setdefault(size, deque(maxlen=_KEPT)).append((self._steps, load, seconds))
        if fresh or self._steps % _REFIT == 0:
            self._points = self._medians()
            self._cost = _fit(self._points)

    def room(self, load: Load, decoding: Load, start: int, *, rows: int | None = None) -> int:
        """Tokens from position `start` of a prompt that may join a step of `load`, of which `decoding` is of running
        requests. Without any, nobody waits for the step. A step without a prompt has room for at least one token.

        `rows`: the step shall take hardly longer than one of so many running requests and no prompt, though the target
        leaves more.
        """
        most = self.ceiling - load.tokens
        if not decoding.tokens:
            return most
        if self._cost is None:
            fits: float = decoding.tokens + _UNKNOWN - load.tokens
        else:
            cost = self._cost
            seconds = _hardly_more(cost, decoding, rows) if rows else self._seconds(cost.of(decoding))
            fits = min(cost.fits(seconds, load, start), self._known(seconds, load, start))
        proven = max((self._proven(point, load, start) for point in self._points if not rows), default=0.0)
        least = 1 if load == decoding else 0
        return max(0, int(min(most, max(fits, proven, least))))

    def _seconds(self, alone: float) -> float:
        """What a step may take whose running requests take `alone`."""
        return max(_HEADROOM * self.target, alone + _OWED * max(self.target, alone))

    def _known(self, seconds: float, load: Load, start: int) -> int:
        """Tokens with which the step is not much larger than those that took hardly more than that, lately. Further on
        the model only guesses: a size that always aims at one time teaches it little about what tokens and pairs cost.
        """
        measured = [(took, load) for kept in self._sizes.values() for _, load, took in kept]
        limit = max(_GROWTH * seconds, min(took for took, _ in measured))
        loads = [load for took, load in measured if took <= limit]
        tokens, pairs = max(_UNKNOWN, *(x.tokens for x in loads)), max(x.pairs for x in loads)
        by_pairs = Cost(0.0, 0.0, 1.0).fits(_GROWTH * pairs, Load(0, load.pairs), start)
        return math.ceil(min(_GROWTH * tokens - load.tokens, by_pairs))

    def _proven(self, point: _Point, load: Load, start: int) -> float:
        """Tokens with which the step is not much larger than one that was quick, lately."""
        if point.seconds > _QUICK * self.target or point.age > 2 * _HALVES:
            return 0.0
        by_pairs = Cost(0.0, 0.0, 1.0).fits(_GROWTH * point.pairs, Load(0, load.pairs), start)
        return min(_GROWTH * point.tokens - load.tokens, by_pairs)

    def _medians(self) -> list[_Point]:
        """What is known of each size that was measured lately."""
        points = []
        for size, kept in list(self._sizes.items()):
            while kept and kept[0][0] <= self._steps - _FORGET:
                kept.popleft()
            if not kept:
                del self._sizes[size]
                continue
            steps, loads, seconds = zip(*kept, strict=True)
            tokens, pairs = median(x.tokens for x in loads), median(x.pairs for x in loads)
            points.append(_Point(tokens, pairs, median_low(seconds), self._steps - steps[-1]))
        return points


def _hardly_more(cost: Cost, decoding: Load, rows: int) -> float:
    """Seconds of a step that takes a little longer than one of `rows` requests like these, if they are not more."""
    many = max(1.0, rows / decoding.tokens)
    alone = cost.of(Load(round(many * decoding.tokens), round(many * decoding.pairs)))
    return (1 + _GENTLE) * alone


def _fit(points: list[_Point]) -> Cost:
    """The cost with no part below 0 that explains the points best, by their relative errors.

    Least squares, repeated with less weight for points that lie far off, which comes close to the least sum of absolute
    errors. A part is left out where the others explain the points nearly as well: with one size all of it is put on
    tokens, which errs on the small side.
    """
    table = np.array([(1.0, point.tokens, point.pairs) for point in points])
    table /= np.array([[max(point.seconds, 1e-9)] for point in points])
    trust = np.array([0.5 ** (point.age / _HALVES) for point in points])
    best, least = Cost(0.0, float(1 / np.median(table[:, 1])), 0.0), math.inf
    for parts in ((1,), (0, 1), (1, 2), (0, 1, 2)):
        if len(parts) > len(points):
            break
        columns = table[:, parts]
        scale = columns.max(axis=0)
        weight = trust
        for _ in range(5):
            found = np.linalg.lstsq(columns / scale * weight[:, None], weight, rcond=None)[0] / scale
            off = np.abs(columns @ found - 1)
            weight = trust / np.sqrt(np.maximum(off, 0.02))
        error = float(trust @ off)
        if (found >= 0).all() and error < _SIMPLER * least:
            full = np.zeros(3)
            full[list(parts)] = found
            best, least = Cost(*map(float, full)), error
    return best
