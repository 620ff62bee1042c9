"""Start-up check: the served CRDs have our fields. On older CRDs the API server would drop new ones without a word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from tenantry.api import (
    GROUP,
    VERSION,
    AdapterPoolSpec,
    AdapterPoolStatus,
    AdapterSpec,
    AdapterStatus,
    TenantSpec,
    TenantStatus,
)
from tenantry.cluster import Client, NotFound

KINDS: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "Tenant": (TenantSpec, TenantStatus),
    "AdapterPool": (AdapterPoolSpec, AdapterPoolStatus),
    "Adapter": (AdapterSpec, AdapterStatus),
}

_REMEDY = (
    "install the CRDs of this release: `helm upgrade --install tenantry-crds` or `kubectl apply -f crds/`"
)


class SchemaMismatch(Exception):
    """The API server does not serve the API that this release needs."""


async def check_schema(client: Client, patience: float = 30.0) -> None:
    """Raises SchemaMismatch, which names the missing fields and the remedy.

    CRDs that were just installed show up in the served document only after a while: `patience` seconds are waited.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return await _check(client)
        except SchemaMismatch:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(0.5)


async def _check(client: Client) -> None:
    try:
        document = await client.transport.request("GET", f"/openapi/v3/apis/{GROUP}/{VERSION}")
    except NotFound as error:
        raise SchemaMismatch(
            f"the API server must serve {GROUP}/{VERSION}, but does not: {_REMEDY}"
        ) from error
    schemas = (document.get("components") or {}).get("schemas") or {}
    missing = [field for kind, models in KINDS.items() for field in missing_fields(schemas, kind, models)]
    if missing:
        shown = ", ".join(f"`{field}`" for field in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise SchemaMismatch(f"the served CRDs lack {shown}{more}: {_REMEDY}")


def missing_fields(
    schemas: dict[str, Any], kind: str, models: tuple[type[BaseModel], type[BaseModel]]
) -> list[str]:
    """Fields of the models which the served schema of the kind has not, as `Kind.spec.field`."""
    served = next((schema for schema in schemas.values() if _is_kind(schema, kind)), None)
    if served is None:
        return [kind]
    properties = served.get("properties") or {}
    return [
        field
        for part, model in zip(("spec", "status"), models, strict=True)
        for field in _lacking(model.model_json_schema(), properties.get(part), f"{kind}.{part}")
    ]


def _is_kind(schema: dict[str, Any], kind: str) -> bool:
    return any(
        (gvk.get("group"), gvk.get("version"), gvk.get("kind")) == (GROUP, VERSION, kind)
        for gvk in schema.get("x-kubernetes-group-version-kind") or []
    )


def _lacking(model: dict[str, Any], served: dict[str, Any] | None, path: str) -> Iterator[str]:
    definitions = model.get("$defs", {})

    def walk(wanted: dict[str, Any], found: dict[str, Any] | None, path: str) -> Iterator[str]:
        if found is None:
            yield path
            return
        wanted = _resolved(wanted, definitions)
        for name, part in wanted.get("properties", {}).items():
            yield from walk(part, (found.get("properties") or {}).get(name), f"{path}.{name}")
        if "items" in wanted and isinstance(wanted["items"], dict):
            yield from walk(wanted["items"], found.get("items"), f"{path}[]")

    yield from walk(model, served, path)


def _resolved(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Without references and without the null branch of an optional field."""
    for _ in range(8):
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rsplit("/", 1)[-1]]
        elif "anyOf" in schema:
            schema = next((part for part in schema["anyOf"] if part.get("type") != "null"), {})
        elif "allOf" in schema:
            schema = schema["allOf"][0]
        else:
            break
    return schema
