"""The control plane that other tests stand on: real, complete enough, and gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import lifecycle, network, process
from cluster.errors import ClusterError

if TYPE_CHECKING:
    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver


def wait_for(condition: object, seconds: float = 30) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)


def test_it_is_a_real_api_server(apiserver: ApiServer) -> None:
    version = json.loads(apiserver.kubectl("version", "-o", "json").stdout)
    assert version["serverVersion"]["gitVersion"] == version["clientVersion"]["gitVersion"]
    assert version["serverVersion"]["gitVersion"].startswith("v1.")


def test_owned_objects_and_namespaces_are_collected(apiserver: ApiServer) -> None:
    apiserver.kubectl("create", "namespace", "collected")
    apiserver.kubectl("-n", "collected", "create", "configmap", "owner")
    owner = json.loads(apiserver.kubectl("-n", "collected", "get", "configmap", "owner", "-o", "json").stdout)
    owned = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "owned",
            "namespace": "collected",
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
            ],
        },
    }
    apiserver.kubectl("create", "-f", "-", text=json.dumps(owned))
    apiserver.kubectl("-n", "collected", "delete", "configmap", "owner")
    wait_for(
        lambda: apiserver.kubectl("-n", "collected", "get", "configmap", "owned", check=False).returncode == 1
    )
    apiserver.kubectl("delete", "namespace", "collected", "--timeout=60s")


def test_another_user_has_no_rights_until_a_role_grants_them(apiserver: ApiServer) -> None:
    config = apiserver.client("reader", "reader")
    refused = apiserver.kubectl("get", "secrets", f"--kubeconfig={config}", check=False)
    assert refused.returncode == 1
    assert 'User "reader" cannot list resource "secrets"' in refused.stderr


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    """The starter is killed the hard way; the kernel must end what it started."""
    folder = tmp_path / "plane"
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from cluster.controlplane import ControlPlane\n"
            "ControlPlane(Path(sys.argv[1])).start(); print('ready', flush=True); time.sleep(600)",
            str(folder),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[1])},
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"ready\n"
    assert {found.part for found in process.find(folder)} == {"etcd", "kube-apiserver"}
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    wait_for(lambda: not process.find(folder))


def test_a_given_cluster_is_used_and_left_alone(
    apiserver: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENANTRY_CACHE", str(tmp_path))  # no state of ours there, and none may appear

    def refuse() -> None:
        raise AssertionError("nothing may be started or stopped")

    monkeypatch.setattr(lifecycle, "clear", refuse)
    monkeypatch.setattr(network, "create", refuse)
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig))
    monkeypatch.setattr("cluster.controlplane.binaries.ensure", lambda _: apiserver.plane._binaries)
    lifecycle.up()
    assert lifecycle.status().lines == [f"kubeconfig   {apiserver.kubeconfig}"]
    lifecycle.down()
    assert list(tmp_path.iterdir()) == []
    apiserver.kubectl("get", "--raw", "/readyz")


def test_a_given_cluster_that_does_not_answer_is_named(
    apiserver: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text(
        apiserver.kubeconfig.read_text().replace(
            apiserver.plane.server, f"https://127.0.0.1:{process.free_port()}"
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    with pytest.raises(ClusterError, match=r"does not answer[\s\S]*unset it"):
        lifecycle.up()
