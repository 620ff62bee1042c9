"""A client on the real API server, and a namespace of the test's own."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tenantry.cluster import Client

if TYPE_CHECKING:
    from tests.conftest import ApiServer

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
def crds(apiserver: ApiServer) -> None:
    """Our kinds are served."""
    apiserver.kubectl("apply", "--server-side", "-f", str(CRDS))
    apiserver.kubectl(
        "wait", "--for=condition=Established", "crd", "-l", "app.kubernetes.io/part-of=tenantry"
    )


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
