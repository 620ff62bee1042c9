"""The Debian packages that nodes and image builds stand on: one list, checked here, read by Makefile and CI."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from .binaries import say
from .errors import ClusterError
from .paths import HERE
from .shell import run

LIST = HERE / "debian-packages.txt"
CNI_FOLDER = Path("/usr/lib/cni")
ELSEWHERE = "or point `KUBECONFIG` at kind, minikube, k3d or any other cluster, which is then used instead"


def listed(text: str) -> list[str]:
    """Package names of the list: one a line, `#` opens a comment."""
    names = (line.partition("#")[0].strip() for line in text.splitlines())
    return [name for name in names if name]


def missing() -> list[str]:
    """Listed packages that are not installed."""
    wanted = listed(LIST.read_text())
    status = run("dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n")
    installed = {
        name
        for name, _, state in (line.partition(" ") for line in status.splitlines())
        if state == "installed"
    }
    return [name for name in wanted if name not in installed]


def ensure() -> None:
    """Installs what is missing. Raises ClusterError where this is not a Debian machine with root."""
    require_machine()
    names = missing()
    if not names:
        return
    say(f"installing Debian packages: {' '.join(names)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", environment=environment)
    run("apt-get", "install", "-y", "--no-install-recommends", *names, environment=environment)


def require_machine() -> None:
    """Raises ClusterError, saying what to do, where nodes cannot run: not Linux, not root, not Debian-like."""
    if platform.system() != "Linux":
        raise ClusterError(
            f"nodes need Linux and this is {platform.system()}: use a Debian machine, {ELSEWHERE}."
        )
    if os.geteuid() != 0:
        raise ClusterError(
            f"nodes need root (network namespaces, mounts, cgroups): run as root, {ELSEWHERE}."
        )
    if not shutil.which("dpkg-query") or not shutil.which("apt-get"):
        raise ClusterError(f"nodes need Debian packages and apt is not here: use Debian 12, {ELSEWHERE}.")
