"""What the chart gives the operator for looking at guarantees, and what holds it to that."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from support.rest import Object, Rest
from tenantry.api import OperatorConfig
from tenantry.desired.isolation import GUARANTEES
from tenantry.evidence import probe
from tenantry.evidence.report import POOL_PREFIX

from .conftest import NAMESPACE, Render

OPERATOR = f"system:serviceaccount:{NAMESPACE}:tenantry-operator"
KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


def _rules(documents: list[Object], kind: str, name: str) -> list[Object]:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    rules: list[Object] = found["rules"]
    return rules


def _config(documents: list[Object]) -> OperatorConfig:
    (found,) = [d for d in documents if d["kind"] == "ConfigMap" and "operator.yaml" in d.get("data", {})]
    return OperatorConfig.model_validate(yaml.safe_load(found["data"]["operator.yaml"]))


def test_the_operator_knows_what_keeps_each_guarantee_and_may_read_no_more(render: Render) -> None:
    documents = render()
    config = _config(documents)
    needed = {name for group in config.admission.values() for name in group}
    for kind in KINDS:
        assert needed <= {d["metadata"]["name"] for d in documents if d["kind"] == kind}
    assert set(config.admission) <= set(GUARANTEES)
    rules = _rules(documents, "ClusterRole", "tenantry-operator")
    [read] = [rule for rule in rules if "validatingadmissionpolicies" in rule["resources"]]
    assert (set(read["resourceNames"]), read["verbs"]) == (needed, ["get"])
    assert _config(render("policies.enabled=false")).admission == {}, "without policies nothing keeps it so"


def test_probes_come_from_the_operators_image_and_can_be_switched_off(render: Render) -> None:
    assert _config(render("images.operator=registry.example/op:2")).evidence.image == "registry.example/op:2"
    assert _config(render("evidence.probes=false")).evidence.image is None
    set_aside = _config(render("evidence.accessKeySecret=mine"))
    assert set_aside.evidence.access_key_file == "/etc/tenantry/access/key"
    assert _config(render("evidence.outside=203.0.113.7:443")).evidence.outside == "203.0.113.7:443"


def test_what_may_be_written_for_evidence(render: Render) -> None:
    documents = render()

    def verbs(kind: str, name: str, resource: str) -> set[str]:
        rules = _rules(documents, kind, name)
        return {verb for rule in rules if resource in rule["resources"] for verb in rule["verbs"]}

    assert verbs("Role", "tenantry-operator", "configmaps") >= {"get", "create", "patch"}
    assert verbs("Role", "tenantry-operator", "pods") == {"delete"}, "probes run in tenants' namespaces only"
    assert verbs("ClusterRole", "tenantry-tenant-namespace", "pods") == {"create", "delete"}


@pytest.mark.apiserver
def test_the_operator_writes_reports_and_no_other_config_map(installed: Rest) -> None:
    def config_map(name: str) -> Object:
        meta = {"name": name, "namespace": NAMESPACE, "labels": {"app.kubernetes.io/managed-by": "tenantry"}}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}

    report, identity = config_map(f"{POOL_PREFIX}shared"), config_map("tenantry-identity")
    assert installed.create(report, user=OPERATOR, dry_run=True).complaint == ""
    refused = installed.create(config_map("mine"), user=OPERATOR, dry_run=True)
    assert "must write no ConfigMap" in refused.complaint
    patch = {"data": {"operator.crt": "another's"}}
    edited = installed.merge(identity, patch, user=OPERATOR, dry_run=True)
    assert (edited.status, "Tenantry's operator must" in edited.complaint) == (403, True)
    assert installed.merge(identity, {"metadata": {"labels": {"a": "b"}}}, dry_run=True).complaint == ""


@pytest.mark.apiserver
def test_a_probe_passes_what_guards_a_tenants_namespace(installed: Rest) -> None:
    label = {"tenantry.dev/tenant-namespace": "fir", "pod-security.kubernetes.io/enforce": "restricted"}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-fir", "labels": label}}
    assert installed.create(space, user=OPERATOR).complaint == ""
    pod: dict[str, Any] = probe.pod(
        "fir", "p", "n1", image="i:1", pull_policy="Never", runtime_class=None, targets=[]
    )
    assert installed.create(probe.service_account("fir")).complaint == ""
    assert installed.create(pod, dry_run=True).complaint == ""
    refused = installed.create(probe.privileged("fir"), dry_run=True)
    assert (refused.status, "PodSecurity" in refused.complaint) == (403, True)
    assert installed.delete(space, user=OPERATOR).complaint == ""
