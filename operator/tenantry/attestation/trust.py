"""The operator's own side of mutual TLS: the authority, and a certificate for itself that it signs as it needs."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry.api.tls import Credentials

from .authority import Authority, AuthorityError, expiry, utc

log = logging.getLogger(__name__)


@dataclass
class Trust:
    """The certificate stands in a folder of this process alone: `ssl` takes certificates from files only.

    `source` is the folder of the authority, which its admin or cert-manager renews.
    """

    source: Path
    authority: Authority
    credentials: Credentials
    key: Ed25519PublicKey

    @classmethod
    def make(cls, source: Path, key: Path, seconds: int, now: float) -> Trust:
        """With a certificate for the operator's identity key that is valid from now on.

        Raises AuthorityError, IdentityError.
        """
        folder = Path(tempfile.mkdtemp(prefix="tenantry-trust-"))
        credentials = Credentials(folder / "tls.crt", key, folder / names.AUTHORITY_FILE)
        public = Signer.load(names.OPERATOR_ISSUER, key).key.public_key()
        trust = cls(source, Authority.load(source), credentials, public)
        trust.renew(seconds, now)
        return trust

    def renew(self, seconds: int, now: float) -> None:
        """The authority as it is now, and a new certificate from it once the old one is half over.

        Connections that stand are not touched.
        """
        try:
            self.authority = Authority.load(self.source)
        except AuthorityError as error:
            log.warning("authority not taken anew: %s", error)
        ours, path = self.credentials.authority, self.credentials.certificate
        changed = not ours.exists() or ours.read_text() != self.authority.pem
        ends = expiry(path.read_text()) if path.exists() else None
        if changed or ends is None or ends - now < seconds / 2:
            name = names.tls_name("operator")
            path.write_text(self.authority.issue(self.key, name, client=True, seconds=seconds, now=utc(now)))
            ours.write_text(self.authority.pem)
            self.credentials.refresh()
