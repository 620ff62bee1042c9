"""The chart on an API server of its own, and a real token of the operator's account."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import binaries
from support.rest import Rest
from support.tenancy import ACCOUNT, RELEASE, TENANT_LABEL, Token, eventually, namespace

if TYPE_CHECKING:
    from support.outage import Outage

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def admin(own_plane: Outage) -> Iterator[Rest]:
    """CRDs and chart as Helm installs them, policies in force."""
    plane = own_plane.plane
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(REPOSITORY / "crds"))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(REPOSITORY / "crds"))
    helm = binaries.ensure(["helm"])["helm"]
    arguments = ["install", "tenantry", str(REPOSITORY / "helm/tenantry"), "--namespace", RELEASE]
    done = subprocess.run(
        [helm, *arguments, "--create-namespace", "--kubeconfig", str(plane.kubeconfig)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rest = Rest(plane.kubeconfig)
    probe = namespace("probe", **{TENANT_LABEL: "probe"})
    eventually("the policies are in force", lambda: rest.create(probe, dry_run=True).complaint != "")
    yield rest
    rest.close()


@pytest.fixture(scope="session")
def thief(admin: Rest, own_plane: Outage) -> Iterator[Token]:
    """Whoever has the operator's own token, as its pod gets it."""
    made = own_plane.plane.kubectl("create", "token", "tenantry-operator", "-n", RELEASE)
    token = Token(own_plane.kubeconfig, made.stdout.strip())
    assert token.whoami() == ACCOUNT
    yield token
    token.close()
