"""A short soak: the tool itself on a tiny model, with adapters that come and go and one kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import engine_world as world
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/engine"))

import soak_memory
from soak import Soak, soak
from soak_replica import Request, SoakReplica, make_small_adapters


def test_a_little_of_chaos_gives_no_wrong_answer_and_leaves_nothing(
    tiny: world.TinyModel, tmp_path: Path
) -> None:
    figures, ranges, faults = soak(
        tiny.folder, tmp_path, dtype="float32", adapters=24, seconds=12, kills=1, clients=8, seed=1
    )
    assert not faults
    assert figures["kills"] == 1
    assert figures["answers"] > 50
    for name in ("http descriptors growth", "engine descriptors growth", "engine threads growth"):
        least, most = ranges[name]
        assert least is None
        assert most is not None
        assert figures[name] <= most
    assert figures["engine MiB"] > 0


@pytest.fixture
def run(tiny: world.TinyModel, tmp_path: Path) -> Soak:
    made, vocab = make_small_adapters(tiny.folder, tmp_path, 20, 0)
    return Soak(SoakReplica(tiny.folder, tmp_path, "float32", made), made, 0, vocab)


def test_the_soak_sees_a_wrong_token_and_a_wrong_probability(run: Soak) -> None:
    key = ("adapter-0000", 0)
    run.oracle[key] = (["a", "b"], [-0.5, -0.25])
    run._compare(key, (["a", "b"], [-0.5, -0.25]), 2, "whole")
    run._compare(key, (["a"], [-0.5]), 2, "left")
    assert not run.faults
    for wrong in ((["a", "c"], [-0.5, -0.25]), (["a", "b"], [-0.5, -0.250001]), (["a"], [-0.5])):
        before = len(run.faults)
        run._compare(key, wrong, 2, "whole")
        assert len(run.faults) == before + 1
    run._add_up({"total": 10, "free": 4, "kv": 5})
    assert "add up" in run.faults[-1]


def test_adapters_change_but_never_how_many(run: Soak) -> None:
    run.declared = set(run.adapters)
    for share in (0.02, 0.5, 0.02, 1.0):
        others = run._others(share)
        assert len(others) == 16
        assert others != run.declared
        run.declared = others


def test_a_request_is_greedy_or_has_a_seed() -> None:
    assert Request([5]).body("base", 3)["temperature"] == 0
    drawn = Request([5], 7).body("base", 3)
    assert (drawn["temperature"], drawn["seed"], drawn["max_tokens"]) == (1, 7, 3)


# memory


@pytest.mark.parametrize(("points", "rise"), [([(0, 1), (1, 3), (2, 5)], 2.0), ([(1, 7), (1, 9)], 0.0)])
def test_slope(points: list[tuple[float, float]], rise: float) -> None:
    assert soak_memory.slope(points) == pytest.approx(rise)


def outside(samples: list[soak_memory.Sample]) -> set[str]:
    """What of a life is judged to be too much or too little."""
    figures, ranges = soak_memory.judge(samples)
    return {n for n, bounds in ranges.items() if not soak_memory.report.within(figures[n], bounds)}


def life(
    *, count: int = 30, live: float = 0.0, blocks: float = 0.0, holes: float = 0.0, late: float = 0.0
) -> list[soak_memory.Sample]:
    """Readings every 20 seconds, of 50 answers each, whose first third still fills caches; what grows is by answer,
    `holes` of the heap by minute, and `late` MiB are taken at once in the end."""
    samples = []
    for number in range(count):
        answers, warming = 50.0 * number, 1e7 * min(number, count // 3)
        sample = {"time": 20.0 * number, "answers": answers}
        for who in soak_memory.PROCESSES:
            noise = 4000 * (-1) ** number
            taken = (warming + live * answers) / 2**20 + holes * number / 3 + late * (number >= count - 2)
            sample |= {
                f"{who} live bytes": 1e8 + warming + noise + live * answers,
                f"{who} blocks": 5e5 + warming / 100 + noise / 100 + blocks * answers,
                f"{who} holes bytes": 0.0,
                f"{who} MiB": 100 + taken,
            }
        samples.append(sample)
    return samples


def test_what_warms_up_and_wavers_is_flat() -> None:
    assert outside(life()) == set()


def test_what_grows_is_told_by_its_kind() -> None:
    both = {f"{who} {{}}" for who in soak_memory.PROCESSES}
    assert outside(life(live=1000)) == {name.format("live bytes per answer") for name in both}
    assert outside(life(blocks=3)) == {name.format("Python blocks per answer") for name in both}
    assert outside(life(holes=3)) == {name.format("MiB per minute") for name in both}
    assert {name.format("peak MiB above the warm level") for name in both} <= outside(life(late=40))


def test_too_little_was_seen_to_judge_memory() -> None:
    assert "memory: samples" in outside(life(count=9))
    assert outside([]) == {"memory: samples", "memory: answers"}


def test_the_probe_tells_what_lives_in_another_process() -> None:
    hold = "import sys; sys.stdout.write('up'); sys.stdout.flush(); x = []\nfor line in sys.stdin:\n"
    hold += "    x.append(bytearray(10 << 20)); x.append([object() for _ in range(50000)]); print('held', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=-1, stdout=-1, env=soak_memory.environment(), bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(2) == b"up"
        before = soak_memory.read(psutil.Process(process.pid))
        process.stdin.write(b"more\n")
        assert process.stdout.readline() == b"held\n"
        after = soak_memory.read(psutil.Process(process.pid))
        process.stdin.close()
    assert after["live bytes"] - before["live bytes"] >= 10 << 20
    assert 50_000 <= after["blocks"] - before["blocks"] < 60_000
