"""Starting programs, and ending exactly those and nothing else.

Every program carries two variables in its environment: the run's folder and its part's name. The kernel keeps
them readable in /proc, so what an ended run left behind is found with certainty: no pid file can be stale and no
reused pid can be mistaken for ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError

RUN_MARK = "TENANTRY_CLUSTER_RUN"
PART_MARK = "TENANTRY_CLUSTER_PART"
_PR_SET_PDEATHSIG = 1
_GUARD = f"""
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Found:
    """A live process of ours."""

    pid: int
    run: str
    part: str
    command: str


def spawn(
    argv: Sequence[str],
    *,
    run: Path,
    part: str,
    log: Path,
    die_with_parent: bool,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `argv` marked as `part` of `run`, its output appended to `log`.

    die_with_parent: the kernel kills it when the starting thread ends, however that happens.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**(os.environ if environment is None else environment), RUN_MARK: str(run), PART_MARK: part},
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()) if die_with_parent else None,  # noqa: PLW1509 - single-threaded starters
        )


def _die_with(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def arrange() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended between fork and prctl
            os._exit(1)

    return arrange


def dying_with_me(argv: Sequence[str | os.PathLike[str]]) -> list[str]:
    """A command that becomes `argv`, and that the kernel kills when the starting thread ends, however that happens.

    For starters with threads, which should run nothing of their own between fork and exec.
    """
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *(os.fspath(word) for word in argv)]


def find(run: Path, part: str = "") -> list[Found]:
    """Every live process that carries `run`'s mark (and `part`'s, if named), whoever its parent is now.

    A zombie has no environment and is not listed.
    """
    wanted, found = str(run), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        marks = _marks(entry)
        if marks.get(RUN_MARK) == wanted and (not part or marks.get(PART_MARK) == part):
            found.append(Found(int(entry.name), wanted, marks.get(PART_MARK, ""), _command(entry)))
    return sorted(found, key=lambda process: process.pid)


def _marks(proc: Path) -> dict[str, str]:
    try:
        raw = (proc / "environ").read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    return {
        name.decode(): value.decode(errors="replace")
        for name, _, value in pairs
        if name in {RUN_MARK.encode(), PART_MARK.encode()}
    }


def _command(proc: Path) -> str:
    try:
        return (proc / "comm").read_text().strip()
    except OSError:
        return ""


def end_all(run: Path, part: str = "", *, seconds: float = 20) -> None:
    """Kills every process of `run` (of `part` alone, if named) and waits until none is left.

    SIGKILL at once: a graceful API server waits a minute for its watches, and all state is thrown away.
    """
    deadline = time.monotonic() + seconds
    while left := find(run, part):
        for process in left:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            names = ", ".join(f"{process.part} (pid {process.pid})" for process in left)
            raise ClusterError(f"these processes do not end: {names}")
        time.sleep(0.05)


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = 15) -> str:
    """Last lines of a log, for an error's text."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"
