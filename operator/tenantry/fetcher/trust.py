"""Whom signatures may be of: public keys and certificate authorities that an admin keeps in one folder.

    <name>.pub          public keys in PEM, more than one while a key is being changed; `keyRef` says <name>
    trusted_root.json   authorities, transparency logs and time stampers in Sigstore's format; `identities` need it

Read anew for every signature, so that a changed folder counts without a restart.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, utils
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from .errors import FetchError, Reason

if TYPE_CHECKING:
    from sigstore.models import TrustedRoot

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
_CURVE_HASHES: dict[int, hashes.HashAlgorithm] = {
    256: hashes.SHA256(),
    384: hashes.SHA384(),
    521: hashes.SHA512(),
}


class Trust:
    """A folder, or None where the release trusts nobody."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def keys(self, name: str) -> list[PublicKey]:
        """The public keys of that name. Raises FetchError(KeyNotFound)."""
        raw = self._read(f"{name}.pub") if _NAME.fullmatch(name) else None
        if raw is None:
            raise FetchError(
                Reason.KEY_NOT_FOUND,
                f"`keyRef` must be a key of the release: there is no `{name}`; an admin adds to `fetcher.trust.keys`",
            )
        try:
            keys = [load_pem_public_key(pem) for pem in _PEM.findall(raw)]
        except (ValueError, UnsupportedAlgorithm):
            keys = []
        usable = [key for key in keys if isinstance(key, PublicKey)]
        if not usable or len(usable) != len(keys):
            raise FetchError(
                Reason.KEY_NOT_FOUND,
                f"the release's key `{name}` must be one or more ECDSA, Ed25519 or RSA public keys in PEM",
            )
        return usable

    def root(self) -> TrustedRoot:
        """The authorities that `identities` are judged by. Raises FetchError(KeyNotFound)."""
        from sigstore.errors import Error
        from sigstore.models import TrustedRoot

        raw = self._read("trusted_root.json")
        if raw is None or self._folder is None:
            raise FetchError(
                Reason.KEY_NOT_FOUND,
                "`identities` need the release's trusted root: an admin sets `fetcher.trust.trustedRoot`",
            )
        try:
            return TrustedRoot.from_file(str(self._folder / "trusted_root.json"))
        except (Error, ValueError) as error:
            raise FetchError(
                Reason.KEY_NOT_FOUND,
                "the release's `fetcher.trust.trustedRoot` must be a Sigstore trusted root",
            ) from error

    def _read(self, name: str) -> bytes | None:
        if self._folder is None:
            return None
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return None


def signed(key: PublicKey, signature: bytes, message: bytes) -> bool:
    """Whether the key signed the message, with the hash that goes with the key."""
    try:
        match key:
            case ed25519.Ed25519PublicKey():
                key.verify(signature, message)
            case rsa.RSAPublicKey():
                key.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
            case ec.EllipticCurvePublicKey():
                key.verify(signature, message, ec.ECDSA(_CURVE_HASHES[key.key_size]))
    except (InvalidSignature, KeyError):
        return False
    return True


def signed_hash(key: PublicKey, signature: bytes, sha256: bytes) -> bool:
    """Whether the key signed a message of which only the SHA-256 is at hand. Ed25519 has no such form."""
    prehashed = utils.Prehashed(hashes.SHA256())
    try:
        match key:
            case rsa.RSAPublicKey():
                key.verify(signature, sha256, padding.PKCS1v15(), prehashed)
            case ec.EllipticCurvePublicKey() if key.key_size == 256:
                key.verify(signature, sha256, ec.ECDSA(prehashed))
            case _:
                return False
    except InvalidSignature:
        return False
    return True
