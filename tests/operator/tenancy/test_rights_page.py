"""`docs/reference/rights.md` is what `kubectl auth can-i --list` says. `TENANTRY_WRITE_DOCS=1` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.rest import Rest
from support.tenancy import ACCOUNT, RELEASE, TENANT_LABEL, eventually, namespace

if TYPE_CHECKING:
    from support.outage import Outage

pytestmark = pytest.mark.apiserver

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/rights.md"
HEAD = """# What each process may do

What the API server's authorizer says of the accounts that the chart makes: `kubectl auth can-i --list` as each of them,
without what every account may do (asking who it is, discovery). A test compares this page with a real API server;
`TENANTRY_WRITE_DOCS=1 python -m pytest tests/operator/tenancy/test_rights_page.py` writes it.

Roles say what; the chart's ValidatingAdmissionPolicies say where and to which objects, and hold even where somebody
gives an account more rights than these ([who may do what](../explanation/roles.md)).
"""


def test_the_page_says_what_the_authorizer_says(admin: Rest, own_plane: Outage) -> None:
    space = namespace("tenant-oak", **{TENANT_LABEL: "oak"})
    assert admin.create(space, user=ACCOUNT).complaint == ""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "tenantry-operator", "namespace": "tenant-oak"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "tenantry-tenant-namespace",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "tenantry-operator", "namespace": RELEASE}],
    }
    assert admin.create(binding, user=ACCOUNT).complaint == ""

    def listed(account: str, where: str) -> str:
        user = f"system:serviceaccount:{RELEASE}:{account}"
        text = own_plane.plane.kubectl("auth", "can-i", "--list", f"--as={user}", "-n", where).stdout
        return _table(text)

    eventually("the binding counts", lambda: "statefulsets.apps" in listed("tenantry-operator", "tenant-oak"))
    sections = [
        ("The operator, in every namespace and outside of namespaces", "tenantry-operator", "kube-system"),
        ("The operator, in the namespace of the release", "tenantry-operator", RELEASE),
        ("The operator, in the namespace of a dedicated tenant", "tenantry-operator", "tenant-oak"),
        ("The gateway", "tenantry-gateway", RELEASE),
        ("The fetcher", "tenantry-fetcher", RELEASE),
    ]
    page = HEAD + "".join(f"\n## {title}\n\n{listed(account, where)}" for title, account, where in sections)
    admin.delete(space, user=ACCOUNT)
    if os.environ.get("TENANTRY_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, f"{PAGE.name} is stale: run this test with TENANTRY_WRITE_DOCS=1"


def _table(text: str) -> str:
    """Resources, names and verbs of kubectl's table, sorted, as Markdown."""
    head, *lines = text.splitlines()
    starts = [head.index(title) for title in ("Non-Resource URLs", "Resource Names", "Verbs")]
    verbs: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        resource, urls, names = (
            line[start:end].strip() for start, end in zip((0, *starts), starts, strict=False)
        )
        if not resource or urls not in ("", "[]") or resource.startswith(("selfsubject", "*.*")):
            continue
        found = verbs.setdefault((resource, names.strip("[]")), set())
        found |= set(line[starts[2] :].strip().strip("[]").split())
    if not verbs:
        return "nothing\n"
    rows = [
        f"| `{resource}` | {f'`{names}`' if names else 'all'} | {' '.join(sorted(words))} |"
        for (resource, names), words in sorted(verbs.items())
    ]
    return "\n".join(["| resource | names | verbs |", "|---|---|---|", *rows]) + "\n"
