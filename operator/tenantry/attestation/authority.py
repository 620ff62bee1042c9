"""The release's own certificate authority: short-lived X.509 certificates for keys that their owners keep.

The operator holds the authority's key as a file; it never sees another private key and needs no right to Secrets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SKEW: Final = timedelta(minutes=5)
MAX_REQUEST_BYTES: Final = 8192

PublicKey = EllipticCurvePublicKey | Ed25519PublicKey


class AuthorityError(Exception):
    """The authority cannot sign; the text names the file or the request."""


@dataclass(frozen=True)
class Authority:
    """Signs for one cluster's release."""

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """From `tls.crt` and `tls.key` (ECDSA) of a folder. Raises AuthorityError."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
            key = load_pem_private_key((folder / "tls.key").read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise AuthorityError(
                f"`{folder}` must hold an authority's `tls.crt` and `tls.key`: {error}"
            ) from error
        if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise AuthorityError(f"`{folder}` must hold an ECDSA key and the certificate of that key")
        return cls(certificate, key)

    @property
    def pem(self) -> str:
        """The authority's certificate."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def issue(self, key: PublicKey, name: str, *, client: bool, seconds: int, now: datetime) -> str:
        """A certificate (PEM) for the key under the DNS name `name`: of a caller (`client`), else of a server."""
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        end = min(now + timedelta(seconds=seconds), self.certificate.not_valid_after_utc)
        if end <= now:
            raise AuthorityError(
                "the authority's certificate has expired: renew it, see the chart's `identity`"
            )
        digital = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        built = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - SKEW, self.certificate.not_valid_before_utc))
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(digital, critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(self._key_identifier(), critical=False)
            .sign(self.key, SHA256())
        )
        return built.public_bytes(Encoding.PEM).decode()

    def _key_identifier(self) -> x509.AuthorityKeyIdentifier:
        """As the authority's certificate itself says it: not everybody derives it from the key in the same way."""
        try:
            found = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        except x509.ExtensionNotFound:
            return x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(found.value)


def requested_key(pem: str) -> EllipticCurvePublicKey:
    """The key of a certificate request, proven to be held by who asks; its other wishes count for nothing.

    Raises AuthorityError.
    """
    if len(pem) > MAX_REQUEST_BYTES:
        raise AuthorityError(f"a certificate request must have at most {MAX_REQUEST_BYTES} bytes")
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        valid = request.is_signature_valid
        key = request.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AuthorityError(f"a certificate request must be PKCS 10 in PEM form: {error}") from error
    if not valid or not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise AuthorityError("a certificate request must be signed by the P-256 key that it is for")
    return key


def key_hash(key: PublicKey) -> str:
    """SHA-256 (hex) of the SubjectPublicKeyInfo."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def expiry(pem: str) -> float | None:
    """When a certificate (PEM) ends, in Unix seconds; None where it is none."""
    try:
        return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc.timestamp()
    except ValueError:
        return None


def utc(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)
