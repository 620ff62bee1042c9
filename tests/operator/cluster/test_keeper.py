"""Create, then apply; prune; status: on the real API server, with requests counted."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY
from tenantry.cluster import (
    CONFIG_MAP,
    TENANT,
    Client,
    Conflict,
    Key,
    NameTaken,
    Obj,
    OwnerChanged,
    Resource,
    StillTerminating,
    condition,
    key_of,
    owned_by,
    resource_of,
    uid_of,
    version_of,
)
from tenantry.cluster.keeper import Keeper, Memory
from tenantry.runtime.store import Store

if TYPE_CHECKING:
    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver


class Bench:
    """A root, and keepers that share store and memory as successive reconciles do."""

    def __init__(self, client: Client, namespace: str, root: Obj) -> None:
        self.client = client
        self.namespace = namespace
        self.root = root
        self.store = Store()
        self.memory = Memory()
        client.on_object = lambda resource, obj, exclusive: self.store.put(resource, obj) and None
        client.on_gone = lambda resource, key, uid: self.store.drop(resource, key, uid) and None
        self.store.put(TENANT, root)

    def keeper(self) -> Keeper:
        return Keeper(self.client, self.store, self.memory)

    def config(self, name: str = "owned", **data: str) -> Obj:
        metadata = {"name": name, "namespace": self.namespace}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}

    async def live(self, name: str = "owned") -> Obj:
        live = await self.client.get(CONFIG_MAP, Key(self.namespace, name))
        assert live is not None
        return live


def sent() -> dict[str, int]:
    """Requests so far, by method."""
    found: dict[str, int] = {}
    for metric in REGISTRY.collect():
        if metric.name == "rest_client_requests":
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    method = sample.labels["method"]
                    found[method] = found.get(method, 0) + int(sample.value)
    return found


class Counted:
    """The requests that a block sent."""

    def __enter__(self) -> Counted:
        self.before = sent()
        return self

    def __exit__(self, *_: object) -> None:
        after = sent()
        self.requests = {
            method: count - self.before.get(method, 0)
            for method, count in after.items()
            if count != self.before.get(method, 0)
        }


def tenant(name: str) -> Obj:
    spec = {"tier": "Free", "models": [{"name": "chat", "baseModel": "smollm2-135m"}]}
    return {"apiVersion": "tenantry.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
async def bench(client: Client, namespace: str, crds: None) -> AsyncIterator[Bench]:
    root = await client.create(tenant(f"t-{uuid.uuid4().hex[:10]}"))
    yield Bench(client, namespace, root)
    await client.delete(TENANT, key_of(root), uid=uid_of(root))


async def test_the_first_write_is_a_post_and_nothing_is_sent_twice(bench: Bench) -> None:
    with Counted() as first:
        await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert first.requests == {"GET": 1, "POST": 1}
    live = await bench.live()
    assert owned_by(live, bench.root)
    assert live["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "tenantry"
    with Counted() as again:
        await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert again.requests == {}


async def test_after_a_restart_an_unchanged_object_is_applied_once_and_not_changed(bench: Bench) -> None:
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    await bench.keeper().ensure(bench.root, [bench.config(a="2")])
    before = version_of(await bench.live())
    bench.memory = Memory()
    await bench.keeper().ensure(bench.root, [bench.config(a="2")])
    assert version_of(await bench.live()) == before
    with Counted() as again:
        await bench.keeper().ensure(bench.root, [bench.config(a="2")])
    assert again.requests == {}


async def test_a_field_that_is_no_longer_sent_goes_away(bench: Bench) -> None:
    await bench.keeper().ensure(bench.root, [bench.config(a="1", b="2")])
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert (await bench.live())["data"] == {"a": "1"}
    await bench.keeper().ensure(bench.root, [bench.config(c="3")])
    assert (await bench.live())["data"] == {"c": "3"}


async def test_what_others_added_stays_and_what_they_changed_of_ours_goes_back(
    bench: Bench, apiserver: ApiServer
) -> None:
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    patch = '{"data": {"a": "changed by hand", "theirs": "stays"}}'
    apiserver.kubectl("-n", bench.namespace, "patch", "configmap", "owned", "--type=merge", "-p", patch)
    await bench.live()  # the event of that change
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert (await bench.live())["data"] == {"a": "1", "theirs": "stays"}


async def test_a_name_that_somebody_else_holds_is_never_taken_over(
    bench: Bench, apiserver: ApiServer
) -> None:
    apiserver.kubectl("-n", bench.namespace, "create", "configmap", "owned", "--from-literal=whose=theirs")
    for _ in range(2):
        with pytest.raises(NameTaken, match="must not exist yet or belong to us"):
            await bench.keeper().ensure(bench.root, [bench.config(whose="ours")])
    live = await bench.live()
    assert live["data"] == {"whose": "theirs"}
    assert "ownerReferences" not in live["metadata"]


async def test_another_root_of_ours_does_not_take_over_either(bench: Bench) -> None:
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    other = await bench.client.create(tenant(f"{bench.root['metadata']['name']}-other"))
    with pytest.raises(NameTaken, match=bench.root["metadata"]["name"]):
        await bench.keeper().ensure(other, [bench.config(a="2")])
    await bench.client.delete(TENANT, key_of(other), uid=uid_of(other))


async def test_an_apply_with_the_uid_of_a_former_incarnation_is_refused(bench: Bench) -> None:
    [old] = await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    await bench.client.delete(CONFIG_MAP, key_of(old), uid=uid_of(old))
    with pytest.raises(Conflict):
        await bench.client.apply(bench.config(a="2"), uid=uid_of(old))
    assert await bench.client.get(CONFIG_MAP, key_of(old)) is None
    new = await bench.client.create(bench.config(a="theirs"))
    with pytest.raises(Conflict):
        await bench.client.apply(bench.config(a="2"), uid=uid_of(old))
    assert uid_of(new) != uid_of(old)
    assert (await bench.live())["data"] == {"a": "theirs"}


async def test_an_object_that_is_still_being_deleted_is_waited_for(bench: Bench) -> None:
    held = bench.config(a="1")
    held["metadata"]["finalizers"] = ["tenantry.dev/test"]
    [live] = await bench.keeper().ensure(bench.root, [held])
    await bench.client.delete(CONFIG_MAP, key_of(live), uid=uid_of(live))
    with pytest.raises(StillTerminating):
        await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    await bench.client.set_finalizer(await bench.live(), "tenantry.dev/test", present=False)
    bench.store.drop(CONFIG_MAP, key_of(live), uid_of(live))
    [new] = await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert uid_of(new) != uid_of(live)


async def test_nothing_is_made_for_a_root_that_is_deleted_or_was_made_anew(bench: Bench) -> None:
    await bench.client.set_finalizer(bench.root, "tenantry.dev/test", present=True)
    await bench.client.delete(TENANT, key_of(bench.root), uid=uid_of(bench.root))
    with pytest.raises(OwnerChanged, match="is being deleted"):
        await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    with pytest.raises(OwnerChanged, match="no finalizer is added"):
        await bench.keeper().add_finalizer(bench.root)
    live = await bench.client.get(TENANT, key_of(bench.root))
    assert live is not None
    await bench.client.set_finalizer(live, "tenantry.dev/test", present=False)
    with pytest.raises(OwnerChanged, match="is gone or was made anew"):
        await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    again = await bench.client.create(tenant(bench.root["metadata"]["name"]))
    with pytest.raises(OwnerChanged, match="is gone or was made anew"):
        await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert await bench.client.get(CONFIG_MAP, Key(bench.namespace, "owned")) is None
    await bench.client.delete(TENANT, key_of(again), uid=uid_of(again))


async def test_nothing_is_made_outside_of_the_namespace_of_its_owner(bench: Bench) -> None:
    """The garbage collector takes such a child for an orphan, and nobody else would ever look for it."""
    owner = {**bench.root, "metadata": {**bench.root["metadata"], "namespace": "elsewhere"}}
    with pytest.raises(ValueError, match="must lie in the namespace of its owner, `elsewhere`"):
        await bench.keeper().ensure(owner, [bench.config(a="1")])
    assert await bench.client.get(CONFIG_MAP, Key(bench.namespace, "owned")) is None


async def test_prune_deletes_only_what_the_root_owns_bears_our_label_and_is_not_kept(
    bench: Bench, apiserver: ApiServer
) -> None:
    kept, gone, unlabelled = bench.config("kept"), bench.config("gone"), bench.config("unlabelled")
    await bench.keeper().ensure(bench.root, [kept, gone, unlabelled])
    foreign = bench.config("foreign")
    foreign["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "tenantry"}
    await bench.client.create(foreign)
    label = "app.kubernetes.io/managed-by-"
    apiserver.kubectl("-n", bench.namespace, "label", "configmap", "unlabelled", label)
    await bench.live("unlabelled")
    deleted = await bench.keeper().prune(bench.root, [CONFIG_MAP], [kept])
    assert [obj["metadata"]["name"] for obj in deleted] == ["gone"]
    left = {obj["metadata"]["name"] async for obj in bench.client.list(CONFIG_MAP, namespace=bench.namespace)}
    assert {"kept", "unlabelled", "foreign"} <= left
    assert "gone" not in left


async def test_prune_spares_an_object_that_changed_since_it_was_seen(
    bench: Bench, apiserver: ApiServer
) -> None:
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    apiserver.kubectl("-n", bench.namespace, "annotate", "configmap", "owned", "touched=yes")
    with pytest.raises(Conflict):
        await bench.keeper().prune(bench.root, [CONFIG_MAP], [])
    await bench.live()
    assert len(await bench.keeper().prune(bench.root, [CONFIG_MAP], [])) == 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_what_is_not_watched_is_looked_at_now_and_then(bench: Bench, apiserver: ApiServer) -> None:
    """Of ConfigMaps no events arrive here: a change by hand stands until the next look, and costs no reads before."""
    clock = Clock()
    bench.store.watch([TENANT])
    bench.memory = Memory(600.0, clock)
    keeper = bench.keeper()
    with Counted() as first:
        await keeper.ensure(bench.root, [bench.config(a="1")])
    assert first.requests == {"GET": 1, "POST": 1}
    assert keeper.recheck_after == 600.0
    apiserver.kubectl(
        "-n", bench.namespace, "patch", "configmap", "owned", "-p", '{"data": {"a": "by hand"}}'
    )
    with Counted() as again:
        await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert again.requests == {}
    clock.now = 601.0
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert (await bench.live())["data"] == {"a": "1"}
    clock.now = 1202.0
    with Counted() as look:
        await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert look.requests == {"GET": 2}, "the root and the object: nothing to write"
    await bench.keeper().ensure(bench.root, [bench.config(a="2")])
    assert (await bench.live())["data"] == {"a": "2"}, "another wish does not wait"


async def test_what_is_not_watched_is_made_anew_and_never_taken_over(bench: Bench) -> None:
    clock = Clock()
    bench.store.watch([TENANT])
    bench.memory = Memory(600.0, clock)
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    live = await bench.live()
    await bench.client.delete(CONFIG_MAP, key_of(live), uid=uid_of(live))
    clock.now = 601.0
    await bench.keeper().ensure(bench.root, [bench.config(a="1")])
    assert uid_of(await bench.live()) != uid_of(live)
    await bench.client.create(bench.config("theirs", x="y"))
    with pytest.raises(NameTaken, match="theirs"):
        await bench.keeper().ensure(bench.root, [bench.config("theirs", a="1")])
    assert (await bench.live("theirs"))["data"] == {"x": "y"}


def serving(message: str = "") -> dict[str, Any]:
    return {"conditions": [condition("Ready", True, "Serving", message)], "tier": "Free"}


async def test_a_status_is_written_only_when_it_says_something_new(bench: Bench) -> None:
    assert await bench.keeper().set_status(bench.root, serving())
    first = await bench.client.get(TENANT, key_of(bench.root))
    assert first is not None
    assert first["status"]["observedGeneration"] == 1
    assert first["status"]["conditions"][0]["observedGeneration"] == 1
    with Counted() as again:
        for _ in range(3):
            assert not await bench.keeper().set_status(bench.root, serving())
    assert again.requests == {}
    assert await bench.keeper().set_status(bench.root, serving("other words"))
    second = await bench.client.get(TENANT, key_of(bench.root))
    assert second is not None
    before, after = (obj["status"]["conditions"][0] for obj in (first, second))
    assert before["lastTransitionTime"] == after["lastTransitionTime"]
    assert after["message"] == "other words"


async def test_a_store_that_lags_behind_costs_a_read_but_no_write(bench: Bench) -> None:
    await bench.keeper().set_status(bench.root, serving())
    bench.store = Store()
    bench.client.on_object = lambda resource, obj, exclusive: None
    with Counted() as again:
        assert not await bench.keeper().set_status(bench.root, serving())
    assert again.requests == {"GET": 1}


async def test_what_a_status_no_longer_says_goes_away(bench: Bench) -> None:
    endpoint = {"endpoint": {"url": "http://gateway", "models": ["chat"]}}
    await bench.keeper().set_status(bench.root, {**serving(), **endpoint})
    await bench.keeper().set_status(bench.root, serving())
    live = await bench.client.get(TENANT, key_of(bench.root))
    assert live is not None
    assert "endpoint" not in live["status"]


async def test_a_status_of_an_older_spec_says_so(bench: Bench) -> None:
    """The spec changed after it was read: the status must not claim to be about the new one."""
    root = bench.root
    await bench.client.merge_patch(TENANT, key_of(root), {"spec": {"suspend": True}})
    await bench.keeper().set_status(root, serving())
    live = await bench.client.get(TENANT, key_of(root))
    assert live is not None
    assert live["metadata"]["generation"] == 2
    assert live["status"]["observedGeneration"] == 1


async def test_a_status_never_lands_on_another_incarnation(bench: Bench) -> None:
    await bench.client.delete(TENANT, key_of(bench.root), uid=uid_of(bench.root))
    again = await bench.client.create(tenant(bench.root["metadata"]["name"]))
    with pytest.raises(OwnerChanged):
        await bench.keeper().set_status(bench.root, serving())
    live = await bench.client.get(TENANT, key_of(again))
    assert live is not None
    assert live.get("status", {}).get("conditions") is None
    await bench.client.delete(TENANT, key_of(again), uid=uid_of(again))


async def test_lists_come_in_pages_and_versions_match(bench: Bench) -> None:
    await bench.keeper().ensure(bench.root, [bench.config(f"c{number}") for number in range(5)])
    labels = "app.kubernetes.io/managed-by=tenantry"
    listed = {
        key_of(obj): version_of(obj)
        async for obj in bench.client.list(CONFIG_MAP, namespace=bench.namespace, labels=labels, page=2)
    }
    assert len(listed) == 5
    versions = await bench.client.versions(CONFIG_MAP, labels=labels, page=2)
    assert listed.items() <= versions.objects.items()
    assert int(versions.at) >= max(int(version) for version in listed.values())


def test_every_path_is_that_of_the_api() -> None:
    assert CONFIG_MAP.path("ns", "a/b") == "/api/v1/namespaces/ns/configmaps/a%2Fb"
    assert TENANT.path("", "acme", "status") == "/apis/tenantry.dev/v1alpha1/tenants/acme/status"
    assert CONFIG_MAP.path() == "/api/v1/configmaps"
    with pytest.raises(ValueError, match="namespace"):
        CONFIG_MAP.path("", "name")
    assert isinstance(resource_of(tenant("x")), Resource)
