"""People and thieves on an API server that has the chart: who speaks how, and who was given what."""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from .rest import Answer, Object, Rest

RELEASE = "tenantry-system"
ACCOUNT = f"system:serviceaccount:{RELEASE}:tenantry-operator"
TENANT_LABEL = "tenantry.dev/tenant-namespace"


class Token(Rest):
    """Speaks with a bearer token and nothing else: whoever stole it."""

    def __init__(self, kubeconfig: Path, token: str) -> None:
        super().__init__(kubeconfig)
        cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        admin, self._client = (
            self._client,
            httpx.Client(
                base_url=cluster["server"],
                verify=_trust(cluster),
                timeout=30,
                headers={"Authorization": f"Bearer {token}"},
            ),
        )
        admin.close()

    def whoami(self) -> str:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = self.call("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
        return str(answer.body["status"]["userInfo"]["username"])


def _trust(cluster: dict[str, Any]) -> Any:
    return ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())


def namespace(name: str, **labels: str) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def eventually(what: str, probe: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


def bind(rest: Rest, role: str, user: str, where: str = "") -> Answer:
    """Give a ClusterRole to a user, in one namespace or everywhere."""
    kind = "RoleBinding" if where else "ClusterRoleBinding"
    body: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": f"{role}-{user}".replace(":", "-"), **({"namespace": where} if where else {})},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}],
    }
    return rest.create(body)
