"""`tenantry export`: what people wrote, the promoted version, and nothing that a cluster made."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from tenantry.cli.export import build

Obj = dict[str, Any]
A, B = (f"sha256:{letter * 64}" for letter in "ab")


def tenant(name: str, **meta: Any) -> Obj:
    made = {
        "uid": "1",
        "resourceVersion": "7",
        "generation": 3,
        "managedFields": [{}],
        "creationTimestamp": "x",
    }
    key = {"name": "ci", "sha256": "c" * 64}
    spec = {
        "tier": "Free",
        "models": [{"name": "chat", "baseModel": "m"}],
        "auth": {"apiKeys": [key]},
        "prompt": {"system": "Grüße"},
    }
    metadata = {"name": name, "finalizers": ["tenantry.dev/release"], **made, **meta}
    return {"metadata": metadata, "spec": spec, "status": {"observedGeneration": 3}}


def version(number: str, digest: str = A, **fields: Any) -> Obj:
    return {
        "version": number,
        "digest": digest,
        "source": f"oci://r.example/tone:{number}",
        "rank": 8,
        **fields,
    }


def adapter(stable: str, *versions: Obj, **status: Any) -> Obj:
    spec = {
        "tenantRef": "acme",
        "versions": list(versions),
        "channels": [{"name": "stable", "version": stable}],
    }
    return {"metadata": {"name": "tone", "namespace": "acme-ml", "uid": "2"}, "spec": spec, "status": status}


def active(entry: Obj) -> Obj:
    """A status that says this version is served."""
    names = {
        "version": "activeVersion",
        "digest": "activeDigest",
        "source": "activeSource",
        "rank": "activeRank",
        "secretRef": "activeSecretRef",
    }
    return {"channels": [{"name": "stable", **{names[name]: value for name, value in entry.items()}}]}


def documents(text: str) -> list[Obj]:
    return [document for document in yaml.safe_load_all(text) if document]


def exported(obj: Obj) -> tuple[Obj, tuple[str, ...]]:
    found = build([], [], [obj])
    [adapter] = [document for document in documents(found.text) if document["kind"] == "Adapter"]
    return adapter, found.notes


def test_only_what_people_wrote_goes_along_in_an_order_that_can_be_applied() -> None:
    note = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "team": "blue"}
    owner = {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "Tenant",
        "name": "oak",
        "uid": "3",
        "controller": True,
    }
    pools: list[Obj] = [
        {"metadata": {"name": "tenant-oak", "ownerReferences": [owner]}, "spec": {}},
        {"metadata": {"name": "shared", "uid": "4"}, "spec": {"tiers": ["Free"]}, "status": {"tenants": 2}},
    ]
    tenants = [tenant("oak"), tenant("acme", labels={"stage": "live"}, annotations=note)]
    found = build(pools, tenants, [adapter("1.0.0", version("1.0.0"))])
    space, pool, acme, oak, tone = documents(found.text)
    assert space == {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "acme-ml"}}
    assert pool == {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "AdapterPool",
        "metadata": {"name": "shared"},
        "spec": {"tiers": ["Free"]},
    }
    assert acme["metadata"] == {"name": "acme", "labels": {"stage": "live"}, "annotations": {"team": "blue"}}
    assert oak["spec"] == tenant("oak")["spec"]
    assert set(tone) == {"apiVersion", "kind", "metadata", "spec"}
    assert found.notes == ()


def test_the_same_objects_make_the_same_text_whatever_their_order() -> None:
    tenants = [tenant("b"), tenant("a")]
    assert build([], tenants, []) == build([], list(reversed(tenants)), [])


def test_what_is_being_deleted_stays_behind_and_is_named() -> None:
    found = build([], [tenant("gone", deletionTimestamp="2026-01-01T00:00:00Z")], [])
    assert documents(found.text) == []
    assert found.notes == ("Tenant gone is being deleted and was left out",)


def test_the_promoted_version_is_asked_for_and_not_the_one_on_its_way() -> None:
    old, new = version("1.0.0"), version("2.0.0", B)
    before = adapter("2.0.0", old, new, **active(old))
    kept = copy.deepcopy(before)
    found, notes = exported(before)
    assert found["spec"]["channels"] == [{"name": "stable", "version": "1.0.0"}]
    assert found["spec"]["versions"] == [new, old]
    assert len(notes) == 1
    assert "serves 1.0.0, which the export asks for, and not 2.0.0" in notes[0]
    assert before == kept


def test_a_promoted_version_that_git_dropped_is_listed_again() -> None:
    old, new = version("1.0.0"), version("2.0.0", B)
    found, _ = exported(adapter("2.0.0", new, **active(old)))
    assert found["spec"]["versions"] == [new, old]
    assert found["spec"]["channels"] == [{"name": "stable", "version": "1.0.0"}]


def test_a_version_whose_bytes_were_changed_goes_along_as_it_is_served() -> None:
    served, changed = version("1.0.0"), version("1.0.0", B)
    found, notes = exported(adapter("1.0.0", changed, **active(served)))
    assert found["spec"]["versions"] == [served]
    assert notes


def test_the_last_promoted_version_counts_before_an_active_one() -> None:
    old, new = version("1.0.0"), version("2.0.0", B)
    status = {**active(new), "lastPromoted": {**old, "generation": 4, "time": "2026-01-01T00:00:00Z"}}
    found, _ = exported(adapter("2.0.0", old, new, **status))
    assert found["spec"]["channels"] == [{"name": "stable", "version": "1.0.0"}]
    assert found["spec"]["versions"] == [new, old]


def test_before_the_first_promotion_the_spec_stands() -> None:
    new = version("1.0.0")
    found, notes = exported(adapter("1.0.0", new))
    assert found["spec"] == adapter("1.0.0", new)["spec"]
    assert notes == ()


def test_credentials_stay_behind_and_are_named() -> None:
    _, notes = exported(adapter("1.0.0", version("1.0.0", secretRef="registry")))
    assert notes == ("Secret acme-ml/registry is not exported: create it before you apply",)


@pytest.mark.parametrize("kept", ["active", "lastPromoted"])
def test_a_promoted_version_that_git_dropped_keeps_its_credentials_name(kept: str) -> None:
    old, new = version("1.0.0", secretRef="registry"), version("2.0.0", B)
    status = active(old) if kept == "active" else {"lastPromoted": {**old, "generation": 4, "time": "x"}}
    found, notes = exported(adapter("2.0.0", new, **status))
    assert found["spec"]["versions"] == [new, old]
    assert "Secret acme-ml/registry is not exported: create it before you apply" in notes
