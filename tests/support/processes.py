"""Operators as processes, with a reconciler of the tests' own: started, looked at over HTTP, ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]

PROGRAM = Path(__file__).parents[1] / "operator" / "runtime" / "program.py"
CONFIG = """
engineImage: registry.example/engine:1
gatewayUrl: http://gateway:8080
fetcherUrl: http://fetcher:8090
tiers: {}
"""


def wait_for(condition: Callable[[], Any], seconds: float = 40) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)
    return value


class Processes:
    """Operators, tenants and what the operators made, all with names of one test."""

    def __init__(self, kubeconfig: Path, namespace: str, folder: Path, kubectl: Kubectl) -> None:
        self.kubectl = kubectl
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self.folder = folder
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG)
        self.started: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        self.tenants: set[str] = set()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        for name in self.tenants:
            self.kubectl("delete", "tenant", name, "--ignore-not-found")

    def start(self, resync_seconds: float = 3600.0, **environment: str) -> subprocess.Popen[bytes]:
        number = len(self.started)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.ports.append(probe.getsockname()[1])
        given = (self.kubeconfig, self.config, self.namespace, self.ports[number], resync_seconds)
        with (self.folder / f"operator-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, given)],
                stderr=log,
                env={**os.environ, **environment},
            )
        self.started.append(process)
        return process

    def log(self, number: int) -> list[dict[str, Any]]:
        lines = (self.folder / f"operator-{number}.log").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def http(self, number: int, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[number]}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except urllib.error.URLError:
            return 0, ""

    def metric(self, number: int, name: str, label: str = "") -> float:
        lines = self.http(number, "/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line)

    def failures(self, number: int) -> float:
        """Requests that got no answer."""
        return self.metric(number, "rest_client_requests_total", 'code="<error>"')

    def sent(self, number: int) -> dict[str, float]:
        """Requests by method; the Lease is renewed by PUT, which nothing else uses."""
        methods = ("GET", "POST", "PATCH", "DELETE")
        return {
            method: self.metric(number, "rest_client_requests_total", f'method="{method}"')
            for method in methods
        }

    def tenant(self, name: str, system: str) -> None:
        self.tenants.add(name)
        manifest = {
            "apiVersion": "tenantry.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": name},
            "spec": {
                "tier": "Free",
                "prompt": {"system": system},
                "models": [{"name": "chat", "baseModel": "m"}],
            },
        }
        self.kubectl("apply", "-f", "-", text=json.dumps(manifest))

    def get(self, kind: str, name: str, namespaced: bool = False) -> dict[str, Any]:
        where = ("-n", self.namespace) if namespaced else ()
        text = self.kubectl(*where, "get", kind, name, "-o", "json", "--ignore-not-found").stdout
        found: dict[str, Any] = json.loads(text) if text.strip() else {}
        return found

    def made(self, tenant: str) -> str | None:
        """What the tenant's ConfigMap says."""
        data = self.get("configmap", f"made-{tenant}", namespaced=True).get("data", {})
        value: str | None = data.get("system")
        return value

    def message(self, tenant: str) -> str:
        conditions = self.get("tenant", tenant).get("status", {}).get("conditions", [])
        return str(conditions[0]["message"]) if conditions else ""

    def holder(self) -> str:
        return str(
            self.get("lease", "tenantry-operator", namespaced=True).get("spec", {}).get("holderIdentity", "")
        )
