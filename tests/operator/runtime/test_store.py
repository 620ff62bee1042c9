"""The store never goes back in time, whatever order events and answers arrive in."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tenantry.cluster import NODE, POD, TENANT, Key
from tenantry.runtime.store import Store


def tenant(version: int, uid: str = "u1", name: str = "acme", **extra: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": uid, "resourceVersion": str(version), **extra.pop("metadata", {})}
    return {"metadata": metadata, **extra}


def test_an_older_or_equal_version_changes_nothing() -> None:
    store = Store()
    assert store.put(TENANT, tenant(10, spec={"tier": "Free"}))
    assert store.put(TENANT, tenant(10)) is None
    assert store.put(TENANT, tenant(9, spec={"tier": "Smb"})) is None
    held = store.get(TENANT, Key("", "acme"))
    assert held is not None
    assert held["spec"] == {"tier": "Free"}
    assert held["kind"] == "Tenant"


def test_versions_compare_as_numbers() -> None:
    store = Store()
    store.put(TENANT, tenant(99))
    assert store.put(TENANT, tenant(100)) is not None


def test_a_late_deletion_of_the_former_incarnation_spares_the_new_one() -> None:
    store = Store()
    store.put(TENANT, tenant(10, "old"))
    store.put(TENANT, tenant(12, "new"))
    assert store.drop(TENANT, Key("", "acme"), "old") is None
    assert store.get(TENANT, Key("", "acme")) is not None


def test_an_answer_that_was_on_its_way_does_not_bring_a_deleted_object_back() -> None:
    store = Store()
    store.put(TENANT, tenant(10))
    assert store.drop(TENANT, Key("", "acme"), "u1") is not None
    assert store.put(TENANT, tenant(10)) is None
    assert store.get(TENANT, Key("", "acme")) is None
    assert store.put(TENANT, tenant(11, "u2")) is not None


def test_only_a_change_beyond_the_version_differs() -> None:
    store = Store()
    store.set_trim(NODE, lambda node: {**node, "status": {}})
    store.put(NODE, tenant(1, status={"heartbeat": 1}))
    change = store.put(NODE, tenant(2, status={"heartbeat": 2}))
    assert change is not None
    assert not change.differs
    change = store.put(NODE, tenant(3, metadata={"labels": {"a": "b"}}))
    assert change is not None
    assert change.differs


def test_content_ignores_status_and_bookkeeping_but_sees_drift() -> None:
    store = Store()
    key = Key("", "acme")
    store.put(TENANT, tenant(1, spec={"a": 1}, status={"x": 1}))
    before = store.content(TENANT, key)
    store.put(
        TENANT, tenant(2, spec={"a": 1}, status={"x": 2}, metadata={"managedFields": [{"manager": "k"}]})
    )
    assert store.content(TENANT, key) == before
    store.put(TENANT, tenant(3, spec={"a": 2}, status={"x": 2}))
    assert store.content(TENANT, key) != before


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["o1", "o2", None]), st.booleans()), max_size=30
    )
)
def test_the_owner_index_equals_a_scan(history: list[tuple[str, str | None, bool]]) -> None:
    store = Store()
    for version, (name, owner, present) in enumerate(history):
        key = Key("ns", name)
        if not present:
            store.drop(POD, key)
            continue
        references = [{"kind": "StatefulSet", "name": "s", "uid": owner, "controller": True}] if owner else []
        pod = tenant(version, name, name, metadata={"namespace": "ns", "ownerReferences": references})
        store.put(POD, pod)
    for owner in ("o1", "o2"):
        scanned = [
            pod["metadata"]["name"]
            for pod in store.list(POD)
            if any(reference["uid"] == owner for reference in pod["metadata"]["ownerReferences"])
        ]
        assert [pod["metadata"]["name"] for pod in store.owned(POD, owner)] == scanned
