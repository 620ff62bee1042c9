"""An operator with nothing to do sends nothing, and a changed limit is enforced at once.

On a real API server with many tenants: the requests that the operator sends in an idle minute (by the server's audit
log, beyond the Lease), and the seconds from the answer to a changed limit until the gateway enforces it. Beside it, in
the same run, a bare watch: the seconds until a client that only watches Tenants sees the change.

    python bench/operator/steady.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kubernetes.aio.client import ApiClient, CustomObjectsApi
from kubernetes.aio.watch import Watch
from tenantry.api import keys, names
from tenantry.cluster import ADAPTER_POOL, POD, STATEFUL_SET, TENANT, Client, Key, Obj
from tenantry.cluster.transport import load_configuration

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "e2e"), str(REPOSITORY / "bench")]

import report  # noqa: E402
from cluster.controlplane import STORE_CONTROLLERS, ControlPlane  # noqa: E402
from cluster.process import free_port  # noqa: E402

SYSTEM = "tenantry-system"
USER = "bench-operator"
POOL = "shared"
RANGES: dict[str, report.Bounds] = {
    "idle_requests_per_minute": (None, 0.0),
    "limit_to_gateway_p99_seconds": (None, 2.0),
}
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": [USER]}, {"level": "None"}],
}
LIMITS = {
    "requestsPerMinute": 1_000_000,
    "tokensPerMinute": 1_000_000,
    "maxInFlight": 8,
    "maxQueued": 8,
    "maxInputTokens": 1024,
    "maxOutputTokens": 1000,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share * 1000) // 1000) - 1)]


@dataclass
class Processes:
    """Operator and gateway, with logs in a folder; ended with the bench."""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *arguments: str) -> None:
        program = str(Path(sys.executable).with_name(name))
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running.append(subprocess.Popen([program, *arguments], stdout=log, stderr=log))

    def check(self) -> None:
        """Raises with the end of the log when one of them ended."""
        for process in self.running:
            if process.poll() is not None:
                log = self.folder / f"{Path(str(process.args[0])).name}.log"  # type: ignore[index]
                raise RuntimeError(f"{log.stem} ended with {process.returncode}: {log.read_text()[-2000:]}")

    def stop(self) -> None:
        for process in self.running:
            process.terminate()
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()


class Audit:
    """What the operator sent, by the API server's own log."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def requests(self, since: float, until: float) -> Counter[str]:
        """Requests beyond the Lease in that time, by verb and path. A watch counts when it is opened anew."""
        found: Counter[str] = Counter()
        known: set[str] = set()
        for line in self._path.read_text().splitlines():
            event = json.loads(line)
            if (
                event["user"]["username"] != USER
                or (event.get("objectRef") or {}).get("resource") == "leases"
            ):
                continue
            at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            if since <= at < until and event["auditID"] not in known:
                known.add(event["auditID"])
                found[f"{event['verb']} {event['requestURI'].partition('?')[0]}"] += 1
        return found


def tenant(number: int, sha256: str) -> Obj:
    return {
        "apiVersion": TENANT.api_version,
        "kind": TENANT.kind,
        "metadata": {"name": f"tenant-{number:04d}"},
        "spec": {
            "tier": "Free",
            "models": [{"name": "chat", "baseModel": "bench"}],
            "limits": {"maxOutputTokens": 100},
            "auth": {"apiKeys": [{"name": "bench", "sha256": sha256}]},
        },
    }


async def wait_for(probe: Callable[[], Any], what: str, processes: Processes, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        value = await probe()
        if value:
            return value
        processes.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.2)


async def make_pool(client: Client, processes: Processes) -> None:
    """A pool, and the pod that a StatefulSet controller and a kubelet would make of it."""
    spec = {
        "baseModel": {"name": "bench", "source": {"image": {"path": "/models/bench"}}},
        "tiers": ["Free"],
        "lanes": [{"name": "fast", "replicas": {"min": 1}}],
        "placement": {"replicasPerTenant": 1},
    }
    pool = {
        "apiVersion": ADAPTER_POOL.api_version,
        "kind": ADAPTER_POOL.kind,
        "metadata": {"name": POOL},
        "spec": spec,
    }
    await client.create(pool)
    key = Key(SYSTEM, names.lane_workload(POOL, "fast"))
    workload = await wait_for(lambda: client.get(STATEFUL_SET, key), "the pool's StatefulSet", processes)
    await client.transport.request(
        "PATCH",
        STATEFUL_SET.path(*key, "status"),
        body={
            "status": {"replicas": 1, "readyReplicas": 1, "observedGeneration": 1, "updateRevision": "one"}
        },
        content_type="application/merge-patch+json",
    )
    template = workload["spec"]["template"]
    labels = {**template["metadata"]["labels"], "controller-revision-hash": "one"}
    owner = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": key.name,
        "uid": workload["metadata"]["uid"],
        "controller": True,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{key.name}-0",
            "namespace": SYSTEM,
            "labels": labels,
            "ownerReferences": [owner],
        },
        "spec": {"containers": [{"name": "engine", "image": "bench"}]},
    }
    await client.create(pod)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = {
        "phase": "Running",
        "podIP": "192.0.2.1",
        "podIPs": [{"ip": "192.0.2.1"}],
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": True,
                "restartCount": 0,
                "image": "bench",
                "imageID": "",
                "containerID": "bench://1",
                "state": {"running": {"startedAt": now}},
            }
        ],
    }
    await client.transport.request(
        "PATCH",
        POD.path(SYSTEM, f"{key.name}-0", "status"),
        body={"status": status},
        content_type="application/merge-patch+json",
    )


async def make_tenants(client: Client, count: int) -> list[str]:
    """Tenants and their keys."""
    minted = [keys.mint(f"tenant-{number:04d}") for number in range(count)]
    gate = asyncio.Semaphore(16)

    async def make(number: int) -> None:
        async with gate:
            await client.create(tenant(number, minted[number].sha256))

    await asyncio.gather(*(make(number) for number in range(count)))
    return [key.key for key in minted]


async def routed(client: Client) -> int:
    return sum([bool(obj.get("status", {}).get("route")) async for obj in client.list(TENANT)])


async def enforced(http: httpx.AsyncClient, key: str, model: str = "chat") -> str:
    """What the gateway says of a request far above the limit: it names the limit that it enforces."""
    body = {"model": model, "max_tokens": 999_999, "messages": [{"role": "user", "content": "hi"}]}
    answer = await http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    return str(answer.json()["error"]["message"])


class BareWatch:
    """The peer: a client that does nothing but watch Tenants."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], float] = {}
        self.changed = asyncio.Condition()

    async def run(self, kubeconfig: Path) -> None:
        new_watch: Any = Watch
        async with ApiClient(await load_configuration(kubeconfig)) as api, new_watch() as watch:
            listing = CustomObjectsApi(api).list_cluster_custom_object
            stream = watch.stream(listing, TENANT.group, TENANT.version, TENANT.plural)
            async for event in stream:
                obj = event["object"]
                limit = obj["spec"].get("limits", {}).get("maxOutputTokens", 0)
                self.seen.setdefault((obj["metadata"]["name"], limit), time.monotonic())
                async with self.changed:
                    self.changed.notify_all()

    async def when(self, name: str, limit: int) -> float:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: (name, limit) in self.seen)
        return self.seen[name, limit]


async def change_limits(
    client: Client, http: httpx.AsyncClient, secrets: list[str], kubeconfig: Path, count: int
) -> tuple[list[float], list[float]]:
    """Seconds from the answer to a changed limit until (the gateway enforces it, a bare watch sees it)."""
    watch = BareWatch()
    watching = asyncio.create_task(watch.run(kubeconfig))
    await watch.when("tenant-0000", 100)
    gateway, bare = [], []
    for number in range(count):
        name, limit = f"tenant-{number % len(secrets):04d}", 101 + number
        patch = {"spec": {"limits": {"maxOutputTokens": limit}}}
        await client.merge_patch(TENANT, Key("", name), patch)
        started = time.monotonic()
        while not (await enforced(http, secrets[number % len(secrets)])).endswith(f" {limit}"):
            if time.monotonic() - started > 30:
                raise RuntimeError(f"the limit of {name} was not enforced within 30 s")
            await asyncio.sleep(0.005)
        gateway.append(time.monotonic() - started)
        bare.append(max(0.0, await watch.when(name, limit) - started))
        if (number + 1) % 50 == 0:
            say(f"  {number + 1}/{count} limits changed")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return gateway, bare


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """A real API server that keeps an audit log of what the operator sends."""
    policy = folder / "audit.yaml"
    policy.write_text(yaml.safe_dump(AUDIT_POLICY))
    flags = (f"--audit-policy-file={policy}", f"--audit-log-path={folder / 'audit.log'}")
    with ControlPlane(folder / "plane", controllers=STORE_CONTROLLERS, extra_flags=flags) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        yield plane


def write_inputs(folder: Path) -> None:
    """Configuration, key and salt."""
    tier = {"defaults": LIMITS, "ceilings": {**LIMITS, "maxOutputTokens": 100_000}}
    config = {
        "releaseNamespace": SYSTEM,
        "engineImage": "bench/engine:1",
        "gatewayUrl": "http://127.0.0.1",
        "fetcherUrl": "http://127.0.0.1:9",
        "tiers": {"Free": tier},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    key = Ed25519PrivateKey.generate()
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "salt").write_bytes(os.urandom(32))


@contextlib.asynccontextmanager
async def running(folder: Path, plane: ControlPlane, port: int) -> AsyncIterator[Processes]:
    processes = Processes(folder)
    operator = plane.client("operator", USER, ("system:masters",))
    common = ["--identity-key", str(folder / "key.pem")]
    try:
        processes.start(
            "tenantry-operator", "--config", str(folder / "config.yaml"), "--kubeconfig", str(operator),
            "--metrics-port", str(free_port()), *common,
        )  # fmt: skip
        processes.start(
            "tenantry-gateway", "--kubeconfig", str(plane.kubeconfig), "--salt-file", str(folder / "salt"),
            "--ledger", f"sqlite:///{folder / 'ledger.db'}", "--host", "127.0.0.1", "--port", str(port),
            "--metrics-port", str(free_port()), *common,
        )  # fmt: skip
        yield processes
    finally:
        processes.stop()


async def measure(
    tenants: int, idle_seconds: float, changes: int
) -> tuple[dict[str, float], dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="tenantry-steady-") as name:
        folder, port = Path(name), free_port()
        write_inputs(folder)
        with control_plane(folder) as plane:
            client = await Client.connect(plane.kubeconfig, user_agent="bench")
            for made in (
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}},
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": names.IDENTITY_CONFIGMAP, "namespace": SYSTEM},
                    "data": {"operator.crt": ""},
                },
            ):
                await client.create(made)
            async with (
                running(folder, plane, port) as processes,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
            ):
                say("pool and tenants ...")
                await make_pool(client, processes)
                began = time.monotonic()
                secrets = await make_tenants(client, tenants)

                async def all_routed() -> bool:
                    return await routed(client) == tenants

                await wait_for(all_routed, "every tenant is routed", processes, 300)
                converged = time.monotonic() - began
                say(
                    f"{tenants} tenants routed after {converged:.1f} s; settling, then {idle_seconds:g} s idle ..."
                )
                await asyncio.sleep(5)
                idle_from = time.time()
                await asyncio.sleep(idle_seconds)
                idle_until = time.time()
                say(f"changing {changes} limits ...")
                gateway, bare = await change_limits(client, http, secrets, plane.kubeconfig, changes)
                processes.check()
                idle = Audit(folder / "audit.log").requests(idle_from, idle_until)
                for request, count in idle.most_common():
                    say(f"  idle: {count} x {request}")
            await client.close()
    figures = {
        "tenants": float(tenants),
        "idle_requests_per_minute": sum(idle.values()) * 60 / idle_seconds,
        "limit_to_gateway_p50_seconds": round(percentile(gateway, 0.5), 4),
        "limit_to_gateway_p99_seconds": round(percentile(gateway, 0.99), 4),
        "limit_to_gateway_max_seconds": round(max(gateway), 4),
        "seconds_until_all_routed": round(converged, 1),
    }
    peers = {
        "bare_watch_p50_seconds": round(percentile(bare, 0.5), 4),
        "bare_watch_p99_seconds": round(percentile(bare, 0.99), 4),
    }
    return figures, peers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 tenants, 10 idle seconds, 20 changes")
    quick = parser.parse_args().quick
    figures, peers = asyncio.run(measure(20, 10, 20) if quick else measure(200, 60, 200))
    sys.exit(
        report.finish(bench="operator/steady", figures=figures, peers=peers, ranges=RANGES, keep=not quick)
    )


if __name__ == "__main__":
    main()
