"""Contract of the drivers with an HTTP server: what is sent, what is read, how each failure is told."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tenantry.api import names
from tenantry.api.identity import Signer, Verifier, key_id
from tenantry.engines import (
    AdapterDeclaration,
    AdapterState,
    ArtifactState,
    EngineError,
    Fence,
    FetcherClient,
    Pull,
    PushState,
    Replica,
    TenantryDriver,
)
from tenantry.engines.http import new_client

DIGEST = "sha256:" + "ab" * 32
NAME = "acme-ml.tone--1.0.0-abababababab"
REPORT: dict[str, Any] = {
    "fence": {"epoch": 3, "counter": 41},
    "ready": True,
    "draining": False,
    "model": {"name": "smollm2-135m", "digest": "sha256:" + "01" * 32},
    "capacity": {
        "maxRank": 64,
        "maxRegistered": 2000,
        "slots": 16,
        "pages": {"total": 512, "free": 400, "kv": 90, "adapter": 14, "cached": 8},
    },
    "adapters": [
        {
            "name": NAME,
            "digest": DIGEST,
            "tenant": "uid-1",
            "pinned": False,
            "state": "Registered",
            "reason": "",
            "message": "",
            "rank": 8,
            "pages": 0,
            "requests": 0,
        }
    ],
}


@dataclass
class Peer:
    """A server that answers with fixed bytes and remembers what it was sent."""

    answer: bytes = b""
    url: str = ""
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    hang: bool = False

    def say(self, status: int, body: object, *, length: int | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answer = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"content-length: {len(raw) if length is None else length}\r\nconnection: close\r\n\r\n"
        ).encode() + raw

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        start, *lines = head.split("\r\n")
        method, path, _ = start.split(" ")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.requests.append((method, path, headers, body))
        if self.hang:
            await reader.read()
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    state = Peer()
    server = await asyncio.start_server(state.handle, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield state
    server.close()


@pytest.fixture
def signer() -> Signer:
    return Signer(names.OPERATOR_ISSUER, Ed25519PrivateKey.generate())


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client(httpx.Timeout(5.0, read=0.5)) as client:
        yield client


@pytest.fixture
def driver(signer: Signer, client: httpx.AsyncClient) -> TenantryDriver:
    return TenantryDriver(signer, client)


def replica(url: str) -> Replica:
    return Replica(name="tenantry-system/pool-fast-0", url=url, audience="pool-uid")


def proven(signer: Signer, audience: str, request: tuple[str, str, dict[str, str], bytes]) -> dict[str, Any]:
    """The claims of the request's token, checked as a receiver checks them."""
    _, path, headers, body = request
    public = signer.key.public_key()
    verifier = Verifier(audience, {key_id(public): (signer.issuer, public)})
    token = headers["authorization"].removeprefix("Bearer ")
    return verifier.verify(token, {names.OPERATOR_ISSUER}, path, hashlib.sha256(body).hexdigest())


async def test_declare_sends_the_whole_set_signed(driver: TenantryDriver, signer: Signer, peer: Peer) -> None:
    peer.say(200, REPORT)
    adapters = [
        AdapterDeclaration("z.b--1.0.0-000000000000", "sha256:" + "00" * 32, "uid-2", True),
        AdapterDeclaration(NAME, DIGEST, "uid-1"),
    ]
    report = await driver.declare(replica(peer.url), adapters, Fence(3, 41), 60)
    method, path, _, body = peer.requests[0]
    assert (method, path) == ("PUT", "/admin/v1/adapters")
    assert json.loads(body) == {
        "fence": {"epoch": 3, "counter": 41},
        "drainSeconds": 60,
        "adapters": [
            {"name": NAME, "digest": DIGEST, "tenant": "uid-1", "pinned": False},
            {
                "name": "z.b--1.0.0-000000000000",
                "digest": "sha256:" + "00" * 32,
                "tenant": "uid-2",
                "pinned": True,
            },
        ],
    }
    proven(signer, "pool-uid", peer.requests[0])
    assert report.fence == Fence(3, 41) > Fence(2, 99)
    assert (report.capacity.max_rank, report.capacity.pages.free) == (64, 400)
    assert report.serves(NAME, DIGEST)
    assert not report.serves(NAME, "sha256:" + "cd" * 32)
    assert not report.serves("other", DIGEST)


@pytest.mark.parametrize(("state", "serves"), [(s, s in ("Registered", "Resident")) for s in AdapterState])
async def test_loaded_means_reported_with_that_digest(
    driver: TenantryDriver, peer: Peer, state: AdapterState, serves: bool
) -> None:
    peer.say(200, REPORT | {"adapters": [REPORT["adapters"][0] | {"state": state.value}]})
    report = await driver.observe(replica(peer.url))
    assert report.serves(NAME, DIGEST) is serves


async def test_observe_and_drain(driver: TenantryDriver, signer: Signer, peer: Peer) -> None:
    peer.say(200, REPORT | {"news": "a field of a later release"})
    await driver.observe(replica(peer.url))
    peer.say(200, {})
    await driver.drain(replica(peer.url))
    assert [r[:2] for r in peer.requests] == [("GET", "/admin/v1/adapters"), ("POST", "/admin/v1/drain")]
    claims = [proven(signer, "pool-uid", request) for request in peer.requests]
    assert claims[0]["jti"] != claims[1]["jti"]


async def test_an_error_keeps_the_peers_code_and_cause(driver: TenantryDriver, peer: Peer) -> None:
    peer.say(409, {"error": {"message": "epoch 3 is over", "type": "x", "param": None, "code": "fenced"}})
    with pytest.raises(EngineError) as caught:
        await driver.declare(replica(peer.url), [], Fence(), 0)
    error = caught.value
    assert (error.status, error.code, error.cause, error.answered) == (409, "fenced", "epoch 3 is over", True)
    assert str(error) == (
        "PUT /admin/v1/adapters at tenantry-system/pool-fast-0: HTTP 409 fenced: epoch 3 is over"
    )


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"<html>upstream gone</html>", "<html>upstream gone</html>"),
        (b"", "no cause given"),
        (b'{"error": "text"}', '{"error": "text"}'),
        (b'{"error": {"code": 7, "message": null}}', "no cause given"),
        (b"[" * 5000, "[" * 512),
    ],
)
async def test_an_error_without_our_form_keeps_its_status(
    driver: TenantryDriver, peer: Peer, body: bytes, cause: str
) -> None:
    peer.say(503, body)
    with pytest.raises(EngineError) as caught:
        await driver.observe(replica(peer.url))
    assert (caught.value.status, caught.value.code, caught.value.cause) == (503, "http_503", cause)


async def test_an_error_whose_body_is_cut_keeps_its_status(driver: TenantryDriver, peer: Peer) -> None:
    peer.say(500, b'{"error": {"mess', length=900)
    with pytest.raises(EngineError) as caught:
        await driver.observe(replica(peer.url))
    assert (caught.value.status, caught.value.code) == (500, "http_500")
    assert caught.value.cause


@pytest.mark.parametrize(
    "change",
    [
        {"adapters": [{"name": NAME}]},
        {"adapters": [REPORT["adapters"][0] | {"state": "loaded ok"}]},
        {"fence": {"epoch": -1, "counter": 0}},
        {"capacity": None},
    ],
)
async def test_an_answer_that_is_not_understood_is_an_error(
    driver: TenantryDriver, peer: Peer, change: dict[str, Any]
) -> None:
    peer.say(200, REPORT | change)
    with pytest.raises(EngineError) as caught:
        await driver.observe(replica(peer.url))
    assert (caught.value.status, caught.value.code) == (200, "invalid_answer")
    assert next(iter(change)) in caught.value.cause


async def test_no_listener_and_no_answer(driver: TenantryDriver, peer: Peer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(EngineError) as caught:
            await driver.observe(replica(f"http://127.0.0.1:{taken.getsockname()[1]}"))
    assert (caught.value.status, caught.value.code) == (None, "unreachable")
    peer.hang = True
    with pytest.raises(EngineError) as caught:
        await driver.observe(replica(peer.url))
    assert (caught.value.status, caught.value.code) == (None, "timeout")
    assert caught.value.cause


async def test_a_redirect_is_not_followed(driver: TenantryDriver, peer: Peer) -> None:
    peer.answer = (
        b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )
    with pytest.raises(EngineError) as caught:
        await driver.observe(replica(peer.url))
    assert caught.value.status == 307
    assert len(peer.requests) == 1


async def test_transfer(signer: Signer, client: httpx.AsyncClient, peer: Peer) -> None:
    fetcher = FetcherClient(signer, peer.url, client)
    target = replica("http://10.0.0.7:8001")
    peer.say(
        200,
        {
            "digest": DIGEST,
            "artifact": {"state": "Verified", "reason": "", "message": "", "bytes": 10},
            "adapter": {"rank": 8, "baseModel": "smollm2-135m", "targetModules": ["q_proj"]},
            "replicas": [{"name": target.name, "state": "Pushing", "reason": "", "message": ""}],
        },
    )
    transfer = await fetcher.transfer(Pull(DIGEST, "oci://registry/acme/tone:1"), [target])
    assert json.loads(peer.requests[0][3]) == {
        "digest": DIGEST,
        "source": "oci://registry/acme/tone:1",
        "replicas": [{"name": target.name, "url": target.url, "audience": "pool-uid"}],
    }
    proven(signer, names.FETCHER_AUDIENCE, peer.requests[0])
    assert transfer.artifact.state is ArtifactState.VERIFIED
    assert transfer.adapter is not None
    assert transfer.adapter.target_modules == ("q_proj",)
    assert transfer.replicas[0].state is PushState.PUSHING
    assert not transfer.final


async def test_a_secret_never_stands_in_an_error(driver: TenantryDriver, peer: Peer) -> None:
    peer.say(401, {"error": {"message": "unknown key", "code": "unauthorized"}})
    with pytest.raises(EngineError) as caught:
        await driver.observe(replica(peer.url))
    token = peer.requests[0][2]["authorization"].removeprefix("Bearer ")
    assert token not in str(caught.value)
    assert token not in repr(driver.__dict__)
