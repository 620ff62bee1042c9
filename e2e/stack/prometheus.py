"""A real Prometheus beside the cluster, which reads what our processes expose as the chart's PodMonitors ask it to.

It reaches pods by port-forward: the chart lets into them only the namespaces that its values name.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster import beside, binaries
from cluster.paths import REPOSITORY
from cluster.process import dying_with_me, free_port

from .install import Stack
from .kube import JsonObject, Kube, condition, eventually

FILES = REPOSITORY / "helm/tenantry/files"
SECONDS = 2
"""From one look at a process to the next."""
PORTS = {"operator": 9090, "gateway": 9090, "fetcher": 8090, "engine": 8001}


@dataclass(frozen=True)
class Prometheus:
    """Its HTTP API."""

    url: str

    def ask(self, path: str, **query: str) -> Any:
        """The `data` of an answer. Raises HTTPError where it refuses."""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30
        ) as answer:
            return json.load(answer)["data"]

    def targets(self) -> dict[str, str]:
        """What it says of each process that it reads; empty where all is well."""
        return {
            target["scrapePool"]: target["lastError"]
            or ("" if target["health"] == "up" else target["health"])
            for target in self.ask("targets")["activeTargets"]
        }

    def rules(self) -> list[JsonObject]:
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


def panels() -> Iterator[tuple[str, str]]:
    """Title and query of all that the dashboards show."""
    for path in sorted((FILES / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"].replace("$__rate_interval", "1m")


@contextmanager
def reading(stack: Stack) -> Iterator[Prometheus]:
    """It has read every process at least twice when the block begins."""
    programs = binaries.ensure(["prometheus"])
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tenantry-prometheus-")))
        jobs = [
            _job(pod, opened.enter_context(_forwarded(stack.kube, pod, port)))
            for part, port in PORTS.items()
            for pod in _pods(stack.kube, part)
        ]
        config = {
            "global": {"scrape_interval": f"{SECONDS}s", "evaluation_interval": f"{SECONDS}s"},
            "rule_files": [str(FILES / "rules.yaml")],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        port = free_port()
        arguments = [
            f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        opened.enter_context(
            beside.running(stack.kube.kubeconfig, folder, programs["prometheus"], *arguments)
        )
        found = Prometheus(f"http://127.0.0.1:{port}")
        eventually("Prometheus has read every process", lambda: _read(found, len(jobs)), seconds=60)
        yield found


def _read(prometheus: Prometheus, processes: int) -> bool:
    try:
        counted = prometheus.ask("query", query=f"count(count_over_time(up[1m]) >= 2) == {processes}")
    except OSError:
        return False
    return bool(counted["result"])


def _pods(kube: Kube, part: str) -> list[JsonObject]:
    found = kube.find("pods", "-A", "-l", f"app.kubernetes.io/component={part}")
    return [
        pod
        for pod in found
        if condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]
    ]


def _job(pod: JsonObject, port: int) -> JsonObject:
    """As the PodMonitors label a process."""
    meta, labels = pod["metadata"], pod["metadata"]["labels"]
    told = {key: labels[f"tenantry.dev/{key}"] for key in ("pool", "lane") if f"tenantry.dev/{key}" in labels}
    told |= {"namespace": meta["namespace"], "pod": meta["name"]}
    return {
        "job_name": f"{meta['namespace']}/{meta['name']}",
        "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": told}],
    }


@contextmanager
def _forwarded(kube: Kube, pod: JsonObject, port: int) -> Iterator[int]:
    """The port of this machine that leads to the pod's."""
    meta, local = pod["metadata"], free_port()
    command = [
        str(kube.kubectl), f"--kubeconfig={kube.kubeconfig}", "port-forward", "-n", meta["namespace"],
        f"pod/{meta['name']}", f"{local}:{port}",
    ]  # fmt: skip
    process = subprocess.Popen(dying_with_me(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", local)) == 0

    try:
        eventually(f"{meta['name']} is reached", listens, seconds=30, every=0.1)
        yield local
    finally:
        process.terminate()
        process.wait(30)
