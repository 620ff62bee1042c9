"""A client on the real API server, and a namespace of the test's own."""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster.controlplane import STORE_CONTROLLERS, ControlPlane
from tenantry.cluster import Client

TESTS = Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from support.outage import Outage  # noqa: E402

if TYPE_CHECKING:
    from tests.conftest import ApiServer

CRDS = TESTS.parent / "crds"


@pytest.fixture(scope="session")
def crds(apiserver: ApiServer) -> None:
    """Our kinds are served."""
    apiserver.kubectl("apply", "--server-side", "-f", str(CRDS))
    apiserver.kubectl(
        "wait", "--for=condition=Established", "crd", "-l", "app.kubernetes.io/part-of=tenantry"
    )


@pytest.fixture(scope="session")
def own_plane() -> Iterator[Outage]:
    """A second API server, for tests that take it away, change its CRDs or its policies. Its users share it in turn."""
    controllers = (*STORE_CONTROLLERS, "clusterrole-aggregation-controller")
    with (
        tempfile.TemporaryDirectory(prefix="tenantry-own-plane-") as folder,
        ControlPlane(Path(folder) / "run", controllers=controllers) as plane,
    ):
        yield Outage(plane)


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[Client]:
    client = await Client.connect(apiserver.kubeconfig, backoff_seconds=0.01)
    yield client
    await client.close()


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    name = f"test-{uuid.uuid4().hex[:10]}"
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    apiserver.kubectl("create", "-f", "-", text=json.dumps(manifest))
    return name
