"""Whether the memory of a replica under soak is flat: what is read of a process, and what is judged of many readings.

Two questions, since one number cannot answer both. Does anything that lives grow with the answers given? That is a
leak, and shows in bytes and objects per answer however small it is beside weights and pages. Does what the process
takes of the machine stay? Holes in the allocator's heap are no leak, but they must come to an end: after the first
third of a life the rise is bounded by the minute, and in all.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report

Sample = dict[str, float]

PROCESSES = ("http", "engine")
PROBE = Path(__file__).resolve().parent / "soak_probe"
LIVE_BYTES = 256.0  # an answer; one forgotten sequence or answer is a thousand and more
BLOCKS = 1.0  # Python's small objects, an answer
MIB_PER_MINUTE = 2.0
MIB_IN_ALL = 32.0
LEAST_SAMPLES, LEAST_ANSWERS = 12, 500
"""In the judged part of the last replica's life: fewer say nothing."""


def environment() -> dict[str, str]:
    """For the replica's processes: with the probe in each of them."""
    paths = [str(PROBE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TENANTRY_SOAK": "1"}


def read(process: psutil.Process) -> Sample:
    """Of one process: what it takes (its own pages, MiB), what lives in it, descriptors and threads."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(60)
        probe.connect(f"\0tenantry-soak-{process.pid}")
        told = b"".join(iter(lambda: probe.recv(4096), b""))
    with process.oneshot():
        return {
            **json.loads(told),
            "MiB": process.memory_full_info().uss / (1 << 20),
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line through points (x, y), by least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def judge(samples: list[Sample]) -> tuple[dict[str, float], dict[str, report.Bounds]]:
    """Figures, and what they may be, from the readings of one life in order. The first third warms up.

    Each reading has `time` (seconds), `answers` (so far), and what `read` gives with the process's name before it.
    """
    warm = samples[len(samples) // 3 :]
    answers = warm[-1]["answers"] - warm[0]["answers"] if warm else 0.0
    figures: dict[str, float] = {"memory: samples": len(warm), "memory: answers": answers}
    ranges: dict[str, report.Bounds] = {
        "memory: samples": (LEAST_SAMPLES, None),
        "memory: answers": (LEAST_ANSWERS, None),
    }
    for who in PROCESSES if warm else ():
        by_answer = [(s["answers"], s) for s in warm]
        mib = [s[f"{who} MiB"] for s in warm]
        for name, value, most in (
            ("live bytes per answer", slope([(x, s[f"{who} live bytes"]) for x, s in by_answer]), LIVE_BYTES),
            ("Python blocks per answer", slope([(x, s[f"{who} blocks"]) for x, s in by_answer]), BLOCKS),
            ("MiB per minute", slope([(s["time"] / 60, s[f"{who} MiB"]) for s in warm]), MIB_PER_MINUTE),
            ("peak MiB above the warm level", max(mib) - mib[0], MIB_IN_ALL),
        ):
            figures[f"{who} {name}"] = round(value, 3)
            ranges[f"{who} {name}"] = (None, most)
        figures[f"{who} MiB"] = round(mib[-1], 1)
        figures[f"{who} MiB of holes in the heap"] = round(warm[-1][f"{who} holes bytes"] / (1 << 20), 1)
    return figures, ranges


def held(samples: list[Sample]) -> tuple[dict[str, float], dict[str, report.Bounds]]:
    """Whether descriptors or threads are still being added in the second half of a life."""
    figures: dict[str, float] = {}
    ranges: dict[str, report.Bounds] = {}
    early, late = samples[: len(samples) // 2 + 1], samples[len(samples) // 2 :]
    for who in PROCESSES if samples else ():
        for what in ("descriptors", "threads"):
            name = f"{who} {what} growth"
            figures[name] = max(s[f"{who} {what}"] for s in late) - max(s[f"{who} {what}"] for s in early)
            ranges[name] = (None, 2)
    return figures, ranges
