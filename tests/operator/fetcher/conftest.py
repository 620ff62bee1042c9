"""A real OCI registry process, a registry that lies on demand, a replica that takes blobs, and small true adapters."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.binaries import ensure
from cluster.pki import certify
from cluster.process import free_port
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tenantry.api import names
from tenantry.api.identity import IdentityError, Signer, Verifier
from tenantry.engines import Pull, Replica, Transfer
from tenantry.fetcher.errors import FetchError
from tenantry.fetcher.net import OriginPolicy
from tenantry.fetcher.sources import Sources
from tenantry.fetcher.transfers import Transfers
from tenantry.fetcher.trust import Trust

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
TITLE = "org.opencontainers.image.title"


def sha256(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


@dataclass(frozen=True)
class Files:
    """The two files of an adapter, as bytes."""

    config: bytes
    weights: bytes

    @property
    def digest(self) -> str:
        return sha256(self.blob)

    @property
    def blob(self) -> bytes:
        return b"".join(struct.pack("<Q", len(part)) + part for part in (self.config, self.weights))

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_bytes(self.config)
        (folder / "adapter_model.safetensors").write_bytes(self.weights)
        return folder


def safetensors(header: object, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def adapter(rank: int = 4, fill: int = 0, **changes: Any) -> Files:
    """A PEFT adapter of one module; `fill` gives it bytes of its own, `changes` alter the configuration."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "base_model_name_or_path": "smollm2-135m",
        "target_modules": ["q_proj"],
        **changes,
    }
    size = rank * 16 * 4
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    header = {
        "__metadata__": {"format": "pt"},
        f"{stem}.lora_A.weight": {"dtype": "F32", "shape": [rank, 16], "data_offsets": [0, size]},
        f"{stem}.lora_B.weight": {"dtype": "F32", "shape": [16, rank], "data_offsets": [size, 2 * size]},
    }
    return Files(json.dumps(config).encode(), safetensors(header, bytes([fill]) * 2 * size))


def descriptor(raw: bytes, title: str, media: str = "application/octet-stream") -> dict[str, Any]:
    return {"mediaType": media, "digest": sha256(raw), "size": len(raw), "annotations": {TITLE: title}}


def manifest(files: Files) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": "application/vnd.tenantry.adapter.v1",
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(b"{}"), "size": 2},
        "layers": [
            descriptor(files.config, "adapter_config.json"),
            descriptor(files.weights, "adapter_model.safetensors"),
        ],
    }


@dataclass
class Answer:
    """What a scripted server sends. `length` lies about the size, `hang` never ends it, `drip` sends it bytewise."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: int | None = None
    length_text: str | None = None
    hang: bool = False
    drip: bool = False


@dataclass
class Scripted:
    """An HTTP server that does as it is told and remembers what it was asked."""

    port: int = 0
    routes: dict[str, Answer | Callable[[dict[str, str]], Answer]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def origin(self) -> str:
        return f"127.0.0.1:{self.port}"

    def serve(self, files: Files, manifest_changes: Callable[[dict[str, Any]], Any] = lambda m: m) -> str:
        """Offer an adapter and return its source."""
        document = manifest_changes(manifest(files))
        self.routes["/v2/acme/tone/manifests/1.0.0"] = Answer(
            headers={"content-type": MANIFEST},
            body=document if isinstance(document, bytes) else json.dumps(document).encode(),
        )
        for raw in (files.config, files.weights):
            self.routes[f"/v2/acme/tone/blobs/{sha256(raw)}"] = Answer(body=raw)
        return f"oci://{self.origin}/acme/tone:1.0.0"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            target = start.split(" ")[1]
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
            self.asked.append((target, headers))
            route = self.routes.get(target.partition("?")[0], Answer(404))
            answer = route(headers) if callable(route) else route
            length = len(answer.body) if answer.length is None else answer.length
            size = f"content-length: {length if answer.length_text is None else answer.length_text}\r\n"
            if answer.length_text == "":
                size = ""
            extra = "".join(f"{k}: {v}\r\n" for k, v in answer.headers.items())
            writer.write(f"HTTP/1.1 {answer.status} X\r\n{size}connection: close\r\n{extra}\r\n".encode())
            for byte in answer.body if answer.drip else b"":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.1)
            writer.write(answer.body)
            await writer.drain()
            if answer.hang:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def scripted() -> AsyncIterator[Callable[[], Any]]:
    """A factory of scripted servers."""
    servers: list[asyncio.Server] = []

    async def start() -> Scripted:
        state = Scripted()
        server = await asyncio.start_server(state.handle, "127.0.0.1", 0)
        servers.append(server)
        state.port = server.sockets[0].getsockname()[1]
        return state

    yield start
    for server in servers:
        server.close()


@dataclass
class Engine:
    """A replica's blob route: verifies token and bytes, then remembers them."""

    verifier: Verifier
    url: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    puts: int = 0
    fail: list[tuple[int, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = start.split(" ")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            status, code = self._take(method, path, headers, body)
            answer = json.dumps({"error": {"message": code, "code": code}} if status >= 300 else {}).encode()
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _take(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str]:
        self.puts += 1
        if self.fail:
            return self.fail.pop(0)
        digest = path.removeprefix("/admin/v1/blobs/")
        token = headers["authorization"].removeprefix("Bearer ")
        try:
            self.verifier.verify(token, {names.FETCHER_ISSUER}, path, digest.removeprefix("sha256:"))
        except IdentityError as error:
            self.refused.append(str(error))
            return 401, "unauthorized"
        if method != "PUT" or sha256(body) != digest:
            return 400, "digest_mismatch"
        if digest in self.blobs:
            return 200, ""
        self.blobs[digest] = body
        return 201, ""


@dataclass(frozen=True)
class Identities:
    """Keys and certificates on disk, as the processes find them."""

    folder: Path
    fetcher_key: Path
    operator: Signer


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    folder = tmp_path / "identity"
    keys = {issuer: certify(folder, issuer) for issuer in (names.OPERATOR_ISSUER, names.FETCHER_ISSUER)}
    path = tmp_path / "fetcher.key"
    path.write_bytes(
        keys[names.FETCHER_ISSUER].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return Identities(folder, path, Signer(names.OPERATOR_ISSUER, keys[names.OPERATOR_ISSUER]))


@pytest.fixture
async def engine(identities: Identities) -> AsyncIterator[Engine]:
    state = Engine(Verifier.load("pool-uid", identities.folder))
    server = await asyncio.start_server(state.handle, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield state
    server.close()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the process answers 200; fails when it ends or takes longer than a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the process ended with {process.returncode}"
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"{url} did not answer within a minute")


class KeptSecrets:
    """Secrets without a cluster, by name."""

    def __init__(self, **secrets: dict[str, str]) -> None:
        self._secrets = secrets

    async def read(self, namespace: str, name: str) -> dict[str, bytes]:
        return {key: value.encode() for key, value in self._secrets[name].items()}

    async def close(self) -> None:
        return None


def sources(
    *origins: str, max_bytes: int = 1 << 20, trust: Path | None = None, **secrets: dict[str, str]
) -> Sources:
    """What reads these origins by plain HTTP, with these Secrets."""
    policy = OriginPolicy.build(origins, origins, True)
    kept: Any = KeptSecrets(**secrets)
    return Sources(policy, max_bytes, 10, secrets=kept, trust=Trust(trust))


async def refused(reader: Sources, pull: Pull, target: Path) -> FetchError:
    with pytest.raises(FetchError) as caught:
        await reader.pull(pull, target)
    return caught.value


async def settle(transfers: Transfers, pull: Pull, *replicas: Replica) -> Transfer:
    """Ask until every state is final."""
    async with asyncio.timeout(20):
        transfer = transfers.ask(pull, replicas)
        while not transfer.final:
            await asyncio.sleep(0.005)
            transfer = transfers.ask(pull, replicas)
        return transfer


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until the process takes connections; fails when it ends or takes longer than a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the process ended with {process.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"port {port} took no connection within a minute")


@pytest.fixture(scope="session")
def registry() -> Iterator[str]:
    """`host:port` of a real OCI registry process (go-containerregistry's)."""
    port = free_port()
    crane = ensure(["crane"])["crane"]
    process = subprocess.Popen(
        [crane, "registry", "serve", "--address", f"127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/v2/", process)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
