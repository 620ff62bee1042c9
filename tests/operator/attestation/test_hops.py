"""Every hop to a real engine by mutual TLS: operator, fetcher and gateway with their certificates, and without."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cluster.pki import certify
from cluster.process import dying_with_me, free_port
from cryptography import x509
from support.trust import make_authority, write_authority, write_key
from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry.api.tls import Credentials
from tenantry.attestation.authority import Authority, requested_key, utc
from tenantry.attestation.gate import Gate
from tenantry.attestation.trust import Trust
from tenantry.controllers import strangers
from tenantry.engines import EngineError, Fence, Replica, TenantryDriver
from tenantry.engines.http import new_client
from tenantry.fetcher.push import Pusher, PushError
from tenantry_gateway.upstream import Upstream, UpstreamError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))

from engine_world import TinyModel  # type: ignore[import-not-found, unused-ignore]

POOL = "0f0e-pool"


@dataclass
class Hops:
    """An engine process behind its gate's certificate, and the keys of those who call it."""

    run: Path
    authority: Authority
    identities: dict[str, Path]
    port: int
    admin_port: int
    health_port: int

    @property
    def replica(self) -> Replica:
        return Replica("tenant-oak/tenant-oak-fast-0", f"https://127.0.0.1:{self.admin_port}", POOL)

    def signer(self, issuer: str) -> Signer:
        return Signer.load(issuer, self.identities[issuer])

    def credentials(self, issuer: str, folder: Path, authority: Authority | None = None) -> Credentials:
        """What the operator publishes for a part, with the key that the part holds."""
        signs = authority or self.authority
        folder.mkdir(exist_ok=True)
        part = issuer.removeprefix("tenantry-")
        key = self.signer(issuer).key.public_key()
        pem = signs.issue(key, names.tls_name(part), client=True, seconds=600, now=utc(time.time()))
        (folder / f"{part}.crt").write_text(pem)
        (folder / "ca.pem").write_text(self.authority.pem)
        return Credentials(folder / f"{part}.crt", self.identities[issuer], folder / "ca.pem")

    def certify(self) -> x509.Certificate:
        """The engine's certificate, anew, as gate and operator do it."""
        gate = Gate(self.run, None)
        key = requested_key(gate.request())
        pem = self.authority.issue(key, names.tls_name(POOL), client=False, seconds=600, now=utc(time.time()))
        gate.admit("", pem, self.authority.pem)
        return x509.load_pem_x509_certificate(pem.encode())


@pytest.fixture(scope="module")
def hops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hops]:
    folder = tmp_path_factory.mktemp("hops")
    identity, run = folder / "identity", folder / "run"
    for made_before in (identity, run, folder / "tiny"):
        made_before.mkdir()
    issuers = (names.OPERATOR_ISSUER, names.FETCHER_ISSUER, names.GATEWAY_ISSUER)
    keys = {issuer: certify(identity, issuer) for issuer in issuers}
    paths = {}
    for issuer, key in keys.items():
        paths[issuer] = write_key(folder / f"{issuer}.key", key)
    # One that stands below a company's root, as cert-manager may make it.
    authority = make_authority(under=make_authority(name="a company's root"))
    made = Hops(run, authority, paths, free_port(), free_port(), free_port())
    made.certify()
    model = TinyModel.make(folder / "tiny")
    command = [
        sys.executable, "-m", "tenantry_engine.main", "--model", model.folder, "--model-name", "tiny",
        "--audience", POOL, "--identity-dir", identity, "--data-dir", folder / "data", "--dtype", "float32",
        "--port", str(made.port), "--admin-port", str(made.admin_port), "--tls-dir", run,
        "--health-port", str(made.health_port), "--max-rank", "8", "--slots", "2", "--threads", "1",
    ]  # fmt: skip
    process = subprocess.Popen(dying_with_me(command))
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, "the engine ended"
        assert time.monotonic() < deadline, "the engine is not ready"
        try:
            if httpx.get(f"http://127.0.0.1:{made.health_port}/readyz", trust_env=False).status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.1)
    yield made
    process.terminate()
    assert process.wait(60) == 0


async def test_operator_fetcher_and_gateway_reach_the_engine(hops: Hops, tmp_path: Path) -> None:
    authority = write_authority(tmp_path / "authority", hops.authority)
    trust = Trust.make(authority, hops.identities[names.OPERATOR_ISSUER], 600, time.time())
    async with new_client(credentials=trust.credentials) as client:
        driver = TenantryDriver(hops.signer(names.OPERATOR_ISSUER), client)
        assert (await driver.observe(hops.replica)).ready
        await driver.declare(hops.replica, [], Fence(1, 1), 0)
    blob = tmp_path / "blob"
    blob.write_bytes(b"x")
    async with new_client(credentials=hops.credentials(names.FETCHER_ISSUER, tmp_path / "fetcher")) as client:
        pusher = Pusher(hops.signer(names.FETCHER_ISSUER), client)
        with pytest.raises(PushError, match="not_wanted"):
            await pusher.push(hops.replica.url, POOL, "sha256:" + "a" * 64, blob)
    gateway = hops.credentials(names.GATEWAY_ISSUER, tmp_path / "gateway")
    upstream = Upstream(tls=gateway.client())
    assert await _models(upstream, hops.port, names.tls_name(POOL)) == ["tiny"]
    upstream.close()


async def _models(upstream: Upstream, port: int, server: str | None) -> list[str]:
    answer = await upstream.request(
        "GET", ("127.0.0.1", port), "/v1/models", headers={}, body=b"", head_timeout=20, server=server
    )
    body = json.loads(await answer.read_all(20, 1 << 20))
    return [model["id"] for model in body["data"]]


async def test_nobody_else_does(hops: Hops, tmp_path: Path) -> None:
    stranger = make_authority()
    gateway = hops.credentials(names.GATEWAY_ISSUER, tmp_path / "good")
    forged = hops.credentials(names.GATEWAY_ISSUER, tmp_path / "forged", stranger)
    neighbour = Credentials(hops.run / "tls.crt", hops.run / "tls.key", hops.run / "ca.pem")
    for port in (hops.port, hops.admin_port):
        for what, tls, server in (
            ("no TLS", None, None),
            ("a certificate of another authority", forged.client(), names.tls_name(POOL)),
            ("an engine's certificate", neighbour.client(), names.tls_name(POOL)),
            ("the engine of another pool", gateway.client(), names.tls_name("another-pool")),
        ):
            upstream = Upstream(tls=tls)
            with pytest.raises(UpstreamError):
                await _models(upstream, port, server)
                pytest.fail(what)
            upstream.close()
    with pytest.raises(UpstreamError, match="no certificate"):
        await _models(Upstream(), hops.port, names.tls_name(POOL))
    signer = hops.signer(names.OPERATOR_ISSUER)
    async with new_client() as client:
        with pytest.raises(EngineError):
            await TenantryDriver(signer, client).observe(hops.replica)
        plain = Replica("x", hops.replica.url.replace("https", "http"), POOL)
        with pytest.raises(EngineError):
            await TenantryDriver(signer, client).observe(plain)
    async with httpx.AsyncClient(trust_env=False) as client:
        for path in ("/metrics", "/admin/v1/adapters", "/v1/models"):
            answer = await client.get(f"http://127.0.0.1:{hops.health_port}{path}")
            assert answer.status_code == 404, "the health port says nothing else"


async def test_a_new_certificate_is_met_by_new_connections_alone(hops: Hops, tmp_path: Path) -> None:
    gateway = hops.credentials(names.GATEWAY_ISSUER, tmp_path / "gateway")
    context = gateway.client()
    upstream = Upstream(tls=context)
    assert await _models(upstream, hops.port, names.tls_name(POOL)) == ["tiny"]
    [kept] = [connection for idle in upstream._idle.values() for connection in idle]
    wanted = hops.certify().serial_number
    deadline = time.monotonic() + 30
    while _serial(hops.port, context) != wanted:
        assert time.monotonic() < deadline, "the engine has not taken its new certificate"
    assert not kept.closed, "a connection that stands is not touched"
    upstream.close()


def _serial(port: int, context: ssl.SSLContext) -> int:
    with (
        socket.create_connection(("127.0.0.1", port), 10) as raw,
        context.wrap_socket(raw, server_hostname=names.tls_name(POOL)) as found,
    ):
        certificate = found.getpeercert(True)
        assert certificate is not None
        return x509.load_der_x509_certificate(certificate).serial_number


async def test_a_stranger_is_refused_and_that_is_what_is_claimed(hops: Hops) -> None:
    url = hops.replica.url
    found = await strangers.look({"fast-0": url}, {"fast-0": True}, 7.0)
    assert (found.holds, found.at) == (True, 7.0), found
    assert found.facts == ("fast-0: without TLS refused, without a certificate refused",)
    unheard = await strangers.look({"fast-0": url}, {"fast-0": False}, 7.0)
    assert (unheard.holds, unheard.blind) == (None, True), "a port that refuses everybody proves nothing"
    bare = await strangers.look(
        {"fast-0": url, "fast-1": f"http://127.0.0.1:{hops.health_port}"},
        {"fast-0": True, "fast-1": True},
        7.0,
    )
    assert (bare.holds, bare.reason) == (False, "replica `fast-1` answers without TLS")


async def test_tls_alone_is_not_enough(hops: Hops, tmp_path: Path) -> None:
    """A server with TLS that asks nobody for a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(hops.run / "tls.crt", hops.run / "tls.key")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found = await strangers.look({"fast-0": url}, {"fast-0": True}, 7.0)
    assert (found.holds, found.reason) == (False, "replica `fast-0` answers whoever shows no certificate")
    gone = await strangers.look({"fast-0": url}, {"fast-0": True}, 7.0)
    assert (gone.holds, gone.blind) == (None, True)
