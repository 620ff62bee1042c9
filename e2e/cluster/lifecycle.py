"""Bringing the whole cluster up, telling what runs, and taking it down without a trace."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import binaries, cgroups, images, network, packages, process
from .binaries import say
from .controlplane import ControlPlane, kubectl
from .errors import ClusterError
from .node import PAUSE_IMAGE, Worker
from .paths import (
    API_PORT,
    HERE,
    HOST_ADDRESS,
    IMAGE_HOST,
    NODES,
    REGISTRY_SERVICE,
    Node,
    cache_dir,
    cluster_dir,
)
from .pki import Authority

MANIFESTS = HERE / "manifests"
COREDNS_IMAGE = f"{IMAGE_HOST}/coredns:1"
REGISTRY_IMAGE = f"{IMAGE_HOST}/registry:1"
SERVER = f"https://{HOST_ADDRESS}:{API_PORT}"
CNI_RESULTS = Path("/var/lib/cni")


def kubeconfig() -> Path:
    """The administrator's kubeconfig: the one in `KUBECONFIG` where that is set, else our cluster's."""
    return foreign_kubeconfig() or cluster_dir() / "admin.kubeconfig"


def foreign_kubeconfig() -> Path | None:
    """What `KUBECONFIG` names, unless that is our own cluster."""
    given = os.environ.get("KUBECONFIG", "")
    if not given:
        return None
    path = Path(given.split(os.pathsep)[0]).expanduser().absolute()
    return None if path == cluster_dir() / "admin.kubeconfig" else path


def workers(nodes: Sequence[Node] = NODES) -> list[Worker]:
    """Our cluster's nodes."""
    return [Worker(node, cluster_dir()) for node in nodes]


def worker(name: str) -> Worker:
    """A node by role or by name. Raises ClusterError with the names there are."""
    for candidate in workers():
        if name in {candidate.node.role, candidate.node.name}:
            return candidate
    raise ClusterError(f"node `{name}` must be one of: {', '.join(node.name for node in NODES)}")


def authority() -> Authority:
    """The running cluster's certificate authority. Raises ClusterError where none runs."""
    folder = cluster_dir() / "pki"
    if not (folder / "ca.key").exists():
        raise ClusterError("no cluster of ours runs; start it by `python -m cluster up`")
    return Authority(folder)


def up() -> None:
    """Starts the cluster unless it runs already; with `KUBECONFIG` set only checks that that one answers."""
    given = foreign_kubeconfig()
    if given is not None:
        answer = kubectl(given, "get", "--raw", "/readyz", "--request-timeout=20s", check=False)
        if answer.returncode:
            raise ClusterError(
                f"the cluster of KUBECONFIG={given} does not answer: {answer.stderr.strip()}\n"
                "`KUBECONFIG` must name a reachable cluster; unset it to start one here."
            )
        say(f"using the cluster of KUBECONFIG={given}; nothing was started")
        return
    with _lock():
        started = time.monotonic()
        packages.ensure()
        binaries.ensure((*binaries.CONTROL_PLANE, *binaries.NODE, *binaries.ADDONS))
        for tag in (PAUSE_IMAGE, COREDNS_IMAGE, REGISTRY_IMAGE):
            images.ensure(tag)
        if is_running():
            say("the cluster runs already")
        else:
            clear()
            _start()
        _settle()
        say(f"the cluster is ready after {time.monotonic() - started:.0f} s")


def down() -> None:
    """Takes our cluster away, whatever state it is in; a cluster given by `KUBECONFIG` is left alone."""
    given = foreign_kubeconfig()
    if given is not None:
        say(f"the cluster of KUBECONFIG={given} is not ours; nothing was stopped")
        return
    packages.require_machine()
    with _lock():
        clear()
        remains = left()
    if remains:
        raise ClusterError("not all of the cluster is gone:\n" + "\n".join(remains))
    say("nothing of the cluster is left")


def is_running() -> bool:
    """Whether every part is there and the API server answers."""
    parts = {found.part for found in process.find(cluster_dir())}
    wanted = {
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        *(node.name for node in NODES),
    }
    ready = cluster_dir() / "admin.kubeconfig"
    return (
        wanted <= parts
        and ready.exists()
        and not kubectl(ready, "get", "--raw", "/readyz", check=False).returncode
    )


def clear() -> None:
    """Ends every process of ours and removes namespaces, links, routes, groups and state, an ended run's included."""
    run = cluster_dir()
    process.end_all(run)
    cgroups.remove()
    network.remove()
    mounted = mounts_below(run)
    if mounted:
        raise ClusterError(f"something is still mounted at {mounted[0]}: unmount it by `umount {mounted[0]}`")
    shutil.rmtree(run, ignore_errors=True)
    if CNI_RESULTS.exists() and not any(CNI_RESULTS.iterdir()):
        CNI_RESULTS.rmdir()


def left() -> list[str]:
    """Everything of ours that exists on this machine now; empty after `down`."""
    run = cluster_dir()
    found = [f"process {item.command} (pid {item.pid})" for item in process.find(run)]
    found += [f"group {path}" for path in cgroups.left()]
    found += network.left()
    found += [f"mount {path}" for path in mounts_below(run)]
    return found + ([f"folder {run}"] if run.exists() else [])


def mounts_below(folder: Path, table: Path = Path("/proc/self/mountinfo")) -> list[str]:
    """Mount points at or below `folder`."""
    points = (line.split()[4] for line in table.read_text().splitlines())
    return [point for point in points if point == str(folder) or point.startswith(f"{folder}/")]


def _start() -> None:
    run = cluster_dir()
    longest = run / max((node.role for node in NODES), key=len) / "kubelet/device-plugins/kubelet.sock"
    if len(str(longest)) > 107:
        raise ClusterError(f"`TENANTRY_CACHE` must be shorter: {longest} is too long for a socket's path")
    network.create()
    plane = ControlPlane(
        run, HOST_ADDRESS, API_PORT, controllers=("*",), scheduler=True, die_with_parent=False
    )
    try:
        plane.start()
    except BaseException:
        clear()
        raise
    say("the control plane is ready")
    for name, user in (("kube-proxy", "system:kube-proxy"), ("kube-router", "tenantry:policy")):
        pair = plane.authority.issue(name, user)
        plane.authority.kubeconfig(run / "kubeconfigs" / f"{name}.kubeconfig", SERVER, pair)
    _apply("policy.yaml")
    for item in workers():
        item.start(plane.authority, SERVER)


def _settle() -> None:
    """Brings images and add-ons in and waits until nodes, DNS and registry are ready."""
    everyone = workers()
    with ThreadPoolExecutor(len(everyone)) as pool:
        list(pool.map(Worker.wait_for_runtime, everyone))
    images.load([PAUSE_IMAGE], everyone)
    images.load([COREDNS_IMAGE, REGISTRY_IMAGE], everyone[:1])
    _apply("dns.yaml")
    _apply("registry.yaml")
    _wait_for_nodes()
    config = cluster_dir() / "admin.kubeconfig"
    for namespace, name in (("kube-system", "coredns"), ("tenantry-registry", "registry")):
        kubectl(config, "-n", namespace, "rollout", "status", f"deployment/{name}", "--timeout=120s")


def _wait_for_nodes(seconds: float = 120) -> None:
    config = cluster_dir() / "admin.kubeconfig"
    deadline = time.monotonic() + seconds
    while True:
        ready = {node["metadata"]["name"] for node in get(config, "nodes") if is_ready(node)}
        waiting = [item for item in workers() if item.node.name not in ready]
        if not waiting:
            break
        if time.monotonic() > deadline:
            log = process.tail(waiting[0].folder / "log" / "kubelet.log")
            raise ClusterError(f"node `{waiting[0].node.name}` was not ready within {seconds:.0f} s:\n{log}")
        time.sleep(0.3)
    for item in workers():
        spec = {"spec": {"podCIDR": item.node.pod_cidr, "podCIDRs": [item.node.pod_cidr]}}
        kubectl(config, "patch", "node", item.node.name, "-p", json.dumps(spec))


def _apply(name: str) -> None:
    kubectl(cluster_dir() / "admin.kubeconfig", "apply", "--server-side", "-f", str(MANIFESTS / name))


def get(config: Path, kind: str, *flags: str) -> list[dict[str, Any]]:
    """All objects of a kind."""
    items: list[dict[str, Any]] = json.loads(kubectl(config, "get", kind, *flags, "-o", "json").stdout)[
        "items"
    ]
    return items


def is_ready(node: dict[str, Any]) -> bool:
    """Whether a node (or pod) reports the condition Ready."""
    conditions = node.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


@dataclass(frozen=True)
class Status:
    """What `status` tells: `lines` for people, `ok` for scripts."""

    ok: bool
    lines: list[str]


def status() -> Status:
    """What runs now and how to reach it."""
    config = kubeconfig()
    given = foreign_kubeconfig()
    if given is None and not is_running():
        remains = left()
        lines = ["no cluster runs; start it by `make cluster-up`"]
        return Status(False, lines + [f"left behind: {item}" for item in remains])
    lines = [f"kubeconfig   {config}"]
    if given is None:
        plane = [found for found in process.find(cluster_dir()) if found.part.startswith(("etcd", "kube-"))]
        lines += [f"{found.part:<24} pid {found.pid}" for found in plane]
        lines.append(
            f"registry     http://{REGISTRY_SERVICE}:5000 (inside: registry.tenantry-registry.svc:5000)"
        )
        lines.append(
            "reach        pods, Services and node ports answer from this machine at their own addresses"
        )
    nodes, pods = get(config, "nodes"), get(config, "pods", "--all-namespaces")
    for node in nodes:
        name = node["metadata"]["name"]
        mine = [pod for pod in pods if pod["spec"].get("nodeName") == name]
        lines.append(
            f"node         {name:<24} {'Ready' if is_ready(node) else 'NotReady':<9} {len(mine)} pods"
        )
    return Status(all(is_ready(node) for node in nodes), lines)


@contextmanager
def _lock() -> Iterator[None]:
    """One `up` or `down` at a time."""
    path = cache_dir() / "locks" / "cluster"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
