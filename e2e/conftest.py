"""One installed Tenantry for all promises. Every test here is marked `e2e`."""

from __future__ import annotations

from pathlib import Path

import pytest
from stack import install
from stack.install import Stack

HERE = Path(__file__).parent
SEEN = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SEEN] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(900))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash[SEEN]:
        terminalreporter.section("what was seen")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> list[str]:
    """Lines for people: figures that a test saw, printed after the run whether or not it passed."""
    return request.config.stash[SEEN]


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The cluster of `make cluster-up` (or of KUBECONFIG) with Tenantry and the example tenants."""
    return install.up()
