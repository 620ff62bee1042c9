"""What a process of its own needs to reach the real API server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import ApiServer


@pytest.fixture
def apiserver_kubeconfig(apiserver: ApiServer) -> Path:
    return Path(apiserver.kubeconfig)
