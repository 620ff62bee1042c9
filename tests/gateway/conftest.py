"""A whole gateway on loopback in front of engines that tests direct."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from cluster.pki import certify
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tenantry.api import names
from tenantry.api.identity import Signer, Verifier
from tenantry_gateway.main import Gateway, server
from tenantry_gateway.settings import Settings, Timeouts
from tenantry_gateway.state import State

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

from gateway_fakes import Engine, endpoint_slice
from gateway_world import AUDIENCE, FAST, SALT, Identity, World, until


@pytest.fixture(scope="session")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    """The gateway's key and the certificate that engines hold."""
    folder = tmp_path_factory.mktemp("identity")
    key = certify(folder, names.GATEWAY_ISSUER)
    private = folder / "tls.key"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Identity(
        private, folder, Signer.load(names.GATEWAY_ISSUER, private), Verifier.load(AUDIENCE, folder)
    )


@pytest.fixture(scope="session")
def engine_ports() -> tuple[int, int]:
    """Two ports that are free on every loopback address; engines differ by address, as pods do."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("0.0.0.0", 0))
        second.bind(("0.0.0.0", 0))
        return first.getsockname()[1], second.getsockname()[1]


@pytest.fixture
def timeouts() -> Timeouts:
    """Overridden by tests that wait for one to pass."""
    return FAST


@pytest.fixture
async def world(
    identity: Identity, engine_ports: tuple[int, int], tmp_path: Path, timeouts: Timeouts
) -> AsyncIterator[World]:
    """A gateway that serves tenant `acme`, with two engines."""
    engines = [Engine(identity.verifier, {"base"}, f"127.0.0.{index + 2}") for index in range(2)]
    for engine in engines:
        await engine.start(*engine_ports)
    settings = Settings(
        identity_key=identity.key,
        salt_file=identity.key,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        host="127.0.0.1",
        port=0,
        max_body_bytes=100_000,
        engine_port=engine_ports[0],
        engine_admin_port=engine_ports[1],
        timeouts=timeouts,
    )
    gateway = Gateway(settings, State(), identity.signer, SALT, poll_seconds=0.05)
    await gateway.start()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    front = server(gateway.api, settings, 0)
    serving = asyncio.create_task(front.serve(sockets=[listener]))
    found = World(gateway, engines, f"http://127.0.0.1:{listener.getsockname()[1]}", engine_ports)
    found.state.replace_tenants([])
    found.state.replace_slices(
        [endpoint_slice({f"base-fast-{index}": engine.host for index, engine in enumerate(engines)})]
    )
    found.put("acme")
    await until(lambda: front.started and all(r.answers for r in gateway.replicas.all()))
    yield found
    for client in found.clients:
        await (client.close() if isinstance(client, openai.AsyncOpenAI) else client.aclose())
    front.should_exit = True
    await serving
    await gateway.stop()
    for engine in engines:
        await engine.stop()
    for engine in engines:
        assert engine.refused == []
