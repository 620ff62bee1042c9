"""A real Karpenter beside the cluster. Its provider is its own kwok: nodes are objects, and kwok plays their kubelets.

So pods on these nodes are called running and never answer. Where they may run, and whose the nodes are, is as with any
other provider.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster import beside, binaries
from cluster.process import dying_with_me, free_port

from . import settings
from .install import Stack
from .kube import JsonObject, Kube

MODULE, KWOK = "sigs.k8s.io/karpenter", "sigs.k8s.io/kwok"
STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat/node-heartbeat.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-delete.yaml",
)
"""What becomes of nodes and pods there."""
TEMPLATE = "made"
NODE_CLASS: JsonObject = {
    "apiVersion": "karpenter.kwok.sh/v1alpha1",
    "kind": "KWOKNodeClass",
    "metadata": {"name": "default"},
}
POOL_SPEC: JsonObject = {
    "template": {
        "spec": {
            "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
            "requirements": [
                {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]},
            ],
        }
    },
    "limits": {"cpu": "64"},
}
"""What an admin offers: the `spec` of a NodePool."""


@dataclass
class Watched:
    """Every state in which the API server has shown a node, oldest first, by name."""

    states: dict[str, list[JsonObject]] = field(default_factory=dict)

    def read(self, stream: Iterator[str]) -> None:
        """Until the stream ends."""
        text = ""
        for line in stream:
            text += line
            if line.rstrip() != "}":
                continue
            node = json.loads(text)
            text = ""
            self.states.setdefault(node["metadata"]["name"], []).append(node)


@contextmanager
def offered(stack: Stack) -> Iterator[None]:
    """Karpenter works, and Enterprise tenants are offered its nodes."""
    programs = binaries.ensure(["karpenter", "kwok"])
    module = binaries.module_folder("karpenter", MODULE)
    kube = stack.kube

    def offer(config: JsonObject) -> None:
        config["nodePoolTemplates"] = {TEMPLATE: POOL_SPEC}
        config["tiers"]["Enterprise"]["nodePoolTemplates"] = [TEMPLATE]

    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tenantry-karpenter-")))
        files = [*(module / "kwok/charts/crds").glob("*.yaml"), *(module / "kwok/apis/crds").glob("*.yaml")]
        defined = beside.define(kube.run, files)
        opened.callback(kube.run, "delete", *defined, "--wait=true", "--timeout=60s")
        kube.apply(NODE_CLASS)
        environment = {
            "DISABLE_LEADER_ELECTION": "true",
            "METRICS_PORT": str(free_port()),
            "HEALTH_PROBE_PORT": str(free_port()),
            "SYSTEM_NAMESPACE": "kube-system",
        }
        stages = binaries.module_folder("karpenter", KWOK) / "kustomize/stage"
        kwok = ["--manage-all-nodes=false", "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"]
        kwok += [f"--config={stages / stage}" for stage in STAGES]
        opened.enter_context(beside.running(kube.kubeconfig, folder, programs["kwok"], *kwok))
        opened.enter_context(
            beside.running(kube.kubeconfig, folder, programs["karpenter"], environment=environment)
        )
        opened.enter_context(settings.changed(stack, offer))
        yield


@contextmanager
def watching(kube: Kube) -> Iterator[Watched]:
    """All states of all nodes while the block runs."""
    command = [str(kube.kubectl), f"--kubeconfig={kube.kubeconfig}", "get", "nodes", "--watch", "-o", "json"]
    process = subprocess.Popen(dying_with_me(command), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = Watched()
    reader = threading.Thread(target=found.read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield found
    finally:
        process.terminate()
        process.wait(30)
        reader.join(30)
