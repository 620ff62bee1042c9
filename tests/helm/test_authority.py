"""The authority that Helm makes: certificates which the operator signs with it are believed by OpenSSL."""

from __future__ import annotations

import base64
import ssl
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tenantry.api import names
from tenantry.api.tls import Credentials
from tenantry.attestation.authority import Authority, requested_key, utc
from tenantry.attestation.gate import Gate

from .conftest import Render


def test_a_handshake_between_what_it_signed(render: Render, tmp_path: Path) -> None:
    [secret] = [o for o in render() if o["kind"] == "Secret" and o["metadata"]["name"] == "tenantry-authority"]
    for name, content in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    authority, now = Authority.load(tmp_path), utc(time.time())
    run, home = tmp_path / "run", tmp_path / "gateway"
    run.mkdir()
    home.mkdir()
    gate = Gate(run, None)
    pool = names.tls_name("pool")
    pem = authority.issue(requested_key(gate.request()), pool, client=False, seconds=60, now=now)
    gate.admit("", pem, authority.pem)
    key = Ed25519PrivateKey.generate()
    (home / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (home / "tls.crt").write_text(
        authority.issue(key.public_key(), names.tls_name("gateway"), client=True, seconds=60, now=now)
    )
    server = Credentials(run / "tls.crt", run / "tls.key", run / "ca.pem").server()
    client = Credentials(home / "tls.crt", home / "tls.key", run / "ca.pem").client()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=pool),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    ends[0].write(b"hello")
    assert ends[1].read() == b"hello"
    found = ends[1].getpeercert()
    assert found is not None
    assert ("DNS", names.tls_name("gateway")) in found["subjectAltName"]
