"""The admission policies from both sides on the real API server, and the chart's own roles beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.rest import Object, Rest

from .conftest import NAMESPACE

pytestmark = pytest.mark.apiserver

OPERATOR = f"system:serviceaccount:{NAMESPACE}:tenantry-operator"
GATEWAY = f"system:serviceaccount:{NAMESPACE}:tenantry-gateway"
FETCHER = f"system:serviceaccount:{NAMESPACE}:tenantry-fetcher"
LABEL = "tenantry.dev/tenant-namespace"
NODE_LABEL = "tenantry.node-restriction.kubernetes.io/tenant"
TAINT = "tenantry.dev/tenant"
OWN = {"key": TAINT, "operator": "Equal", "value": "pine"}


def _namespace(name: str, **labels: str) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def _pod(namespace: str, *tolerations: Object, name: str = "intruder", **spec: Any) -> Object:
    body = {"containers": [{"name": "c", "image": "x:1"}], "tolerations": list(tolerations), **spec}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


@pytest.fixture(scope="module")
def spaces(installed: Rest) -> Iterator[Rest]:
    """A namespace of a tenant, made by the operator, and one of somebody else, both able to hold pods."""
    tenant, other = _namespace("tenant-pine", **{LABEL: "pine"}), _namespace("charts-other")
    assert installed.create(tenant, user=OPERATOR).complaint == ""
    assert installed.create(other).complaint == ""
    for name in ("tenant-pine", "charts-other", "kube-system"):
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": name},
        }
        installed.apply(account)
    yield installed
    installed.delete(other)
    installed.delete(tenant, user=OPERATOR)


# -- pods --


@pytest.mark.parametrize(
    ("words", "pod"),
    [
        ("must not tolerate `tenantry.dev/tenant`", _pod("charts-other", OWN)),
        (
            "must not tolerate `tenantry.dev/tenant`",
            _pod("charts-other", {"key": TAINT, "operator": "Exists"}),
        ),
        (
            "must not tolerate `tenantry.dev/tenant`",
            _pod("charts-other", {"key": TAINT, "effect": "NoExecute"}),
        ),
        ("must name a key", _pod("charts-other", {"operator": "Exists"})),
        ("must name a key", _pod("charts-other", {"operator": "Exists", "effect": "NoSchedule"})),
        ("`spec.nodeName` must be absent", _pod("charts-other", nodeName="n")),
        ("with another value than pine", _pod("tenant-pine", {**OWN, "value": "oak"})),
        ("with another value than pine", _pod("tenant-pine", {"key": TAINT, "operator": "Exists"})),
        ("must name a key", _pod("tenant-pine", {"operator": "Exists"})),
        ("`spec.nodeName` must be absent", _pod("tenant-pine", OWN, nodeName="n")),
        ("must not tolerate `tenantry.dev/tenant`", _pod(NAMESPACE, OWN)),
    ],
)
def test_foreign_pods_are_refused(spaces: Rest, words: str, pod: Object) -> None:
    answer = spaces.create(pod, dry_run=True)
    assert answer.status == 403
    assert words in answer.complaint


@pytest.mark.parametrize(
    "pod",
    [
        _pod("charts-other"),
        _pod("charts-other", {"key": "nvidia.com/gpu", "operator": "Exists"}),
        _pod("tenant-pine", OWN),
        _pod("tenant-pine", {**OWN, "effect": "NoExecute"}),
        _pod("kube-system", {"operator": "Exists"}, nodeName="n"),
        _pod("kube-system", OWN),
    ],
)
def test_others_are_let_be(spaces: Rest, pod: Object) -> None:
    assert spaces.create(pod, dry_run=True).complaint == ""


def test_a_toleration_cannot_be_added_later(spaces: Rest) -> None:
    pod = _pod("charts-other", name="later")
    assert spaces.create(pod).complaint == ""
    grown = [*spaces.get(pod)["spec"]["tolerations"], OWN]
    assert "must not tolerate" in spaces.merge(pod, {"spec": {"tolerations": grown}}).complaint
    assert spaces.merge(pod, {"metadata": {"labels": {"a": "b"}}}).complaint == ""
    spaces.delete(pod)


def test_pods_that_were_there_before_can_still_be_finalized(spaces: Rest) -> None:
    """An UPDATE that adds nothing is nobody's business, else an old pod could never be deleted."""
    pod = _pod("charts-other", {"operator": "Exists"}, name="old")
    pod["metadata"]["finalizers"] = ["example.com/wait"]
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "tenantry-nodes"},
    }
    assert spaces.merge(binding, {"spec": {"validationActions": ["Audit"]}}).complaint == ""
    assert _until(lambda: spaces.create(pod).complaint == "")
    assert spaces.merge(binding, {"spec": {"validationActions": ["Deny"]}}).complaint == ""
    assert _until(lambda: spaces.create(_pod("charts-other", OWN), dry_run=True).complaint != "")
    spaces.delete(pod)
    assert spaces.merge(pod, {"metadata": {"finalizers": None}}).complaint == ""


def test_only_schedulers_bind(spaces: Rest) -> None:
    pod = _pod("charts-other", name="bound")
    assert spaces.create(pod).complaint == ""
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "bound", "namespace": "charts-other"},
        "target": {"kind": "Node", "name": "n"},
    }
    for path in ("pods/bound/binding", "bindings"):
        url = f"/api/v1/namespaces/charts-other/{path}"
        assert "must be bound by a scheduler" in spaces.call("POST", url + "?dryRun=All", binding).complaint
        taken = spaces.call("POST", url + "?dryRun=All", binding, user="system:kube-scheduler")
        assert taken.complaint == ""
    spaces.delete(pod)


def test_a_kubelet_makes_only_mirror_pods_of_its_own_node(spaces: Rest) -> None:
    """The one exception for pods, as the API server itself bounds it."""
    mirror = _pod("charts-other", {"operator": "Exists"}, name="mirror", nodeName="charts-node")
    mirror["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "1"}
    assert "must name a key" in spaces.create(mirror, dry_run=True).complaint, (
        "the annotation alone is nothing"
    )


# -- fences --

EVE = "eve"


@pytest.fixture(scope="module")
def eve(spaces: Rest) -> Iterator[str]:
    """Who may do everything by RBAC, but is not of the group that repairs by hand."""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "charts-eve"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": EVE}],
    }
    assert spaces.create(binding).complaint == ""
    assert _until(lambda: _may(spaces, EVE, "create", "pods", namespace="tenant-pine"))
    yield EVE
    spaces.delete(binding)


def _fences(namespace: str) -> list[Object]:
    open_all: Object = {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]}
    meta = {"name": "opened", "namespace": namespace}
    return [
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": open_all},
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": {"hard": {"pods": "9"}}},
        {"apiVersion": "v1", "kind": "LimitRange", "metadata": meta, "spec": {"limits": []}},
    ]


def test_nobody_opens_a_tenants_fences_by_adding_to_them(spaces: Rest, eve: str) -> None:
    """Network policies add up: one more that allows everything would open all the others."""
    for fence in _fences("tenant-pine"):
        refused = spaces.create(fence, user=eve, dry_run=True)
        assert "Edit `spec.isolation` of the Tenant" in refused.complaint, fence["kind"]
        assert spaces.create(fence).complaint == "", "who repairs by hand may"
        patch = {"metadata": {"labels": {"a": "b"}}}
        assert "operator alone" in spaces.merge(fence, patch, user=eve, dry_run=True).complaint
        assert "operator alone" in spaces.delete(fence, user=eve, dry_run=True).complaint
        assert spaces.delete(fence).complaint == ""
    for fence in _fences("charts-other"):
        assert spaces.create(fence, user=eve, dry_run=True).complaint == "", "elsewhere nothing is in the way"


@pytest.mark.parametrize(
    "label",
    [
        "pod-security.kubernetes.io/enforce",
        "pod-security.kubernetes.io/warn",
        "tenantry.dev/tenant",
        "app.kubernetes.io/managed-by",
    ],
)
def test_labels_that_hold_a_tenants_pods_stay(spaces: Rest, eve: str, label: str) -> None:
    space = _namespace("tenant-pine")
    for part in ("", "/status"):
        patch = {"metadata": {"labels": {label: "privileged"}}}
        refused = spaces.merge(space, patch, part=part, user=eve, dry_run=True)
        assert "must stay as Tenantry's operator wrote them" in refused.complaint
    assert (
        spaces.merge(space, {"metadata": {"labels": {"team": "x"}}}, user=eve, dry_run=True).complaint == ""
    )
    assert spaces.merge(space, patch, user=OPERATOR, dry_run=True).complaint == ""


# -- namespaces --


def test_the_label_is_the_operators_at_creation(spaces: Rest) -> None:
    marked = _namespace("tenant-fir", **{LABEL: "fir"})
    assert spaces.create(marked, user=OPERATOR, dry_run=True).complaint == ""
    assert "operator alone" in spaces.create(marked, dry_run=True).complaint
    assert spaces.create(_namespace("charts-free"), dry_run=True).complaint == ""
    assert "operator alone" in spaces.create(_namespace("charts-free"), user=OPERATOR, dry_run=True).complaint
    wrong = _namespace("kube-fir", **{LABEL: "fir"})
    assert "operator alone" in spaces.create(wrong, user=OPERATOR, dry_run=True).complaint


@pytest.mark.parametrize("part", ["", "/status", "/finalize"])
@pytest.mark.parametrize("user", ["", OPERATOR])
def test_the_label_cannot_be_added_changed_or_removed(spaces: Rest, part: str, user: str) -> None:
    """On the subresources too, which take metadata along."""
    for name, value in (("charts-other", "pine"), ("tenant-pine", "oak"), ("tenant-pine", None)):
        live = spaces.get(_namespace(name))
        live["metadata"]["labels"][LABEL] = value
        if value is None:
            del live["metadata"]["labels"][LABEL]
        path = f"/api/v1/namespaces/{name}{part}?dryRun=All"
        answer = spaces.call("PUT", path, live, user=user)
        assert answer.status == 403
        if not user:
            assert "must stay as it was at creation" in answer.complaint


def test_the_operator_touches_its_own_namespaces_only(spaces: Rest) -> None:
    patch = {"metadata": {"labels": {"a": "b"}}}
    other, own = _namespace("charts-other"), _namespace("tenant-pine")
    assert spaces.merge(own, patch, user=OPERATOR, dry_run=True).complaint == ""
    assert spaces.delete(own, user=OPERATOR, dry_run=True).complaint == ""
    assert "must not change or delete" in spaces.merge(other, patch, user=OPERATOR, dry_run=True).complaint
    assert "must not change or delete" in spaces.delete(other, user=OPERATOR, dry_run=True).complaint
    assert spaces.merge(other, patch, dry_run=True).complaint == ""
    assert spaces.delete(own, dry_run=True).complaint == ""


# -- role bindings --


def _binding(namespace: str = "tenant-pine", **change: Any) -> Object:
    body = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "tenantry-operator", "namespace": namespace},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "tenantry-tenant-namespace",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "tenantry-operator", "namespace": NAMESPACE}],
    }
    return {**body, **change}


_OTHERS = [
    [{"kind": "ServiceAccount", "name": "default", "namespace": "charts-other"}],
    [{"kind": "ServiceAccount", "name": "tenantry-operator", "namespace": "charts-other"}],
    [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "eve"}],
]


def test_the_operator_gives_itself_rights_in_tenants_namespaces(spaces: Rest) -> None:
    assert spaces.create(_binding(), user=OPERATOR, dry_run=True).complaint == ""
    for elsewhere in ("charts-other", "kube-system"):
        refused = spaces.create(_binding(elsewhere), user=OPERATOR, dry_run=True)
        # Two policies refuse it, and either may be the one that the API server lets speak.
        assert "of dedicated tenants" in refused.complaint


@pytest.mark.parametrize("subjects", _OTHERS)
def test_the_operator_gives_rights_to_nobody_else(spaces: Rest, subjects: list[Object]) -> None:
    refused = spaces.create(_binding(subjects=subjects), user=OPERATOR, dry_run=True)
    assert "must bind its own account only" in refused.complaint


@pytest.mark.parametrize("name", ["cluster-admin", "edit"])
def test_the_operator_binds_no_other_role(spaces: Rest, name: str) -> None:
    """Refused by the role (`bind` names one) before the policy is asked; the policy stands behind it."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    assert spaces.create(_binding(roleRef=role), user=OPERATOR, dry_run=True).status == 403


def test_the_operator_leaves_bindings_of_others_alone(spaces: Rest) -> None:
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
    theirs = _binding(roleRef=role, subjects=_OTHERS[0])
    theirs["metadata"]["name"] = "theirs"
    assert spaces.create(theirs).complaint == ""
    refused = spaces.delete(theirs, user=OPERATOR, dry_run=True)
    assert "must leave the RoleBindings of others alone" in refused.complaint
    assert spaces.delete(theirs).complaint == ""


def test_other_users_bind_as_before(spaces: Rest) -> None:
    assert spaces.create(_binding("charts-other", subjects=_OTHERS[2]), dry_run=True).complaint == ""


# -- nodes --


def _node(**labels: str) -> Object:
    taints = [{"key": "gpu", "effect": "NoSchedule"}]
    metadata = {"name": "charts-node", "labels": {"zone": "a", **labels}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}}


@pytest.fixture
def node(spaces: Rest) -> Iterator[Object]:
    document = _node(**{"tenantry.dev/claimable": "true"})
    assert spaces.create(document).complaint == ""
    yield spaces.get(document)  # with the taint of a node that is not ready yet
    spaces.delete(document)


def _claim(node: Object, tenant: str = "pine") -> Object:
    taints = [*node["spec"]["taints"], {"key": TAINT, "value": tenant, "effect": "NoSchedule"}]
    metadata = {"labels": {NODE_LABEL: tenant}, "annotations": {"tenantry.dev/tenant-uid": "1"}}
    return {"metadata": metadata, "spec": {"taints": taints}}


KUBELET = "system:node:charts-node"


def _as_kubelet(rest: Rest, node: Object, patch: Object, part: str = "") -> str:
    path = f"{rest.path(node)}{part}?dryRun=All"
    content = "application/merge-patch+json"
    return rest.call("PATCH", path, patch, user=KUBELET, groups=["system:nodes"], content=content).complaint


@pytest.mark.parametrize("part", ["", "/status"])
def test_a_kubelet_neither_offers_nor_releases_its_node(spaces: Rest, node: Object, part: str) -> None:
    """A node that somebody took over must not pull a tenant's pods towards itself, nor keep a tenant's place."""
    offer = {"metadata": {"labels": {"tenantry.dev/claimable": "yes"}}}
    assert "must not change `tenantry.dev/claimable`" in _as_kubelet(spaces, node, offer, part)
    note = {"metadata": {"annotations": {"tenantry.dev/tenant-uid": "1"}}}
    assert "must not change `tenantry.dev/claimable`" in _as_kubelet(spaces, node, note, part)
    assert _as_kubelet(spaces, node, {"metadata": {"annotations": {"volumes.example/x": "1"}}}, part) == ""
    taken = {"metadata": {"labels": {NODE_LABEL: "pine"}}}
    assert _as_kubelet(spaces, node, taken, part) != "", "NodeRestriction guards the tenant's label"


def test_the_operator_cordons_what_a_tenant_holds_and_lifts_only_its_own(spaces: Rest, node: Object) -> None:
    cordon = {"metadata": {"annotations": {"tenantry.dev/cordoned": "why"}}, "spec": {"unschedulable": True}}
    lift = {"metadata": {"annotations": {"tenantry.dev/cordoned": None}}, "spec": {"unschedulable": None}}
    refused = spaces.merge(node, cordon, user=OPERATOR, dry_run=True)
    assert "must cordon only nodes that a tenant holds" in refused.complaint
    assert spaces.merge(node, _claim(node), user=OPERATOR).complaint == ""
    unsaid = spaces.merge(node, {"spec": {"unschedulable": True}}, user=OPERATOR, dry_run=True)
    assert "with the annotation `tenantry.dev/cordoned`" in unsaid.complaint
    assert spaces.merge(node, cordon, user=OPERATOR).complaint == ""
    half = spaces.merge(node, {"spec": {"unschedulable": None}}, user=OPERATOR, dry_run=True)
    assert "together with the cordon" in half.complaint
    assert spaces.merge(node, lift, user=OPERATOR).complaint == ""
    assert spaces.merge(node, {"spec": {"unschedulable": True}}).complaint == "", "an admin's cordon"
    assert "lift only a cordon of its own" in spaces.merge(node, lift, user=OPERATOR, dry_run=True).complaint


def test_the_operator_claims_and_releases_a_node(spaces: Rest, node: Object) -> None:
    assert spaces.merge(node, _claim(node), user=OPERATOR).complaint == ""
    assert "release a node before" in spaces.merge(node, _claim(node, "oak"), user=OPERATOR).complaint
    metadata = {"labels": {NODE_LABEL: None}, "annotations": {"tenantry.dev/tenant-uid": None}}
    release = {"metadata": metadata, "spec": {"taints": node["spec"]["taints"]}}
    assert spaces.merge(node, release, user=OPERATOR).complaint == ""


@pytest.mark.parametrize(
    ("words", "patch"),
    [
        ("change no label", {"metadata": {"labels": {"zone": "b"}}}),
        ("change no label", {"metadata": {"labels": {"zone": None}}}),
        ("change no label", {"metadata": {"labels": {"tenantry.dev/claimable": None}}}),
        ("change no label", {"metadata": {"labels": {"other": "x"}}}),
        ("change no annotation", {"metadata": {"annotations": {"other": "x"}}}),
        ("change no taint", {"spec": {"taints": []}}),
        ("change no taint", {"spec": {"taints": [{"key": "gpu", "effect": "NoExecute"}]}}),
        ("must cordon only nodes that a tenant holds", {"spec": {"unschedulable": True}}),
    ],
)
def test_the_operator_changes_nothing_else_on_a_node(
    spaces: Rest, node: Object, words: str, patch: Object
) -> None:
    assert words in spaces.merge(node, patch, user=OPERATOR, dry_run=True).complaint
    assert words not in spaces.merge(node, patch, dry_run=True).complaint


def test_only_claimable_nodes_are_claimed(spaces: Rest, node: Object) -> None:
    assert spaces.merge(node, {"metadata": {"labels": {"tenantry.dev/claimable": "no"}}}).complaint == ""
    assert "claim only nodes" in spaces.merge(node, _claim(node), user=OPERATOR, dry_run=True).complaint


# -- rights, as the API server sees them --


def _may(
    rest: Rest, user: str, verb: str, resource: str, group: str = "", namespace: str = "", name: str = ""
) -> bool:
    plain, _, part = resource.partition("/")
    attributes = {
        "verb": verb, "resource": plain, "subresource": part, "group": group, "namespace": namespace, "name": name,
    }  # fmt: skip
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }
    answer = rest.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer.body["status"]["allowed"])


@pytest.mark.parametrize("user", [OPERATOR, GATEWAY, FETCHER])
def test_nobody_reads_secrets_or_enters_pods(installed: Rest, user: str) -> None:
    for namespace in ("", NAMESPACE, "kube-system"):
        for verb in ("get", "list", "watch", "create", "update", "patch", "delete"):
            assert not _may(installed, user, verb, "secrets", namespace=namespace)
        assert not _may(installed, user, "create", "pods", namespace=namespace)
        for part in ("pods/exec", "pods/portforward", "pods/ephemeralcontainers", "serviceaccounts/token"):
            assert not _may(installed, user, "create", part, namespace=namespace)
    assert not _may(installed, user, "get", "nodes/proxy")
    assert not _may(installed, user, "escalate", "clusterroles", "rbac.authorization.k8s.io")
    assert not _may(installed, user, "impersonate", "users")


def test_gateway_and_fetcher(installed: Rest) -> None:
    assert _may(installed, GATEWAY, "watch", "tenants", "tenantry.dev")
    assert _may(installed, GATEWAY, "watch", "endpointslices", "discovery.k8s.io")
    assert not _may(installed, GATEWAY, "patch", "tenants", "tenantry.dev")
    assert not _may(installed, GATEWAY, "patch", "tenants/status", "tenantry.dev")
    assert not _may(installed, GATEWAY, "list", "pods")
    assert not _may(installed, FETCHER, "get", "tenants", "tenantry.dev")
    assert not _may(installed, FETCHER, "get", "configmaps", namespace=NAMESPACE)


def test_the_operators_workloads_are_where_it_may_have_them(spaces: Rest) -> None:
    create = ("create", "statefulsets", "apps")
    assert _may(spaces, OPERATOR, *create, namespace=NAMESPACE)
    assert not _may(spaces, OPERATOR, *create, namespace="charts-other")
    assert not _may(spaces, OPERATOR, *create, namespace="tenant-pine")
    assert not _may(spaces, OPERATOR, "delete", "pods", namespace="kube-system")
    binding = _binding()
    assert spaces.create(binding, user=OPERATOR).complaint == ""
    assert _until(lambda: _may(spaces, OPERATOR, *create, namespace="tenant-pine"))
    assert not _may(spaces, OPERATOR, "get", "secrets", namespace="tenant-pine")
    assert spaces.delete(binding, user=OPERATOR).complaint == ""


def test_people(installed: Rest) -> None:
    """No shipped role writes a status; who edits a namespace promotes adapters there."""
    for role in ("edit", "admin", "view", "tenantry-tenant-editor", "tenantry-pool-editor"):
        path = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}"
        rules = installed.call("GET", path).body["rules"] or []
        ours = [rule for rule in rules if "tenantry.dev" in (rule.get("apiGroups") or [])]
        assert not [r for rule in ours for r in rule["resources"] if "/" in r]


def _until(probe: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if probe():
            return True
        time.sleep(0.1)
    return False
