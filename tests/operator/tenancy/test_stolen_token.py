"""What the operator's own token is worth to whoever stole it: tried with a real one, against roles and policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from support.rest import Object, Rest
from support.tenancy import ACCOUNT, RELEASE, TENANT_LABEL, Token, eventually, namespace

if TYPE_CHECKING:
    from support.outage import Outage

pytestmark = pytest.mark.apiserver

OURS = {"app.kubernetes.io/managed-by": "tenantry"}
FOREIGN = "acme-ml"
API = "tenantry.dev/v1alpha1"


def _object(kind: str, name: str, where: str = "", version: str = "v1", **body: Any) -> Object:
    metadata = {"name": name, "labels": dict(OURS), **({"namespace": where} if where else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _pod(where: str, name: str = "intruder", **spec: Any) -> Object:
    return _object("Pod", name, where, spec={**_SPEC, **spec})


def _workload(where: str, **spec: Any) -> Object:
    template = {"metadata": {"labels": {"a": "b", **OURS}}, "spec": {**_SPEC, **spec}}
    body = {"serviceName": "x", "selector": {"matchLabels": {"a": "b"}}, "template": template}
    return _object("StatefulSet", "intruder", where, "apps/v1", spec=body)


_SPEC: Object = {"containers": [{"name": "c", "image": "x:1"}], "automountServiceAccountToken": False}
_MODEL = {"name": "m", "source": {"image": {"path": "/m"}}}
_POOL = {"baseModel": _MODEL, "tiers": ["Free"], "lanes": [{"name": "fast"}]}
_TENANT = {"tier": "Free", "models": [{"name": "chat", "baseModel": "m"}]}


def _pool(name: str, **metadata: Any) -> Object:
    pool = _object("AdapterPool", name, "", API, spec=_POOL)
    pool["metadata"] |= metadata
    return pool


def _event(where: str, kind: str, version: str, about: str = "") -> Object:
    regarding = {"apiVersion": version, "kind": kind, "name": "x", **({"namespace": about} if about else {})}
    body = {
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "tenantry.dev/operator",
        "reportingInstance": "x",
        "action": "A",
        "reason": "R",
        "type": "Normal",
        "regarding": regarding,
    }
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "x.1", "namespace": where},
        **body,
    }


def _lease(name: str, where: str = RELEASE) -> Object:
    return _object("Lease", name, where, "coordination.k8s.io/v1", spec={})


def _secret(name: str) -> Object:
    return {"name": "s", "secret": {"secretName": name}}


def _container(**fields: Any) -> Object:
    return {"containers": [{"name": "c", "image": "x:1", **fields}]}


def _from_secret(**source: Any) -> Object:
    return _container(env=[{"name": "S", "valueFrom": source}])


def _gateway(
    image: str = "tenantry/gateway:0.1.0",
    secret: str = "tenantry-gateway-identity",
    account: str = "tenantry-gateway",
    command: tuple[str, ...] | list[str] = ("tenantry-gateway",),
) -> Object:
    """A gateway of one tenant, beside the shared one."""
    container = {"name": "gateway", "image": image, "command": list(command)}
    pod = {"containers": [container], "serviceAccountName": account, "volumes": [_secret(secret)]}
    labels = {"a": "b", **OURS}
    body = {
        "selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return _object("Deployment", "tenantry-gateway-acme", RELEASE, "apps/v1", spec=body)


@pytest.fixture(scope="module")
def world(admin: Rest) -> Rest:
    """A foreign namespace with things in it, an admin's pool, a tenant, and the namespace of a dedicated one."""
    assert admin.create(namespace(FOREIGN)).complaint == ""
    things = [
        _object("ConfigMap", "theirs", FOREIGN, data={}),
        _object("ConfigMap", "bystander", RELEASE, data={}),
        _pool("shared"),
        {"apiVersion": API, "kind": "Tenant", "metadata": {"name": "acme"}, "spec": _TENANT},
        _workload(FOREIGN),
    ]
    things[1]["metadata"]["labels"] = {}
    for thing in things:
        assert admin.create(thing).complaint == "", thing
    return admin


@pytest.fixture(scope="module")
def mighty(world: Rest, thief: Token) -> Iterator[Token]:
    """The same token after somebody gave its account every right there is: only the policies are left."""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "by-mistake"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "tenantry-operator", "namespace": RELEASE}],
    }
    assert world.create(binding).complaint == ""
    eventually("it may read Secrets", lambda: thief.call("GET", "/api/v1/secrets").status == 200)
    yield thief
    world.delete(binding)
    eventually("it may no longer", lambda: thief.call("GET", "/api/v1/secrets").status == 403)


# What is made (POST), by words of the policy that refuses it.
ELSEWHERE = "must write only in its own namespace and in those of dedicated tenants"
MADE: list[tuple[str, Object]] = [
    *((ELSEWHERE, _pod(where)) for where in ("kube-system", "default", FOREIGN)),
    *((ELSEWHERE, _workload(where)) for where in ("kube-system", FOREIGN)),
    (ELSEWHERE, _object("ConfigMap", "x", "kube-system", data={})),
    (ELSEWHERE, _object("Secret", "x", FOREIGN)),
    (ELSEWHERE, _object("ServiceAccount", "x", FOREIGN)),
    (ELSEWHERE, _lease("tenantry-operator", "kube-system")),
    ("must hold the Lease `tenantry-operator` only", _lease("tenantry-gateway")),
    ("must record events about Tenants", _event("kube-system", "Pod", "v1", "kube-system")),
    ("must record events about Tenants", _event("kube-system", "Adapter", API, "kube-system")),
    ("must record events about Tenants", _event(FOREIGN, "Pod", "v1", FOREIGN)),
    (
        "must write no cluster-scoped kinds but",
        _object(
            "ClusterRole", "x", "", "rbac.authorization.k8s.io/v1",
            rules=[{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}],
        ),
    ),
    ("must write no cluster-scoped kinds but", _object("PriorityClass", "x", "", "scheduling.k8s.io/v1", value=1)),
    (
        "only objects with `app.kubernetes.io/managed-by=tenantry`",
        {**_pod(RELEASE), "metadata": {"name": "x", "namespace": RELEASE}},
    ),
    ("must neither make nor delete Tenants", _object("Tenant", "mine", "", API, spec=_TENANT)),
    ("only AdapterPools that it derived", _pool("mine")),
    ("only AdapterPools that it derived", _pool("tenant-acme")),
    ("must mount neither Secrets", _workload(RELEASE, volumes=[_secret("tenantry-gateway-identity")])),
    ("must mount neither Secrets", _pod(RELEASE, volumes=[_secret("tenantry-salt")])),
    ("must mount neither Secrets", _workload(RELEASE, volumes=[{"name": "h", "hostPath": {"path": "/"}}])),
    (
        "must mount neither Secrets",
        _workload(RELEASE, volumes=[{"name": "p", "projected": {"sources": [{"secret": {"name": "tenantry-salt"}}]}}]),
    ),
    (
        "must mount neither Secrets",
        _workload(RELEASE, volumes=[{"name": "p", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]),
    ),
    (
        "must not mount the gateway's ledger",
        _workload(RELEASE, volumes=[{"name": "l", "persistentVolumeClaim": {"claimName": "tenantry-ledger"}}]),
    ),
    ("must not hand Secrets", _workload(RELEASE, **_from_secret(secretKeyRef={"name": "tenantry-salt", "key": "s"}))),
    ("must not hand Secrets", _workload(RELEASE, **_container(envFrom=[{"secretRef": {"name": "tenantry-salt"}}]))),
    ("must get no token", _workload(RELEASE, automountServiceAccountToken=True)),
    ("must get no token", _workload(RELEASE, serviceAccountName="tenantry-gateway")),
    ("must neither be privileged", _workload(RELEASE, hostNetwork=True)),
    ("must neither be privileged", _workload(RELEASE, **_container(securityContext={"privileged": True}))),
    ("must mount neither Secrets", _gateway(command=["sh", "-c", "cat /k/tls.key"])),
    ("must mount neither Secrets", _gateway(image="evil:1")),
    ("must mount neither Secrets", _gateway(secret="tenantry-operator-identity")),
    ("must mount neither Secrets", _gateway(account="tenantry-operator")),
    ("must be set by Tenantry's operator alone", namespace("mine")),
]  # fmt: skip

# (words, what is there, merge patch)
CHANGED: list[tuple[str, Object, Object]] = [
    (ELSEWHERE, _object("ConfigMap", "theirs", FOREIGN), {"data": {"a": "b"}}),
    (ELSEWHERE, _workload(FOREIGN), {"spec": {"replicas": 0}}),
    ("operator must", _object("ConfigMap", "bystander", RELEASE), {"data": {"a": "b"}}),
    ("operator must", _object("ConfigMap", "bystander", RELEASE), {"metadata": {"labels": OURS}}),
    ("only objects with", _object("Deployment", "tenantry-gateway", RELEASE, "apps/v1"), {"spec": {"replicas": 0}}),
    ("must leave `spec` of Tenants", _object("Tenant", "acme", "", API), {"spec": {"suspend": True}}),
    ("must leave `spec` of Tenants", _object("Tenant", "acme", "", API), {"spec": {"auth": {"apiKeys": [
        {"name": "mine", "sha256": "a" * 64}]}}}),
    ("must leave labels", _object("Tenant", "acme", "", API), {"metadata": {"labels": {"a": "b"}}}),
    ("must leave labels", _object("Tenant", "acme", "", API), {"metadata": {"annotations": {"a": "b"}}}),
    ("no finalizer but", _object("Tenant", "acme", "", API), {"metadata": {"finalizers": ["example.com/hold"]}}),
    ("only AdapterPools that it derived", _pool("shared"), {"spec": {"tiers": ["Smb"]}}),
    ("must not change or delete a namespace", namespace("kube-system"), {"metadata": {"labels": {"a": "b"}}}),
    ("must not change or delete a namespace", namespace(FOREIGN), {"metadata": {"labels": {"a": "b"}}}),
]  # fmt: skip

# (words, what is there)
DELETED: list[tuple[str, Object]] = [
    (ELSEWHERE, _object("ConfigMap", "theirs", FOREIGN)),
    (ELSEWHERE, _object("ServiceAccount", "default", "kube-system")),
    ("only objects with", _object("Deployment", "tenantry-gateway", RELEASE, "apps/v1")),
    ("only objects with", _object("Secret", "tenantry-salt", RELEASE)),
    ("must neither make nor delete Tenants", _object("Tenant", "acme", "", API)),
    ("only AdapterPools that it derived", _pool("shared")),
    ("must not change or delete a namespace", namespace(FOREIGN)),
]


def test_with_the_charts_own_roles_all_of_it_is_refused(world: Rest, thief: Token) -> None:
    taken = [document for _, document in MADE if thief.create(document, dry_run=True).status != 403]
    taken += [doc for _, doc, patch in CHANGED if thief.merge(doc, patch, dry_run=True).status != 403]
    taken += [document for _, document in DELETED if thief.delete(document, dry_run=True).status != 403]
    assert taken == []


def test_it_reads_no_secret_and_enters_no_pod(world: Rest, thief: Token) -> None:
    for where in ("kube-system", RELEASE, FOREIGN, "default"):
        for path in ("secrets", "configmaps", "serviceaccounts"):
            assert thief.call("GET", f"/api/v1/namespaces/{where}/{path}").status == 403, (where, path)
        assert thief.call("GET", f"/api/v1/namespaces/{where}/secrets/tenantry-salt").status == 403
    for path in ("secrets", "configmaps", "serviceaccounts"):
        assert thief.call("GET", f"/api/v1/{path}").status == 403, path
    # Reports have names of their own, so single ConfigMaps beside it are read; nothing secret lies in one.
    own = thief.call("GET", f"/api/v1/namespaces/{RELEASE}/configmaps/tenantry-identity")
    assert own.status == 200
    for where in ("kube-system", FOREIGN):
        assert thief.call("GET", f"/api/v1/namespaces/{where}/configmaps/tenantry-identity").status == 403


@pytest.mark.parametrize(("words", "document"), MADE)
def test_with_every_right_the_policies_still_refuse_to_make(
    mighty: Token, words: str, document: Object
) -> None:
    answer = mighty.create(document, dry_run=True)
    assert words in answer.complaint, answer


@pytest.mark.parametrize(("words", "document", "patch"), CHANGED)
def test_with_every_right_the_policies_still_refuse_to_change(
    mighty: Token, words: str, document: Object, patch: Object
) -> None:
    answer = mighty.merge(document, patch, dry_run=True)
    assert words in answer.complaint, answer


@pytest.mark.parametrize(("words", "document"), DELETED)
def test_with_every_right_the_policies_still_refuse_to_delete(
    mighty: Token, words: str, document: Object
) -> None:
    answer = mighty.delete(document, dry_run=True)
    assert words in answer.complaint, answer


def test_with_every_right_it_gets_no_token_of_another_account(mighty: Token) -> None:
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    for where, name in (("kube-system", "default"), (RELEASE, "tenantry-gateway"), (FOREIGN, "default")):
        path = f"/api/v1/namespaces/{where}/serviceaccounts/{name}/token"
        answer = mighty.call("POST", path, request)
        assert answer.status == 403, answer


def test_a_gateway_of_one_tenant_may_have_what_the_shared_one_has(mighty: Token) -> None:
    """Where nothing but the release's own program reads it."""
    assert mighty.create(_gateway(), dry_run=True).complaint == ""
    assert mighty.create(_gateway(secret="tenantry-salt"), dry_run=True).complaint == ""


def test_what_the_operator_does_goes_through(world: Rest, thief: Token) -> None:
    """The other side of every rule."""
    owner = world.get({"apiVersion": API, "kind": "Tenant", "metadata": {"name": "acme"}})
    reference = {
        "apiVersion": API,
        "kind": "Tenant",
        "name": "acme",
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    for document in (
        _lease("tenantry-operator"),
        _workload(RELEASE),
        _workload(RELEASE, volumes=[{"name": "c", "configMap": {"name": "tenantry-identity"}}]),
        _event("default", "Tenant", API),
        _event(FOREIGN, "Adapter", API, FOREIGN),
        _pool("tenant-acme", ownerReferences=[reference]),
        namespace("tenant-acme", **{TENANT_LABEL: "acme"}),
    ):
        assert thief.create(document, dry_run=True).complaint == "", document
    tenant = _object("Tenant", "acme", "", API)
    finalizer = {"metadata": {"finalizers": ["tenantry.dev/release"]}}
    assert thief.merge(tenant, finalizer, dry_run=True).complaint == ""
    status = {"status": {"observedGeneration": 1}}
    assert thief.merge(tenant, status, part="/status", dry_run=True).complaint == ""
    assert thief.merge(_pool("shared"), status, part="/status", dry_run=True).complaint == ""


def test_what_engines_trust_is_changed_by_the_operator_alone(world: Rest, own_plane: Outage) -> None:
    """Whoever got rights in a dedicated tenant's namespace cannot swap the certificates of its callers."""
    space = namespace("tenant-fir", **{TENANT_LABEL: "fir"})
    assert world.create(space, user=ACCOUNT).complaint == ""
    config = _object("ConfigMap", "tenantry-identity", "tenant-fir", data={"gateway.crt": "good"})
    assert world.create(config).complaint == ""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "eve", "namespace": "tenant-fir"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
        "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "eve"}],
    }
    assert world.create(role).complaint == ""
    own = {**config, "metadata": {"name": "own", "namespace": "tenant-fir"}}
    eventually("eve may write there", lambda: world.create(own, user="eve").complaint == "")
    change = {"data": {"gateway.crt": "evil"}}
    assert "must be changed by it alone" in world.merge(config, change, user="eve").complaint
    assert "must be changed by it alone" in world.delete(config, user="eve").complaint
    unmark = {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}
    assert "must be changed by it alone" in world.merge(config, unmark, user="eve").complaint
    assert world.merge(own, change, user="eve").complaint == ""
    assert world.merge(config, {"data": {"a": "b"}}, dry_run=True).complaint == "", "an admin may repair"
    assert world.delete(space, user=ACCOUNT).complaint == ""
    eventually("the namespace goes", lambda: world.get(space).get("code") == 404)
