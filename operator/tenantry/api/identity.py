"""Signed identities between our own processes: short-lived EdDSA tokens that bind caller, audience, path and body.

Each process that speaks to another holds an Ed25519 private key; receivers hold certificates only (RFC 8037, RFC 7519).
`kid` is the first 16 hex digits of the SHA-256 of the certificate's SubjectPublicKeyInfo; the certificate's common name
is the only issuer that its key may speak for.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

ALGORITHM = "EdDSA"
MAX_LIFETIME_SECONDS = 30
LEEWAY_SECONDS = 5


class IdentityError(Exception):
    """The token does not prove what it must; the text says what is wrong and never repeats the token."""


def key_id(key: Ed25519PublicKey) -> str:
    """The `kid` of a public key."""
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()[:16]


@dataclass(frozen=True)
class Signer:
    """Signs for one issuer."""

    issuer: str
    key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def load(cls, issuer: str, path: Path) -> Signer:
        """Read a PEM (PKCS 8) private key. Raises IdentityError when it is not an Ed25519 key."""
        key = load_pem_private_key(path.read_bytes(), password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(f"`{path}` must hold an Ed25519 private key in PEM form")
        return cls(issuer, key)

    def sign(self, audience: str, path: str, body: bytes = b"", **claims: Any) -> str:
        """A token for one request: `path` without query, `body` exactly as sent."""
        return self.sign_hash(audience, path, hashlib.sha256(body).hexdigest(), **claims)

    def sign_hash(self, audience: str, path: str, body_sha256: str, **claims: Any) -> str:
        """The same where the body's SHA-256 (hex) is known before the bytes are read."""
        now = int(time.time())
        return jwt.encode(
            {
                "jti": str(uuid.uuid4()),
                **claims,
                "iss": self.issuer,
                "aud": audience,
                "iat": now,
                "exp": now + MAX_LIFETIME_SECONDS,
                "path": path,
                "body": body_sha256,
            },
            self.key,
            algorithm=ALGORITHM,
            headers={"kid": key_id(self.key.public_key())},
        )


@dataclass(frozen=True)
class Verifier:
    """Verifies tokens against the certificates of a folder."""

    audience: str
    keys: dict[str, tuple[str, Ed25519PublicKey]]

    @classmethod
    def load(cls, audience: str, folder: Path) -> Verifier:
        """Read every `*.crt` (PEM) of the folder. Raises IdentityError when none is usable."""
        keys: dict[str, tuple[str, Ed25519PublicKey]] = {}
        for path in sorted(folder.glob("*.crt")):
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            key = certificate.public_key()
            names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            if isinstance(key, Ed25519PublicKey) and names:
                keys[key_id(key)] = (str(names[0].value), key)
        if not keys:
            raise IdentityError(f"`{folder}` must hold at least one Ed25519 certificate (*.crt)")
        return cls(audience, keys)

    def verify(self, token: str, issuers: set[str], path: str, body_sha256: str) -> dict[str, Any]:
        """The claims of a valid token of one of the issuers. Raises IdentityError."""
        try:
            kid = str(jwt.get_unverified_header(token).get("kid", ""))
        except jwt.InvalidTokenError as error:
            raise IdentityError("not a token") from error
        issuer, key = self.keys.get(kid, (None, None))
        if issuer is None or key is None or issuer not in issuers:
            raise IdentityError("unknown key or issuer")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                audience=self.audience,
                issuer=issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iat", "jti", "iss", "aud"]},
            )
        except jwt.InvalidTokenError as error:
            raise IdentityError(str(error)) from error
        if claims["exp"] - claims["iat"] > MAX_LIFETIME_SECONDS:
            raise IdentityError(f"lifetime must be at most {MAX_LIFETIME_SECONDS} s")
        if claims.get("path") != path or claims.get("body") != body_sha256:
            raise IdentityError("signed for another path or body")
        return claims
