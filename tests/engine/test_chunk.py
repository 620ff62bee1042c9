"""The size of a step follows how long steps take, on any machine, through noise and change."""

from __future__ import annotations

import random

import pytest
from tenantry_engine.chunk import StepSize


def drive(size: StepSize, base: float, each: float, noise: random.Random, steps: int = 60) -> list[float]:
    """Mixed steps of 8 running requests on a machine where a step takes base + each x tokens; their seconds."""
    taken = []
    for _ in range(steps):
        tokens = size.tokens(decoding=8)
        seconds = (base + each * tokens) * (noise.choice((4.0, 9.0)) if noise.random() < 0.1 else 1.0)
        taken.append(base + each * tokens)
        size.measured(tokens, seconds)
    return taken


@pytest.mark.parametrize(("base", "each"), [(0.02, 0.0004), (0.004, 0.0002), (0.05, 0.002), (0.0, 0.001)])
def test_it_finds_the_target_and_stays_below(base: float, each: float) -> None:
    taken = drive(StepSize(target=0.1, ceiling=2048), base, each, random.Random(1))
    assert max(taken[:10]) <= 0.13, "it must not overshoot on the way"
    settled = taken[-20:]
    assert max(settled) <= 0.105
    assert min(settled) >= 0.06, "prompts get what the target leaves"


def test_a_slow_first_step_does_not_slow_prompts_down_for_long() -> None:
    size = StepSize(target=0.1, ceiling=256)
    size.measured(200, 3.0)  # the first call of everything
    assert min(drive(size, 0.02, 0.0004, random.Random(2))[-10:]) >= 0.06


def test_it_follows_a_machine_that_becomes_slower_or_quicker() -> None:
    size = StepSize(target=0.1, ceiling=2048)
    noise = random.Random(3)
    drive(size, 0.02, 0.0002, noise)
    assert max(drive(size, 0.02, 0.002, noise)[-10:]) <= 0.115
    assert min(drive(size, 0.02, 0.0002, noise, steps=1200)[-10:]) >= 0.06


def test_prompts_go_on_however_slow_the_machine_is() -> None:
    size = StepSize(target=0.01, ceiling=256)
    assert set(drive(size, 0.5, 0.1, random.Random(4), steps=20)) == {0.5 + 0.1 * (8 + size.least)}


def test_nobody_waits_for_a_step_without_running_requests() -> None:
    size = StepSize(target=0.01, ceiling=256)
    size.measured(256, 5.0)
    assert size.tokens(decoding=0) == 256
    assert size.tokens(decoding=1) < 256


@pytest.mark.parametrize(("target", "ceiling", "word"), [(0.0, 8, "target"), (0.1, 0, "ceiling")])
def test_bounds(target: float, ceiling: int, word: str) -> None:
    with pytest.raises(ValueError, match=f"`{word}` must be"):
        StepSize(target, ceiling)
