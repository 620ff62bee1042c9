"""An authority as the chart makes one, identities as files, and a pod's gate as the operator meets it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tenantry.api.identity import Signer
from tenantry.attestation.authority import Authority
from tenantry.attestation.gate import Gate

AUDIENCE = "pool-uid"


def make_authority() -> Authority:
    """As the chart makes one."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tenantry-authority")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    return Authority(certificate, key)


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
