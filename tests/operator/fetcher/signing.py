"""Signatures as cosign and Sigstore's clients make them, and a Sigstore of the test's own to make them with."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SIGN = "https://sigstore.dev/cosign/sign/v1"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
SHA256 = ec.ECDSA(hashes.SHA256())
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
_ISSUER_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_TIMESTAMPS_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def spki(key: ec.EllipticCurvePrivateKey, encoding: Encoding = Encoding.DER) -> bytes:
    return key.public_key().public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)


def simple_payload(digest: str) -> bytes:
    """What `cosign sign` signs of a manifest in its older form."""
    critical = {
        "identity": {"docker-reference": "registry.example/acme/tone"},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }
    return json.dumps({"critical": critical, "optional": None}).encode()


def statement(digest: str, predicate: str = SIGN) -> bytes:
    """What `cosign sign` signs of a manifest in its newer form."""
    return json.dumps(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": "tone", "digest": {"sha256": digest.removeprefix("sha256:")}}],
            "predicateType": predicate,
            "predicate": {},
        }
    ).encode()


def envelope(payload: bytes, key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
    kind = "application/vnd.in-toto+json"
    message = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    return {
        "payload": b64(payload),
        "payloadType": kind,
        "signatures": [{"sig": b64(key.sign(message, SHA256))}],
    }


def key_bundle(content: dict[str, Any]) -> bytes:
    """A bundle whose verifier knows the key from elsewhere; `content` is the envelope or the message signature."""
    material = {"publicKey": {"hint": "release"}, "tlogEntries": []}
    return json.dumps({"mediaType": BUNDLE, "verificationMaterial": material, **content}).encode()


def blob_signature(blob: bytes, key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
    """What `cosign sign-blob` makes."""
    digest = {"algorithm": "SHA2_256", "digest": b64(hashlib.sha256(blob).digest())}
    return {"messageSignature": {"messageDigest": digest, "signature": b64(key.sign(blob, SHA256))}}


@dataclass
class Sigstore:
    """A certificate authority, a log of its certificates and a log of signatures. Each key can be another's."""

    authority: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    certificate_log: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    signature_log: ec.EllipticCurvePrivateKey = field(default_factory=new_key)

    @property
    def root(self) -> x509.Certificate:
        name = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "test"),
                x509.NameAttribute(NameOID.COMMON_NAME, "root"),
            ]
        )
        public = self.authority.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(7)
            .not_valid_before(NOW - timedelta(days=30))
            .not_valid_after(NOW + timedelta(days=3650))
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.authority, hashes.SHA256())
        )

    def trusted_root(self) -> str:
        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            return {
                "baseUrl": "https://log.example",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": b64(spki(key)),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": {"start": "2026-01-01T00:00:00Z"},
                },
                "logId": {"keyId": b64(hashlib.sha256(spki(key)).digest())},
            }

        authority = {
            "subject": {"organization": "test", "commonName": "root"},
            "uri": "https://authority.example",
            "certChain": {"certificates": [{"rawBytes": b64(self.root.public_bytes(Encoding.DER))}]},
            "validFor": {"start": "2026-01-01T00:00:00Z"},
        }
        return json.dumps(
            {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [log(self.signature_log)],
                "certificateAuthorities": [authority],
                "ctlogs": [log(self.certificate_log)],
                "timestampAuthorities": [],
            }
        )

    def certificate(
        self, key: ec.EllipticCurvePrivateKey, subject: str, issuer: str, begin: datetime = NOW
    ) -> x509.Certificate:
        """A certificate for ten minutes, with the timestamp of the certificate log in it."""
        root = self.root
        public = self.authority.public_key()
        name = x509.UniformResourceIdentifier(subject) if "://" in subject else x509.RFC822Name(subject)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(root.subject)
            .public_key(key.public_key())
            .serial_number(11)
            .not_valid_before(begin)
            .not_valid_after(begin + timedelta(minutes=10))
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_EXTENSION, issuer.encode()), critical=False)
        )
        unlogged = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        stamp = int(begin.timestamp() * 1000)
        issuer_hash = hashlib.sha256(spki(self.authority)).digest()
        # RFC 6962, section 3.2: what a log signs of a certificate that it has not seen signed yet.
        entry = issuer_hash + struct.pack("!I", len(unlogged))[1:] + unlogged
        signature = self.certificate_log.sign(
            struct.pack("!BBQH", 0, 0, stamp, 1) + entry + struct.pack("!H", 0), SHA256
        )
        log_id = hashlib.sha256(spki(self.certificate_log)).digest()
        timestamp = struct.pack("!B32sQHBBH", 0, log_id, stamp, 0, 4, 3, len(signature)) + signature
        listed = struct.pack("!H", len(timestamp)) + timestamp
        listed = struct.pack("!H", len(listed)) + listed
        octets = (
            b"\x04" + (bytes([len(listed)]) if len(listed) < 128 else b"\x81" + bytes([len(listed)])) + listed
        )
        logged = x509.UnrecognizedExtension(_TIMESTAMPS_EXTENSION, octets)
        return builder.add_extension(logged, critical=False).sign(self.authority, hashes.SHA256())

    def bundle(
        self,
        digest: str,
        subject: str,
        issuer: str,
        *,
        blob: bytes | None = None,
        seconds: int = 60,
        predicate: str = SIGN,
    ) -> bytes:
        """A signature of `digest`, or of `blob`, logged so many seconds after the certificate was made."""
        key = new_key()
        certificate = self.certificate(key, subject, issuer)
        pem = b64(certificate.public_bytes(Encoding.PEM))
        body: dict[str, Any]
        if blob is None:
            content: dict[str, Any] = {"dsseEnvelope": envelope(statement(digest, predicate), key)}
            signed = content["dsseEnvelope"]
            body = {
                "envelopeHash": {"algorithm": "sha256", "value": "0" * 64},
                "payloadHash": {
                    "algorithm": "sha256",
                    "value": hashlib.sha256(base64.b64decode(signed["payload"])).hexdigest(),
                },
                "signatures": [{"signature": signed["signatures"][0]["sig"], "verifier": pem}],
            }
            kind = "dsse"
        else:
            content = blob_signature(blob, key)
            body = {
                "data": {"hash": {"algorithm": "sha256", "value": hashlib.sha256(blob).hexdigest()}},
                "signature": {
                    "content": content["messageSignature"]["signature"],
                    "publicKey": {"content": pem},
                },
            }
            kind = "hashedrekord"
        entry = self._logged(kind, body, int(NOW.timestamp()) + seconds)
        material = {
            "certificate": {"rawBytes": b64(certificate.public_bytes(Encoding.DER))},
            "tlogEntries": [entry],
        }
        return json.dumps({"mediaType": BUNDLE, "verificationMaterial": material, **content}).encode()

    def _logged(self, kind: str, spec: dict[str, Any], time: int) -> dict[str, Any]:
        """The entry of a log that holds nothing else."""
        body = _canonical({"apiVersion": "0.0.1", "kind": kind, "spec": spec})
        log_id = hashlib.sha256(spki(self.signature_log)).digest()
        promise = _canonical(
            {"body": b64(body), "integratedTime": time, "logID": log_id.hex(), "logIndex": 0}
        )
        root = hashlib.sha256(b"\x00" + body).digest()
        note = f"log.example\n1\n{b64(root)}\n"
        mark = b64(log_id[:4] + self.signature_log.sign(note.encode(), SHA256))
        return {
            "logIndex": "0",
            "logId": {"keyId": b64(log_id)},
            "kindVersion": {"kind": kind, "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": b64(self.signature_log.sign(promise, SHA256))},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": b64(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\u2014 log.example {mark}\n"},
            },
            "canonicalizedBody": b64(body),
        }


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
