"""Ten thousand tenants and as many adapters on a real API server: what the operator costs and how quick it is.

Pods and replicas are hollow (bench/hollow.py); API server, etcd, operator and gateway are real. In one run: seconds
until everything is served; requests of the operator per object that is created (by the server's audit log, watches,
lists and the Lease aside) and in an idle minute; its memory; the seconds from the answer to a changed limit until the
Tenant's status tells it and until the gateway enforces it, beside a bare watch; the seconds from the start of another
operator until it has caught up; and who moves when a pool of (at scale) 1,000 tenants loses a replica.

    python bench/operator/scale.py [--tenants 10000] [--adapters 10000] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from kubernetes.aio.client import ApiClient, ApiException, CustomObjectsApi
from kubernetes.aio.watch import Watch
from prometheus_client.parser import text_string_to_metric_families
from tenantry.api import keys, names
from tenantry.cluster import ADAPTER, ADAPTER_POOL, TENANT, Client, Key, Obj, Resource
from tenantry.cluster.transport import load_configuration

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "e2e"), str(REPOSITORY / "bench")]

import report  # noqa: E402
from cluster.controlplane import ControlPlane  # noqa: E402
from cluster.process import free_port  # noqa: E402
from steady import (  # noqa: E402
    LIMITS,
    SYSTEM,
    USER,
    Audit,
    Processes,
    control_plane,
    enforced,
    percentile,
    say,
    wait_for,
    write_inputs,
)

HOME = "bench-ml"
LOSING, SERVING = "losing", "serving"
PER_POOL = 1000
REPLICAS = 4
ALIAS = "tone"
RANGES: dict[str, report.Bounds] = {
    "requests_per_object_on_create": (None, 3.0),
    "idle_requests_on_tenants_and_adapters": (None, 0.0),
    "operator_peak_mib": (None, 350.0),
    "change_to_status_p99_seconds": (None, 1.0),
    "change_to_gateway_p99_seconds": (None, 2.0),
    "writes_on_tenants_and_adapters_after_restart": (None, 0.0),
    "moved_seats_per_lost_seat": (1.0, 1.05),
    "unready_while_a_replica_left": (None, 0.0),
}


@dataclass(frozen=True)
class Size:
    tenants: int
    adapters: int
    idle_seconds: float
    changes: int

    @property
    def losing(self) -> int:
        """Tenants of the pool that loses a replica."""
        return min(PER_POOL, max(2, self.tenants // 2))

    @property
    def pools(self) -> int:
        """Pools for all others."""
        return max(1, -(-(self.tenants - self.losing) // PER_POOL))


# objects


def name_of(number: int) -> str:
    return f"tenant-{number:05d}"


def base_model(number: int, size: Size) -> str:
    return LOSING if number < size.losing else SERVING


def pool(name: str, model: str, replicas: int = REPLICAS) -> Obj:
    return {
        "apiVersion": ADAPTER_POOL.api_version,
        "kind": ADAPTER_POOL.kind,
        "metadata": {"name": name},
        "spec": {
            "baseModel": {"name": model, "source": {"image": {"path": "/models/bench"}}},
            "tiers": ["MidMarket"],
            "lora": {"maxRank": 64},
            "lanes": [{"name": "fast", "replicas": {"min": replicas}}],
        },
    }


def tenant(number: int, sha256: str, size: Size) -> Obj:
    model: Obj = {"name": ALIAS, "baseModel": base_model(number, size)}
    if number < size.adapters:
        model["adapterRef"] = {"namespace": HOME, "name": name_of(number)}
    return {
        "apiVersion": TENANT.api_version,
        "kind": TENANT.kind,
        "metadata": {"name": name_of(number)},
        "spec": {
            "tier": "MidMarket",
            "models": [model],
            "adapterNamespaces": [HOME],
            "limits": {"maxOutputTokens": 100},
            "auth": {"apiKeys": [{"name": "bench", "sha256": sha256}]},
        },
    }


def adapter(number: int) -> Obj:
    digest = f"sha256:{number:064x}"
    source = f"oci://registry.example/bench/{name_of(number)}:1.0.0"
    version = {"version": "1.0.0", "digest": digest, "source": source, "rank": 8}
    return {
        "apiVersion": ADAPTER.api_version,
        "kind": ADAPTER.kind,
        "metadata": {"name": name_of(number), "namespace": HOME},
        "spec": {
            "tenantRef": name_of(number),
            "versions": [version],
            "channels": [{"name": "stable", "version": "1.0.0"}],
        },
    }


def condition(obj: Obj, kind: str) -> str:
    listed = (obj.get("status") or {}).get("conditions") or []
    return next((str(entry["status"]) for entry in listed if entry["type"] == kind), "")


def is_settled(obj: Obj) -> bool:
    """Served as the spec says, and nothing is under way."""
    seen = (obj.get("status") or {}).get("observedGeneration") == obj["metadata"]["generation"]
    return seen and condition(obj, "Ready") == "True" and condition(obj, "Reconciling") == "False"


# what is seen


@dataclass
class Seen:
    """What a client that only watches saw of Tenants and Adapters; times are monotonic seconds."""

    settled: dict[str, set[str]] = field(default_factory=lambda: {"tenants": set(), "adapters": set()})
    seats: dict[str, frozenset[str]] = field(default_factory=dict)
    asked: dict[tuple[str, int], float] = field(default_factory=dict)
    told: dict[tuple[str, int], float] = field(default_factory=dict)
    unready: set[str] = field(default_factory=set)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    watching: list[asyncio.Task[None]] = field(default_factory=list)

    async def run(self, kubeconfig: Path, resource: Resource) -> None:
        new_watch: Any = Watch
        async with ApiClient(await load_configuration(kubeconfig)) as api:
            listing = CustomObjectsApi(api).list_cluster_custom_object
            while True:
                try:
                    async with new_watch() as watch:
                        stream = watch.stream(listing, resource.group, resource.version, resource.plural)
                        async for event in stream:
                            self._take(resource.plural, event["object"])
                            async with self.changed:
                                self.changed.notify_all()
                except ApiException as error:
                    if error.status != 429:  # so the API server answers while a new kind's storage starts
                        raise
                    await asyncio.sleep(0.5)

    def _take(self, plural: str, obj: Obj) -> None:
        name = obj["metadata"]["name"]
        (self.settled[plural].add if is_settled(obj) else self.settled[plural].discard)(name)
        if plural != TENANT.plural:
            return
        if condition(obj, "Ready") != "True":
            self.unready.add(name)
        status = obj.get("status") or {}
        self.seats[name] = frozenset(r for place in status.get("placement", []) for r in place["replicas"])
        now, limit = time.monotonic(), obj["spec"]["limits"]["maxOutputTokens"]
        self.asked.setdefault((name, limit), now)
        routed = ((status.get("route") or {}).get("limits") or {}).get("maxOutputTokens")
        if routed == limit and status.get("observedGeneration") == obj["metadata"]["generation"]:
            self.told.setdefault((name, limit), now)

    async def when_told(self, name: str, limit: int) -> float:
        """When the status told that limit."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: (name, limit) in self.told)
        return self.told[name, limit]

    async def until(self, probe: Callable[[], bool], processes: Processes, what: str, seconds: float) -> None:
        """Wait for what the next objects show; says how far it is."""
        deadline, spoken = time.monotonic() + seconds, time.monotonic()
        while not probe():
            processes.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {seconds:g} s: {what}")
            for task in self.watching:
                if task.done():
                    task.result()  # raises what ended it
            if time.monotonic() - spoken > 15:
                spoken = time.monotonic()
                say(
                    "  settled: "
                    + ", ".join(f"{len(found)} {plural}" for plural, found in self.settled.items())
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1), self.changed:
                    await self.changed.wait()


def memory(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """(resident now, at most so far) in MiB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    found = {name: text for name, _, text in (line.partition(":") for line in lines)}
    now, peak = (float(found[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def about(request: str) -> str:
    """What a request, `verb path`, concerns: `tenants`, `adapters`, `events` or `others`."""
    parts = request.partition(" ")[2].strip("/").split("/")
    return next((p for p in ("events", TENANT.plural, ADAPTER.plural) if p in parts), "others")


def requests(audit: Path, since: float, until: float) -> Counter[str]:
    """What the operator sent, `verb resource`, without lists, watches and the Lease."""
    found: Counter[str] = Counter()
    for request, count in Audit(audit).requests(since, until).items():
        verb = request.partition(" ")[0]
        if verb not in ("list", "watch"):
            found[f"{verb} {about(request)}"] += count
    return found


async def events_are_written(audit: Path) -> bool:
    """Whether the operator, which writes events one after the other, wrote none for a while."""
    began = time.time()
    await asyncio.sleep(3)
    return not any(request.endswith(" events") for request in requests(audit, began, time.time()))


class Operator:
    """The operator's process, which may be replaced by another."""

    def __init__(self, folder: Path, plane: ControlPlane, processes: Processes) -> None:
        self._processes = processes
        self._port = free_port()
        self._arguments = [
            "--config", str(folder / "config.yaml"),
            "--kubeconfig", str(plane.client("operator", USER, ("system:masters",))),
            "--metrics-port", str(self._port),
            "--identity-key", str(folder / "key.pem"),
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        self._processes.start("tenantry-operator", *self._arguments)
        self.process = self._processes.running[-1]

    async def restart(self) -> None:
        """Ended as a Deployment ends it, then another."""
        self._processes.running.remove(self.process)
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 60)
        self.start()

    async def has_caught_up(self, http: httpx.AsyncClient, size: Size) -> bool:
        """Leads, has looked at every object, and no key is dirty or being worked on."""
        try:
            text = (await http.get(f"http://127.0.0.1:{self._port}/metrics")).text
        except httpx.HTTPError:
            return False
        values: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] += sample.value  # type: ignore[assignment]
                if sample.name == "controller_runtime_reconcile_total":
                    values[f"{sample.labels['controller']} {sample.labels['result']}"] += sample.value  # type: ignore[assignment]
        looked = (
            values["tenant success"] + values["tenant requeue_after"] >= size.tenants
            and values["adapter success"] >= size.adapters
        )
        return bool(
            looked
            and values["leader_election_master_status"] == 1
            and not values["workqueue_depth"]
            and not values["controller_runtime_active_workers"]
        )


# the run


def start_hollow(folder: Path, plane: ControlPlane, processes: Processes, fetcher_port: int) -> None:
    """Pods, replicas and fetcher; the log is named after the program, where `Processes` looks for it."""
    command = [sys.executable, str(REPOSITORY / "bench" / "hollow.py")]
    command += ["--kubeconfig", str(plane.kubeconfig), "--fetcher-port", str(fetcher_port)]
    with (folder / f"{Path(sys.executable).name}.log").open("wb") as log:
        processes.running.append(subprocess.Popen(command, stdout=log, stderr=log))


@contextlib.asynccontextmanager
async def running(
    folder: Path, plane: ControlPlane, gateway_port: int
) -> AsyncIterator[tuple[Processes, Operator]]:
    fetcher_port = free_port()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["tiers"]["MidMarket"] = {"defaults": LIMITS, "ceilings": {**LIMITS, "maxOutputTokens": 1_000_000}}
    config["fetcherUrl"] = f"http://127.0.0.1:{fetcher_port}"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    processes = Processes(folder)
    operator = Operator(folder, plane, processes)
    try:
        start_hollow(folder, plane, processes, fetcher_port)
        operator.start()
        processes.start(
            "tenantry-gateway", "--kubeconfig", str(plane.kubeconfig), "--salt-file", str(folder / "salt"),
            "--ledger", f"sqlite:///{folder / 'ledger.db'}", "--host", "127.0.0.1", "--port", str(gateway_port),
            "--metrics-port", str(free_port()), "--identity-key", str(folder / "key.pem"),
        )  # fmt: skip
        yield processes, operator
    finally:
        processes.stop()


async def make_pools(client: Client, size: Size, processes: Processes) -> None:
    await client.create(pool(LOSING, LOSING))
    for number in range(size.pools):
        await client.create(pool(f"{SERVING}-{number:02d}", SERVING))

    async def ready() -> bool:
        return all([condition(obj, "Degraded") == "False" async for obj in client.list(ADAPTER_POOL)])

    await wait_for(ready, "every pool's replicas are ready", processes, 300)


async def make_tenants(client: Client, size: Size) -> list[str]:
    """Tenants, each with its adapter as one commit would bring both; their keys."""
    minted = [keys.mint(name_of(number)) for number in range(size.tenants)]
    gate = asyncio.Semaphore(8)

    async def make(number: int) -> None:
        async with gate:
            await client.create(tenant(number, minted[number].sha256, size))
            if number < size.adapters:
                await client.create(adapter(number))
            if (number + 1) % 1000 == 0:
                say(f"  {number + 1} made")

    await asyncio.gather(*(make(number) for number in range(size.tenants)))
    return [key.key for key in minted]


async def change_limits(
    client: Client, http: httpx.AsyncClient, secrets: list[str], seen: Seen, count: int
) -> dict[str, list[float]]:
    """Seconds from the answer to a changed limit until status tells it, the gateway enforces it, a watch sees it."""
    found: dict[str, list[float]] = {"status": [], "gateway": [], "watch": []}
    step = max(1, len(secrets) // count)
    for number in range(count):
        which = number * step % len(secrets)
        name, limit = name_of(which), 101 + number
        patch = {"spec": {"limits": {"maxOutputTokens": limit}}}
        await client.merge_patch(TENANT, Key("", name), patch)
        began = time.monotonic()
        while not (await enforced(http, secrets[which], ALIAS)).endswith(f" {limit}"):
            if time.monotonic() - began > 60:
                raise RuntimeError(f"the limit of {name} was not enforced within 60 s")
            await asyncio.sleep(0.005)
        found["gateway"].append(time.monotonic() - began)
        found["status"].append(max(0.0, await seen.when_told(name, limit) - began))
        found["watch"].append(max(0.0, seen.asked[name, limit] - began))
        if (number + 1) % 50 == 0:
            say(f"  {number + 1}/{count} limits changed")
    return found


async def lose_replica(client: Client, size: Size, seen: Seen, processes: Processes) -> dict[str, float]:
    """Take one of the replicas of a pool away for good; who moved, and for how long not all was settled."""
    mine = [name_of(number) for number in range(size.losing)]
    lost = names.replica_pod(LOSING, "fast", REPLICAS - 1)
    before = {name: seen.seats[name] for name in mine}
    victims = [name for name in mine if lost in before[name]]
    seen.unready.clear()
    began = time.monotonic()
    await client.merge_patch(
        ADAPTER_POOL, Key("", LOSING), {"spec": pool(LOSING, LOSING, REPLICAS - 1)["spec"]}
    )

    def done() -> bool:
        return all(lost not in seen.seats[name] and name in seen.settled["tenants"] for name in mine)

    await seen.until(done, processes, f"nobody is on {lost} any more", 900)
    seconds = time.monotonic() - began

    async def gone() -> bool:
        live = await client.get(ADAPTER_POOL, Key("", LOSING)) or {}
        [lane] = (live.get("status") or {}).get("lanes") or [{}]
        return lane.get("replicas") == REPLICAS - 1 and condition(live, "Reconciling") == "False"

    await wait_for(gone, f"{lost} is gone", processes, 300)
    moved = {name: len(seen.seats[name] - before[name]) for name in mine}
    return {
        "tenants_of_the_pool": float(len(mine)),
        "tenants_of_the_lost_replica": float(len(victims)),
        "tenants_moved": float(sum(count > 0 for count in moved.values())),
        "moved_seats_per_lost_seat": round(sum(moved.values()) / max(1, len(victims)), 3),
        "unready_while_a_replica_left": float(len(seen.unready)),
        "seconds_until_moved": round(seconds, 1),
    }


async def measure(size: Size) -> tuple[dict[str, float], dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="tenantry-scale-") as name:
        folder, port = Path(name), free_port()
        write_inputs(folder)
        with control_plane(folder) as plane:
            client = await Client.connect(plane.kubeconfig, user_agent="bench")
            try:
                return await _measure(folder, plane, port, client, size)
            finally:
                await client.close()


async def _measure(
    folder: Path, plane: ControlPlane, port: int, client: Client, size: Size
) -> tuple[dict[str, float], dict[str, float]]:
    audit = folder / "audit.log"
    for space in (SYSTEM, HOME):
        await client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    identity = {"name": names.IDENTITY_CONFIGMAP, "namespace": SYSTEM}
    await client.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": identity, "data": {"operator.crt": ""}}
    )
    figures: dict[str, float] = {"tenants": float(size.tenants), "adapters": float(size.adapters)}
    async with (
        running(folder, plane, port) as (processes, operator),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        seen = Seen()
        watching = [asyncio.create_task(seen.run(plane.kubeconfig, kind)) for kind in (TENANT, ADAPTER)]
        seen.watching = watching
        say("pools ...")
        await make_pools(client, size, processes)
        say(f"{size.tenants} tenants and {size.adapters} adapters ...")
        began, since = time.monotonic(), time.time()
        secrets = await make_tenants(client, size)
        created = time.monotonic() - began

        def everything() -> bool:
            found = seen.settled
            return len(found["tenants"]) == size.tenants and len(found["adapters"]) == size.adapters

        await seen.until(everything, processes, "everything is served", 3600)
        figures["seconds_until_all_served"] = round(time.monotonic() - began, 1)
        say(f"all served after {figures['seconds_until_all_served']:g} s; settling ...")
        await wait_for(lambda: operator.has_caught_up(http, size), "the operator rests", processes, 600)
        await wait_for(lambda: events_are_written(audit), "events are written", processes, 600)
        sent = requests(audit, since, time.time())
        for request, count in sent.most_common():
            say(f"  {count / (size.tenants + size.adapters):.2f} per object: {request}")
        figures["requests_per_object_on_create"] = round(
            sum(sent.values()) / (size.tenants + size.adapters), 3
        )
        for plural, count in (("tenants", size.tenants), ("adapters", size.adapters)):
            own = sum(n for request, n in sent.items() if request.endswith(f" {plural}"))
            figures[f"requests_on_{plural}_each"] = round(own / max(1, count), 3)
        say(f"{size.idle_seconds:g} s idle ...")
        idle_from = time.time()
        await asyncio.sleep(size.idle_seconds)
        idle = Audit(audit).requests(idle_from, time.time())
        for request, count in idle.most_common():
            say(f"  idle: {count} x {request}")
        own = sum(count for request, count in idle.items() if about(request) != "others")
        figures["idle_requests_on_tenants_and_adapters"] = float(own)
        # what was seen of a pool's isolation is told again before it counts as too old
        rest = (sum(idle.values()) - own) * 60 / size.idle_seconds
        figures["idle_requests_per_pool_and_minute"] = round(rest / (size.pools + 1), 2)
        say(f"changing {size.changes} limits ...")
        changed = await change_limits(client, http, secrets, seen, size.changes)
        for what in ("status", "gateway"):
            for share, label in ((0.5, "p50"), (0.99, "p99")):
                figures[f"change_to_{what}_{label}_seconds"] = round(percentile(changed[what], share), 4)
        say("a pool loses a replica ...")
        figures |= await lose_replica(client, size, seen, processes)
        await wait_for(lambda: operator.has_caught_up(http, size), "the operator rests", processes, 600)
        figures["operator_mib"], figures["operator_peak_mib"] = (
            round(mib, 1) for mib in memory(operator.process)
        )
        say("another operator ...")
        since, began = time.time(), time.monotonic()
        await operator.restart()
        await wait_for(
            lambda: operator.has_caught_up(http, size), "the operator has caught up", processes, 1800
        )
        figures["seconds_from_restart_until_caught_up"] = round(time.monotonic() - began, 1)
        written = {
            request: count
            for request, count in requests(audit, since, time.time()).items()
            if not request.startswith("get ")
        }
        for request, count in written.items():
            say(f"  after the restart: {count} x {request}")
        own = {request for request in written if request.endswith((TENANT.plural, ADAPTER.plural, "events"))}
        figures["writes_on_tenants_and_adapters_after_restart"] = float(
            sum(written[request] for request in own)
        )
        # what pools own is applied once by each new leader, which cannot know otherwise that nobody changed it
        others = sum(count for request, count in written.items() if request not in own)
        figures["other_writes_after_restart_per_pool"] = round(others / (size.pools + 1), 2)
        now, peak = memory(operator.process)
        say(f"  {now:.0f} MiB, at most {peak:.0f}")
        figures["operator_peak_mib"] = max(figures["operator_peak_mib"], round(peak, 1))
        processes.check()
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    peers = {
        "seconds_to_create_by_a_bare_client": round(created, 1),
        "bare_watch_p50_seconds": round(percentile(changed["watch"], 0.5), 4),
        "bare_watch_p99_seconds": round(percentile(changed["watch"], 0.99), 4),
    }
    return figures, peers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--adapters", type=int, default=10_000, help="of the first tenants, one each")
    parser.add_argument(
        "--quick", action="store_true", help="60 tenants and adapters, 10 idle seconds, 20 changes"
    )
    options = parser.parse_args()
    if not 2 <= options.tenants <= 99_999 or not 0 <= options.adapters <= options.tenants:
        parser.error("`--tenants` must be 2 to 99999 and `--adapters` at most as many")
    full = Size(options.tenants, options.adapters, 60, 200)
    figures, peers = asyncio.run(measure(Size(60, 60, 10, 20) if options.quick else full))
    whole = not options.quick and (options.tenants, options.adapters) == (10_000, 10_000)
    sys.exit(report.finish(bench="operator/scale", figures=figures, peers=peers, ranges=RANGES, keep=whole))


if __name__ == "__main__":
    main()
