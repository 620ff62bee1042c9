"""The cluster comes up, survives what happens to clusters, and goes without a trace."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import cgroups, hollow, lifecycle, network, process
from cluster.controlplane import kubectl
from cluster.paths import NODES, cache_dir, cluster_dir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Places where these programs are known to leave things when nobody keeps them from it.
HABITS = (
    *(
        "/var/lib/cni",
        "/var/lib/kubelet",
        "/var/log/containers",
        "/var/log/pods",
        "/run/containerd",
        "/opt/containerd",
    ),
    *("/opt/cni", "/etc/cni", "/run/netns", "/run/nri", "/usr/libexec/kubernetes", "/var/run/kubernetes"),
)


def machine() -> dict[str, object]:
    """What a cluster could change on this machine."""

    def output(*words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    return {
        "links": sorted(line.split()[0] for line in output("ip", "-br", "link").splitlines()),
        "routes": sorted(output("ip", "route").splitlines()),
        "rules": output("nft", "--stateless", "list", "ruleset"),
        "mounts": sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "groups": sorted(
            str(path) for top in cgroups.hierarchies() for path in top.iterdir() if path.is_dir()
        ),
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "habits": [path for path in HABITS if Path(path).exists()],
        "strays": sorted(str(path) for path in Path("/tmp").glob("*kubelet*")),
        "programs": programs(),
    }


def programs() -> list[int]:
    """Processes, whatever they carry, that run a program which only nodes have."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            program = os.readlink(entry / "exe")
        except OSError:
            continue
        is_ours = program.startswith(str(cache_dir() / "bin"))
        if is_ours and Path(program).name in {
            "containerd",
            "containerd-shim-runc-v2",
            "kubelet",
            "kube-proxy",
            "kubemark",
        }:
            found.append(int(entry.name))
    return found


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert not process.find(cluster_dir()), "a cluster runs: take it away first by `make cluster-down`"
    lifecycle.down()
    yield
    lifecycle.down()


@pytest.mark.usefixtures("clean")
def test_up_again_after_being_killed_and_down_without_a_trace() -> None:
    before = machine()
    lifecycle.up()
    config = lifecycle.kubeconfig()
    assert lifecycle.status().ok
    kubectl(config, "create", "namespace", "from-the-first-life")

    # A run that is ended from outside: control plane and one node's first process go, all else stays.
    for found in process.find(cluster_dir()):
        if found.part.startswith(("etcd", "kube-", NODES[1].name)):
            with contextlib.suppress(ProcessLookupError):  # a node's first process takes the others with it
                os.kill(found.pid, signal.SIGKILL)
    wait_until(lambda: not lifecycle.is_running())
    assert not lifecycle.status().ok
    assert network.left(), "the network outlives its processes: that is what the next start must clear"

    started = time.monotonic()
    lifecycle.up()
    assert lifecycle.status().ok
    assert kubectl(config, "get", "namespace", "from-the-first-life", check=False).returncode == 1
    print(f"second start: {time.monotonic() - started:.0f} s")

    hollow.add(cluster_dir(), lifecycle.SERVER, 1)
    lifecycle.down()
    assert lifecycle.left() == []
    after = machine()
    for part, state in before.items():
        assert after[part] == state, f"{part} differ from before"


@pytest.mark.usefixtures("clean")
def test_down_takes_away_half_a_cluster_and_none_at_all() -> None:
    network.create()
    cgroups.create(NODES[0].name)
    assert lifecycle.left()
    lifecycle.down()
    assert lifecycle.left() == []
    lifecycle.down()


def wait_until(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.1)
