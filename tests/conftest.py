"""Fixtures shared by every room: the real API server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY / "e2e") not in sys.path:
    sys.path.insert(0, str(REPOSITORY / "e2e"))

# Where there is no GPU, Triton's kernels run in its interpreter. That must be chosen before anything imports triton,
# and transformers does in other rooms' tests.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from cluster.controlplane import STORE_CONTROLLERS, ControlPlane  # noqa: E402


@dataclass(frozen=True)
class ApiServer:
    """A real API server for tests: no nodes, so nothing runs, but everything is stored, checked and collected."""

    plane: ControlPlane

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.plane.kubeconfig

    def kubectl(
        self, *arguments: str, text: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as administrator; `text` goes to its stdin. Raises with its stderr unless `check` is off."""
        return self.plane.kubectl(*arguments, text=text, check=check)

    def client(self, name: str, user: str, groups: tuple[str, ...] = ()) -> Path:
        """A kubeconfig for another user, e.g. to test what a role allows."""
        return self.plane.client(name, user, groups)


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """One API server per test session, with namespace deletion, garbage collection and service accounts working.

    It ends with the session, also when that is killed. Tests share it: use names of your own.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tenantry-apiserver-") as folder,
        ControlPlane(Path(folder) / "run", controllers=STORE_CONTROLLERS) as plane,
    ):
        yield ApiServer(plane)
