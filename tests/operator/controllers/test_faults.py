"""Every request of every reconcile fails once in every way, on a real API server: the end state is always the same.

Tenants of every kind of place come, change and go. A clean run records what the operator sends for them; then many of
them run side by side, each with faults of its own, and must end as the clean ones did: nothing twice, nothing left
over, no storm of requests. By default every call meets a few faults; `TENANTRY_FAULTS_FULL=1` makes it all of them.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from support.faults import FAULTS, WRITES, Aim, Call, Fault, Record, Saboteur
from tenantry.api import names
from tenantry.cluster import (
    ADAPTER,
    ADAPTER_POOL,
    CONFIG_MAP,
    NODE,
    SERVICE_ACCOUNT,
    TENANT,
    Key,
    Obj,
    Resource,
    controller_of,
    find_condition,
    key_of,
    resource_of,
    uid_of,
)
from tenantry.cluster.client import MANAGED
from tenantry.controllers import farewell, leftovers
from tenantry.controllers import pods as pod_facts
from tenantry.desired.revision import ANNOTATION
from tenantry.evidence.report import POOL_PREFIX
from tenantry.promotion.retire import GRACE_SECONDS

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(3600)]

FULL = bool(os.environ.get("TENANTRY_FAULTS_FULL"))
PHASES = ("create", "update", "delete")
SHARED = {"servicecidrs"}
"""Asked once a minute for all tenants together: which of them asks is chance."""
AT_ONCE = 40
ROUNDS = 3
OWN = (TENANT, ADAPTER_POOL, ADAPTER, NODE)
MADE = (*(kind for kind in leftovers.KINDS if kind not in OWN), SERVICE_ACCOUNT, CONFIG_MAP)
# Where it differs from one run to the next and says nothing of the end state.
_VOLATILE = frozenset(
    {
        *("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "observedGeneration"),
        *("lastTransitionTime", "since", "time", "startedAt", "stepStartedAt", "replacedAt"),
    }
)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass
class Instance:
    """One tenant with its surroundings; `name` is in the name or the namespace of all that belongs to it."""

    lab: Lab
    scenario: str
    name: str
    aims: dict[str, list[Aim]] = field(default_factory=dict)

    async def run(self, phase: str) -> None:
        await getattr(self, f"_{phase}_{self.scenario}")()

    # shared: a pool with two lanes, and a Free tenant

    async def _create_shared(self) -> None:
        lanes = [{"name": lane, "replicas": {"min": 1}, "slots": 8} for lane in ("fast", "bulk")]
        await self._make("AdapterPool", {**self._model(), "tiers": ["Free"], "lanes": lanes})
        await self._make("Tenant", {"tier": "Free", "models": [{"name": "chat", "baseModel": self.name}]})

    async def _update_shared(self) -> None:
        """Another template, a lane less, other limits."""
        lanes = [{"name": "fast", "replicas": {"min": 1}, "slots": 9}]
        await self._edit(ADAPTER_POOL, {"lanes": lanes})
        await self._edit(TENANT, {"limits": {"maxInFlight": 7}})

    async def _delete_shared(self) -> None:
        await self._remove(TENANT)
        await self._remove(ADAPTER_POOL)

    # lora: a pool that holds adapters, a MidMarket tenant, and its adapter

    async def _create_lora(self) -> None:
        where = self.lab.config.release_namespace
        lanes = [{"name": "fast", "replicas": {"min": 1}, "slots": 8}]
        pool = {**self._model(), "tiers": ["MidMarket"], "lanes": lanes, "lora": {"maxRank": 16}}
        reference = {"namespace": where, "name": self.name}
        models = [{"name": "chat", "baseModel": self.name, "adapterRef": reference}]
        listed = [
            {"version": version, "digest": f"sha256:{letter * 64}", "source": _SOURCE + version, "rank": 8}
            for version, letter in (("1.0.0", "a"), ("1.1.0", "b"))
        ]
        channels = [{"name": "stable", "version": "1.0.0"}]
        await self._make("AdapterPool", pool)
        await self._make("Adapter", {"tenantRef": self.name, "versions": listed, "channels": channels}, where)
        await self._make("Tenant", {"tier": "MidMarket", "adapterNamespaces": [where], "models": models})

    async def _update_lora(self) -> None:
        await self._edit(ADAPTER, {"channels": [{"name": "stable", "version": "1.1.0"}]})

    async def _delete_lora(self) -> None:
        for resource in (ADAPTER, TENANT, ADAPTER_POOL):
            await self._remove(resource)

    # dedicated: an Enterprise tenant on a node that is offered to it

    async def _create_dedicated(self) -> None:
        labels = {names.CLAIMABLE_LABEL: "true", "for": self.name}
        await self.lab.make(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels}}
        )
        spec = {
            "tier": "Enterprise",
            "models": [{"name": "chat", "baseModel": f"tiny-{self.lab.suffix}"}],
            "dedicated": {"poolTemplateRef": "gold", "replicas": 1},
            "isolation": {"nodeSelector": {"for": self.name}, "egress": ["203.0.113.0/24"]},
        }
        await self._make("Tenant", spec)

    async def _update_dedicated(self) -> None:
        """A network less, a replica more."""
        await self._edit(TENANT, {"dedicated": {"replicas": 2}, "isolation": {"egress": None}})

    async def _delete_dedicated(self) -> None:
        await self._remove(TENANT)

    # what the scenarios are made of

    def _model(self) -> Obj:
        return {"baseModel": {"name": self.name, "source": {"image": {"path": "/models/tiny"}}}}

    async def _make(self, kind: str, spec: Obj, namespace: str | None = None) -> None:
        meta = {"name": self.name, **({"namespace": namespace} if namespace else {})}
        await self.lab.make(
            {"apiVersion": "tenantry.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": spec}
        )

    def _key(self, resource: Resource) -> Key:
        return Key(self.lab.config.release_namespace if resource.namespaced else "", self.name)

    async def _edit(self, resource: Resource, spec: Obj) -> None:
        await self.lab.client.merge_patch(resource, self._key(resource), {"spec": spec})

    async def _remove(self, resource: Resource) -> None:
        await self.lab.remove(resource, self._key(resource))


_SOURCE = "oci://registry.example/tone:"
SCENARIOS = ("shared", "lora", "dedicated")
Facts = dict[str, Any]


class Stage:
    """All instances under one operator, and what there is of each in the cluster."""

    def __init__(self, lab: Lab, saboteur: Saboteur, instance: re.Pattern[str]) -> None:
        self.lab = lab
        self.saboteur = saboteur
        self._instance = instance
        self._numbers = itertools.count()

    def instance(self, scenario: str) -> Instance:
        return Instance(self.lab, scenario, f"m{next(self._numbers):03}-{self.lab.suffix}")

    async def begin(self, phase: str, instances: list[Instance]) -> None:
        for one in instances:
            self.saboteur.records[one.name] = Record(aims=one.aims.get(phase, []))
        await asyncio.gather(*(one.run(phase) for one in instances))

    async def facts(self) -> dict[str, Facts]:
        """Everything that bears an instance's name, without what is drawn anew in each run."""
        objects = [obj for resource in OWN async for obj in self.lab.client.list(resource)]
        for resource in MADE:
            objects += [obj async for obj in self.lab.client.list(resource, labels=MANAGED)]
        ours = [(found[0], obj) for obj in objects if (found := self._instance.search(str(key_of(obj))))]
        uids = {uid_of(obj): f"<{obj['kind']}>" for _, obj in ours}
        revisions = {
            key_of(obj).name: (obj.get("status") or {}).get("updateRevision")
            for _, obj in ours
            if obj["kind"] == "StatefulSet"
        }
        found: dict[str, Facts] = {}
        for name, obj in ours:
            key = f"{obj['kind']} {key_of(obj)}".replace(name, "*").replace(self.lab.suffix, "<lab>")
            found.setdefault(name, {})[key] = _plain(_outline(obj, revisions), name, uids)
        return found

    async def settled(
        self, instances: list[Instance], *, gone: bool, seconds: float = 90.0
    ) -> dict[str, Facts]:
        """Nothing is under way (or left, where `gone`), nor has anything changed for as long as a replica keeps a name
        that nobody needs, and a count is debounced."""
        before: dict[str, Facts] = {}
        since = time.monotonic()
        deadline = since + seconds
        while True:
            facts = await self.facts()
            now = {one.name: facts.get(one.name, {}) for one in instances}
            left = [key for found in now.values() for key in found if not key.startswith("Node ")]
            if now != before or (gone and left) or not await self._at_rest(instances):
                before, since = now, time.monotonic()
            elif time.monotonic() - since > GRACE_SECONDS + 3.0:
                return now
            assert time.monotonic() < deadline, (
                f"not settled without faults: {json.dumps(now, indent=1)[-4000:]}"
            )
            await asyncio.sleep(0.3)

    async def _at_rest(self, instances: list[Instance]) -> bool:
        ours = {one.name for one in instances}
        for resource in (TENANT, ADAPTER_POOL, ADAPTER):
            async for obj in self.lab.client.list(resource):
                found = self._instance.search(obj["metadata"]["name"])
                if found and found[0] in ours and not _is_at_rest(obj):
                    return False
        return True

    async def expect(
        self, instances: list[Instance], wanted: dict[str, Facts], seconds: float = 120.0
    ) -> None:
        """Each instance ends as `wanted` of its scenario says, and stays so."""
        deadline = time.monotonic() + seconds
        while True:
            facts = await self.facts()
            off = [one for one in instances if facts.get(one.name, {}) != wanted[one.scenario]]
            if not off:
                return
            one = off[0]
            assert time.monotonic() < deadline, (
                f"{len(off)} of {len(instances)} ended differently; {one.name} ({one.scenario}) with "
                f"{[(str(aim.call), aim.fault.name) for aims in one.aims.values() for aim in aims if aim.spent]}:\n"
                + _difference(wanted[one.scenario], facts.get(one.name, {}))
            )
            await asyncio.sleep(0.5)


def _is_at_rest(obj: Obj) -> bool:
    status = obj.get("status") or {}
    reconciling = find_condition(obj, "Reconciling") or {}
    ready = find_condition(obj, "Ready") or {}
    return (
        status.get("observedGeneration") == obj["metadata"]["generation"]
        and (ready.get("status"), reconciling.get("status")) == ("True", "False")
        and not obj["metadata"].get("deletionTimestamp")
    )


def _outline(obj: Obj, revisions: dict[str, str | None]) -> Obj:
    """What matters of an object: of our kinds all, of others what the operator writes."""
    if obj["kind"] == "Pod":
        owner = (controller_of(obj) or {}).get("name", "")
        return {"current": pod_facts.revision(obj) == revisions.get(owner)}
    if obj["kind"] == "Node":
        taints = [t for t in obj["spec"].get("taints") or [] if t["key"] == names.NODE_TAINT]
        meta = {name: obj["metadata"].get(name) for name in ("labels", "annotations")}
        return {"metadata": meta, "taints": taints}
    kept = {name: value for name, value in obj.items() if name != "status"}
    if obj["kind"] == "StatefulSet":
        meta = dict(obj["metadata"])
        # Which template ran on every replica last is noted some time after it does; the template itself is in `spec`.
        meta["annotations"] = {k: v for k, v in (meta.get("annotations") or {}).items() if k != ANNOTATION}
        kept["metadata"] = meta
    if obj["kind"] == "ConfigMap" and obj["metadata"]["name"].startswith(POOL_PREFIX.rstrip("-")):
        kept.pop("data", None)  # when something was seen, and a seal of that
    if resource_of(obj) in OWN:
        status = dict(obj.get("status") or {})
        # What was observed of guarantees, and when, depends on the moments of the looks; they have tests of their own.
        status.pop("isolation", None)
        seen = ("IsolationVerified", "NetworkIsolated")
        status["conditions"] = [c for c in status.get("conditions") or [] if c["type"] not in seen]
        for entry in status.get("placement") or []:
            entry.pop("reason", None)  # may count the other instances' pools
        kept["status"] = status
    return kept


def _plain(value: Any, name: str, uids: dict[str, str]) -> Any:
    text = (
        json.dumps(_stripped(value), sort_keys=True)
        .replace(name, "*")
        .replace(name.partition("-")[2], "<lab>")
    )
    return json.loads(_UUID.sub(lambda found: uids.get(found[0], "<another>"), text))


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        uid = {"uid": value["uid"]} if "uid" in value and "controller" in value else {}
        uid |= {"uid": value["uid"]} if "uid" in value and "lanes" in value else {}
        return {k: _stripped(v) for k, v in value.items() if k not in _VOLATILE} | uid
    return [_stripped(item) for item in value] if isinstance(value, list) else value


def _difference(wanted: Facts, found: Facts) -> str:
    left, right = (json.dumps(facts, indent=1, sort_keys=True).splitlines() for facts in (wanted, found))
    return "\n".join(
        itertools.islice(difflib.unified_diff(left, right, "clean", "with faults", lineterm="", n=2), 60)
    )


@pytest.fixture
async def stage(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A running operator whose every request goes through the saboteur, and is not repeated by the transport."""
    monkeypatch.setattr(farewell, "GATEWAY_SECONDS", 0.2)
    lab.config = lab.config.model_copy(update={"workers": 8})
    run, looked = lab._run, dict[Key, tuple[object, float]]()

    async def lean(workload: Obj) -> None:
        """Hundreds of StatefulSets: each is looked at when it changed, else every two seconds."""
        state = (workload["metadata"]["uid"], workload["metadata"]["generation"])
        known, at = looked.get(key_of(workload), (None, 0.0))
        if known != state or time.monotonic() - at > 2.0:
            looked[key_of(workload)] = (state, time.monotonic())
            await run(workload)

    monkeypatch.setattr(lab, "_run", lean)
    operator = await lab.start()
    transport = operator.world.setup.client.transport
    instance = re.compile(rf"m\d{{3}}-{lab.suffix}")
    saboteur = Saboteur(transport._send, instance)
    monkeypatch.setattr(transport, "_send", saboteur)
    monkeypatch.setattr(transport, "_attempts", 1)
    return Stage(lab, saboteur, instance)


@dataclass
class Clean:
    """What runs without faults showed: the facts after each phase by scenario, and the calls that all of them sent."""

    facts: dict[str, dict[str, Facts]] = field(default_factory=dict)
    calls: dict[tuple[str, str], Counter[Call]] = field(default_factory=dict)


_clean = Clean()


async def clean(stage: Stage) -> Clean:
    """Run once for all tests of this file."""
    if _clean.facts:
        return _clean
    instances = [stage.instance(scenario) for scenario in SCENARIOS for _ in range(2)]
    found = Clean()
    for phase in PHASES:
        await stage.begin(phase, instances)
        facts = await stage.settled(instances, gone=phase == "delete")
        found.facts[phase] = {}
        for one in instances:
            first = found.facts[phase].setdefault(one.scenario, facts[one.name])
            assert facts[one.name] == first, _difference(first, facts[one.name])
            sent = stage.saboteur.records[one.name].calls
            before = found.calls.get((one.scenario, phase))
            found.calls[one.scenario, phase] = sent if before is None else before & sent
    _clean.facts, _clean.calls = found.facts, found.calls
    return _clean


async def test_every_call_may_fail_in_every_way(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    without = await clean(stage)
    wanted, calls = without.facts, without.calls
    planned = [one for scenario in SCENARIOS for one in _plan(stage, scenario, calls)]
    every = {call for found in calls.values() for call in found if call.target not in SHARED}
    met: set[tuple[Call, str]] = set()
    tried: set[tuple[Call, str]] = set()
    most = 0
    for _ in range(ROUNDS):
        unmet: list[tuple[Instance, str, Aim]] = []
        for batch in [planned[start : start + AT_ONCE] for start in range(0, len(planned), AT_ONCE)]:
            for phase in PHASES:
                await stage.begin(phase, batch)
                await stage.expect(batch, wanted[phase])
                for one in batch:
                    record, usual = stage.saboteur.records[one.name], calls[one.scenario, phase].total()
                    most = max(most, record.calls.total() - usual)
                    bound = 2 * usual + 20 * (1 + len(record.aims))
                    assert record.calls.total() <= bound, f"{one.name} {phase}: {record.calls.most_common(5)}"
                    met |= {(aim.call, aim.fault.name) for aim in record.aims if aim.spent}
                    unmet += [(one, phase, aim) for aim in record.aims if not aim.spent]
            await stage.expect(batch, wanted["delete"])
        tried |= {(aim.call, aim.fault.name) for _, _, aim in unmet}
        # Some calls are made only when something comes late, and one fault changes when the next could be met.
        left = every - {call for call, _ in met}
        planned = [_again(stage, *one) for one in unmet if one[2].call in left]
    with capsys.disabled():
        print(
            "\n"
            + _matrix(met)
            + f"\n{len(met)} pairs of call and fault, at most {most} requests more than without"
        )
    missed = [f"{call} x {fault}" for call, fault in sorted(tried - met)]
    assert {call for call, _ in met} >= every, missed
    assert {fault for _, fault in met} == {fault.name for fault in FAULTS}, missed
    assert len(missed) <= len(met) // 20, missed


async def test_two_operators_at_once_leave_what_one_leaves(stage: Stage, lab: Lab) -> None:
    """Each thinks that it leads, as a leader that was stopped and woke up may for a moment; then the older one ends."""
    wanted = (await clean(stage)).facts
    instances = [stage.instance(scenario) for scenario in SCENARIOS]
    for phase in PHASES:
        older = lab.operator
        assert older is not None
        newer = await lab.start()
        await stage.begin(phase, instances)
        # Engines refuse the older one's declarations, so what it says of adapters is wrong until it has ended.
        await stage.expect([one for one in instances if one.scenario != "lora"], wanted[phase])
        await older.stop()
        lab.operator = newer
        await stage.expect(instances, wanted[phase])


def _plan(stage: Stage, scenario: str, calls: dict[tuple[str, str], Counter[Call]]) -> list[Instance]:
    """Instances with their aims: one fault in each phase, or a few in the short form."""
    depth = 1 if FULL else 3
    aims: dict[str, list[Aim]] = {}
    for phase in PHASES:
        pairs = [(c, f) for c in sorted(calls[scenario, phase]) for f in _faults(c, phase)]
        aims[phase] = [Aim(call, fault) for call, fault in pairs]
    count = max(-(-len(found) // depth) for found in aims.values())
    instances = [stage.instance(scenario) for _ in range(count)]
    for phase, found in aims.items():
        for number, aim in enumerate(found):
            instances[number % count].aims.setdefault(phase, []).append(aim)
    return instances


def _again(stage: Stage, one: Instance, phase: str, aim: Aim) -> Instance:
    """The same aim, and no other, in an instance of its own."""
    instance = stage.instance(one.scenario)
    instance.aims[phase] = [Aim(aim.call, aim.fault)]
    return instance


_turn: dict[str, Iterator[Fault]] = {}


def _faults(call: Call, phase: str) -> list[Fault]:
    """All faults of the verb, or in the short form: a cut after each write, and the others in turn."""
    fitting = [fault for fault in FAULTS if call.verb in fault.verbs]
    if FULL:
        return fitting
    others = _turn.setdefault(
        call.verb, itertools.cycle([f for f in fitting if f.name != "cut after the write"])
    )
    return [*(fitting[:1] if call.verb in WRITES else []), next(others)]


def _matrix(met: set[tuple[Call, str]]) -> str:
    """Calls by faults; a cross where they met."""
    width = max(len(str(call)) for call, _ in met)
    head = "\n".join(f"{'':{width}} {'| ' * number}{fault.name}" for number, fault in enumerate(FAULTS))
    rows = [
        f"{call!s:{width}} " + " ".join("x" if (call, fault.name) in met else "." for fault in FAULTS)
        for call in sorted({call for call, _ in met})
    ]
    return "\n".join([head, *rows])
