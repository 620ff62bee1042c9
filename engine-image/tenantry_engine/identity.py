"""Who may ask: verifies the signed identities of `docs/reference/wire.md` with certificates alone.

The engine holds no secret. It trusts the Ed25519 certificates of one folder, each for the issuer that it names, and
keeps the ids of the tokens of the last minute, so that none is served twice.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tenantry_engine.errors import EngineError, RequestError

GATEWAY = "tenantry-gateway"
OPERATOR = "tenantry-operator"
FETCHER = "tenantry-fetcher"

MAX_LIFETIME_SECONDS = 30
LEEWAY_SECONDS = 5
_RELOAD_SECONDS = 5.0
_SALT = re.compile("[0-9a-f]{64}")
_MAX_REMEMBERED = 1 << 18


@dataclass(frozen=True)
class Identity:
    """For whom one request is served. `token_id` is the ledger id of the request."""

    tenant: str
    uid: str
    weight: int
    cap: int
    lane: str
    salt: str
    model: str
    digest: str
    token_id: str


def load_certificates(folder: Path) -> dict[str, tuple[str, Ed25519PublicKey]]:
    """`kid` -> (issuer, key) of every Ed25519 certificate (`*.crt`, PEM) of the folder."""
    keys: dict[str, tuple[str, Ed25519PublicKey]] = {}
    for path in sorted(folder.glob("*.crt")):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (ValueError, OSError):
            continue
        key = certificate.public_key()
        names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        if isinstance(key, Ed25519PublicKey) and names:
            spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            keys[hashlib.sha256(spki).hexdigest()[:16]] = (str(names[0].value), key)
    return keys


class Verifier:
    """Checks tokens for one audience. Not for use by several threads at once."""

    def __init__(self, audience: str, folder: Path, clock: Callable[[], float] = time.time) -> None:
        if not audience:
            raise EngineError("`--audience` must name the pool's uid; give it or `--dev-open`")
        self._audience = audience
        self._folder = folder
        self._clock = clock
        self._keys = load_certificates(folder)
        self._loaded = clock()
        self._seen: OrderedDict[str, float] = OrderedDict()
        if not self._keys:
            raise EngineError(
                f"`--identity-dir` must hold at least one Ed25519 certificate (*.crt): {folder}; "
                "mount the release's identity ConfigMap there, or give `--dev-open`"
            )

    def verify(self, token: str, issuers: Set[str], path: str, body_sha256: str) -> dict[str, Any]:
        """The claims of a valid token that was not used before.

        Raises RequestError 401 with what is wrong; its text never repeats the token.
        """
        try:
            kid = str(jwt.get_unverified_header(token).get("kid", ""))
        except jwt.InvalidTokenError as error:
            raise _refused("it is not a token") from error
        issuer, key = self._key(kid)
        if issuer not in issuers:
            raise _refused("its key or issuer is unknown here")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=["EdDSA"],
                audience=self._audience,
                issuer=issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iat", "jti", "iss", "aud"]},
            )
        except jwt.InvalidTokenError as error:
            raise _refused(str(error)) from error
        if claims["exp"] - claims["iat"] > MAX_LIFETIME_SECONDS:
            raise _refused(f"its lifetime must be at most {MAX_LIFETIME_SECONDS} s")
        if claims.get("path") != path or claims.get("body") != body_sha256:
            raise _refused("it is signed for another path or body")
        self._use_once(str(claims["jti"]))
        return claims

    def _key(self, kid: str) -> tuple[str, Ed25519PublicKey]:
        if kid not in self._keys and self._clock() - self._loaded >= _RELOAD_SECONDS:
            self._keys = load_certificates(self._folder) or self._keys
            self._loaded = self._clock()
        try:
            return self._keys[kid]
        except KeyError as error:
            raise _refused("its key or issuer is unknown here") from error

    def _use_once(self, token_id: str) -> None:
        now = self._clock()
        horizon = MAX_LIFETIME_SECONDS + 2 * LEEWAY_SECONDS
        while self._seen and next(iter(self._seen.values())) + horizon < now:
            self._seen.popitem(last=False)
        if token_id in self._seen:
            raise _refused("it was used before")
        if len(self._seen) >= _MAX_REMEMBERED:
            raise RequestError(
                "too many requests in the last minute to tell replays apart",
                status=503,
                code="overloaded",
                retry_after=1,
            )
        self._seen[token_id] = now


def read_identity(claims: dict[str, Any]) -> Identity:
    """The identity that a gateway's token carries. Raises RequestError 401 naming the claim that is wrong."""

    def text(name: str, default: str | None = None) -> str:
        value = claims.get(name, default)
        if not isinstance(value, str):
            raise _refused(f"claim `{name}` must be a string")
        return value

    def count(name: str) -> int:
        value = claims.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _refused(f"claim `{name}` must be an integer of at least 1")
        return value

    salt = text("salt")
    if not _SALT.fullmatch(salt):  # a poor one would let tenants share cached blocks
        raise _refused("claim `salt` must be 64 hex digits")
    return Identity(
        tenant=text("tenant"),
        uid=text("uid"),
        weight=count("weight"),
        cap=count("cap"),
        lane=text("lane"),
        salt=salt,
        model=text("model"),
        digest=text("digest", ""),
        token_id=text("jti"),
    )


def _refused(why: str) -> RequestError:
    return RequestError(
        f"the identity of this request is refused: {why}", status=401, code="invalid_identity"
    )
