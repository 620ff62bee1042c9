"""Hollow nodes: kubelets that register, take GPU pods and report them Running, without running anything.

They show scheduling, taints and counts at sizes that one machine could never hold for real (75 MB each).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import binaries, process
from .controlplane import kubectl
from .errors import ClusterError
from .lifecycle import get, is_ready
from .paths import HERE
from .pki import Authority

PART = "hollow-"
GPU = {"nvidia.com/gpu": "8"}
GPU_TAINT = "nvidia.com/gpu=present:NoSchedule"
"""Keeps pods that need no GPU, and would only seem to run, away from hollow nodes."""


def names(run: Path) -> list[str]:
    """Names of the hollow nodes that run now."""
    found = {item.part.removeprefix(PART) for item in process.find(run) if item.part.startswith(PART)}
    return sorted(found, key=lambda name: (len(name), name))


def add(
    run: Path,
    server: str,
    count: int,
    *,
    prefix: str = "tenantry-hollow",
    resources: Mapping[str, str] = GPU,
    labels: Mapping[str, str] | None = None,
    taints: Sequence[str] = (GPU_TAINT,),
    die_with_parent: bool = False,
) -> list[str]:
    """Starts `count` more hollow nodes in the cluster whose state lies in `run`; returns their names once Ready."""
    program = binaries.ensure(binaries.HOLLOW)["kubemark"]
    authority, taken = Authority(run / "pki"), set(names(run))
    free = (name for number in range(len(taken) + count) if (name := f"{prefix}-{number}") not in taken)
    new = [next(free) for _ in range(count)]
    for name in new:
        folder = run / "hollow" / name
        folder.mkdir(parents=True, exist_ok=True)
        pair = authority.issue(name, f"system:node:{name}", ("system:nodes",))
        config = authority.kubeconfig(run / "kubeconfigs" / f"{name}.kubeconfig", server, pair)
        every_label = {"tenantry.dev/hollow": "true", **(labels or {})}
        process.spawn(
            [
                *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("bash", str(HERE / "hollow-init.sh"), "--morph=kubelet", f"--name={name}"),
                *("--use-host-image-service=false", "--kubelet-read-only-port=0"),
                f"--kubelet-port={process.free_port()}",
                *(f"--extended-resources={_pairs(resources)}", f"--node-labels={_pairs(every_label)}"),
                *([f"--register-with-taints={','.join(taints)}"] if taints else []),
            ],
            run=run,
            part=f"{PART}{name}",
            log=run / "log" / f"{name}.log",
            die_with_parent=die_with_parent,
            environment={
                "PATH": os.environ.get("PATH", os.defpath),
                "FOLDER": str(folder),
                "KUBEMARK": str(program),
                "NODE_KUBECONFIG": str(config),
            },
        )
    _wait(run, new)
    return new


def remove(run: Path, which: Sequence[str] = ()) -> list[str]:
    """Ends hollow nodes (all, or those named) and deletes their objects; returns their names."""
    running = names(run)
    gone = [name for name in running if name in which] if which else running
    for name in gone:
        process.end_all(run, part=f"{PART}{name}")
        kubectl(run / "admin.kubeconfig", "delete", "node", name, "--ignore-not-found")
        shutil.rmtree(run / "hollow" / name, ignore_errors=True)
    return gone


def _wait(run: Path, new: Sequence[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        ready = {
            node["metadata"]["name"] for node in get(run / "admin.kubeconfig", "nodes") if is_ready(node)
        }
        waiting = [name for name in new if name not in ready]
        if not waiting:
            return
        if time.monotonic() > deadline or waiting[0] not in names(run):
            log = process.tail(run / "log" / f"{waiting[0]}.log")
            raise ClusterError(f"hollow node `{waiting[0]}` did not get ready:\n{log}")
        time.sleep(0.3)


def _pairs(values: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())
