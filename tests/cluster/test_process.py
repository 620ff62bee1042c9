"""Processes are found by what they carry, never by a number that another may have taken over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from cluster import process

E2E = Path(process.__file__).resolve().parents[1]
STARTER = """
import subprocess
from cluster.process import dying_with_me
child = subprocess.Popen(dying_with_me(["sleep", "300"]), stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


def test_everything_a_part_started_is_ended_and_nothing_else(tmp_path: Path) -> None:
    run, other = tmp_path / "ours", tmp_path / "theirs"
    grandchildren = ["sh", "-c", "sleep 300 & setsid sleep 300 & wait"]
    ours = process.spawn(grandchildren, run=run, part="a", log=tmp_path / "log", die_with_parent=False)
    theirs = process.spawn(["sleep", "300"], run=other, part="a", log=tmp_path / "log", die_with_parent=False)
    try:
        deadline = time.monotonic() + 10
        while len(process.find(run)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.end_all(run)
        assert process.find(run) == []
        assert [found.pid for found in process.find(other)] == [theirs.pid]
    finally:
        process.end_all(other)
        ours.wait()
        theirs.wait()


def test_one_part_is_ended_alone(tmp_path: Path) -> None:
    started = [
        process.spawn(["sleep", "300"], run=tmp_path, part=part, log=tmp_path / "log", die_with_parent=True)
        for part in ("a", "b")
    ]
    try:
        process.end_all(tmp_path, part="a")
        assert [found.part for found in process.find(tmp_path)] == ["b"]
    finally:
        process.end_all(tmp_path)
        for item in started:
            item.wait()


def test_an_unmarked_child_of_this_process_is_not_ours(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "300"])
    try:
        assert process.find(tmp_path) == []
        process.end_all(tmp_path)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_program_dies_with_its_starter_however_that_ends(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, cwd=E2E, start_new_session=True
    )
    try:
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        deadline = time.monotonic() + 10
        while child.name() != "sleep":  # it has become what it was told to
            assert time.monotonic() < deadline
            time.sleep(0.02)
        starter.kill()
        starter.wait()
        assert psutil.wait_procs([child], timeout=10) == ([child], [])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
