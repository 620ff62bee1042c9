"""The start-up check against CRDs of another release."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.processes import CONFIG
from tenantry.cluster import Client, NotFound
from tenantry.runtime import main
from tenantry.runtime.main import Options
from tenantry.runtime.schema import KINDS, SchemaMismatch, check_schema, missing_fields

if TYPE_CHECKING:
    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver


@pytest.fixture
async def served(client: Client, crds: None) -> Any:
    await check_schema(client)
    document = await client.transport.request("GET", "/openapi/v3/apis/tenantry.dev/v1alpha1")
    return document["components"]["schemas"]


async def test_the_crds_of_this_release_have_every_field(client: Client, crds: None) -> None:
    await check_schema(client)


def test_a_field_that_is_not_served_is_named(served: Any) -> None:
    older = copy.deepcopy(served)
    tenant = next(schema for name, schema in older.items() if name.endswith(".Tenant"))
    del tenant["properties"]["status"]["properties"]["route"]["properties"]["pools"]["items"]["properties"][
        "uid"
    ]
    del tenant["properties"]["spec"]["properties"]["limits"]
    missing = missing_fields(older, "Tenant", KINDS["Tenant"])
    assert missing == ["Tenant.spec.limits", "Tenant.status.route.pools[].uid"]
    assert missing_fields(served, "Tenant", KINDS["Tenant"]) == []
    assert missing_fields({}, "Adapter", KINDS["Adapter"]) == ["Adapter"]


async def test_an_operator_on_older_crds_begins_nothing(
    apiserver: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def older(client: Client) -> None:
        raise SchemaMismatch("the served CRDs lack `Tenant.spec.weight`")

    (tmp_path / "config.yaml").write_text(CONFIG)
    options = Options(tmp_path / "config.yaml", None, None, namespace, apiserver.kubeconfig, 0, None)
    monkeypatch.setattr(main, "check_schema", older)
    with pytest.raises(SchemaMismatch, match="`Tenant"):
        async with asyncio.timeout(20):
            await main.operate(options, lambda setup: [])
    assert apiserver.kubectl("-n", namespace, "get", "leases", "-o", "name").stdout == ""


async def test_the_message_says_what_to_do(
    client: Client, crds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: Any, **__: Any) -> Any:
        return {"components": {"schemas": {}}}

    async def unknown(*_: Any, **__: Any) -> Any:
        raise NotFound(404, "NotFound", "no such path")

    monkeypatch.setattr(client.transport, "request", nothing)
    with pytest.raises(SchemaMismatch, match="lack `Tenant`, `AdapterPool`, `Adapter`: install the CRDs"):
        await check_schema(client, patience=0)
    monkeypatch.setattr(client.transport, "request", unknown)
    with pytest.raises(
        SchemaMismatch, match=r"must serve tenantry\.dev/v1alpha1, but does not: install the CRDs"
    ):
        await check_schema(client, patience=0)
