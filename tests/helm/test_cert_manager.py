"""A real cert-manager makes and renews the authority for mutual TLS, as the chart asks for it."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import beside, binaries
from cryptography import x509
from cryptography.x509.oid import ExtensionOID
from tenantry.attestation.authority import Authority

from .conftest import Render

pytestmark = pytest.mark.apiserver

SPACE = "cert-manager"
ROOT = {
    "apiVersion": "cert-manager.io/v1",
    "kind": "Certificate",
    "metadata": {"name": "root", "namespace": SPACE},
    "spec": {
        "secretName": "root",
        "commonName": "a company's root",
        "isCA": True,
        "privateKey": {"algorithm": "ECDSA", "size": 384},
        "issuerRef": {"name": "itself"},
    },
}
ISSUERS = [
    {"metadata": {"name": "itself", "namespace": SPACE}, "spec": {"selfSigned": {}}},
    {"metadata": {"name": "company", "namespace": SPACE}, "spec": {"ca": {"secretName": "root"}}},
]


@dataclass
class Peer:
    """cert-manager on the API server of the tests."""

    apiserver: Any

    def apply(self, *documents: dict[str, Any]) -> None:
        text = yaml.safe_dump_all(documents)
        self.apiserver.kubectl("apply", "--server-side", "-f", "-", text=text)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.apiserver.kubectl("get", kind, name, "-n", SPACE, "-o", "json").stdout
        )
        return found

    def ready(self, name: str, revision: int = 1) -> None:
        where = ("-n", SPACE, "--timeout=60s", f"certificate/{name}")
        self.apiserver.kubectl("wait", f"--for=jsonpath={{.status.revision}}={revision}", *where)
        self.apiserver.kubectl("wait", "--for=condition=Ready", *where)

    def secret(self, name: str, folder: Path) -> Path:
        """As a pod would have it mounted."""
        folder.mkdir(exist_ok=True)
        for file, content in self.get("secret", name)["data"].items():
            (folder / file).write_bytes(base64.b64decode(content))
        return folder

    def renew(self, name: str) -> None:
        """What `cmctl renew` does."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        issuing = {"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "by a test"}
        kept = [c for c in self.get("certificate", name)["status"]["conditions"] if c["type"] != "Issuing"]
        conditions = [*kept, {**issuing, "lastTransitionTime": now}]
        patch = json.dumps({"status": {"conditions": conditions}})
        self.apiserver.kubectl(
            "patch", "certificate", name, "-n", SPACE, "--subresource=status", "--type=merge", "-p", patch
        )


@pytest.fixture
def peer(apiserver: Any, tmp_path: Path) -> Iterator[Peer]:
    program = binaries.ensure(["cert-manager"])["cert-manager"]
    module = binaries.module_folder("cert-manager", "github.com/cert-manager/cert-manager")
    defined = beside.define(apiserver.kubectl, (module / "deploy/crds").glob("*.yaml"))
    apiserver.kubectl("create", "namespace", SPACE)
    try:
        with beside.running(apiserver.kubeconfig, tmp_path, program):
            yield Peer(apiserver)
    finally:
        apiserver.kubectl("delete", "namespace", SPACE, "--wait=false")
        apiserver.kubectl("delete", *defined, "--wait=true", "--timeout=60s")


def test_its_authority_signs_for_us_and_keeps_its_key_when_it_is_renewed(
    peer: Peer, render: Render, tmp_path: Path
) -> None:
    chart = render("identity.certManager.issuerRef.name=company", "identity.certManager.issuerRef.kind=Issuer")
    [wanted] = [document for document in chart if document["kind"] == "Certificate"]
    wanted["metadata"]["namespace"] = SPACE
    peer.apply(*[{"apiVersion": "cert-manager.io/v1", "kind": "Issuer"} | issuer for issuer in ISSUERS])
    peer.apply(ROOT, wanted)
    name = wanted["metadata"]["name"]
    peer.ready(name)
    first = Authority.load(peer.secret(wanted["spec"]["secretName"], tmp_path / "first"))
    assert first.certificate.issuer != first.certificate.subject, "the company's root signed for it"
    constraints = first.certificate.extensions.get_extension_for_oid(ExtensionOID.BASIC_CONSTRAINTS).value
    assert isinstance(constraints, x509.BasicConstraints)
    assert constraints.ca

    peer.renew(name)
    peer.ready(name, revision=2)
    second = Authority.load(peer.secret(wanted["spec"]["secretName"], tmp_path / "second"))
    assert second.pem != first.pem
    assert second.key.public_key() == first.key.public_key()


def test_the_operator_mounts_the_secret_that_cert_manager_fills(render: Render) -> None:
    chart = render("identity.certManager.issuerRef.name=company")
    [wanted] = [document for document in chart if document["kind"] == "Certificate"]
    deployments = {d["metadata"]["name"]: d for d in chart if d["kind"] == "Deployment"}
    operator = deployments["tenantry-operator"]
    volumes = {volume["name"]: volume for volume in operator["spec"]["template"]["spec"]["volumes"]}
    assert volumes["authority"]["secret"]["secretName"] == wanted["spec"]["secretName"]
    assert "tenantry-authority" not in {d["metadata"]["name"] for d in chart if d["kind"] == "Secret"}
