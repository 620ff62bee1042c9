"""A control plane of one's own whose API server goes away and comes back, and whose etcd can be spoken to."""

from __future__ import annotations

import base64
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.controlplane import ControlPlane

API = "kube-apiserver"
CONTROLLERS = "kube-controller-manager"


@dataclass
class Outage:
    """To be used from the thread that started the plane: its parts end with that thread."""

    plane: ControlPlane

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig

    def stop(self) -> None:
        """The API server is gone in the middle of whatever it does, and Kubernetes' controllers with it."""
        for part in (self.plane._parts.pop(CONTROLLERS), self.plane._parts[API]):
            part.kill()
            part.wait()

    def start(self) -> None:
        """It is back at the same address."""
        self.plane._spawn(API, *self._flags())
        self.plane._wait_ready()
        self.plane._start_controllers()

    def erase(self, path: str) -> int:
        """Delete a key below `/registry` behind the API server's back: nobody gets an event. How many there were."""
        answer = self._etcd("deleterange", {"key": _encoded(f"/registry/{path}")})
        return int(answer.get("deleted", 0))

    def compact(self) -> None:
        """Forget all history: a watch that goes on from before now is answered with 410."""
        revision = self._etcd("range", {"key": _encoded("/registry"), "limit": "1"})["header"]["revision"]
        self._etcd("compaction", {"revision": revision, "physical": True})

    def _flags(self) -> list[str]:
        words = self.plane._parts[API].args
        assert isinstance(words, list)
        return [str(word) for word in words[1:]]

    def _etcd(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        [server] = [flag.partition("=")[2] for flag in self._flags() if flag.startswith("--etcd-servers=")]
        request = urllib.request.Request(f"{server}/v3/kv/{call}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def _encoded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()
