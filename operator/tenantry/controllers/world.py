"""What every controller knows of the world: parsed specs, pools with their replicas, placements, observations."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from tenantry.api import AdapterPoolSpec, AdapterSpec, OperatorConfig, TenantSpec, names
from tenantry.api.common import Model
from tenantry.api.pool import LaneName
from tenantry.attestation.proof import Proof
from tenantry.cluster import (
    ADAPTER,
    ADAPTER_POOL,
    POD,
    STATEFUL_SET,
    TENANT,
    Client,
    Key,
    Obj,
    controller_of,
    is_deleting,
    key_of,
    spec_version,
    uid_of,
)
from tenantry.desired import gate, older
from tenantry.desired.problems import Problem, SpecError
from tenantry.engines import FetcherClient, Replica, TenantryDriver
from tenantry.engines.base import EngineDriver
from tenantry.engines.http import new_client
from tenantry.evidence.network import Target
from tenantry.promotion.retire import RETIRE_SECONDS
from tenantry.runtime.controller import Setup

from . import pods, visits
from .evidence import Evidence
from .observations import Observations
from .placements import Placements, routed_replicas

M = TypeVar("M", bound=Model)

REST = 10.0
"""A replica rests so many times as long as it was looked at, so that all of them leave time for all else."""
MAX_REST_SECONDS = 10.0
PARSED = 2048
"""Specs that are kept as models, those used last: a model takes several times the memory of its text."""


@dataclass(frozen=True)
class Pool:
    """An AdapterPool with a valid spec. `tenant` is the one that it is dedicated to."""

    name: str
    uid: str
    namespace: str
    spec: AdapterPoolSpec
    tenant: str | None
    deleting: bool
    obj: Obj


class Links:
    """Indexes over references, kept by the watches: who must look again when something else changed."""

    def __init__(self) -> None:
        self._adapters: dict[str, set[Key]] = {}
        self._routed: dict[Key, set[str]] = {}
        self._users: dict[Key, set[str]] = {}
        self.short_of_nodes: set[str] = set()
        self.with_egress: set[str] = set()
        self.unplaced: set[str] = set()

    def adapters_of(self, tenant: str) -> frozenset[Key]:
        return frozenset(self._adapters.get(tenant, ()))

    def users_of(self, adapter: Key) -> frozenset[str]:
        """Tenants that refer to the adapter, rightly or not."""
        return frozenset(self._users.get(adapter, ()))

    def routed_to(self, replica: Key) -> frozenset[str]:
        """Tenants whose stored route names the replica."""
        return frozenset(self._routed.get(replica, ()))

    def adapter_changed(self, old: Obj | None, new: Obj | None) -> None:
        for obj, present in ((old, False), (new, True)):
            tenant = (obj or {}).get("spec", {}).get("tenantRef")
            if obj is None or not isinstance(tenant, str):
                continue
            if present:
                self._adapters.setdefault(tenant, set()).add(key_of(obj))
            else:
                self._adapters.get(tenant, set()).discard(key_of(obj))

    def tenant_changed(self, old: Obj | None, new: Obj | None) -> frozenset[Key]:
        """The replicas that the old or the new route names."""
        before, after = routed_replicas(old), routed_replicas(new)
        name = (new or old or {})["metadata"]["name"]
        if (((new or {}).get("spec") or {}).get("isolation") or {}).get("egress"):
            self.with_egress.add(name)
        else:
            self.with_egress.discard(name)
        for adapter in _references(old):
            self._users.get(adapter, set()).discard(name)
        for adapter in _references(new):
            self._users.setdefault(adapter, set()).add(name)
        for replica in before - after:
            self._routed.get(replica, set()).discard(name)
        for replica in after - before:
            self._routed.setdefault(replica, set()).add(name)
        return before | after


class World:
    """Shared by all controllers of one process; to be used from one event loop."""

    def __init__(self, setup: Setup, clock: Callable[[], float] = time.monotonic) -> None:
        self.setup = setup
        self.store = setup.store
        self.config: OperatorConfig = setup.config
        self.clock = clock
        self.began = clock()
        """Since when this process leads."""
        self.placements = Placements(setup.store)
        self.observations = Observations()
        self.evidence = Evidence(setup.config, setup.signer)
        self.links = Links()
        self.proofs: dict[Key, Proof] = {}
        """Gates of replicas, by `Key(pool, replica)`, as they were last heard."""
        self._rests: dict[Key, float] = {}
        self.leaving: set[Key] = set()
        self.retiring: set[Key] = set()
        self.driver: EngineDriver | None = None
        self.fetcher: FetcherClient | None = None
        trust = setup.trust
        self.http: httpx.AsyncClient = new_client(credentials=None if trust is None else trust.credentials)
        # Where gateways tell their metrics; None: wherever the endpoints of their Service are.
        self.gateway_urls: list[str] | None = None
        self.retire_seconds = RETIRE_SECONDS
        if setup.signer is not None:
            self.driver = TenantryDriver(setup.signer, self.http)
            self.fetcher = FetcherClient(setup.signer, setup.config.fetcher_url, self.http)
        self._specs: OrderedDict[tuple[str, Key], tuple[tuple[str, int], Model | SpecError]] = OrderedDict()
        setup.first.append(self._begin)

    def _begin(self) -> None:
        self.began = self.clock()
        self.placements.begin()

    # specs

    def tenant_spec(self, tenant: Obj) -> TenantSpec:
        """Raises SpecError, naming each field."""
        return self._parsed(TenantSpec, tenant)

    def adapter_spec(self, adapter: Obj) -> AdapterSpec:
        """Raises SpecError, naming each field."""
        return self._parsed(AdapterSpec, adapter)

    def pool_spec(self, pool: Obj) -> AdapterPoolSpec:
        """Raises SpecError, naming each field."""
        return self._parsed(AdapterPoolSpec, pool)

    def _parsed(self, model: type[M], obj: Obj) -> M:
        key = (obj["kind"], key_of(obj))
        version = spec_version(obj)
        cached = self._specs.get(key)
        if cached is None or cached[0] != version:
            cached = self._specs[key] = (version, _parse(model, obj))
            if len(self._specs) > PARSED:
                self._specs.popitem(last=False)
        self._specs.move_to_end(key)
        result = cached[1]
        if isinstance(result, SpecError):
            raise result
        assert isinstance(result, model)
        return result

    def forget_spec(self, kind: str, key: Key) -> None:
        self._specs.pop((kind, key), None)

    # tenants and adapters

    def tenant(self, name: str) -> Obj | None:
        return self.store.get(TENANT, Key("", name))

    def adapter(self, key: Key) -> Obj | None:
        """None also while it is being deleted: it is to be served by nothing then."""
        obj = self.store.get(ADAPTER, key)
        return None if obj is None or is_deleting(obj) else obj

    # pools

    def pool(self, name: str) -> Pool | None:
        obj = self.store.get(ADAPTER_POOL, Key("", name))
        if obj is None:
            return None
        try:
            spec = self.pool_spec(obj)
        except SpecError:
            return None
        tenant = dedicated_to(obj)
        return Pool(
            name=name,
            uid=uid_of(obj),
            namespace=self.config.release_namespace if tenant is None else names.tenant_namespace(tenant),
            spec=spec,
            tenant=tenant,
            deleting=is_deleting(obj),
            obj=obj,
        )

    def pools(self) -> Iterator[Pool]:
        for key in self.store.keys(ADAPTER_POOL):
            pool = self.pool(key.name)
            if pool is not None:
                yield pool

    # replicas

    def workload(self, pool: Pool, lane: LaneName) -> Obj | None:
        """The StatefulSet of a lane, if it is this pool's."""
        found = self.store.get(STATEFUL_SET, Key(pool.namespace, names.lane_workload(pool.name, lane)))
        owner = controller_of(found) if found is not None else None
        return found if owner is not None and owner.get("uid") == pool.uid else None

    def lane_replicas(self, pool: Pool, lane: LaneName) -> list[str]:
        """The replicas that the lane is to have, whether their pods run or not: names are stable over restarts."""
        workload = self.workload(pool, lane)
        count = 0 if workload is None else int(workload.get("spec", {}).get("replicas", 1))
        return [names.replica_pod(pool.name, lane, ordinal) for ordinal in range(count)]

    def replicas(self, pool: Pool) -> list[str]:
        return [replica for lane in pool.spec.lanes for replica in self.lane_replicas(pool, lane.name)]

    def placeable(self, pool: Pool, lane: LaneName, held: Sequence[str]) -> list[str]:
        """The replicas of a lane on which a tenant that is on `held` may be placed.

        Not those that will be no more (`retiring`); and while all of its own are about to be away (`leaving`), not
        these either, so that it finds another one first.
        """
        staying = [r for r in self.lane_replicas(pool, lane) if Key(pool.name, r) not in self.retiring]
        here = [replica for replica in staying if Key(pool.name, replica) not in self.leaving]
        stranded = bool(held) and not any(replica in here for replica in held)
        return here if stranded and here else staying

    def pod(self, pool: Pool, replica: str) -> Obj | None:
        found = self.store.get(POD, Key(pool.namespace, replica))
        labels = found["metadata"].get("labels", {}) if found is not None else {}
        return found if labels.get(names.POOL_LABEL) == pool.name else None

    def is_ready(self, pool: Pool, replica: str) -> bool:
        pod = self.pod(pool, replica)
        return pod is not None and pods.is_ready(pod)

    def peer(self, pool: Pool, replica: str, ip: str) -> Replica:
        """The replica as drivers and the fetcher address it."""
        scheme = "https" if self.is_secured(pool) else "http"
        url = f"{scheme}://{_host(ip)}:{names.ENGINE_ADMIN_PORT}"
        return Replica(f"{pool.namespace}/{replica}", url, pool.uid)

    def gate(self, pool: Pool, replica: str, ip: str) -> str:
        """Where the gate of the replica's pod listens."""
        return f"http://{_host(ip)}:{names.ENGINE_GATE_PORT}"

    def is_secured(self, pool: Pool) -> bool:
        """Whether the pool's engines are reached by mutual TLS: as they are written, not as the tenant asks by now."""
        if pool.tenant is None:
            return False
        workloads = (self.workload(pool, lane.name) for lane in pool.spec.lanes)
        return any(gate.stands(workload["spec"]["template"]["spec"]) for workload in workloads if workload)

    def wall_clock(self) -> float:
        """Unix seconds, for what outlives this process: certificates and proofs."""
        return time.time()

    def gateway_url(self, pod: Obj) -> str:
        """Where a gateway answers the cluster's own questions."""
        return f"http://{_host(str(pods.address(pod)))}:{names.METRICS_PORT}"

    # what a probe is compared with

    async def targets(self, client: Client) -> list[Target]:
        """What probes try to reach."""
        return await visits.targets(self.config, client)

    async def control(self, targets: Sequence[Target]) -> dict[str, str]:
        """What this process, an ordinary pod, reaches of it; by target id."""
        return await visits.control(targets)

    async def knock(self, ip: str, ports: tuple[int, int]) -> dict[int, str]:
        """Try the two ports of a running probe and let it end."""
        return await visits.knock(ip, ports)

    # waking others

    def wake_replicas(self, replicas: Iterable[Key]) -> None:
        """Debounced: many tenants and adapters change in one commit."""
        now = self.clock()
        for replica in replicas:
            self.setup.enqueue("replica", replica, after=max(0.2, self._rests.get(replica, now) - now))

    def rest_replica(self, replica: Key, seconds: float) -> None:
        """Looking at a replica of a thousand tenants took so long: let more changes come together before the next."""
        self._rests[replica] = self.clock() + min(MAX_REST_SECONDS, REST * seconds)

    def wake_tenants(self, tenants: Iterable[str]) -> None:
        for tenant in tenants:
            self.setup.enqueue("tenant", Key("", tenant))

    def wake_adapters(self, adapters: Iterable[Key]) -> None:
        """Debounced: the replicas of a tenant report one shortly after the other."""
        for adapter in adapters:
            self.setup.enqueue("adapter", adapter, after=0.3)

    def wake_pool(self, pool: str) -> None:
        """For its counts only, so not at once."""
        self.setup.enqueue("pool", Key("", pool), after=2.0)


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _references(tenant: Obj | None) -> frozenset[Key]:
    models = ((tenant or {}).get("spec") or {}).get("models") or []
    refs = [model.get("adapterRef") for model in models if isinstance(model, dict)]
    return frozenset(Key(ref["namespace"], ref["name"]) for ref in refs if ref)


def dedicated_to(pool: Obj) -> str | None:
    """The tenant that controls a derived pool. Its name is derived too: nothing else can pose as one."""
    owner = controller_of(pool)
    if owner is None or owner.get("kind") != "Tenant":
        return None
    tenant = str(owner.get("name", ""))
    return tenant if pool["metadata"]["name"] == names.dedicated_pool(tenant) else None


def _parse(model: type[M], obj: Obj) -> M | SpecError:
    try:
        spec = model.model_validate(obj.get("spec"))
    except ValidationError as error:
        return SpecError(_problem(entry) for entry in error.errors()[:8])
    problems = older.broken(obj["kind"], key_of(obj).name, spec)
    return SpecError(problems) if problems else spec


def _problem(entry: Any) -> Problem:
    path = ""
    for part in entry["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return Problem(path or "spec", f"must be valid: {entry['msg']}")
