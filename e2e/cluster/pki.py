"""A throwaway certificate authority: everything it signs lasts as long as one cluster."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


def certify(folder: Path, issuer: str, key: Ed25519PrivateKey | None = None) -> Ed25519PrivateKey:
    """A key that signs identities as `issuer`; its certificate, `<issuer>.crt`, is left in `folder`."""
    key = key or Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, None)
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{issuer}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return key


class Authority:
    """Signs certificates into `folder`; `ca.crt` there is what everyone trusts."""

    def __init__(self, folder: Path) -> None:
        """Makes a new authority in `folder`, or takes the one that lies there."""
        self.folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tenantry-cluster-ca")])
        self.pair = Pair(folder / "ca.crt", folder / "ca.key")
        if self.pair.key.exists():
            key = serialization.load_pem_private_key(self.pair.key.read_bytes(), password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            self._key = key
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._write("ca", certificate, self._key)

    def issue(
        self,
        name: str,
        common_name: str,
        groups: Sequence[str] = (),
        names: Sequence[str] = (),
        ips: Sequence[str] = (),
    ) -> Pair:
        """Signs a certificate for client and server use; `groups` become Kubernetes groups."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups),
                x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            ]
        )
        builder = (
            self._builder(subject, key.public_key())
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
        )
        alternatives: list[x509.GeneralName] = [x509.DNSName(item) for item in names]
        alternatives += [x509.IPAddress(ipaddress.ip_address(item)) for item in ips]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return self._write(name, builder.sign(self._key, hashes.SHA256()), key)

    def signing_key(self, name: str) -> Pair:
        """A bare key pair (no certificate): public half in `<name>.pub`, for service account tokens."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = self.folder / f"{name}.pub"
        public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        return Pair(public, _write_secret(self.folder / f"{name}.key", _pem(key)))

    def kubeconfig(self, path: Path, server: str, pair: Pair) -> Path:
        """Writes a kubeconfig, with everything inlined, that speaks to `server` as `pair`."""

        def inline(file: Path) -> str:
            return base64.b64encode(file.read_bytes()).decode()

        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "tenantry",
                    "cluster": {
                        "server": server,
                        "certificate-authority-data": inline(self.pair.certificate),
                    },
                }
            ],
            "users": [
                {
                    "name": "tenantry",
                    "user": {
                        "client-certificate-data": inline(pair.certificate),
                        "client-key-data": inline(pair.key),
                    },
                }
            ],
            "contexts": [{"name": "tenantry", "context": {"cluster": "tenantry", "user": "tenantry"}}],
            "current-context": "tenantry",
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write_secret(path, yaml.safe_dump(content, sort_keys=False).encode())

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        # A minute back: clocks of one machine's namespaces agree, those of a restored snapshot may not.
        start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + LIFETIME)
        )

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
        path = self.folder / f"{name}.crt"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return Pair(path, _write_secret(self.folder / f"{name}.key", _pem(key)))


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_secret(path: Path, content: bytes) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(content)
    return path


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_encipherment=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
