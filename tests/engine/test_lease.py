"""An engine runs no longer than its lease, whoever is there to end it or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import engine_world as world
import httpx
import pytest
from replica_process import ReplicaProcess, running
from tenantry_engine.lease import Lease

ENDLESS = {"model": "base", "prompt": "the", "max_tokens": 8000, "ignore_eos": True, "stream": True}


def write(path: Path, until: object) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps({"expiresAt": until}))
    partial.rename(path)


class Clocks:
    """Wall clock and monotonic clock that tests move."""

    wall = 1000.0
    steady = 50.0

    def lease(self, path: Path) -> Lease:
        return Lease(path, lambda: self.wall, lambda: self.steady)


def test_it_ends_on_time_and_a_clock_set_back_prolongs_nothing(tmp_path: Path) -> None:
    path, clocks = tmp_path / "lease", Clocks()
    lease = clocks.lease(path)
    assert lease.left() <= 0, "nothing is there"
    write(path, 1100)
    assert lease.left() == 100
    clocks.steady += 60
    clocks.wall -= 900
    assert lease.left() == 40
    write(path, 200)  # a new one, by the clock as it is now
    assert lease.left() == 100


@pytest.mark.parametrize("content", ["", "{", "[]", '{"expiresAt": "soon"}', '{"expiresAt": null}', "\xff"])
def test_what_cannot_be_read_extends_nothing(tmp_path: Path, content: str) -> None:
    path, clocks = tmp_path / "lease", Clocks()
    lease = clocks.lease(path)
    write(path, 1010)
    assert lease.left() == 10
    path.write_text(content, encoding="latin-1")
    assert lease.left() == 10, "what was granted holds"
    clocks.steady += 10
    assert lease.left() <= 0
    path.unlink()
    assert lease.left() <= 0


async def test_an_extension_is_seen_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    write(path, time.time() + 0.5)
    lease = Lease(path)
    ended = asyncio.create_task(lease.ended(0.05))
    write(path, time.time() + 60)
    await asyncio.wait([ended], timeout=1.0)
    assert not ended.done()
    write(path, time.time() - 1)
    await asyncio.wait_for(ended, 10)


def test_a_replica_ends_with_its_lease_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    slow = world.TinyModel.make(tmp_path / "slow", max_position_embeddings=8192)
    path = tmp_path / "lease"
    write(path, time.time() - 1)
    late = ReplicaProcess(slow.folder, tmp_path, "--lease", str(path))
    try:
        assert late.process.wait(timeout=60) == 3
        assert "not started: the lease" in late.said
    finally:
        late.close()
    write(path, time.time() + 3600)
    with running(slow.folder, tmp_path, "--lease", str(path)) as replica:
        engine = replica.engine
        with httpx.stream("POST", f"{replica.url}/v1/completions", json=ENDLESS, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            write(path, time.time() - 1)  # nobody renews: the gate's word is over
            rest: list[str] = []
            with contextlib.suppress(httpx.TransportError):
                rest.extend(lines)
            assert "data: [DONE]" not in rest, "an answer that was cut never ends cleanly"
        assert replica.process.wait(timeout=30) == 3
        assert not engine.is_running()
        assert "the lease has ended" in replica.said
