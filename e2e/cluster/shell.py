"""Running the machine's own tools, with their complaint in the error."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import ClusterError


def run(
    *argv: str | Path,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    seconds: float = 1800,
) -> str:
    """Runs a command and returns its stdout; raises ClusterError with its last words where it fails."""
    try:
        result = subprocess.run(
            [str(word) for word in argv],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=cwd,
            timeout=seconds,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"`{argv[0]}` is missing; run `python -m cluster packages --install`") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{_short(argv)}` did not end within {seconds:.0f} s") from error
    if result.returncode:
        words = "\n".join((result.stdout + result.stderr).strip().splitlines()[-25:])
        raise ClusterError(f"`{_short(argv)}` exited {result.returncode}:\n{words}")
    return result.stdout


def succeeds(*argv: str | Path) -> bool:
    """Whether a command exits 0; its output is of no interest."""
    return subprocess.run([str(word) for word in argv], capture_output=True, check=False).returncode == 0


def _short(argv: Sequence[str | Path]) -> str:
    words = " ".join(str(word) for word in argv)
    return words if len(words) < 120 else f"{words[:117]}..."
