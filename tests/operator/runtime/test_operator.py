"""The whole operator as a process on a real API server: converge, repair, survive, hand over."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver

PROGRAM = Path(__file__).with_name("program.py")
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


class Lab:
    """Operators, tenants and what the operators made, all with names of one test."""

    def __init__(self, apiserver: ApiServer, namespace: str, folder: Path) -> None:
        self.apiserver = apiserver
        self.kubeconfig = apiserver.kubeconfig
        self.namespace = namespace
        self.folder = folder
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG)
        self.started: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        self.tenants: set[str] = set()

    def start(self) -> subprocess.Popen[bytes]:
        number = len(self.started)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.ports.append(probe.getsockname()[1])
        arguments = [str(self.kubeconfig), str(self.config), self.namespace, str(self.ports[number])]
        with (self.folder / f"operator-{number}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stderr=log)
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
        self.apiserver.kubectl("apply", "-f", "-", text=json.dumps(manifest))

    def get(self, kind: str, name: str, namespaced: bool = False) -> dict[str, Any]:
        where = ("-n", self.namespace) if namespaced else ()
        text = self.apiserver.kubectl(*where, "get", kind, name, "-o", "json", "--ignore-not-found").stdout
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


@pytest.fixture
def lab(apiserver: ApiServer, crds: None, namespace: str, tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(apiserver, namespace, tmp_path)
    yield lab
    for process in lab.started:
        process.kill()
        process.wait()
    for name in lab.tenants:
        apiserver.kubectl("delete", "tenant", name, "--ignore-not-found")


@pytest.fixture
def name() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


def test_tenants_converge_drift_is_repaired_and_poison_stays_alone(lab: Lab, name: str) -> None:
    lab.tenant(name, "before the start")
    lab.tenant(f"{name}-bad", "poison")
    lab.start()
    wait_for(lambda: lab.made(name) == "before the start")
    lab.tenant(f"{name}-two", "after the start")
    wait_for(lambda: lab.made(f"{name}-two") == "after the start")

    lab.tenant(name, "changed")
    wait_for(lambda: lab.made(name) == "changed" and "changed" in lab.message(name))
    patch = '{"data": {"system": "by hand"}}'
    lab.apiserver.kubectl(
        "-n", lab.namespace, "patch", "configmap", f"made-{name}", "--type=merge", "-p", patch
    )
    wait_for(lambda: lab.made(name) == "changed")
    lab.apiserver.kubectl("-n", lab.namespace, "delete", "configmap", f"made-{name}")
    wait_for(lambda: lab.made(name) == "changed")

    assert lab.http(0, "/readyz")[0] == 200
    assert lab.http(0, "/healthz")[0] == 200
    assert lab.metric(0, "controller_runtime_reconcile_errors_total") >= 1
    assert lab.made(f"{name}-bad") is None
    assert any("poisoned" in entry.get("exception", "") for entry in lab.log(0))

    metadata = lab.get("tenant", name)["metadata"]
    assert "finalizers" not in metadata
    assert not [key for key in metadata.get("annotations", {}) if "kopf" in key]

    lab.tenant(f"{name}-bad", "healed")
    wait_for(lambda: lab.made(f"{name}-bad") == "healed" and lab.message(f"{name}-bad"))

    # and when nothing changes, nothing is sent
    before = lab.sent(0)
    assert before["POST"] >= 3
    time.sleep(3)
    assert lab.sent(0) == before


def test_leadership_goes_from_one_to_the_next_each_with_a_higher_epoch(lab: Lab, name: str) -> None:
    def epoch(system: str, seconds: float = 40) -> int:
        """The epoch under which that text was served."""
        lab.tenant(name, system)
        wait_for(lambda: system in lab.message(name), seconds)
        return int(lab.message(name).rsplit(" ", 1)[1])

    first = lab.start()
    epochs = [epoch("one")]
    second = lab.start()
    wait_for(lambda: lab.http(1, "/readyz")[0] == 200)
    assert lab.metric(1, "leader_election_master_status") == 0
    holder = lab.holder()

    # one that is told to stop gives the Lease back: the standby need not wait for it to run out
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) == 0
    epochs.append(epoch("two", 10))
    assert lab.holder() not in ("", holder)
    assert lab.metric(1, "leader_election_master_status") == 1

    # one that is killed is replaced when its Lease has run out
    third = lab.start()
    wait_for(lambda: lab.http(2, "/readyz")[0] == 200)
    second.kill()
    epochs.append(epoch("three"))

    # one whose Lease was taken ends
    patch = '{"spec": {"holderIdentity": "thief"}}'
    lab.apiserver.kubectl(
        "-n", lab.namespace, "patch", "lease", "tenantry-operator", "--type=merge", "-p", patch
    )
    assert wait_for(lambda: third.poll() is not None, 20)
    assert third.returncode == 1
    assert any("leadership lost" in entry["message"] for entry in lab.log(2))
    assert epochs == sorted(set(epochs))


def test_without_the_right_the_process_ends_and_says_which(lab: Lab) -> None:
    lab.kubeconfig = lab.apiserver.client(f"nobody-{uuid.uuid4().hex[:6]}", "nobody")
    process = lab.start()
    assert wait_for(process.poll, 40) == 1
    assert "configmaps is forbidden" in (lab.folder / "operator-0.log").read_text()
