"""The charts as Helm renders them, and what they make of the real API server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import binaries

REPOSITORY = Path(__file__).resolve().parents[2]
if str(REPOSITORY / "tests") not in sys.path:
    sys.path.insert(0, str(REPOSITORY / "tests"))

from support.rest import Object, Rest  # noqa: E402

NAMESPACE = "tenantry-charts"
CHART = REPOSITORY / "helm/tenantry"

Helm = Callable[..., "subprocess.CompletedProcess[str]"]
Render = Callable[..., list[Object]]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Runs helm; the process with its output comes back, whatever it says."""
    program = binaries.ensure(["helm"])["helm"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """The chart's objects for `--set` settings."""

    def run(*settings: str) -> list[Object]:
        sets = [word for setting in settings for word in ("--set", setting)]
        done = helm("template", "tenantry", str(CHART), "--namespace", NAMESPACE, *sets)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return run


# Others share this API server: the policies must not outlive these tests.
@pytest.fixture(scope="package")
def installed(apiserver: Any, helm: Helm) -> Iterator[Rest]:
    """The API server with CRDs and the chart as Helm installs it, policies in force."""
    apiserver.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(REPOSITORY / "crds"))
    release = ("tenantry", "--namespace", NAMESPACE, "--kubeconfig", str(apiserver.kubeconfig))
    done = helm("install", *release, str(CHART), "--create-namespace")
    assert done.returncode == 0, done.stderr
    rest = Rest(apiserver.kubeconfig)
    probe = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "probe", "labels": _LABEL}}
    deadline = time.monotonic() + 30
    while not rest.create(probe, dry_run=True).complaint:
        assert time.monotonic() < deadline, "the policies are not in force"
        time.sleep(0.1)
    yield rest
    done = helm("uninstall", *release)
    assert done.returncode == 0, done.stderr
    kinds = "deploy,svc,cm,secret,sa,role,rolebinding,netpol,pdb,clusterrole,clusterrolebinding"
    policies = "validatingadmissionpolicy,validatingadmissionpolicybinding"
    left = apiserver.kubectl(
        "get", f"{kinds},{policies}", "-A", "-l", "app.kubernetes.io/instance=tenantry", "-o", "name"
    )
    assert left.stdout == ""
    rest.close()


_LABEL = {"tenantry.dev/tenant-namespace": "probe"}
