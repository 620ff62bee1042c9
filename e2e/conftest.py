"""One installed Tenantry for all promises. Every test here is marked `e2e`."""

from __future__ import annotations

from pathlib import Path

import pytest
from stack import install
from stack.install import Stack

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The cluster of `make cluster-up` (or of KUBECONFIG) with Tenantry and the example tenants."""
    return install.up()
