"""Exactly one gateway knows a tenant: its own where it has one, the shared one otherwise."""

from __future__ import annotations

from typing import Any

from gateway_fakes import tenant
from tenantry_gateway.state import State


def on(place: str | None, name: str = "oak") -> dict[str, Any]:
    item = tenant(name, [])
    if place is not None:
        item["status"]["route"]["gateway"] = place
    return item


def test_the_shared_one_forgets_a_tenant_that_gets_its_own() -> None:
    shared, own = State(), State(only="oak")
    for state in (shared, own):
        state.replace_tenants([on(None), on("Dedicated", "elm")])
    assert (set(shared.tenants), set(own.tenants)) == ({"oak"}, set())
    for state in (shared, own):
        state.put_tenant(on("Dedicated"))
    assert (set(shared.tenants), set(own.tenants)) == (set(), {"oak"})
    for state in (shared, own):
        state.put_tenant(on("Shared"))
    assert (set(shared.tenants), set(own.tenants)) == ({"oak"}, set())


def test_a_pool_by_mutual_tls_is_marked_and_unmarked() -> None:
    state, item = State(), on(None)
    item["status"]["route"]["pools"][0]["tls"] = True
    state.put_tenant(item)
    assert state.secured == {"pool-uid"}
    state.put_tenant(on(None))
    assert state.secured == set()
