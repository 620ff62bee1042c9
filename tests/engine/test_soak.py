"""A short soak: the tool itself on a tiny model, with adapters that come and go and one kill."""

from __future__ import annotations

import sys
from pathlib import Path

import engine_world as world
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/engine"))

from soak import Soak, soak
from soak_replica import SoakReplica, make_small_adapters, slope


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


def test_the_soak_sees_a_wrong_token_and_a_wrong_probability(tiny: world.TinyModel, tmp_path: Path) -> None:
    made, vocab = make_small_adapters(tiny.folder, tmp_path, 2, 0)
    run = Soak(SoakReplica(tiny.folder, tmp_path, "float32", made), made, 0, vocab)
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


@pytest.mark.parametrize(("points", "rise"), [([(0, 1), (1, 3), (2, 5)], 2.0), ([(1, 7), (1, 9)], 0.0)])
def test_slope(points: list[tuple[float, float]], rise: float) -> None:
    assert slope(points) == pytest.approx(rise)
