"""Whose signature counts: by named keys and by identities, for exactly the artifact that was signed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tenantry.engines import Identity, Pull, SignaturePolicy, Verification
from tenantry.fetcher.errors import FetchError
from tenantry.fetcher.net import OriginPolicy
from tenantry.fetcher.signatures import BundleText, SimpleSignature, Subject, verify
from tenantry.fetcher.sources import Sources
from tenantry.fetcher.trust import Trust, signed, signed_hash

from .conftest import MANIFEST, Answer, Files, Scripted, adapter, manifest, sha256
from .signing import (
    BUNDLE,
    SHA256,
    Sigstore,
    b64,
    blob_signature,
    envelope,
    key_bundle,
    new_key,
    simple_payload,
    spki,
    statement,
)

Start = Callable[[], Any]
FILES = adapter()
MANIFEST_RAW = json.dumps(manifest(FILES)).encode()
DIGEST = sha256(MANIFEST_RAW)
OTHER = sha256(b"another manifest")
WHO = Identity("https://issuer.example", "https://ci.example/acme/train@refs/heads/main")
BY_KEY = Verification(SignaturePolicy.REQUIRED, key_ref="release")
BY_IDENTITY = Verification(SignaturePolicy.REQUIRED, identities=(Identity("https://x.example", "me"), WHO))


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    folder = tmp_path / "trust"
    folder.mkdir()
    return folder


def simple(server: Scripted, payload: bytes, signature: bytes, digest: str = DIGEST) -> None:
    """Put cosign's older form beside a manifest."""
    layer = {
        "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
        "digest": sha256(payload),
        "size": len(payload),
        "annotations": {"dev.cosignproject.cosign/signature": b64(signature)},
    }
    body = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": [layer]}).encode()
    server.routes[f"/v2/acme/tone/manifests/{digest.replace(':', '-')}.sig"] = Answer(body=body)
    server.routes[f"/v2/acme/tone/blobs/{sha256(payload)}"] = Answer(body=payload)


def refer(server: Scripted, *referrers: bytes | list[bytes], digest: str = DIGEST, api: bool = True) -> None:
    """Put bundles beside a manifest, as referrers by the API or by the tag that stands in for it."""
    entries = []
    for bundles in referrers:
        bundles = [bundles] if isinstance(bundles, bytes) else bundles
        layers = [{"mediaType": BUNDLE, "digest": sha256(raw), "size": len(raw)} for raw in bundles]
        body = json.dumps(
            {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": BUNDLE, "layers": layers}
        )
        name = sha256(body.encode())
        server.routes[f"/v2/acme/tone/manifests/{name}"] = Answer(body=body.encode())
        server.routes |= {f"/v2/acme/tone/blobs/{sha256(raw)}": Answer(body=raw) for raw in bundles}
        entries.append({"mediaType": MANIFEST, "artifactType": BUNDLE, "digest": name, "size": len(body)})
    index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    path = f"referrers/{digest}" if api else f"manifests/{digest.replace(':', '-')}"
    server.routes[f"/v2/acme/tone/{path}"] = Answer(body=index)


def room(server: Scripted, trust: Path | None) -> Sources:
    return Sources(
        OriginPolicy.build([server.origin], [server.origin], True), 1 << 20, 10, trust=Trust(trust)
    )


async def judge(server: Scripted, trust: Path | None, asked: Verification = BY_KEY) -> str:
    """Who signed what the server offers, or why that does not count: `reason: message`."""
    source = server.serve(FILES)
    try:
        report = await room(server, trust).signature(Pull(FILES.digest, source, "acme-ml", "", asked), DIGEST)
    except FetchError as error:
        return str(error)
    assert report is not None
    return report.message if report.verified else f"told, {report.reason}: {report.message}"


async def test_a_key_in_both_of_cosigns_forms(scripted: Start, trust: Path) -> None:
    key = new_key()
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    payload = simple_payload(DIGEST)
    for number in range(3):
        server = await scripted()
        if number == 0:
            simple(server, payload, key.sign(payload, SHA256))
        else:
            bundle = key_bundle({"dsseEnvelope": envelope(statement(DIGEST), key)})
            refer(server, bundle, api=number == 1)
        assert await judge(server, trust) == "key `release`"


async def test_a_changed_key_counts_beside_the_old_one_and_without_a_restart(
    scripted: Start, trust: Path
) -> None:
    old, new, server = new_key(), new_key(), await scripted()
    payload = simple_payload(DIGEST)
    simple(server, payload, new.sign(payload, SHA256))
    (trust / "release.pub").write_bytes(spki(old, Encoding.PEM))
    assert "another key" in await judge(server, trust)
    (trust / "release.pub").write_bytes(spki(old, Encoding.PEM) + spki(new, Encoding.PEM))
    assert await judge(server, trust) == "key `release`"
    (trust / "release.pub").write_bytes(spki(old, Encoding.PEM))
    assert "another key" in await judge(server, trust)


@pytest.mark.parametrize("form", ["simple", "bundle"])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", "SignatureMissing: the artifact must be signed"),
        ("wrong key", "SignatureInvalid: the signature does not count: it was made with another key"),
        ("replayed", f"it is of another artifact, `{OTHER}`"),
        ("torn", "it was made with another key"),
        ("empty", "it was made with another key"),
    ],
)
async def test_what_a_key_does_not_vouch_for(
    scripted: Start, trust: Path, form: str, case: str, words: str
) -> None:
    key, server = new_key(), await scripted()
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    signer = new_key() if case == "wrong key" else key
    of = OTHER if case == "replayed" else DIGEST
    if form == "simple":
        payload = simple_payload(of)
        signature = signer.sign(payload, SHA256)
        if case == "torn":
            payload = payload.replace(b"registry.example", b"registry.evil")
        if case != "missing":
            simple(server, payload, b"" if case == "empty" else signature)
    else:
        sealed = envelope(statement(of), signer)
        if case == "torn":
            sealed["payload"] = b64(statement(of) + b" ")
        elif case == "empty":
            sealed["signatures"][0]["sig"] = "no base64"
        if case != "missing":
            refer(server, key_bundle({"dsseEnvelope": sealed}))
    assert words in await judge(server, trust)


async def test_another_statement_of_the_signer_approves_of_nothing(scripted: Start, trust: Path) -> None:
    key, server = new_key(), await scripted()
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    report = statement(DIGEST, "https://cosign.sigstore.dev/attestation/vuln/v1")
    refer(server, key_bundle({"dsseEnvelope": envelope(report, key)}))
    assert "not a signature" in await judge(server, trust)


async def test_one_good_signature_among_bad_ones_is_enough(scripted: Start, trust: Path) -> None:
    key, server = new_key(), await scripted()
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    payload = simple_payload(DIGEST)
    simple(server, payload, new_key().sign(payload, SHA256))
    bad = key_bundle({"dsseEnvelope": envelope(statement(OTHER), key)})
    good = key_bundle({"dsseEnvelope": envelope(statement(DIGEST), key)})
    refer(server, b"[]", b'{"dsseEnvelope": 7}', bad, good)
    assert await judge(server, trust) == "key `release`"


async def test_only_the_first_signatures_are_looked_at(scripted: Start, trust: Path) -> None:
    key, server = new_key(), await scripted()
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    flood = [json.dumps({"n": n}).encode() for n in range(40)]
    refer(server, flood[:20], flood[20:])
    assert "SignatureInvalid" in await judge(server, trust)
    assert sum(path.startswith("/v2/acme/tone/blobs") for path, _ in server.asked) == 32


@pytest.mark.parametrize("huge", ["manifest", "payload", "bundle"])
async def test_a_signature_of_any_size_is_not_read_to_its_end(
    scripted: Start, trust: Path, huge: str
) -> None:
    key, server = new_key(), await scripted()
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    if huge == "payload":
        simple(server, b" " * (1 << 17), b"x")
    elif huge == "bundle":
        refer(server, b" " * (2 << 20))
    else:
        path = f"/v2/acme/tone/manifests/{DIGEST.replace(':', '-')}.sig"
        server.routes[path] = Answer(body=b" " * (2 << 20))
    assert (await judge(server, trust)).startswith("TooLarge")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no `release`"),
        (b"", "must be one or more ECDSA, Ed25519 or RSA public keys"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "must be one or more ECDSA"),
    ],
)
async def test_a_key_that_the_release_does_not_have(
    scripted: Start, trust: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (trust / "release.pub").write_bytes(content)
    verdict = await judge(await scripted(), trust)
    assert verdict.startswith("KeyNotFound")
    assert words in verdict
    assert (await judge(await scripted(), None)).startswith("KeyNotFound")
    aside = Verification(SignaturePolicy.REQUIRED, key_ref="../release")
    assert (await judge(await scripted(), trust, aside)).startswith("KeyNotFound")


async def test_a_warning_blocks_nothing_and_says_why(scripted: Start, trust: Path) -> None:
    (trust / "release.pub").write_bytes(spki(new_key(), Encoding.PEM))
    warn = Verification(SignaturePolicy.WARN, key_ref="release")
    server = await scripted()
    assert (await judge(server, trust, warn)).startswith("told, SignatureMissing: the artifact must be")
    server.routes[f"/v2/acme/tone/referrers/{DIGEST}"] = Answer(500)
    assert (await judge(server, trust, warn)).startswith("told, SourceUnavailable: ")


async def test_a_registry_that_cannot_be_asked_is_no_unsigned_artifact(scripted: Start, trust: Path) -> None:
    """`Required` fails as unavailable, which is tried again, and not as missing."""
    (trust / "release.pub").write_bytes(spki(new_key(), Encoding.PEM))
    server = await scripted()
    server.routes[f"/v2/acme/tone/referrers/{DIGEST}"] = Answer(503)
    assert (await judge(server, trust)).startswith("SourceUnavailable: ")


@pytest.mark.parametrize(
    "asked",
    [Verification(SignaturePolicy.REQUIRED), Verification(SignaturePolicy.REQUIRED, "release", (WHO,))],
)
async def test_nothing_or_both_to_judge_by_is_refused(
    scripted: Start, trust: Path, asked: Verification
) -> None:
    assert "exactly one of `keyRef` and `identities`" in await judge(await scripted(), trust, asked)


# Sigstore


async def test_an_identity(scripted: Start, trust: Path) -> None:
    sigstore, server = Sigstore(), await scripted()
    (trust / "trusted_root.json").write_text(sigstore.trusted_root())
    refer(server, sigstore.bundle(DIGEST, WHO.subject, WHO.issuer))
    assert await judge(server, trust, BY_IDENTITY) == f"`{WHO.subject}` by `{WHO.issuer}`"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", "SignatureMissing"),
        ("another subject", "of nobody whom `identities` list"),
        ("another issuer", "of nobody whom `identities` list"),
        ("another authority", "certificate chain"),
        ("another certificate log", "SCT"),
        ("another signature log", "log entry"),
        ("replayed", f"it is of another artifact, `{OTHER}`"),
        ("expired", "certificate chain"),
        ("too early", "certificate chain"),
        ("torn", "invalid signature"),
        ("not logged", "exactly one log entry"),
        ("a key's", "certificate"),
        ("a report", "not a signature"),
        ("nonsense", "SignatureInvalid"),
    ],
)
async def test_what_an_identity_does_not_vouch_for(
    scripted: Start, trust: Path, case: str, words: str
) -> None:
    sigstore, server = Sigstore(), await scripted()
    (trust / "trusted_root.json").write_text(sigstore.trusted_root())
    stranger = Sigstore()
    maker = {
        "another authority": Sigstore(stranger.authority, sigstore.certificate_log, sigstore.signature_log),
        "another certificate log": Sigstore(
            sigstore.authority, stranger.certificate_log, sigstore.signature_log
        ),
        "another signature log": Sigstore(
            sigstore.authority, sigstore.certificate_log, stranger.signature_log
        ),
    }.get(case, sigstore)
    bundle = maker.bundle(
        OTHER if case == "replayed" else DIGEST,
        "mallory@example.com" if case == "another subject" else WHO.subject,
        "https://evil.example" if case == "another issuer" else WHO.issuer,
        seconds={"expired": 3600, "too early": -3600}.get(case, 60),
        predicate="https://slsa.dev/provenance/v1"
        if case == "a report"
        else "https://sigstore.dev/cosign/sign/v1",
    )
    changed = json.loads(bundle)
    if case == "torn":
        changed["dsseEnvelope"]["payload"] = b64(statement(DIGEST) + b" ")
    elif case == "not logged":
        changed["verificationMaterial"]["tlogEntries"] = []
    elif case == "a key's":
        changed["verificationMaterial"] = {
            "publicKey": {"hint": "x"},
            "tlogEntries": changed["verificationMaterial"]["tlogEntries"],
        }
    elif case == "nonsense":
        changed = {"mediaType": BUNDLE, "dsseEnvelope": [], "verificationMaterial": None}
    if case != "missing":
        refer(server, json.dumps(changed).encode())
    verdict = await judge(server, trust, BY_IDENTITY)
    assert words in verdict
    assert not verdict.startswith("`")


async def test_identities_need_a_trusted_root(scripted: Start, trust: Path) -> None:
    assert "an admin sets `fetcher.trust.trustedRoot`" in await judge(await scripted(), trust, BY_IDENTITY)
    (trust / "trusted_root.json").write_text("{}")
    assert "must be a Sigstore trusted root" in await judge(await scripted(), trust, BY_IDENTITY)


async def test_a_simple_signature_is_no_identity(scripted: Start, trust: Path) -> None:
    (trust / "trusted_root.json").write_text(Sigstore().trusted_root())
    server = await scripted()
    simple(server, simple_payload(DIGEST), b"x")
    assert "no Sigstore bundle" in await judge(server, trust, BY_IDENTITY)


# Blobs: what lies in buckets and hubs


def blob_verdict(files: Files, bundle: bytes, asked: Verification, trust: Path) -> str:
    try:
        return verify(Subject(files.digest, blob=True), [BundleText(bundle)], asked, Trust(trust))
    except FetchError as error:
        return str(error)


def test_a_signed_blob(trust: Path) -> None:
    key, sigstore, other = new_key(), Sigstore(), adapter(fill=9)
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    (trust / "trusted_root.json").write_text(sigstore.trusted_root())
    assert blob_verdict(FILES, key_bundle(blob_signature(FILES.blob, key)), BY_KEY, trust) == "key `release`"
    for wrong in (blob_signature(other.blob, key), blob_signature(FILES.blob, new_key())):
        assert "another key, or of other bytes" in blob_verdict(FILES, key_bundle(wrong), BY_KEY, trust)
    good = sigstore.bundle("", WHO.subject, WHO.issuer, blob=FILES.blob)
    assert blob_verdict(FILES, good, BY_IDENTITY, trust) == f"`{WHO.subject}` by `{WHO.issuer}`"
    replayed = sigstore.bundle("", WHO.subject, WHO.issuer, blob=other.blob)
    assert "SignatureInvalid" in blob_verdict(FILES, replayed, BY_IDENTITY, trust)
    # A signature of a blob is none of a manifest, should anyone ever make the two equal.
    subject = Subject(FILES.digest, blob=False)
    for bundle, asked in ((key_bundle(blob_signature(FILES.blob, key)), BY_KEY), (good, BY_IDENTITY)):
        with pytest.raises(FetchError, match="no signature of an artifact of this kind"):
            verify(subject, [BundleText(bundle)], asked, Trust(trust))


@pytest.mark.parametrize("kind", ["p384", "p521", "rsa", "ed25519"])
def test_other_kinds_of_keys(trust: Path, kind: str) -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, padding

    payload = simple_payload(DIGEST)
    private: Any
    if kind == "rsa":
        private = rsa.generate_private_key(65537, 2048)
        signature = private.sign(payload, padding.PKCS1v15(), hashes.SHA256())
    elif kind == "ed25519":
        private = ed25519.Ed25519PrivateKey.generate()
        signature = private.sign(payload)
    else:
        curve, hashed = (
            (ec.SECP384R1(), hashes.SHA384()) if kind == "p384" else (ec.SECP521R1(), hashes.SHA512())
        )
        private = ec.generate_private_key(curve)
        signature = private.sign(payload, ec.ECDSA(hashed))
    public = private.public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (trust / "release.pub").write_bytes(pem)
    found = [SimpleSignature(payload, signature)]
    assert verify(Subject(DIGEST, blob=False), found, BY_KEY, Trust(trust)) == "key `release`"
    assert not signed(public, signature, payload + b" ")
    assert not signed_hash(public, signature, b"\0" * 32)
