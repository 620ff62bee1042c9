"""The operator's own side of mutual TLS: the authority, and a certificate for itself that it signs as it needs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry.api.tls import Credentials

from .authority import Authority, expiry, utc


@dataclass(frozen=True)
class Trust:
    """The certificate stands in a folder of this process alone: `ssl` takes certificates from files only."""

    authority: Authority
    credentials: Credentials
    key: Ed25519PublicKey

    @classmethod
    def make(cls, authority: Authority, key: Path, seconds: int, now: float) -> Trust:
        """With a certificate for the operator's identity key that is valid from now on. Raises IdentityError."""
        folder = Path(tempfile.mkdtemp(prefix="tenantry-trust-"))
        ca = folder / names.AUTHORITY_FILE
        ca.write_text(authority.pem)
        public = Signer.load(names.OPERATOR_ISSUER, key).key.public_key()
        trust = cls(authority, Credentials(folder / "tls.crt", key, ca), public)
        trust.renew(seconds, now)
        return trust

    def renew(self, seconds: int, now: float) -> None:
        """A new certificate once the old one is half over. Connections that stand are not touched."""
        path = self.credentials.certificate
        ends = expiry(path.read_text()) if path.exists() else None
        if ends is None or ends - now < seconds / 2:
            name = names.tls_name("operator")
            path.write_text(self.authority.issue(self.key, name, client=True, seconds=seconds, now=utc(now)))
            self.credentials.refresh()
