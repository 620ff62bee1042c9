"""The process as a pod runs it: real API server, real signals, real files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster.process import free_port
from gateway_fakes import Behaviour, Engine, endpoint_slice, tenant
from gateway_world import chat, error_of, until, until_answer
from tenantry.api import keys

if TYPE_CHECKING:
    from gateway_world import Identity

    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver
REPOSITORY = Path(__file__).resolve().parents[2]


def own_address() -> str:
    """An address of this machine that is not loopback: the API server takes no other in an EndpointSlice."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


@dataclass
class Process:
    """`tenantry-gateway` as a child, and what it logged."""

    folder: Path
    arguments: list[str]
    port: int = 0
    metrics_port: int = 0
    child: subprocess.Popen[bytes] | None = None
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "gateway.log"

    def launch(self) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from tenantry_gateway.main import main; main()"),
                    *(
                        "--host",
                        "127.0.0.1",
                        "--port",
                        str(self.port),
                        "--metrics-port",
                        str(self.metrics_port),
                    ),
                    *("--ledger", f"sqlite:///{self.folder}/ledger.db", "--drain-seconds", "0.2"),
                    *self.arguments,
                ],
                stdout=log,
                stderr=log,
            )

    async def start(self) -> None:
        """Returns once it is ready."""
        self.launch()
        await until_answer(self.readiness, 200, 40)

    async def readiness(self) -> int:
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"http://127.0.0.1:{self.metrics_port}/readyz")).status_code
        except httpx.TransportError:
            return 0

    def client(self, key: str) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", headers={"authorization": f"Bearer {key}"}, timeout=10
        )
        self.clients.append(client)
        return client

    async def end(self, how: signal.Signals) -> int:
        assert self.child is not None
        self.child.send_signal(how)
        return await asyncio.to_thread(self.child.wait, 20)

    def ledger(self) -> list[dict[str, Any]]:
        connection = sqlite3.connect(self.folder / "ledger.db")
        connection.row_factory = sqlite3.Row
        try:
            rows = connection.execute(
                "SELECT * FROM opened o LEFT JOIN closed c ON c.id = o.id ORDER BY o.id"
            )
            return [dict(row) for row in rows]
        finally:
            connection.close()


class Cluster:
    """Writes the objects that the operator and the endpoint controller would write."""

    def __init__(self, apiserver: ApiServer) -> None:
        self.apiserver = apiserver
        self.key = keys.mint("gwp").key

    def tenant(self, **options: Any) -> None:
        """Applies Tenant `gwp` with its status."""
        hashes = options.pop("hashes", [keys.hash_key(self.key)])
        entries = [{"name": f"key-{index}", "sha256": sha256} for index, sha256 in enumerate(hashes)]
        whole = tenant("gwp", entries, **options)
        whole["metadata"] = {"name": "gwp"}
        status = whole.pop("status")
        self.apiserver.kubectl("apply", "-f", "-", text=json.dumps(whole))
        patch = json.dumps({"status": status})
        self.apiserver.kubectl("patch", "tenant", "gwp", "--subresource=status", "--type=merge", "-p", patch)

    def endpoints(self, hosts: dict[str, str]) -> None:
        part = endpoint_slice(hosts)
        part["metadata"] |= {"namespace": "gwp-system", "name": "base-fast-gwp"}
        part["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "tenantry"
        for endpoint in part["endpoints"]:
            endpoint["targetRef"]["namespace"] = "gwp-system"
        whole = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8000}],
            **part,
        }
        self.apiserver.kubectl("apply", "-f", "-", text=json.dumps(whole))


@pytest.fixture(scope="module")
def cluster(apiserver: ApiServer) -> Cluster:
    apiserver.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
    deadline = time.monotonic() + 30
    while apiserver.kubectl("get", "tenants", check=False).returncode != 0:
        assert time.monotonic() < deadline, "the API server does not serve Tenants"
        time.sleep(0.1)
    apiserver.kubectl("create", "namespace", "gwp-system")
    found = Cluster(apiserver)
    found.tenant()
    return found


LANES = [{"name": "fast", "service": "base-fast", "slots": 16, "replicas": ["base-fast-0"]}]


@pytest.fixture
async def process(
    cluster: Cluster, identity: Identity, engine_ports: tuple[int, int], tmp_path: Path
) -> AsyncIterator[Process]:
    """Started with rights to list and watch its two kinds, and to nothing else."""
    salt = tmp_path / "salt"
    salt.write_bytes(os.urandom(32))
    rights = cluster.apiserver.client("tenantry-gateway-test", "tenantry-gateway-test")
    roles = ("--verb=list,watch", "--resource=tenants.tenantry.dev,endpointslices.discovery.k8s.io")
    apply = ("--dry-run=client", "-o", "json")
    for made in (
        cluster.apiserver.kubectl("create", "clusterrole", "gwp", *roles, *apply).stdout,
        cluster.apiserver.kubectl(
            "create", "clusterrolebinding", "gwp", "--clusterrole=gwp", "--user=tenantry-gateway-test", *apply
        ).stdout,
    ):
        cluster.apiserver.kubectl("apply", "-f", "-", text=made)
    found = Process(
        tmp_path,
        [
            *("--identity-key", str(identity.key), "--salt-file", str(salt), "--kubeconfig", str(rights)),
            *("--engine-port", str(engine_ports[0]), "--engine-admin-port", str(engine_ports[1])),
        ],
    )
    yield found
    for client in found.clients:
        await client.aclose()
    if found.child is not None and found.child.poll() is None:
        found.child.kill()
        found.child.wait()


@pytest.fixture
async def engine(
    cluster: Cluster, identity: Identity, engine_ports: tuple[int, int]
) -> AsyncIterator[Engine]:
    """The one replica of the pool; verifies tokens for the pool uid that the route names."""
    found = Engine(identity.verifier, {"base"}, own_address())
    await found.start(*engine_ports)
    cluster.tenant(lanes=LANES, namespace="gwp-system")
    cluster.endpoints({"base-fast-0": found.host})
    yield found
    await found.stop()
    assert found.refused == []


async def served(client: httpx.AsyncClient) -> int:
    return (await client.post("/v1/chat/completions", json=chat())).status_code


async def until_served(client: httpx.AsyncClient) -> None:
    await until_answer(lambda: served(client), 200)


async def test_changes_of_a_tenant_reach_the_data_path_in_two_seconds(
    cluster: Cluster, process: Process, engine: Engine
) -> None:
    await process.start()
    client = process.client(cluster.key)
    await until_served(client)

    second = keys.mint("gwp").key
    both = [keys.hash_key(cluster.key), keys.hash_key(second)]
    await asyncio.to_thread(cluster.tenant, lanes=LANES, namespace="gwp-system", hashes=both)
    await until_answer(lambda: served(process.client(second)), 200, 2)
    assert await served(client) == 200, "the first key serves on while both are valid"

    await asyncio.to_thread(cluster.tenant, lanes=LANES, namespace="gwp-system", hashes=both[1:])
    await until_answer(lambda: served(client), 401, 2)
    assert await served(process.client(second)) == 200

    limits = {"maxOutputTokens": 5}
    await asyncio.to_thread(
        cluster.tenant, lanes=LANES, namespace="gwp-system", hashes=both[1:], limits=limits
    )

    async def rejected_field() -> int:
        answer = await process.client(second).post("/v1/chat/completions", json=chat(max_tokens=6))
        return answer.status_code

    await until_answer(rejected_field, 400, 2)

    await asyncio.to_thread(
        cluster.tenant, lanes=LANES, namespace="gwp-system", hashes=both[1:], suspend=True
    )
    await until_answer(lambda: served(process.client(second)), 403, 2)


async def test_sigterm_finishes_streams_and_writes_the_ledger(
    cluster: Cluster, process: Process, engine: Engine
) -> None:
    release = asyncio.Event()

    async def each(index: int) -> None:
        if index == 1:
            await release.wait()

    await process.start()
    client = process.client(cluster.key)
    await until_served(client)
    engine.behaviour = Behaviour(each=each)
    lines: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
        async for line in answer.aiter_lines():
            if line and not lines:
                ending = asyncio.create_task(process.end(signal.SIGTERM))
                await until_answer(process.readiness, 503)
                release.set()
            lines.append(line)
    assert "data: [DONE]" in lines
    assert await ending == 0, process.log.read_text()
    last = process.ledger()[-1]
    assert (last["outcome"], last["output_tokens"], last["stream"]) == ("done", 3, 1)
    text = process.log.read_text()
    assert cluster.key not in text
    assert "hello there" not in text
    assert all(json.loads(line) for line in text.splitlines()), "every line is JSON"


async def test_sigkill_leaves_records_that_the_next_start_closes(
    cluster: Cluster, process: Process, engine: Engine
) -> None:
    never = asyncio.Event()

    async def each(_index: int) -> None:
        await never.wait()

    await process.start()
    client = process.client(cluster.key)
    await until_served(client)
    engine.behaviour = Behaviour(each=each)
    before = len(engine.calls)
    hanging = asyncio.create_task(client.post("/v1/chat/completions", json=chat(max_tokens=7)))
    await until(lambda: len(engine.calls) > before)
    await process.end(signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        await hanging
    left = [row["outcome"] for row in process.ledger() if row["outcome"] != "done"]
    assert left == [None], "the opened record was durable before dispatch"

    await process.start()
    (last,) = (row for row in process.ledger() if row["outcome"] != "done")
    assert (last["outcome"], last["estimated"], last["output_tokens"]) == ("unknown", 1, 7)
    answer = await process.client(cluster.key).get("/v1/usage")
    assert answer.json()["total_tokens"] == sum(
        r["input_tokens"] + r["output_tokens"] for r in process.ledger()
    )


class Cable:
    """A TCP proxy in front of the API server that can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._pipes: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def plug(self) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pipe = asyncio.create_task(self._pipe(source, sink))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    @staticmethod
    async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()


async def test_without_the_api_server_traffic_flows_on_and_a_new_gateway_refuses(
    cluster: Cluster, process: Process, engine: Engine, tmp_path: Path
) -> None:
    kubeconfig = Path(process.arguments[process.arguments.index("--kubeconfig") + 1])
    config = kubeconfig.read_text()
    host, _, port = config.partition("server: https://")[2].split()[0].partition(":")
    cable = Cable(int(port))
    await cable.plug()
    ours = tmp_path / "kubeconfig"
    ours.write_text(config.replace(f"https://{host}:{port}", f"https://127.0.0.1:{cable.port}"))
    process.arguments[process.arguments.index(str(kubeconfig))] = str(ours)

    await process.start()
    client = process.client(cluster.key)
    await until_served(client)
    await cable.cut()
    for _ in range(5):
        assert await served(client) == 200
    assert await process.readiness() == 200

    late = keys.mint("gwp").key
    both = [keys.hash_key(cluster.key), keys.hash_key(late)]
    await asyncio.to_thread(cluster.tenant, lanes=LANES, namespace="gwp-system", hashes=both)
    assert await served(process.client(late)) == 401
    await cable.plug()
    await until_answer(lambda: served(process.client(late)), 200, 10)
    await process.end(signal.SIGTERM)

    await cable.cut()
    process.launch()
    await until_answer(process.readiness, 503, 40)
    refused = await process.client(cluster.key).post("/v1/chat/completions", json=chat())
    assert (refused.status_code, error_of(refused)["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"]


def test_a_wrong_configuration_is_told(tmp_path: Path, identity: Identity) -> None:
    salt = tmp_path / "salt"
    salt.write_bytes(b"short")
    command = [sys.executable, "-c", "from tenantry_gateway.main import main; main()"]
    files = ["--identity-key", str(identity.key), "--salt-file", str(salt)]
    bad = subprocess.run(
        [*command, *files, "--ledger", "postgres://x"], capture_output=True, timeout=30, check=False
    )
    assert bad.returncode == 1
    assert b"--salt-file" in bad.stdout
    salt.write_bytes(b"s" * 32)
    bad = subprocess.run(
        [*command, *files, "--ledger", "postgres://x"], capture_output=True, timeout=30, check=False
    )
    assert bad.returncode == 1
    assert b"--ledger" in bad.stdout
