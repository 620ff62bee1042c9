"""An authority as the chart makes one, identities as files, and a pod's gate as the operator meets it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tenantry.api.identity import Signer
from tenantry.attestation.authority import Authority
from tenantry.attestation.gate import Gate

AUDIENCE = "pool-uid"


def make_authority(
    key: EllipticCurvePrivateKey | None = None,
    under: Authority | None = None,
    name: str = "tenantry-authority",
) -> Authority:
    """As the chart makes one; with a key that it has already, or under an authority that is not ours."""
    key = key or generate_private_key(SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(under.certificate.subject if under else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(under.key if under else key, SHA256())
    )
    return Authority(certificate, key)


def write_authority(folder: Path, authority: Authority) -> Path:
    """The folder, with the authority as a mounted Secret would hold it."""
    folder.mkdir(exist_ok=True)
    (folder / "tls.crt").write_text(authority.pem)
    (folder / "tls.key").write_bytes(
        authority.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return folder


@dataclass
class Pod:
    """What of a pod a gate sees, and the operator's way to it."""

    folder: Path
    gate: Gate
    http: httpx.AsyncClient
    signer: Signer
    policy: Path

    async def post(self, path: str, body: bytes, signer: Signer | None = None) -> httpx.Response:
        token = (signer or self.signer).sign(AUDIENCE, path, body)
        return await self.http.post(path, content=body, headers={"authorization": f"Bearer {token}"})


def write_key(path: Path, key: Ed25519PrivateKey) -> Path:
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path
