"""API keys `tk_<tenant>_<secret>`: 256 random bits made on the caller's machine; only the hash is ever stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

PREFIX = "tk_"


@dataclass(frozen=True)
class MintedKey:
    """`key` is shown once and kept by its owner; `sha256` goes into `Tenant.spec.auth.apiKeys`."""

    key: str
    sha256: str


def hash_key(key: str) -> str:
    """Lower-case hex SHA-256 of the whole key."""
    return hashlib.sha256(key.encode()).hexdigest()


def mint(tenant: str) -> MintedKey:
    """A new key for the tenant. Tenant names are DNS labels, so `_` ends the name without doubt."""
    key = f"{PREFIX}{tenant}_{secrets.token_urlsafe(32)}"
    return MintedKey(key=key, sha256=hash_key(key))


def tenant_of(key: str) -> str | None:
    """The tenant that a key names, or None when it has not the form of a key. Proves nothing by itself."""
    if not key.startswith(PREFIX):
        return None
    tenant, separator, secret = key[len(PREFIX) :].partition("_")
    return tenant if separator and tenant and secret else None


def matches(key: str, sha256: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(hash_key(key), sha256)
