"""What stands before an engine in its pod: a key, a certificate for it, and the verifier's word on this very boot.

It starts before the engine (a sidecar among the init containers) and counts as started once all of that is there; the
engine waits for it, reads certificate and lease from the folder that both share, and ends when the lease does. The
gate asks (a nonce of its own, the kernel's boot id, its key), the operator carries the question to the verifier and the
token back. What the operator says is signed; the gate judges the token itself, so that an operator that errs, lies or
is gone opens nothing.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import ValidationError

from .authority import expiry, key_hash
from .policy import GatePolicy
from .token import AttestationError, Question, joint_nonce, verify

KEY_FILE: Final = "tls.key"
CERTIFICATE_FILE: Final = "tls.crt"
AUTHORITY_FILE: Final = "ca.pem"
LEASE_FILE: Final = "lease"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
QUESTION_SECONDS: Final = 120.0
"""An answer that takes longer is refused: ask again."""


class GateError(Exception):
    """A request that the gate refuses. `code` is a word of the answer."""

    def __init__(self, code: str, message: str, status: int = 403) -> None:
        self.code = code
        self.status = status
        super().__init__(message)


@dataclass(frozen=True)
class Challenge:
    """What the gate wants to have proven."""

    nonce: str
    boot_id: str
    request: str
    evidence: bytes
    expires_at: float | None

    def wire(self) -> dict[str, Any]:
        return {
            "nonce": self.nonce,
            "bootId": self.boot_id,
            "request": self.request,
            "evidence": base64.b64encode(self.evidence).decode(),
            "expiresAt": self.expires_at,
        }


class Gate:
    """Keeps the folder that it shares with the engine. `policy` None: no proof is asked, only a certificate."""

    def __init__(
        self,
        folder: Path,
        policy: Path | None,
        boot_id: Path = BOOT_ID,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._policy = policy
        self._boot_id = boot_id
        self._clock = clock
        self._question: Question | None = None
        self._key = _key_of(folder / KEY_FILE)

    def rules(self) -> GatePolicy | None:
        """As the operator wrote them last. Raises GateError."""
        if self._policy is None:
            return None
        try:
            return GatePolicy.model_validate_json(self._policy.read_bytes())
        except (OSError, ValidationError) as error:
            raise GateError("BadPolicy", "the gate's policy cannot be read", 500) from error

    def ask(self, operators_nonce: str) -> tuple[str, Question]:
        """The gate's own nonce and the question that evidence must answer; an earlier question counts no more."""
        own = secrets.token_hex(32)
        boot_id = self._boot_id.read_text().strip()
        self._question = Question(
            joint_nonce(operators_nonce, own), boot_id, key_hash(self._key.public_key()), self._clock()
        )
        return own, self._question

    def request(self) -> str:
        """A certificate request (PKCS 10, PEM) for the engine's key."""
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
        built = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self._key, SHA256())
        return built.public_bytes(Encoding.PEM).decode()

    def admit(self, token: str, certificate: str, authority: str) -> float | None:
        """Take the answer; until when the engine may run (Unix seconds), None where no proof is asked.

        Raises GateError. A question is answered once.
        """
        policy, question, self._question = self.rules(), self._question, None
        until = None
        if policy is not None:
            now = self._clock()
            if question is None or now - question.asked_at > QUESTION_SECONDS:
                raise GateError(
                    "NotAsked", "an answer must follow a question, once: ask for a challenge", 409
                )
            try:
                until = verify(token, policy, question, now)
            except AttestationError as error:
                raise GateError(error.code, str(error)) from error
        self._certify(certificate, authority)
        if until is not None:
            _write(self._folder / LEASE_FILE, json.dumps({"expiresAt": until}).encode())
        return until

    def _certify(self, certificate: str, authority: str) -> None:
        try:
            found = x509.load_pem_x509_certificate(certificate.encode())
            x509.load_pem_x509_certificate(authority.encode())
        except ValueError as error:
            raise GateError("BadCertificate", "`certificate` and `authority` must be PEM", 400) from error
        if found.public_key() != self._key.public_key():
            raise GateError("BadCertificate", "`certificate` must be for the key of the request", 400)
        _write(self._folder / AUTHORITY_FILE, authority.encode())
        _write(self._folder / CERTIFICATE_FILE, certificate.encode())


def lease(folder: Path) -> float | None:
    """Until when the engine may run, as the gate wrote it; None where it wrote nothing."""
    try:
        found = json.loads((folder / LEASE_FILE).read_bytes())["expiresAt"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(found) if isinstance(found, int | float) else None


def is_open(folder: Path, attested: bool, now: float) -> bool:
    """Whether the engine may start: a certificate that is valid, and the lease where proof is asked."""
    try:
        ends = expiry((folder / CERTIFICATE_FILE).read_text())
    except OSError:
        return False
    until = lease(folder) if attested else None
    return ends is not None and ends > now and (not attested or (until is not None and until > now))


def evidence_path(question: Question) -> str:
    """Where an attestation agent in the pod's sandbox makes evidence bound to the question."""
    report_data = base64.urlsafe_b64encode(question.digest()).decode()
    return f"/aa/evidence?runtime_data={quote(report_data, safe='')}"


def _key_of(path: Path) -> EllipticCurvePrivateKey:
    """The engine's TLS key: made once for the pod's life, in memory that only the pod's containers see."""
    if path.exists():
        key = load_pem_private_key(path.read_bytes(), password=None)
        if isinstance(key, EllipticCurvePrivateKey):
            return key
    made = generate_private_key(SECP256R1())
    _write(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, for readers beside us."""
    partial = path.with_name(f".{path.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    partial.rename(path)
