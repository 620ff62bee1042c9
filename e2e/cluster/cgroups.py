"""The control groups that nodes run in, under either version of the kernel's interface."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import ClusterError
from .paths import PREFIX

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids")
"""Those of version 2 that kubelet asks for."""


def version(root: Path = ROOT) -> int:
    """2 where the unified hierarchy is mounted at the top, else 1."""
    return 2 if (root / "cgroup.controllers").exists() else 1


def hierarchies(root: Path = ROOT) -> list[Path]:
    """Folders below which a group must exist: one per controller in version 1, the top itself in version 2."""
    if version(root) == 2:
        return [root]
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())


def parent(node: str) -> str:
    """Path of a node's group below every hierarchy, as kubelet's `cgroupRoot` wants it."""
    return f"/{PREFIX}/{node}"


def create(node: str, root: Path = ROOT) -> None:
    """Makes a node's group in every hierarchy, able to hold pods. Raises ClusterError where the kernel refuses."""
    for hierarchy in hierarchies(root):
        if version(root) == 2:
            _delegate(hierarchy)
        for group in (hierarchy / PREFIX, hierarchy / PREFIX / node):
            group.mkdir(exist_ok=True)
            if version(root) == 2:
                _delegate(group)
            elif (group / "cpuset.cpus").exists():
                # A new cpuset of version 1 is empty and takes no process until both are filled.
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (group / name).write_text((group.parent / name).read_text())


def _delegate(group: Path) -> None:
    offered = (group / "cgroup.controllers").read_text().split()
    enable = " ".join(f"+{name}" for name in CONTROLLERS if name in offered)
    try:
        (group / "cgroup.subtree_control").write_text(enable)
    except OSError as error:
        raise ClusterError(
            f"the kernel does not let {group} pass on its controllers ({error.strerror}): processes live in it. "
            "Start from the machine's own root group, or point `KUBECONFIG` at another cluster."
        ) from error


def remove(root: Path = ROOT, seconds: float = 20) -> None:
    """Ends what still runs in our groups and removes them from every hierarchy."""
    deadline = time.monotonic() + seconds
    for hierarchy in hierarchies(root) if root.exists() else []:
        top = hierarchy / PREFIX
        while top.exists():
            for group in _deepest_first(top):
                _kill(group)
                try:
                    group.rmdir()
                except OSError:
                    continue  # a process is still ending, or a group below was busy
            if top.exists():
                if time.monotonic() > deadline:
                    raise ClusterError(f"{top} stays busy; see its cgroup.procs")
                time.sleep(0.05)


def left(root: Path = ROOT) -> list[Path]:
    """Our groups that exist now."""
    return [path for hierarchy in hierarchies(root) if (path := hierarchy / PREFIX).exists()]


def _deepest_first(top: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(top, topdown=False):
        yield Path(folder)


def _kill(group: Path) -> None:
    try:
        pids = (group / "cgroup.procs").read_text().split()
    except OSError:
        return
    for pid in pids:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
