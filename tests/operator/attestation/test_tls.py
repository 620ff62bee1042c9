"""Mutual TLS with the release's own authority: the right certificate on each side, any wrong one refused, rotation."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.trust import make_authority, write_authority, write_key
from tenantry.api import names
from tenantry.api.tls import Credentials
from tenantry.attestation.authority import Authority, AuthorityError, expiry, requested_key, utc
from tenantry.attestation.gate import Gate
from tenantry.attestation.trust import Trust

POOL = names.tls_name("pool-1")


def caller(folder: Path, authority: Authority, name: str = "gateway", seconds: int = 600) -> Credentials:
    """A part that calls engines, with its certificate in a folder."""
    folder.mkdir(exist_ok=True)
    key = Ed25519PrivateKey.generate()
    write_key(folder / "tls.key", key)
    certify(folder, authority, key, name, seconds=seconds)
    return Credentials(folder / "tls.crt", folder / "tls.key", folder / "ca.pem")


def certify(
    folder: Path,
    authority: Authority,
    key: Ed25519PrivateKey,
    name: str,
    *,
    client: bool = True,
    seconds: int = 600,
) -> None:
    pem = authority.issue(
        key.public_key(), names.tls_name(name), client=client, seconds=seconds, now=utc(time.time())
    )
    (folder / "tls.crt").write_text(pem)
    (folder / "ca.pem").write_text(authority.pem)


def engine(folder: Path, authority: Authority, pool: str = "pool-1") -> Credentials:
    """A replica's certificate, by way of its gate."""
    folder.mkdir(exist_ok=True)
    gate = Gate(folder, None)
    key = requested_key(gate.request())
    pem = authority.issue(key, names.tls_name(pool), client=False, seconds=600, now=utc(time.time()))
    gate.admit("", pem, authority.pem)
    return Credentials(folder / "tls.crt", folder / "tls.key", folder / "ca.pem")


@asynccontextmanager
async def echoing(context: ssl.SSLContext) -> AsyncIterator[int]:
    """Answers every line with itself."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line)
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echoed(port: int, context: ssl.SSLContext | None, name: str = POOL) -> bool:
    """Whether a line comes back; by TLS 1.3 a server refuses a client only after the client's handshake."""
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=name if context else None
            )
            writer.write(b"hello\n")
            line = await reader.readline()
            writer.close()
    except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
        return False
    return line == b"hello\n"


async def test_the_right_certificates_and_every_wrong_one(tmp_path: Path, authority: Authority) -> None:
    gateway = caller(tmp_path / "gateway", authority).client()
    async with echoing(engine(tmp_path / "engine", authority).server()) as port:
        assert await echoed(port, gateway)
        assert not await echoed(port, gateway, names.tls_name("pool-2")), "another pool's engine"
        assert not await echoed(port, None), "no TLS at all"
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.load_verify_locations(cadata=authority.pem)
        assert not await echoed(port, bare), "no certificate"
        stranger = make_authority()
        forged = caller(tmp_path / "forged", stranger)
        (tmp_path / "forged" / "ca.pem").write_text(authority.pem)
        assert not await echoed(port, forged.client()), "a certificate of another authority"
        neighbour = engine(tmp_path / "neighbour", authority, "pool-2")
        assert not await echoed(port, neighbour.client()), "an engine's certificate is no caller's"
        old = caller(tmp_path / "old", authority, seconds=1).client()
        await asyncio.sleep(1.1)  # its end is a time, there is nothing else to wait for
        assert not await echoed(port, old), "one that has ended"
        weak = caller(tmp_path / "weak", authority).client()
        weak.minimum_version, weak.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        assert not await echoed(port, weak), "an old protocol"
    async with echoing(engine(tmp_path / "fake", stranger).server()) as port:
        assert not await echoed(port, gateway), "an engine of another authority"


async def test_new_certificates_are_taken_while_a_stream_runs_on(
    tmp_path: Path, authority: Authority
) -> None:
    client, server = caller(tmp_path / "gateway", authority), engine(tmp_path / "engine", authority)
    context = client.client()
    async with echoing(server.server()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=POOL)
        writer.write(b"one\n")
        assert await reader.readline() == b"one\n"

        def serial() -> int:
            found = writer2.get_extra_info("ssl_object").getpeercert(True)
            return x509.load_der_x509_certificate(found).serial_number

        engine(tmp_path / "engine", authority)
        assert server.refresh()
        certify(
            tmp_path / "gateway",
            authority,
            _key(tmp_path / "gateway" / "tls.key"),
            "gateway",
        )
        assert client.refresh()
        _, writer2 = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=POOL)
        written = x509.load_pem_x509_certificate((tmp_path / "engine" / "tls.crt").read_bytes())
        assert serial() == written.serial_number, "a new connection meets the new certificate"
        writer.write(b"two\n")
        assert await reader.readline() == b"two\n", "the old stream runs on"
        (tmp_path / "engine" / "tls.crt").write_text("half of")
        assert not server.refresh()
        assert await echoed(port, context), "what does not fit together changes nothing"
        writer.close()
        writer2.close()


def _key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    return key


def test_the_operator_renews_its_own_at_half(tmp_path: Path, authority: Authority) -> None:
    key, now = write_key(tmp_path / "tls.key", Ed25519PrivateKey.generate()), time.time()
    trust = Trust.make(write_authority(tmp_path / "authority", authority), key, 600, now)

    def ends() -> float:
        return expiry(trust.credentials.certificate.read_text()) or 0.0

    first = ends()
    trust.renew(600, now + 200)
    assert ends() == first
    trust.renew(600, now + 301)
    assert ends() == pytest.approx(now + 901, abs=2)


async def test_a_renewed_authority_is_taken_and_what_the_one_before_signed_is_still_believed(
    tmp_path: Path, authority: Authority
) -> None:
    """By cert-manager its key stays; whoever has not heard of the new certificate yet is understood all the same."""
    source = write_authority(tmp_path / "authority", authority)
    key = write_key(tmp_path / "tls.key", Ed25519PrivateKey.generate())
    trust = Trust.make(source, key, 600, time.time())
    before = engine(tmp_path / "before", authority).server()
    renewed = make_authority(authority.key)
    write_authority(source, renewed)
    trust.renew(600, time.time())
    assert trust.authority.pem == renewed.pem
    assert trust.credentials.authority.read_text() == renewed.pem
    after = engine(tmp_path / "after", trust.authority).server()
    for server in (before, after):
        async with echoing(server) as port:
            for client in (trust.credentials, caller(tmp_path / "gateway", authority)):
                assert await echoed(port, client.client())


def test_an_authority_that_cannot_be_read_leaves_the_one_before(tmp_path: Path, authority: Authority) -> None:
    source = write_authority(tmp_path / "authority", authority)
    key = write_key(tmp_path / "tls.key", Ed25519PrivateKey.generate())
    trust = Trust.make(source, key, 600, time.time())
    (source / "tls.crt").write_text(make_authority().pem)  # its key comes a moment later
    trust.renew(600, time.time())
    assert trust.authority.pem == authority.pem


async def test_of_an_authority_under_a_root_that_one_alone_is_believed(tmp_path: Path) -> None:
    root = make_authority(name="a company's root")
    ours, other = (make_authority(under=root) for _ in range(2))
    gateway, stranger = (caller(tmp_path / name, one) for name, one in (("ours", ours), ("other", other)))
    (tmp_path / "other" / "ca.pem").write_text(ours.pem)
    async with echoing(engine(tmp_path / "engine", ours).server()) as port:
        assert await echoed(port, gateway.client())
        assert not await echoed(port, stranger.client()), "the same root signed for it"


def test_requests_are_believed_for_their_key_alone(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "run").mkdir()
    request = Gate(tmp_path / "run", None).request()
    key = requested_key(request)
    found = x509.load_pem_x509_certificate(
        authority.issue(key, POOL, client=False, seconds=60, now=utc(time.time())).encode()
    )
    assert found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    usage = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]
    for broken in ("", "x" * 9000, request[:-200], generate_private_key(SECP256R1()).__class__.__name__):
        with pytest.raises(AuthorityError, match="must"):
            requested_key(broken)
    with pytest.raises(AuthorityError, match="must hold"):
        Authority.load(tmp_path)
