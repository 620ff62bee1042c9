"""What placement is told of pods, nodes and replicas, from objects alone: no cluster, no replicas."""

from __future__ import annotations

from typing import Any

import pytest
from tenantry.api import OperatorConfig
from tenantry.cluster import ADAPTER_POOL, NODE, POD, STATEFUL_SET, TENANT, Key, Obj
from tenantry.controllers import World, placing, pods
from tenantry.controllers.observations import Observation
from tenantry.controllers.pool import PoolReconciler
from tenantry.controllers.watches import Watches
from tenantry.engines import ReplicaReport
from tenantry.engines.base import AdapterReport, AdapterState, Capacity, Fence, ModelReport, Pages
from tenantry.placement.standing import PATIENCE_SECONDS
from tenantry.runtime.controller import Fence as WriteFence
from tenantry.runtime.controller import Setup
from tenantry.runtime.store import Store

REPLICAS = tuple(f"lora-fast-{i}" for i in range(4))


class Cluster:
    """A LoRA pool of four ready replicas on two zones, and what the controllers know of it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.enqueued: list[tuple[str, Key, float]] = []
        self._version = 0
        config = OperatorConfig.model_validate(
            {"engineImage": "e:1", "gatewayUrl": "http://g", "fetcherUrl": "http://f", "tiers": {}}
        )
        unused: Any = None
        self.store = Store()
        self.store.set_trim(POD, pods.trim_pod)
        self.store.set_trim(NODE, pods.trim_node)
        setup = Setup(unused, self.store, config, unused, None, self._enqueue, lambda: WriteFence(1, 1))
        self.world = World(setup, clock=lambda: self.now)
        self.pool()
        owner = {"kind": "AdapterPool", "name": "lora", "uid": "uid-lora", "controller": True}
        self.put(
            STATEFUL_SET, "lora-fast", {"replicas": 4}, namespace="tenantry-system", ownerReferences=[owner]
        )
        for number, replica in enumerate(REPLICAS):
            labels = {"topology.kubernetes.io/zone": f"zone-{number % 2}"}
            self.put(NODE, f"node-{number}", {}, labels=labels)
            self.pod(replica, f"node-{number}")

    def _enqueue(self, controller: str, key: Key, *, after: float = 0.0) -> None:
        self.enqueued.append((controller, key, after))

    def put(self, resource: Any, name: str, spec: Obj, status: Obj | None = None, **meta: Any) -> Obj:
        self._version += 1
        metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(self._version), **meta}
        metadata.setdefault("generation", self._version)
        obj = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": metadata,
            "spec": spec,
            "status": status or {},
        }
        self.store.put(resource, obj)
        return obj

    def pool(self, **spec: Any) -> None:
        wire: Obj = {
            "baseModel": {"name": "tiny", "source": {"image": {"path": "/m"}}},
            "tiers": ["MidMarket"],
            "lora": {"maxRank": 16},
            "lanes": [{"name": "fast"}],
            **spec,
        }
        self.put(ADAPTER_POOL, "lora", wire)

    def pod(self, name: str, node: str | None, *, ready: bool = True) -> tuple[Obj | None, Obj | None]:
        """The stored pod before and after."""
        key = Key("tenantry-system", name)
        before = self.store.get(POD, key)
        status = {
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "engine", "containerID": "c", "state": {"running": {}}}],
        }
        labels = {"tenantry.dev/pool": "lora", "app.kubernetes.io/managed-by": "tenantry"}
        self.put(POD, name, {"nodeName": node}, status, namespace="tenantry-system", labels=labels)
        return before, self.store.get(POD, key)

    def tenant(self, name: str, adapters: int = 0) -> placing.Placing:
        """Reconcile it once."""
        models: list[Obj] = [
            {"name": f"m{i}", "baseModel": "tiny", "adapterRef": {"namespace": "ml", "name": f"a{i}"}}
            for i in range(adapters)
        ]
        spec = {
            "tier": "MidMarket",
            "adapterNamespaces": ["ml"],
            "models": models or [{"name": "chat", "baseModel": "tiny"}],
        }
        obj = self.put(TENANT, name, spec)
        placed = placing.shared(self.world, name, self.world.tenant_spec(obj), 1)
        self.world.placements.assume(name, placed.placement)
        return placed

    def reports(self, replica: str, total: int, *adapters: AdapterReport) -> None:
        pages = Pages(total=total, free=total)
        capacity = Capacity(max_rank=16, max_registered=2000, slots=8, pages=pages)
        report = ReplicaReport(Fence(), True, False, ModelReport("tiny"), capacity, adapters)
        pod = self.store.get(POD, Key("tenantry-system", replica))
        process = pods.incarnation(pod) if pod is not None else None
        assert process is not None
        self.world.observations.put(Key("lora", replica), Observation(process, report))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def seats(placed: placing.Placing) -> set[str]:
    return set(placed.placement.pools["lora"].replicas)


def reason(placed: placing.Placing) -> str:
    return placed.placement.pools["lora"].reason


def pinned(tenant: str, pages: int) -> AdapterReport:
    return AdapterReport(
        "x", "sha256:0", AdapterState.RESIDENT, tenant=f"uid-{tenant}", pinned=True, pages=pages
    )


def test_zones_come_from_the_nodes_of_the_pods(cluster: Cluster) -> None:
    for number in range(12):
        placed = cluster.tenant(f"t{number}")
        assert {int(name[-1]) % 2 for name in seats(placed)} == {0, 1}
        assert reason(placed).startswith("the only pool that fits; lane fast: 2 of 4 replicas in 2 zones")


def test_nothing_moves_and_nothing_is_said_anew_while_a_pod_restarts(cluster: Cluster) -> None:
    first = cluster.tenant("maple")
    victim = sorted(seats(first))[0]
    cluster.pod(victim, None, ready=False)
    assert cluster.tenant("maple").placement == first.placement
    assert cluster.enqueued[-1] == ("tenant", Key("", "maple"), PATIENCE_SECONDS)
    cluster.now += 60
    cluster.pod(victim, f"node-{victim[-1]}")
    assert cluster.tenant("maple").placement == first.placement


def test_a_replica_that_stays_away_is_left_and_returns_slowly(cluster: Cluster) -> None:
    first = cluster.tenant("maple")
    victim = sorted(seats(first))[0]
    cluster.pod(victim, None, ready=False)
    cluster.tenant("maple")
    cluster.now += PATIENCE_SECONDS
    moved = cluster.tenant("maple")
    assert victim not in seats(moved)
    assert seats(first) - {victim} <= seats(moved)
    assert f"left `{victim}` (not ready for 5 minutes)" in reason(moved)
    watches = Watches(cluster.world)
    woken = watches.pod_to_tenants(*cluster.pod(victim, f"node-{victim[-1]}"), cluster.store)
    assert Key("", "maple") in list(woken), "the replica may take it back"
    cluster.enqueued.clear()
    assert cluster.tenant("maple").placement == moved.placement, "a moment of readiness is not trusted"
    assert cluster.enqueued == [("tenant", Key("", "maple"), PATIENCE_SECONDS)]


def test_after_a_restart_a_lost_replica_draws_nobody_back(cluster: Cluster) -> None:
    first = cluster.tenant("maple")
    victim = sorted(seats(first))[0]
    cluster.pod(victim, None, ready=False)
    cluster.tenant("maple")
    cluster.now += PATIENCE_SECONDS
    moved = cluster.tenant("maple")
    cluster.world.placements.standings = type(cluster.world.placements.standings)()
    assert cluster.tenant("maple").placement == moved.placement


def test_a_lane_that_shrank_and_grew_begins_anew(cluster: Cluster) -> None:
    cluster.pod(REPLICAS[3], None, ready=False)
    for number in range(6):
        cluster.tenant(f"t{number}")
    owner = {"kind": "AdapterPool", "name": "lora", "uid": "uid-lora", "controller": True}
    cluster.now += PATIENCE_SECONDS
    for replicas in (3, 4):
        cluster.put(
            STATEFUL_SET, "lora-fast", {"replicas": replicas}, namespace="tenantry-system",
            ownerReferences=[owner],
        )  # fmt: skip
        cluster.tenant("late")
    assert not cluster.world.placements.standings.is_lost(Key("lora", REPLICAS[3]), cluster.now)


def test_registered_adapters_fill_a_replica(cluster: Cluster) -> None:
    cluster.pool(lora={"maxRank": 16, "maxRegistered": 10}, placement={"replicasPerTenant": 1})
    for number in range(8):
        assert len(seats(cluster.tenant(f"t{number}", adapters=5))) == 1
    full = cluster.tenant("late", adapters=5)
    assert set(full.objections) == {f"m{i}" for i in range(5)}
    assert "is full: at most 1000 tenants and 10 adapters: add replicas" in full.objections["m0"]
    assert seats(cluster.tenant("plain")) != set(), "a tenant without adapters has room"


def test_a_tenant_with_more_adapters_than_a_replica_holds_is_told_what_to_do(cluster: Cluster) -> None:
    cluster.pool(lora={"maxRank": 16, "maxRegistered": 3})
    placed = cluster.tenant("whale", adapters=4)
    assert placed.too_large.startswith("pool `lora`: its 4 adapters are more than the 3")
    assert seats(placed) == set()
    assert set(placed.objections) == {"m0", "m1", "m2", "m3"}


def test_pinned_pages_are_those_that_replicas_report(cluster: Cluster) -> None:
    cluster.pool(placement={"replicasPerTenant": 1})
    [here] = seats(cluster.tenant("maple", adapters=1))
    [_] = seats(cluster.tenant("other", adapters=1))
    for replica in REPLICAS:
        cluster.reports(replica, 100)
    cluster.reports(here, 100, pinned("maple", 30))
    assert seats(cluster.tenant("maple", adapters=1)) == {here}
    assert cluster.world.placements.get("maple").pools["lora"].pages == 30
    cluster.reports(here, 50, pinned("maple", 30))
    moved = cluster.tenant("maple", adapters=1)
    assert here not in seats(moved), "half of 50 pages may be pinned"
    assert f"left `{here}` (full)" in reason(moved)


def test_a_pool_that_is_full_is_passed_over(cluster: Cluster) -> None:
    cluster.pool(placement={"replicasPerTenant": 4, "maxTenantsPerReplica": 1})
    cluster.tenant("first")
    full = cluster.tenant("second")
    assert full.objections["chat"].endswith("has 1 tenants already: add replicas")
    assert len(full.placement.pools["lora"].replicas) == 0


def test_a_tenant_that_waited_for_replicas_is_told_why_the_pool_not_that_it_has_it(cluster: Cluster) -> None:
    owner = {"kind": "AdapterPool", "name": "lora", "uid": "uid-lora", "controller": True}
    for replicas, expected in ((0, "the pool has no replicas"), (2, "all 2 replicas in 2 zones")):
        cluster.put(
            STATEFUL_SET, "lora-fast", {"replicas": replicas}, namespace="tenantry-system",
            ownerReferences=[owner],
        )  # fmt: skip
        assert reason(cluster.tenant("maple")) == f"the only pool that fits; lane fast: {expected}"


def seated(cluster: Cluster, name: str, *replicas: str) -> Obj:
    """A tenant as an earlier leader left it."""
    spec = {"tier": "MidMarket", "models": [{"name": "chat", "baseModel": "tiny"}]}
    seats = sorted(replicas)
    place = {"pool": "lora", "namespace": "tenantry-system", "replicas": seats, "reason": "then"}
    route = {"weight": 1, "models": [{"name": "chat", "pool": "lora"}]}
    return cluster.put(TENANT, name, spec, {"placement": [place], "route": route})


def begin(cluster: Cluster) -> None:
    """What workers do before their first reconcile."""
    for call in cluster.world.setup.first:
        call()


def test_a_new_leader_starts_from_the_last_statuses_whatever_it_was_asked_before(cluster: Cluster) -> None:
    workload = next(iter(cluster.store.list(STATEFUL_SET)))
    seated(cluster, "early", *REPLICAS[:2])
    assert not list(Watches(cluster.world).workload_to_tenants(None, workload, cluster.store))
    names = [f"tenant-{number}" for number in range(12)]
    for number, name in enumerate(names):
        seated(cluster, name, REPLICAS[number % 4], REPLICAS[(number + 1) % 4])
    seated(cluster, "early", *REPLICAS[2:])  # it was moved while another led
    begin(cluster)
    placements = cluster.world.placements
    assert placements.tenants_on("lora") == {"early", *names}
    assert placements.get("early").pools["lora"].replicas == REPLICAS[2:]
    for name in names:
        before = placements.get(name)
        spec = cluster.world.tenant_spec(cluster.store.get(TENANT, Key("", name)) or {})
        assert placing.shared(cluster.world, name, spec, 1).placement == before, "a restart moves nobody"


def test_a_new_leader_puts_nobody_on_a_replica_that_is_being_emptied(cluster: Cluster) -> None:
    PoolReconciler(cluster.world)
    cluster.pool(lanes=[{"name": "fast", "replicas": {"min": 3}}])
    begin(cluster)
    assert cluster.world.retiring == {Key("lora", REPLICAS[3])}
    for number in range(20):
        placed = cluster.tenant(f"tenant-{number}").placement.pools["lora"]
        assert REPLICAS[3] not in placed.replicas
