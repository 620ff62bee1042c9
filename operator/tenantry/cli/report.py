"""`tenantry report`: what a tenant is guaranteed, with the evidence, as an auditor reads it. Reads only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tenantry.api.common import Tier
from tenantry.api.names import IDENTITY_CONFIGMAP
from tenantry.evidence import render
from tenantry.evidence.audit import Audit, audit
from tenantry.evidence.book import Subject
from tenantry.evidence.report import Report, read, where
from tenantry.evidence.seal import CERTIFICATE, certified, is_sealed

from .errors import CliError

Obj = dict[str, Any]
FORMS = {"text": render.as_text, "json": render.as_json, "html": render.as_html}


class Source(Protocol):
    """What a report is made from."""

    def tenant(self, name: str) -> Obj:
        """Raises CliError."""

    def pool(self, name: str) -> Obj | None: ...

    def config_map(self, namespace: str, name: str) -> Obj | None: ...


def report(cluster: Source, name: str, form: str, release: str, now: float | None = None) -> tuple[str, bool]:
    """The report, and whether it has gaps. `release`: the operator's namespace, where the certificate lies that
    reports must be sealed with. `now`: seconds since 1970, else this machine's clock. Raises CliError."""
    tenant = cluster.tenant(name)
    try:
        made: Audit = audit(tenant, gather(cluster, tenant, release), time.time() if now is None else now)
    except ValueError as error:
        raise CliError(f"Tenant `{name}` cannot be read: {error}") from error
    return FORMS[form](made), bool(made.gaps)


def gather(cluster: Source, tenant: Obj, release: str) -> list[tuple[str, Report | None]]:
    """The stored reports that speak of the tenant: its own, or those of the pools that serve it."""
    identity = cluster.config_map(release, IDENTITY_CONFIGMAP)
    keys = certified(str(((identity or {}).get("data") or {}).get(CERTIFICATE, "")))
    if not keys:
        where = f"`{release}/{IDENTITY_CONFIGMAP}`"
        raise CliError(
            f"ConfigMap {where} must hold `{CERTIFICATE}`: name the operator's namespace by `--release`"
        )
    status, name = tenant.get("status") or {}, tenant["metadata"]["name"]
    tier = Tier(str(status.get("tier") or (tenant.get("spec") or {}).get("tier")))
    if tier.dedicated:
        return [
            _stored(cluster, Subject("Tenant", name), str(tenant["metadata"].get("uid", "")), release, keys)
        ]
    found = []
    for pool in (status.get("route") or {}).get("pools") or []:
        live = cluster.pool(pool["name"])
        uid = str(((live or {}).get("metadata") or {}).get("uid", ""))
        found.append(_stored(cluster, Subject("AdapterPool", pool["name"]), uid, release, keys))
    return found


def _stored(
    cluster: Source, subject: Subject, uid: str, release: str, keys: Sequence[Ed25519PublicKey]
) -> tuple[str, Report | None]:
    namespace, name = where(subject, release)
    found = cluster.config_map(namespace, name)
    what = f"ConfigMap {namespace}/{name} of {subject.kind} {subject.name}"
    if found is not None and not is_sealed(found, keys):
        return f"{what} (not sealed by the operator, so not believed)", None
    return what, read(found, subject, uid)
