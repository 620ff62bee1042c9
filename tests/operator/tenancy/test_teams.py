"""The roles for people, on the real authorizer: what each team may do, and that none of them writes a status."""

from __future__ import annotations

import pytest
from support.rest import Object, Rest
from support.tenancy import bind, eventually, namespace

pytestmark = pytest.mark.apiserver

API = "tenantry.dev/v1alpha1"
ML, ELSEWHERE = "team-ml", "team-other"
EVERY = frozenset({"get", "list", "watch", "create", "update", "patch", "delete"})
READ = frozenset({"get", "list", "watch"})
NONE: frozenset[str] = frozenset()

# user -> (role, namespace or everywhere); then what of each kind it may do, and where
TEAMS = {
    "pat-platform": ("tenantry-platform-admin", ""),
    "ann-account": ("tenantry-account-manager", ""),
    "max-ml": ("edit", ML),
    "ada-ml": ("admin", ML),
    "ian-intern": ("view", ML),
}
RIGHTS = [
    ("pat-platform", "tenants", "", EVERY),
    ("pat-platform", "adapterpools", "", EVERY),
    ("pat-platform", "adapters", ML, READ),
    ("ann-account", "tenants", "", EVERY),
    ("ann-account", "adapterpools", "", READ),
    ("ann-account", "adapters", ML, READ),
    ("max-ml", "adapters", ML, EVERY),
    ("ada-ml", "adapters", ML, EVERY),
    ("ian-intern", "adapters", ML, READ),
    *((user, "adapters", ELSEWHERE, NONE) for user in ("max-ml", "ada-ml", "ian-intern")),
    *(
        (user, kind, "", NONE)
        for user in ("max-ml", "ada-ml", "ian-intern")
        for kind in ("tenants", "adapterpools")
    ),
    *(
        (user, f"{kind}/{part}", ML if kind == "adapters" else "", NONE)
        for user in TEAMS
        for kind in ("tenants", "adapterpools", "adapters")
        for part in ("status", "finalizers")
    ),
]


@pytest.fixture(scope="module")
def teams(admin: Rest) -> Rest:
    """Everybody has the role of their team, and the cluster has gathered what belongs to it."""
    for name in (ML, ELSEWHERE):
        assert admin.create(namespace(name)).complaint == ""
    for user, (role, where) in TEAMS.items():
        assert bind(admin, role, user, where).complaint == ""
    eventually("roles are gathered", lambda: may(admin, "pat-platform", "create", "adapterpools"))
    eventually("roles are gathered", lambda: may(admin, "ann-account", "create", "tenants"))
    eventually("roles are gathered", lambda: may(admin, "max-ml", "create", "adapters", ML))
    return admin


def may(rest: Rest, user: str, verb: str, resource: str, where: str = "") -> bool:
    plain, _, part = resource.partition("/")
    attributes = {
        "verb": verb,
        "resource": plain,
        "subresource": part,
        "group": "tenantry.dev",
        "namespace": where,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }
    answer = rest.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer.body["status"]["allowed"])


@pytest.mark.parametrize(("user", "resource", "where", "verbs"), RIGHTS)
def test_each_team_may_do_this_and_no_more(
    teams: Rest, user: str, resource: str, where: str, verbs: frozenset[str]
) -> None:
    assert {verb for verb in EVERY if may(teams, user, verb, resource, where)} == set(verbs)


def test_no_role_of_the_cluster_but_the_operators_writes_a_status(teams: Rest) -> None:
    """Those that Kubernetes brings and that gather ours included; `cluster-admin` may do everything, by definition."""
    roles = teams.call("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles").body["items"]
    writers = {
        role["metadata"]["name"]
        for role in roles
        for rule in role.get("rules") or []
        if {"tenantry.dev", "*"} & set(rule.get("apiGroups") or [])
        and any(
            part.endswith(("/status", "/finalizers")) or part == "*" for part in rule.get("resources") or []
        )
        and {"update", "patch", "*"} & set(rule["verbs"])
    }
    assert {name for name in writers if not name.startswith("system:")} == {
        "tenantry-operator",
        "cluster-admin",
    }


def test_a_promotion_by_the_ml_team_and_what_it_cannot_touch(teams: Rest) -> None:
    """For real, not by review."""
    version = {
        "version": "1.0.0",
        "digest": f"sha256:{'a' * 64}",
        "source": "oci://r.example/a/b:1",
        "rank": 8,
    }
    spec: Object = {
        "tenantRef": "acme",
        "versions": [version],
        "channels": [{"name": "stable", "version": "1.0.0"}],
    }
    meta = {"name": "tone", "namespace": ML}
    adapter: Object = {"apiVersion": API, "kind": "Adapter", "metadata": meta, "spec": spec}
    assert teams.create(adapter, user="max-ml").complaint == ""
    status = {"status": {"channels": [{"name": "stable", "desiredVersion": "9.9.9"}]}}
    assert teams.merge(adapter, status, part="/status", user="max-ml").status == 403
    foreign = {**adapter, "metadata": {"name": "tone", "namespace": ELSEWHERE}}
    assert teams.create(foreign, user="max-ml").status == 403
    tenant = {"apiVersion": API, "kind": "Tenant", "metadata": {"name": "team"}, "spec": {
        "tier": "Free", "models": [{"name": "chat", "baseModel": "m"}]}}  # fmt: skip
    assert teams.create(tenant, user="max-ml").status == 403
    assert teams.create(tenant, user="ann-account").complaint == ""
    route = {"status": {"observedGeneration": 1}}
    assert teams.merge(tenant, route, part="/status", user="ann-account").status == 403
    assert teams.merge(tenant, route, part="/status", user="pat-platform").status == 403
    for document, user in ((tenant, "ann-account"), (adapter, "max-ml")):
        assert teams.delete(document, user=user).complaint == ""
