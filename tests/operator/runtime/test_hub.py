"""From events to dirty keys: references that move, echoes, and mappers that cannot read an object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenantry.cluster import POD, TENANT, Key, Obj
from tenantry.runtime.controller import (
    DONE,
    Context,
    Controller,
    Result,
    Watch,
    label_key,
    own_key,
    owner_key,
)
from tenantry.runtime.hub import Hub, writing
from tenantry.runtime.store import Store
from tenantry.runtime.workset import Priority


class Nothing:
    async def reconcile(self, key: Key, ctx: Context) -> Result:
        return DONE


def obj(version: int, *, name: str = "acme", uid: str = "u1", **extra: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": uid, "resourceVersion": str(version), **extra.pop("metadata", {})}
    return {"metadata": metadata, **extra}


def pod(version: int, **labels: str) -> dict[str, Any]:
    return obj(version, name="p", metadata={"namespace": "ns", "labels": labels})


def hub_of(*watches: Watch) -> Hub:
    return Hub(Store(), [Controller("tenant", Nothing(), list(watches))])


def dirty(hub: Hub, controller: str = "tenant") -> list[str]:
    """The names that are dirty now; afterwards none is."""
    found = []
    workset = hub.queues[controller]._set
    while (taken := workset.take(0.0)) is not None:
        found.append(taken[0].name)
        workset.done(taken[0], 0.0)
    return found


async def test_when_a_reference_moves_both_ends_are_woken() -> None:
    hub = hub_of(Watch(POD, label_key("pool")))
    hub.arrived(POD, pod(1, pool="a"))
    assert dirty(hub) == ["a"]
    hub.arrived(POD, pod(2, pool="b"))
    assert dirty(hub) == ["a", "b"]
    hub.left(POD, Key("ns", "p"), "u1")
    assert dirty(hub) == ["b"]


async def test_the_owner_is_woken_by_what_it_owns() -> None:
    hub = hub_of(Watch(POD, owner_key("Tenant")))
    owners = [
        {"kind": "Tenant", "name": "acme", "uid": "u", "controller": True},
        {"kind": "Tenant", "name": "other"},
    ]
    hub.arrived(POD, obj(1, metadata={"namespace": "ns", "ownerReferences": owners}))
    assert dirty(hub) == ["acme"]


async def test_an_own_status_does_not_wake_the_root_and_that_of_another_hand_does() -> None:
    hub = hub_of(Watch(TENANT, own_key))
    hub.arrived(TENANT, obj(1, metadata={"generation": 1}))
    assert dirty(hub) == ["acme"]
    ours = obj(2, metadata={"generation": 1}, status={"observedGeneration": 1})
    with writing("tenant", Key("", "acme")):
        hub.answered(TENANT, ours, True)
    hub.arrived(TENANT, ours)
    assert dirty(hub) == []
    hub.arrived(TENANT, obj(3, metadata={"generation": 1}, status={"observedGeneration": 0}))
    assert dirty(hub) == ["acme"]
    hub.arrived(TENANT, obj(4, metadata={"generation": 1, "deletionTimestamp": "now", "finalizers": ["x"]}))
    assert dirty(hub) == ["acme"]


async def test_a_list_after_the_first_one_says_that_a_watch_began_anew() -> None:
    hub = hub_of(Watch(TENANT, own_key))
    hub.listed(TENANT, obj(1))
    assert not hub.relisted.is_set()
    hub.synced.set()
    hub.listed(TENANT, obj(1))
    assert hub.relisted.is_set()


async def test_an_own_write_wakes_others_at_once_and_its_echo_nobody() -> None:
    hub = Hub(
        Store(),
        [
            Controller("tenant", Nothing(), [Watch(POD, label_key("tenant"))]),
            Controller("pool", Nothing(), [Watch(POD, label_key("pool"))]),
        ],
    )
    written = pod(5, tenant="acme", pool="shared")
    with writing("tenant", Key("", "acme")):
        hub.answered(POD, written, True)
    assert dirty(hub, "tenant") == []
    assert dirty(hub, "pool") == ["shared"]
    hub.arrived(POD, written)
    assert dirty(hub, "tenant") == []
    assert dirty(hub, "pool") == []


async def test_a_write_that_may_hide_others_changes_wakes_its_writer_too() -> None:
    hub = hub_of(Watch(POD, label_key("tenant")))
    with writing("tenant", Key("", "acme")):
        hub.answered(POD, pod(5, tenant="acme"), False)
    assert dirty(hub) == ["acme"]


async def test_a_live_read_that_is_newer_wakes_even_the_reader() -> None:
    hub = hub_of(Watch(TENANT, own_key))
    hub.arrived(TENANT, obj(1, metadata={"generation": 1}))
    dirty(hub)
    with writing("tenant", Key("", "acme")):
        hub.answered(TENANT, obj(2, metadata={"generation": 2}), False)
    assert dirty(hub) == ["acme"]
    hub.arrived(TENANT, obj(2, metadata={"generation": 2}))
    assert dirty(hub) == []


async def test_a_mapper_that_fails_on_one_object_stops_no_other_event() -> None:
    def broken(old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        raise ValueError("cannot read this")

    hub = hub_of(Watch(TENANT, broken), Watch(TENANT, own_key))
    hub.arrived(TENANT, obj(1))
    assert dirty(hub) == ["acme"]


async def test_what_a_resync_or_the_first_list_adds_waits_behind_changes() -> None:
    hub = hub_of(Watch(TENANT, own_key))
    hub.arrived(TENANT, obj(1, name="a", uid="a"), Priority.LOW)
    hub.arrived(TENANT, obj(2, name="b", uid="b"), Priority.LOW)
    hub.arrived(TENANT, obj(3, name="c", uid="c"))
    assert dirty(hub) == ["c", "a", "b"]


async def test_answers_of_kinds_that_nobody_watches_are_not_kept() -> None:
    hub = hub_of(Watch(TENANT, own_key))
    hub.answered(POD, pod(1), True)
    assert hub.store.count(POD) == 0
