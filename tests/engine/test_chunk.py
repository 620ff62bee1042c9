"""The size of a step follows how long steps take, on any machine, through noise and change."""

from __future__ import annotations

import random
import statistics

import pytest
from tenantry_engine.chunk import Cost, Load, StepSize


def drive(size: StepSize, base: float, each: float, noise: random.Random, steps: int = 60) -> list[float]:
    """Mixed steps of 8 running requests on a machine where a step takes base + each x tokens; their seconds."""
    taken = []
    for _ in range(steps):
        load = Load(8, 800)
        load += Load.of(0, size.room(load, decoding=load, start=0))
        taken.append(base + each * load.tokens)
        size.measured(load, taken[-1] * (noise.choice((4.0, 9.0)) if noise.random() < 0.1 else 1.0))
    return taken


def through_a_prompt(size: StepSize, cost: Cost, length: int, noise: random.Random) -> list[float]:
    """Steps of 15 running requests until a prompt of `length` tokens is computed, at that cost; their seconds."""
    taken, start = [], 0
    while start < length:
        load = Load(15, 15 * 110)
        count = min(length - start, size.room(load, decoding=load, start=start))
        load += Load.of(start, count)
        taken.append(cost.fixed + cost.token * load.tokens + cost.pair * load.pairs)
        size.measured(load, taken[-1] * noise.choice((0.97, 1.0, 1.0, 1.04, 3.0)))
        start += count
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
    size.measured(Load.of(0, 200), 3.0)  # the first call of everything
    assert min(drive(size, 0.02, 0.0004, random.Random(2))[-10:]) >= 0.06


def test_it_follows_a_machine_that_becomes_slower_or_quicker() -> None:
    size = StepSize(target=0.1, ceiling=2048)
    noise = random.Random(3)
    drive(size, 0.02, 0.0002, noise)
    assert max(drive(size, 0.02, 0.002, noise)[-10:]) <= 0.115
    assert min(drive(size, 0.02, 0.0002, noise, steps=1200)[-10:]) >= 0.06


def test_prompts_get_a_share_of_the_time_however_slow_the_machine_is() -> None:
    alone = 0.5 + 0.01 * 8
    taken = drive(StepSize(target=0.01, ceiling=256), 0.5, 0.01, random.Random(4))[-20:]
    assert 1.1 * alone <= min(taken)
    assert max(taken) <= 1.3 * alone


@pytest.mark.parametrize(
    "cost",
    [Cost(0.01, 0.002, 1e-6), Cost(0.03, 0.0004, 2e-6), Cost(0.004, 0.0002, 1e-7), Cost(0.02, 0.001, 0.0)],
)
def test_deep_in_a_long_prompt_chunks_shrink_as_attention_grows(cost: Cost) -> None:
    size, noise = StepSize(target=0.1, ceiling=2048), random.Random(5)
    for _ in range(2):
        taken = through_a_prompt(size, cost, 6000, noise)
        late = sorted(taken)
        assert late[int(0.95 * len(late))] <= 0.115
    assert statistics.median(taken) >= 0.06, "prompts get what the target leaves"


@pytest.mark.parametrize(
    "cost", [Cost(0.02, 0.0015, 1e-6), Cost(0.03, 0.001, 5e-7), Cost(0.01, 0.0025, 1e-6)]
)
def test_steps_that_all_took_the_same_do_not_let_the_next_one_be_huge(cost: Cost) -> None:
    """For thousands of steps there is always a prompt, so that the target is all that was ever measured."""
    size, noise, taken = StepSize(target=0.1, ceiling=256), random.Random(8), []
    for start in (depth for _ in range(3) for depth in range(0, 6000, 24)):
        load = Load(15, 15 * noise.randint(60, 160))
        load += Load.of(start, size.room(load, decoding=load, start=start))
        taken.append(cost.of(load))
        size.measured(load, taken[-1] * noise.lognormvariate(0, 0.12) * noise.choice((1,) * 30 + (2,)))
    assert max(taken) <= 0.2
    assert statistics.median(taken) >= 0.08


def test_from_one_row_on_a_step_grows_at_any_depth() -> None:
    size, cost = StepSize(target=0.1, ceiling=256), Cost(0.001, 0.0001, 1e-8)
    for start in (0, 50_000):
        for _ in range(40):
            load = Load(1, 10)
            load += Load.of(start, room := size.room(load, decoding=load, start=start))
            size.measured(load, cost.of(load))
        assert room >= 60


def test_a_prompt_goes_on_at_any_depth() -> None:
    size, cost = StepSize(target=0.05, ceiling=2048), Cost(0.01, 0.002, 1e-6)
    through_a_prompt(size, cost, 2000, random.Random(6))
    running = Load(15, 1650)
    assert size.room(running, decoding=running, start=1_000_000) == 1
    assert size.room(running + Load.of(1_000_000, 1), decoding=running, start=1_000_000) == 0, (
        "once in a step"
    )


@pytest.mark.parametrize("running", [4, 8, 16])
@pytest.mark.parametrize("target", [0.02, 0.1])
def test_beside_whom_prompts_shall_not_slow_down_a_step_is_as_one_of_all_rows(
    target: float, running: int
) -> None:
    size, load = StepSize(target, ceiling=2048), Load(running, 100 * running)
    drive(size, 0.02, 0.0004, random.Random(7))
    for _ in range(64):
        size.measured(load, 0.02 + 0.0004 * running)
    full = 0.02 + 0.0004 * 16
    room = size.room(load, decoding=load, start=0, rows=16)
    assert 1.05 * full <= 0.02 + 0.0004 * (running + room) <= 1.25 * full


def test_what_was_measured_long_ago_no_longer_counts() -> None:
    size, running = StepSize(target=0.1, ceiling=256), Load(8, 800)
    for _ in range(9):
        size.measured(Load.of(0, 64), 5.0)
    for _ in range(600):
        size.measured(running, 0.01)
    for load, seconds in (*[(Load.of(0, 64), 0.02)] * 3, *[(running, 0.01)] * 8):
        size.measured(load, seconds)
    assert size.room(running, decoding=running, start=0) >= 56


def test_nobody_waits_for_a_step_without_running_requests() -> None:
    size = StepSize(target=0.01, ceiling=256)
    size.measured(Load.of(0, 256), 5.0)
    assert size.room(Load(), decoding=Load(), start=0) == 256
    assert size.room(Load(56, 56), decoding=Load(), start=5000) == 200
    assert size.room(Load(1, 10), decoding=Load(1, 10), start=0) == 1


@pytest.mark.parametrize(("target", "ceiling", "word"), [(0.0, 8, "target"), (0.1, 0, "ceiling")])
def test_bounds(target: float, ceiling: int, word: str) -> None:
    with pytest.raises(ValueError, match=f"`{word}` must be"):
        StepSize(target, ceiling)
