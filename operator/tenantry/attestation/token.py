"""Judges a verifier's token (a JWT, RFC 7519): who signed it, for which question, how old it is, what it measured.

The algorithm follows from the configured key, never from the token, so that neither `none` nor a MAC made with a
public key passes. The question binds two nonces (the gate's and the operator's), the kernel's boot id and the engine's
TLS key: a token for another node, another boot or another key answers another question.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from .policy import GatePolicy

MAX_TOKEN_BYTES: Final = 64 << 10
LEEWAY_SECONDS: Final = 30.0
"""How far the clocks of verifier and node may differ."""
_RSA_BITS: Final = 2048
_EC: Final = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")

PublicKey = Ed25519PublicKey | EllipticCurvePublicKey | RSAPublicKey


VERDICTS: Final = frozenset(
    {
        "BadSignature",
        "Expired",
        "Malformed",
        "NotYet",
        "OtherIssuer",
        "OtherKey",
        "OtherMeasurements",
        "OtherNode",
        "Stale",
        "TooLarge",
        "WrongNonce",
    }
)
"""Codes by which a token is found wanting."""


class AttestationError(Exception):
    """A token that proves not enough. `code` is a word for conditions and tests; the text repeats no token."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True)
class Question:
    """What evidence is bound to."""

    nonce: str
    boot_id: str
    key: str
    """SHA-256 (hex) of the SubjectPublicKeyInfo of the engine's TLS key."""
    asked_at: float
    """Unix seconds."""

    def runtime_data(self) -> dict[str, str]:
        """As it is sent to a verifier, which repeats it."""
        return {"bootId": self.boot_id, "key": self.key, "nonce": self.nonce}

    def digest(self) -> bytes:
        """SHA-384 of the runtime data in canonical JSON (RFC 8785): the report data of evidence."""
        return hashlib.sha384(
            json.dumps(self.runtime_data(), sort_keys=True, separators=(",", ":")).encode()
        ).digest()


def joint_nonce(operators: str, gates: str) -> str:
    """One nonce of two, so that both who ask know that the answer is fresh."""
    return hashlib.sha256(f"{operators}.{gates}".encode()).hexdigest()


def verify(token: str, policy: GatePolicy, question: Question, now: float) -> float:
    """Until when (Unix seconds) the token proves what `policy` asks. Raises AttestationError."""
    if len(token) > MAX_TOKEN_BYTES:
        raise AttestationError("TooLarge", f"a token must have at most {MAX_TOKEN_BYTES} bytes")
    claims = _signed(token, policy)
    issued, expires = _time(claims, "iat"), _time(claims, "exp")
    until = min(expires, issued + policy.max_age_seconds)
    if claims.get("iss") != policy.issuer:
        raise AttestationError("OtherIssuer", f"`iss` must be `{policy.issuer}`")
    if issued > now + LEEWAY_SECONDS:
        raise AttestationError("NotYet", "`iat` must not lie in the future: compare the clocks")
    if issued < question.asked_at - LEEWAY_SECONDS:
        raise AttestationError("Stale", "`iat` must not lie before the question: the token is an old one")
    if until <= now:
        raise AttestationError("Expired", "the token is past its `exp` or older than `maxAgeSeconds`")
    _answers(_at(claims, policy.runtime_data), question, policy.runtime_data)
    for pointer, allowed in policy.measurements.items():
        found = _text(_at(claims, pointer))
        if found is None or found not in allowed:
            raise AttestationError(
                "OtherMeasurements", f"claim `{pointer}` must have a value that the policy lists"
            )
    return until


def load_key(pem: str) -> tuple[PublicKey, tuple[str, ...]]:
    """A key or a certificate's key, with the algorithms that it may have signed by. Raises ValueError."""
    raw = pem.encode()
    key: Any
    if b"BEGIN CERTIFICATE" in raw:
        key = x509.load_pem_x509_certificate(raw).public_key()
    else:
        key = load_pem_public_key(raw)
    if isinstance(key, Ed25519PublicKey):
        return key, ("EdDSA",)
    if isinstance(key, EllipticCurvePublicKey) and key.curve.name in _EC:
        return key, (_EC[key.curve.name],)
    if isinstance(key, RSAPublicKey) and key.key_size >= _RSA_BITS:
        return key, _RSA
    raise ValueError(f"must be Ed25519, EC (P-256, P-384, P-521) or RSA of at least {_RSA_BITS} bits")


def _signed(token: str, policy: GatePolicy) -> dict[str, Any]:
    """The claims, once a configured key signed them."""
    for pem in policy.keys:
        try:
            key, algorithms = load_key(pem)
        except ValueError as error:
            raise AttestationError("BadKey", f"a key of the verifier {error}") from error
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(algorithms),
                options={
                    "verify_exp": False,  # by the caller's clock, and with the policy's bound on age
                    "verify_iat": False,
                    "verify_nbf": False,
                    "verify_aud": False,
                    "require": ["exp", "iat", "iss"],
                },
            )
        except (jwt.InvalidSignatureError, jwt.InvalidAlgorithmError):
            continue
        except jwt.MissingRequiredClaimError as error:
            raise AttestationError("Malformed", str(error)) from error
        except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
            raise AttestationError("Malformed", "the verifier's answer must be a JWT") from error
        return claims
    raise AttestationError("BadSignature", "no configured key of the verifier signed the token")


def _time(claims: dict[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 40:
        raise AttestationError("Malformed", f"`{name}` must be a time in Unix seconds")
    return float(value)


def _answers(found: Any, question: Question, pointer: str) -> None:
    if not isinstance(found, dict):
        raise AttestationError("Malformed", f"claim `{pointer}` must repeat nonce, boot id and key")
    if found.get("nonce") != question.nonce:
        raise AttestationError("WrongNonce", "the token answers another question: its nonce differs")
    if found.get("bootId") != question.boot_id:
        raise AttestationError(
            "OtherNode", "the token speaks of another node, or of an earlier boot of this one"
        )
    if found.get("key") != question.key:
        raise AttestationError("OtherKey", "the token speaks of another engine: its TLS key differs")


def _at(claims: Any, pointer: str) -> Any:
    """The value behind a JSON pointer, None where there is none."""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(claims, dict):
            claims = claims.get(name)
        elif isinstance(claims, list) and name.isdecimal() and int(name) < len(claims):
            claims = claims[int(name)]
        else:
            return None
    return claims


def _text(value: Any) -> str | None:
    """As a policy writes it; None for what no policy can list."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int):
        return json.dumps(value)
    return None


__all__ = ["VERDICTS", "AttestationError", "Question", "joint_nonce", "load_key", "verify"]
