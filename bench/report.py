"""What every benchmark says at its end: one JSON object as the last line, a dated copy in bench/results, an exit code.

The object is `{"bench", "figures", "peers", "ranges", "ok"}`. `peers` was measured in the same run. `ranges` names the
figures that must lie within bounds, `(least, most)`, None where there is none; a figure that is missing is outside.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

Bounds = tuple[float | None, float | None]


def finish(
    *,
    bench: str,
    figures: Mapping[str, Any],
    peers: Mapping[str, Any],
    ranges: Mapping[str, Bounds],
    keep: bool = True,
    details: Mapping[str, Any] | None = None,
) -> int:
    """Prints the verdict and returns the exit code: 0 within all ranges, else 1.

    bench: `<room>/<name>`; `keep` False = a smoke run, which leaves no file; `details`
    (rounds, work) go to the file only.
    """
    outside = [name for name, bounds in ranges.items() if not within(figures.get(name), bounds)]
    for name in outside:
        least, most = ranges[name]
        print(f"outside its range: {name} = {figures.get(name)}, must be {least} to {most}", file=sys.stderr)
    result = {
        "bench": bench,
        "figures": dict(figures),
        "peers": dict(peers),
        "ranges": {name: list(bounds) for name, bounds in ranges.items()},
        "ok": not outside,
    }
    if keep:
        now = datetime.now(UTC)
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{now:%Y-%m-%d}-{bench.replace('/', '-')}.json"
        about = {"date": now.isoformat(timespec="seconds"), **surroundings(), **(details or {})}
        path.write_text(json.dumps({**result, **about}, indent=1) + "\n")
        print(f"kept in bench/results/{path.name}", file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 1 if outside else 0


def within(value: float | None, bounds: Bounds) -> bool:
    """Whether a figure was measured and lies in its range, borders included."""
    least, most = bounds
    if value is None or value != value:
        return False
    return (least is None or value >= least) and (most is None or value <= most)


def surroundings() -> dict[str, Any]:
    """Machine, versions and commit, since a figure without them says nothing."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=RESULTS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "commit": found.stdout.strip(),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "load_average": os.getloadavg(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
