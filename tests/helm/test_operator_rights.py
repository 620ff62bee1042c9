"""The operator as a process under the chart's own roles and policies: any 403 is a fault of the chart."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.rest import Object, Rest

from .conftest import NAMESPACE

pytestmark = pytest.mark.apiserver

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:tenantry-operator"
API = "tenantry.dev/v1alpha1"


def _stored(rest: Rest, kind: str, name: str, namespace: str = NAMESPACE, version: str = "v1") -> Object:
    return rest.get({"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}})


@pytest.fixture
def operator(installed: Rest, apiserver: Any, tmp_path: Path) -> Iterator[Path]:
    """A running operator with the chart's configuration and keys; yields its log."""
    config = yaml.safe_load(_stored(installed, "ConfigMap", "tenantry-operator")["data"]["operator.yaml"])
    config["poolTemplates"] = {"standard": _POOL}
    config["tiers"]["Enterprise"]["poolTemplates"] = ["standard"]
    (tmp_path / "operator.yaml").write_text(yaml.safe_dump(config))
    key = _stored(installed, "Secret", "tenantry-operator-identity")["data"]["tls.key"]
    (tmp_path / "tls.key").write_bytes(base64.b64decode(key))
    for name, text in _stored(installed, "ConfigMap", "tenantry-identity")["data"].items():
        (tmp_path / name).write_text(text)
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}")
    kubeconfig = apiserver.client("tenantry-operator", ACCOUNT, groups)
    log = tmp_path / "log"
    arguments = ["--config", str(tmp_path / "operator.yaml"), "--identity-key", str(tmp_path / "tls.key")]
    arguments += ["--identity-dir", str(tmp_path), "--namespace", NAMESPACE, "--kubeconfig", str(kubeconfig)]
    program = "from tenantry.runtime.main import main; main()"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments, "--metrics-port", "0"],
            stdout=output,
            stderr=output,
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        )
    yield log
    process.terminate()
    process.wait(30)


_POOL = {
    "baseModel": {"name": "m", "source": {"image": {"path": "/m"}}},
    "tiers": ["Enterprise"],
    "lanes": [{"name": "fast"}],
}


def test_a_dedicated_tenant_comes_and_goes_without_a_refusal(
    operator: Path, installed: Rest, apiserver: Any
) -> None:
    labels = {"tenantry.dev/claimable": "true"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "rights-node", "labels": labels}}
    pool = {"apiVersion": API, "kind": "AdapterPool", "metadata": {"name": "rights"}, "spec": _POOL}
    spec = {
        "tier": "Enterprise",
        "models": [{"name": "chat", "baseModel": "m"}],
        "dedicated": {"poolTemplateRef": "standard"},
        "isolation": {"egress": ["203.0.113.0/24"]},
    }
    tenant = {"apiVersion": API, "kind": "Tenant", "metadata": {"name": "rights"}, "spec": spec}
    for document in (node, pool, tenant):
        assert installed.apply(document).complaint == ""

    def there(kind: str, name: str, namespace: str, version: str) -> Callable[[], bool]:
        return lambda: "metadata" in _named(installed, kind, name, namespace, version)

    sets = ("StatefulSet", "apps/v1")
    _await(there(sets[0], "rights-fast", NAMESPACE, sets[1]), operator)
    _await(there(sets[0], "tenant-rights-fast", "tenant-rights", sets[1]), operator)
    _await(there("NetworkPolicy", "tenantry-egress", "tenant-rights", "networking.k8s.io/v1"), operator)
    assert (
        installed.get(node)["metadata"]["labels"]["tenantry.node-restriction.kubernetes.io/tenant"]
        == "rights"
    )
    _await(lambda: _conditions(installed.get(tenant)) != {}, operator)
    assert installed.delete(tenant).complaint == ""
    # No StatefulSet controller runs here: nothing but the objects themselves has to go.
    _await(lambda: installed.get(tenant).get("code") == 404, operator)
    _await(lambda: "metadata" not in _named(installed, "Namespace", "tenant-rights", "", "v1"), operator)
    assert "tenantry.node-restriction.kubernetes.io/tenant" not in installed.get(node)["metadata"]["labels"]
    for document in (pool, node):
        assert installed.delete(document).complaint == ""
    refusals = [
        line for line in operator.read_text().splitlines() if re.search(r"\b403\b|[Ff]orbidden", line)
    ]
    assert refusals == []


def _named(rest: Rest, kind: str, name: str, namespace: str, version: str) -> Object:
    found = _stored(rest, kind, name, namespace, version)
    return found if found.get("kind") == kind else {}


def _conditions(live: Object) -> Object:
    return {c["type"]: c for c in live.get("status", {}).get("conditions", [])}


def _await(probe: Callable[[], bool], log: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)
