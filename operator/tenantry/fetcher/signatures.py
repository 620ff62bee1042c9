"""Finds the signatures of an artifact and judges them: by a named public key, or by the identity in a certificate.

Beside an OCI manifest lie cosign's signatures (a tag `sha256-<hex>.sig` with "simple signing" payloads) and Sigstore
bundles (manifests that refer to it); beside the files of a folder lies one bundle, `adapter.sigstore.json`, over the
adapter blob. A signature counts for the digest that it speaks of and for no other.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tenantry.engines.fetcher import Identity, Verification

from .errors import FetchError, Reason, printable
from .folder import Folder
from .oci import Repository, parse_manifest
from .trust import PublicKey, Trust, signed, signed_hash

BUNDLE_FILE = "adapter.sigstore.json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle"
STATEMENT_TYPE = "application/vnd.in-toto+json"
# Other statements of the same signer, a scan's report for one, approve of nothing.
SIGN_PREDICATE = "https://sigstore.dev/cosign/sign/v1"

_NOT_BY_KEY = "it was made with another key, or of other bytes"

MAX_SIGNATURES = 32
MAX_PAYLOAD_BYTES = 64 << 10
MAX_BUNDLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Subject:
    """What must be signed: the digest of a manifest, or (`blob`) the SHA-256 of the adapter blob itself."""

    digest: str
    blob: bool

    @property
    def hex(self) -> str:
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True)
class SimpleSignature:
    """cosign's older form: a payload that names a manifest, and the signature over it."""

    payload: bytes
    signature: bytes


@dataclass(frozen=True)
class BundleText:
    """A Sigstore bundle as it was found."""

    raw: bytes


Candidate = SimpleSignature | BundleText


class _Refused(Exception):
    """One candidate does not prove what it must, and why."""


async def find_in_repository(repository: Repository, digest: str) -> list[Candidate]:
    """The first of what may be signatures of a manifest. Raises FetchError when the registry cannot be asked."""
    found: list[Candidate] = []
    async for candidate in _beside(repository, digest):
        found.append(candidate)
        if len(found) == MAX_SIGNATURES:
            break
    return found


async def _beside(repository: Repository, digest: str) -> AsyncIterator[Candidate]:
    raw = await _optional(repository.manifest, f"{digest.replace(':', '-')}.sig")
    for layer in _entries(raw, "layers"):
        match layer:
            case {
                "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
                "digest": str(blob),
                "annotations": {"dev.cosignproject.cosign/signature": str(text)},
            }:
                payload = await repository.blob(blob, MAX_PAYLOAD_BYTES)
                yield SimpleSignature(payload, _base64(text))
    raw = await _optional(repository.referrers, digest)
    for entry in _entries(raw, "manifests"):
        match entry:
            case {"artifactType": str(kind), "digest": str(manifest)} if kind.startswith(BUNDLE_TYPE):
                for layer in _entries(await repository.manifest(manifest), "layers"):
                    match layer:
                        case {"mediaType": str(kind), "digest": str(blob)} if kind.startswith(BUNDLE_TYPE):
                            yield BundleText(await repository.blob(blob, MAX_BUNDLE_BYTES))


async def find_in_folder(folder: Folder) -> list[Candidate]:
    """The bundle beside the files, if there is one. Raises FetchError when the source cannot be asked."""
    raw = await _optional(lambda name: folder.text(name, MAX_BUNDLE_BYTES), BUNDLE_FILE)
    return [BundleText(raw)] if raw is not None else []


def verify(subject: Subject, found: Sequence[Candidate], asked: Verification, trust: Trust) -> str:
    """Who signed, in words, when one of the candidates is what is asked for. Raises FetchError else."""
    if bool(asked.key_ref) == bool(asked.identities):
        raise FetchError(
            Reason.SIGNATURE_INVALID, "`verification` must have exactly one of `keyRef` and `identities`"
        )
    check: Callable[[Candidate], str]
    if asked.key_ref:
        keys = trust.keys(asked.key_ref)

        def check(candidate: Candidate) -> str:
            _by_key(candidate, subject, keys)
            return f"key `{asked.key_ref}`"
    else:
        root = trust.root()

        def check(candidate: Candidate) -> str:
            if not isinstance(candidate, BundleText):
                raise _Refused("it is no Sigstore bundle, which `identities` need")
            return _by_identity(candidate, subject, asked.identities, root)

    reasons: list[str] = []
    for candidate in found:
        try:
            return check(candidate)
        except _Refused as refused:
            reasons.append(str(refused))
    if not reasons:
        beside = f"a file `{BUNDLE_FILE}`" if subject.blob else "a signature"
        raise FetchError(
            Reason.SIGNATURE_MISSING,
            f"the artifact must be signed: there is no {beside} for {subject.digest}",
        )
    more = f" (and {len(reasons) - 1} more are no better)" if len(reasons) > 1 else ""
    raise FetchError(Reason.SIGNATURE_INVALID, f"the signature does not count: {reasons[0]}{more}")


def _by_key(candidate: Candidate, subject: Subject, keys: Sequence[PublicKey]) -> None:
    """Raises _Refused."""
    if isinstance(candidate, SimpleSignature):
        if not any(signed(key, candidate.signature, candidate.payload) for key in keys):
            raise _Refused(_NOT_BY_KEY)
        match _json(candidate.payload):
            case {"critical": {"image": {"docker-manifest-digest": str(digest)}}}:
                _same(digest, subject)
            case _:
                raise _Refused("its payload names no manifest")
        return
    match _json(candidate.raw):
        case {
            "dsseEnvelope": {
                "payload": str(text),
                "payloadType": str(kind),
                "signatures": [{"sig": str(sig)}],
            }
        }:
            payload = _base64(text)
            message = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
            if not any(signed(key, _base64(sig), message) for key in keys):
                raise _Refused(_NOT_BY_KEY)
            _statement(kind, payload, subject)
        case {"messageSignature": {"signature": str(sig)}} if subject.blob:
            if not any(signed_hash(key, _base64(sig), bytes.fromhex(subject.hex)) for key in keys):
                raise _Refused(_NOT_BY_KEY)
        case _:
            raise _Refused("the bundle holds no signature of an artifact of this kind")


def _by_identity(candidate: BundleText, subject: Subject, identities: Sequence[Identity], root: Any) -> str:
    """Who signed. Raises _Refused."""
    from sigstore.hashes import Hashed
    from sigstore.models import Bundle
    from sigstore.verify import Verifier
    from sigstore.verify import policy as policies
    from sigstore_models.common.v1 import HashAlgorithm

    try:
        bundle = Bundle.from_json(candidate.raw)
        certificate = bundle.signing_certificate
        signer = next((i for i in identities if _is(policies, certificate, i)), None)
        if signer is None:
            raise _Refused("its certificate is of nobody whom `identities` list")
        policy = policies.Identity(identity=signer.subject, issuer=signer.issuer)
        verifier = Verifier(trusted_root=root)
        if "dsseEnvelope" in _json(candidate.raw):
            _statement(*verifier.verify_dsse(bundle, policy), subject)
        elif subject.blob:
            hashed = Hashed(algorithm=HashAlgorithm.SHA2_256, digest=bytes.fromhex(subject.hex))
            verifier.verify_artifact(hashed, bundle, policy)
        else:
            raise _Refused("the bundle holds no signature of an artifact of this kind")
    except _Refused:
        raise
    except Exception as error:
        # The bundle is foreign, and what it sets off in parsers of three formats has no common class.
        raise _Refused(printable(str(error)) or type(error).__name__) from error
    return f"`{printable(signer.subject)}` by `{printable(signer.issuer)}`"


def _is(policies: Any, certificate: Any, identity: Identity) -> bool:
    from sigstore.errors import VerificationError

    try:
        policies.Identity(identity=identity.subject, issuer=identity.issuer).verify(certificate)
    except VerificationError:
        return False
    return True


def _statement(kind: str, payload: bytes, subject: Subject) -> None:
    """An in-toto statement that signs the subject. Raises _Refused."""
    if kind != STATEMENT_TYPE:
        raise _Refused("the envelope holds no in-toto statement")
    match _json(payload):
        case {"predicateType": str(predicate), "subject": list(subjects)}:
            pass
        case _:
            raise _Refused("the statement has no subject")
    if predicate != SIGN_PREDICATE:
        raise _Refused(f"it is a statement of type `{printable(predicate)}`, not a signature")
    digests = [
        entry["digest"].get("sha256")
        for entry in subjects
        if isinstance(entry, dict) and isinstance(entry.get("digest"), dict)
    ]
    if subject.hex not in digests:
        _same(f"sha256:{next(iter(digests), '')}", subject)


def _same(digest: str, subject: Subject) -> None:
    if digest != subject.digest:
        raise _Refused(f"it is of another artifact, `{printable(digest, 71)}`, not of {subject.digest}")


def _entries(raw: bytes | None, field: str) -> list[Any]:
    if raw is None:
        return []
    entries = parse_manifest(raw).get(field)
    return entries[:MAX_SIGNATURES] if isinstance(entries, list) else []


async def _optional(read: Callable[[str], Any], name: str) -> bytes | None:
    """What is read, or None where there is no such thing."""
    try:
        raw: bytes = await read(name)
    except FetchError as error:
        if error.reason is Reason.NOT_FOUND:
            return None
        raise
    return raw


def _base64(text: str) -> bytes:
    """Empty for what is no base64: it verifies nothing then."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
