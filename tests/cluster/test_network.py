"""Pods, Services and names are reachable as on any cluster, until a policy says otherwise."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import hollow, images, lifecycle, process
from cluster.controlplane import kubectl
from cluster.paths import NODES, REGISTRY_SERVICE, cluster_dir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROBE = "tenantry.local/probe:1"
NAMESPACE = "cluster-network"
RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True)
class Net:
    """A namespace with a server on one node and a probe on another."""

    config: Path

    def kubectl(
        self, *words: str, text: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return kubectl(self.config, "-n", NAMESPACE, *words, text=text, check=check)

    def apply(self, *objects: Mapping[str, object]) -> None:
        self.kubectl(
            "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )

    def fetch(self, url: str) -> bool:
        """Whether the probe gets an answer."""
        return (
            self.kubectl(
                "exec", "probe", "--", "curl", "-sf", "-m", "2", "-o", "/dev/null", url, check=False
            ).returncode
            == 0
        )

    def address(self, pod: str) -> str:
        return self.kubectl("get", "pod", pod, "-o", "jsonpath={.status.podIP}").stdout


def pod(name: str, node: str, command: list[str], ready: str = "") -> dict[str, object]:
    container: dict[str, object] = {
        "name": "main",
        "image": PROBE,
        "imagePullPolicy": "Never",
        "command": command,
        "securityContext": RESTRICTED,
        "resources": {"limits": {"memory": "64Mi", "cpu": "500m"}},
    }
    if ready:
        container["readinessProbe"] = {"httpGet": {"port": 8080, "path": ready}, "periodSeconds": 1}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": f"tenantry-{node}"},
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    assert lifecycle.foreign_kubeconfig() is None, "these tests look into the nodes: unset `KUBECONFIG`"
    ran_before = bool(process.find(cluster_dir()))
    lifecycle.up()
    images.ensure(PROBE)
    images.load([PROBE], lifecycle.workers())
    config = lifecycle.kubeconfig()
    serve = ["python3", "-m", "http.server", "8080", "--directory", "/proc/self/task"]
    kubectl(config, "delete", "namespace", NAMESPACE, "--ignore-not-found")
    kubectl(config, "create", "namespace", NAMESPACE)
    kubectl(config, "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    found = Net(config)
    found.apply(
        pod("web", "lora", serve, ready="/"),
        pod("near", "shared", serve, ready="/"),
        pod("probe", "shared", ["sleep", "infinity"]),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {
                "type": "NodePort",
                "selector": {"app": "web"},
                "ports": [{"port": 80, "targetPort": 8080}],
            },
        },
    )
    found.kubectl("wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")
    yield found
    if ran_before:
        kubectl(config, "delete", "namespace", NAMESPACE)
    else:
        lifecycle.down()


def eventually(net: Net, url: str, expected: bool, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while net.fetch(url) is not expected:
        assert time.monotonic() < deadline, f"{url} must {'' if expected else 'not '}answer"
        time.sleep(0.3)


def test_pods_reach_pods_services_and_names_across_nodes(net: Net) -> None:
    eventually(net, f"http://{net.address('web')}:8080/", expected=True)
    eventually(net, f"http://web.{NAMESPACE}.svc.cluster.local/", expected=True)
    eventually(net, f"http://web.{NAMESPACE}/", expected=True)
    eventually(net, "http://registry.tenantry-registry.svc:5000/v2/", expected=True)


def test_this_machine_reaches_pods_services_and_node_ports(net: Net) -> None:
    service = json.loads(net.kubectl("get", "service", "web", "-o", "json").stdout)["spec"]
    urls = [
        f"http://{net.address('web')}:8080/",
        f"http://{service['clusterIP']}/",
        f"http://{REGISTRY_SERVICE}:5000/v2/",
    ]
    urls += [f"http://{node.address}:{service['ports'][0]['nodePort']}/" for node in NODES]
    for url in urls:
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200, url


def test_pods_have_no_way_out(net: Net) -> None:
    """Nothing translates their addresses, so an air-gapped tenant is not just a promise here."""
    assert not net.fetch("http://192.0.2.1/")


def test_default_deny_is_enforced_within_and_across_nodes_and_lifted(net: Net) -> None:
    across, near = (f"http://{net.address(name)}:8080/" for name in ("web", "near"))
    for url in (across, near):
        eventually(net, url, expected=True)
    deny = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "deny"},
        "spec": {"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", "near"]}]},
                 "policyTypes": ["Ingress", "Egress"]},
    }  # fmt: skip
    net.apply(deny)
    for url in (across, near, f"http://web.{NAMESPACE}/"):
        eventually(net, url, expected=False)
    # kubelet's own probes must pass, else a policy would take a healthy pod out of service.
    assert net.kubectl("wait", "--for=condition=Ready", "pod/web", "pod/near", "--timeout=5s").returncode == 0

    allow = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "allow"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "web"}},
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"app": "probe"}}}], "ports": [{"port": 8080}]}
            ],
        },
    }
    net.apply(allow)
    eventually(net, across, expected=True)
    assert not net.fetch(near)
    net.kubectl("delete", "networkpolicy", "deny", "allow")
    eventually(net, near, expected=True)


def test_egress_of_the_probe_is_cut_too(net: Net) -> None:
    url = f"http://{net.address('web')}:8080/"
    eventually(net, url, expected=True)
    net.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "no-egress"},
            "spec": {"podSelector": {"matchLabels": {"app": "probe"}}, "policyTypes": ["Egress"]},
        }
    )
    eventually(net, url, expected=False)
    net.kubectl("delete", "networkpolicy", "no-egress")
    eventually(net, url, expected=True)


def test_limits_are_seen_by_the_kernel(net: Net) -> None:
    names = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max")
    script = f"import os; print(next(open(n).read() for n in {names!r} if os.path.exists(n)))"
    limit = net.kubectl("exec", "probe", "--", "python3", "-c", script).stdout.strip()
    assert int(limit) == 64 << 20


def test_hollow_nodes_run_gpu_pods_and_go(net: Net) -> None:
    [name] = hollow.add(cluster_dir(), lifecycle.SERVER, 1, prefix="tenantry-gpu", labels={"pool": "big"})
    gpu = pod("gpu", "shared", ["true"])
    spec = gpu["spec"]
    assert isinstance(spec, dict)
    spec["nodeSelector"] = {"pool": "big"}
    spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    spec["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "8"}}
    net.apply(gpu)
    net.kubectl("wait", "--for=condition=Ready", "pod/gpu", "--timeout=60s")
    assert net.kubectl("get", "pod", "gpu", "-o", "jsonpath={.spec.nodeName}").stdout == name
    net.kubectl("delete", "pod", "gpu", "--force", "--grace-period=0")
    assert hollow.remove(cluster_dir(), [name]) == [name]
    assert net.kubectl("get", "node", name, check=False).returncode == 1


def test_an_image_that_is_there_is_not_imported_again(net: Net) -> None:
    assert net.config.exists()
    worker = lifecycle.worker("lora")
    held = images.present(worker)
    assert held[PROBE] == images.ensure(PROBE).digest
    started = time.monotonic()
    images.load([PROBE], [worker])
    assert images.present(worker) == held
    assert time.monotonic() - started < 30


def test_a_node_that_lost_power_comes_back(net: Net) -> None:
    worker = lifecycle.worker("lora")
    worker.stop()
    assert not [found for found in process.find(cluster_dir()) if found.part == worker.node.name]
    worker.launch()
    worker.wait_for_runtime()
    eventually(net, f"http://web.{NAMESPACE}/", expected=True, seconds=120)
