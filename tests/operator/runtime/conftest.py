"""What a process of its own needs to reach the real API server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import ApiServer


@pytest.fixture
def name() -> str:
    """Of a Tenant that no other test has."""
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def apiserver_kubeconfig(apiserver: ApiServer) -> Path:
    return Path(apiserver.kubeconfig)
