"""The CRDs on the real API server, applied once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
if str(REPOSITORY / "tests") not in sys.path:
    sys.path.insert(0, str(REPOSITORY / "tests"))

from support.rest import Object, Rest  # noqa: E402


@pytest.fixture(scope="session")
def rest(apiserver: Any) -> Iterator[Rest]:
    """The API server with the CRDs established and the namespace `crd-tests`."""
    apiserver.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
    apiserver.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(REPOSITORY / "crds"))
    apiserver.kubectl("create", "namespace", "crd-tests")
    client = Rest(apiserver.kubeconfig)
    yield client
    client.close()


@pytest.fixture
def apply(rest: Rest) -> Iterator[Callable[[Object], str]]:
    """Apply an object; the answer is the API server's complaint, empty when it was taken. Deleted at the end."""
    made: list[Object] = []

    def run(document: Object) -> str:
        made.append(document)
        return rest.apply(document).complaint

    yield run
    for document in made:
        rest.delete(document)
