"""What the charts promise, seen in what Helm renders."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from support.rest import Object, Rest
from tenantry.api import OperatorConfig, names
from tenantry.api.identity import Signer, Verifier
from tenantry.api.values import Values
from tenantry.controllers import leftovers

from .conftest import CHART, NAMESPACE, REPOSITORY, Helm, Render

PARTS = ("operator", "fetcher", "gateway")


def _one(documents: list[Object], kind: str, name: str) -> Object:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def _pods(documents: list[Object]) -> Iterator[Object]:
    for document in documents:
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]["spec"]


def _roles(documents: list[Object]) -> Iterator[tuple[str, Object]]:
    for document in documents:
        if document["kind"] in ("Role", "ClusterRole"):
            for rule in document.get("rules", []):
                yield document["metadata"]["name"], rule


@pytest.mark.parametrize("chart", ["tenantry", "tenantry-crds"])
def test_lint(helm: Helm, chart: str) -> None:
    done = helm("lint", "--strict", str(REPOSITORY / "helm" / chart))
    assert done.returncode == 0, done.stdout + done.stderr


def test_defaults_are_valid_values() -> None:
    Values.model_validate(yaml.safe_load((CHART / "values.yaml").read_text()))


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("operator.replics=2", "replics"),
        ("operator.replicas=3", "/operator/replicas"),
        ("gateway.replicas=2", "/gateway/replicas"),
        ("images.engine=engine:latest", "/images/engine"),
        ("images.engine=registry.example.com:5000/engine", "/images/engine"),
        ("policies.privilegedNamespaces=", "/policies/privilegedNamespaces"),
        ("fetcher.allowOrigins={https://registry.example.com}", "/fetcher/allowOrigins/0"),
        ("fetcher.trust.keys.release=MFkw", "/fetcher/trust/keys/release"),
        ("tiers.Gold.weight=1", "Gold"),
        ("tiers.Free.defaults.maxInFlight=0", "/tiers/Free/defaults/maxInFlight"),
        ("identity.gateway.existingSecret=mine", "`identity.gateway.certificate` must be set"),
        ("identity.gateway.certificate=PEM", "`identity.gateway.existingSecret` must be set"),
        ("identity.existingAuthoritySecret=a,identity.certManager.issuerRef.name=b", "must not both be set"),
        ("identity.certManager.duration=1y", "/identity/certManager/duration"),
        ("identity.certManager.issuerRef.kind=Thing", "/identity/certManager/issuerRef/kind"),
    ],
)
def test_a_wrong_value_is_refused(helm: Helm, setting: str, complaint: str) -> None:
    done = helm("template", "t", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_images_by_tag_and_digest_are_taken(render: Render) -> None:
    image = f"registry.example.com:5000/operator:1.0.0@sha256:{'a' * 64}"
    pods = list(_pods(render(f"images.operator={image}", "images.gateway=gateway:latest-1")))
    assert {c["image"] for pod in pods for c in pod["containers"]} == {image, "gateway:latest-1"}


def test_pods_are_restricted(render: Render) -> None:
    """The rules of Pod Security's `restricted`, and a read-only root besides."""
    for pod in _pods(render()):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]
        assert not [v for v in pod["volumes"] if "hostPath" in v]


def test_every_deployment_has_a_budget_that_lets_nodes_drain(render: Render) -> None:
    documents = render()
    for part in PARTS:
        budget = _one(documents, "PodDisruptionBudget", f"tenantry-{part}")
        labels = _one(documents, "Deployment", f"tenantry-{part}")["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_no_wildcards_no_escalation_no_secrets(render: Render) -> None:
    for name, rule in _roles(render()):
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], name
        assert not {"escalate", "impersonate", "deletecollection"} & set(rule["verbs"]), name
        assert "secrets" not in rule["resources"], name
        assert not {"nodes/proxy", "pods/exec", "pods/log", "serviceaccounts/token"} & set(
            rule["resources"]
        ), name
        if "bind" in rule["verbs"]:
            assert rule["resourceNames"] == ["tenantry-tenant-namespace"]


def test_the_cluster_waits_for_no_webhook_of_ours(render: Render) -> None:
    """Whatever is down here, others' objects are taken: policies are judged by the API server alone."""
    kinds = {document["kind"] for document in render()}
    assert "ValidatingAdmissionPolicy" in kinds
    assert not {kind for kind in kinds if kind.endswith("WebhookConfiguration")}


def test_what_the_operator_may_make_for_a_tenant_is_looked_for_after_it(render: Render) -> None:
    makes = {
        resource
        for name, rule in _roles(render())
        if name in ("tenantry-operator", "tenantry-tenant-namespace") and "create" in rule["verbs"]
        for resource in rule["resources"]
    }
    looked_for = {kind.plural for kind in leftovers.KINDS}
    assert makes - {"events", "leases"} == looked_for | {"configmaps", "serviceaccounts", "nodepools"}


def test_rights_of_each_process(render: Render) -> None:
    """What may be written where; a change here is a change of what a break-in is worth."""
    documents = render()
    writes: dict[str, set[str]] = {}
    for document in documents:
        if document["kind"] in ("Role", "ClusterRole"):
            key = f"{document['kind']}/{document['metadata']['name']}"
            writes[key] = {
                f"{verb} {resource}"
                for rule in document.get("rules", [])
                for verb in rule["verbs"]
                for resource in rule["resources"]
                if verb not in ("get", "list", "watch")
            }
    assert writes["ClusterRole/tenantry-gateway"] == set()
    assert writes["ClusterRole/tenantry-operator"] == {
        "patch tenants", "patch nodes", "bind clusterroles",
        *(f"patch {kind}/status" for kind in ("tenants", "adapterpools", "adapters")),
        *(f"update {kind}/finalizers" for kind in ("tenants", "adapterpools")),
        *(f"{verb} {kind}" for kind in ("adapterpools", "namespaces", "rolebindings", "nodepools")
          for verb in ("create", "patch", "delete")),
        "create events", "patch events",
    }  # fmt: skip
    for name, rule in _roles(documents):
        if name not in ("tenantry-operator",):
            assert not [r for r in rule["resources"] if r.endswith("/status")], (
                "no shipped role may write a status"
            )
    subjects = {
        s["name"] for d in documents if d["kind"].endswith("RoleBinding") for s in d["subjects"]
    }  # the fetcher has no rights at all
    assert subjects == {"tenantry-operator", "tenantry-gateway"}
    fetcher = _one(documents, "Deployment", "tenantry-fetcher")["spec"]["template"]["spec"]
    assert fetcher["automountServiceAccountToken"] is False


def test_each_process_mounts_its_own_key_only(render: Render) -> None:
    documents = render()
    for part in PARTS:
        pod = _one(documents, "Deployment", f"tenantry-{part}")["spec"]["template"]["spec"]
        secrets = {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
        more = {"gateway": {"tenantry-salt"}, "operator": {"tenantry-authority"}}.get(part, set())
        assert secrets == {f"tenantry-{part}-identity"} | more


def test_keys_and_certificates_work_together(render: Render, tmp_path: Any) -> None:
    """The processes' own code signs with the key of the Secret and verifies with the ConfigMap."""
    documents = render()
    certificates = _one(documents, "ConfigMap", names.IDENTITY_CONFIGMAP)["data"]
    assert set(certificates) == {f"{part}.crt" for part in PARTS}
    for name, text in certificates.items():
        (tmp_path / name).write_text(text)
    for part in PARTS:
        pem = base64.b64decode(_one(documents, "Secret", f"tenantry-{part}-identity")["data"]["tls.key"])
        assert isinstance(load_pem_private_key(pem, None), Ed25519PrivateKey)
        (tmp_path / "tls.key").write_bytes(pem)
        token = Signer.load(f"tenantry-{part}", tmp_path / "tls.key").sign("pool", "/x")
        claims = Verifier.load("pool", tmp_path).verify(
            token,
            {f"tenantry-{part}"},
            "/x",
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        )
        assert claims["iss"] == f"tenantry-{part}"
    expiry = x509.load_pem_x509_certificate(certificates["gateway.crt"].encode()).not_valid_after_utc
    assert expiry.year >= 2035
    assert len(base64.b64decode(_one(documents, "Secret", "tenantry-salt")["data"]["salt"])) >= 32


def test_given_keys_are_used(render: Render) -> None:
    documents = render(
        *(f"identity.{part}.existingSecret=my-{part}" for part in PARTS),
        "identity.existingAuthoritySecret=my-authority",
        *(f"identity.{part}.certificate=CERT-{part}" for part in PARTS),
        "identity.existingSaltSecret=my-salt",
    )
    assert not [d for d in documents if d["kind"] == "Secret"]
    assert _one(documents, "ConfigMap", names.IDENTITY_CONFIGMAP)["data"]["fetcher.crt"] == "CERT-fetcher"


def test_traces_go_to_the_collector_that_is_named(render: Render) -> None:
    def environment(*settings: str) -> list[Object]:
        operator = _one(render(*settings), "Deployment", "tenantry-operator")
        found: list[Object] = operator["spec"]["template"]["spec"]["containers"][0].get("env", [])
        return found

    assert environment() == []
    address = "http://collector.monitoring:4318"
    wanted = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": address}
    assert environment(f"operator.tracesEndpoint={address}") == [wanted]


def test_the_operator_reads_its_configuration(render: Render) -> None:
    template = ["poolTemplates.big.baseModel.name=m", "poolTemplates.big.baseModel.source.image.path=/m"]
    template += ["poolTemplates.big.tiers={Enterprise}", "poolTemplates.big.lanes[0].name=fast"]
    documents = render(
        *template, "tiers.Enterprise.poolTemplates={big}", "gateway.url=https://ai.example.com/v1"
    )
    text = _one(documents, "ConfigMap", "tenantry-operator")["data"]["operator.yaml"]
    config = OperatorConfig.model_validate(yaml.safe_load(text))
    assert config.release_namespace == NAMESPACE
    assert config.gateway_url == "https://ai.example.com/v1"
    assert config.fetcher_url == f"http://tenantry-fetcher.{NAMESPACE}.svc:{names.FETCHER_PORT}"
    assert len(config.tiers) == 5
    for policy in config.tiers.values():
        for field, value in policy.defaults.model_dump(exclude_none=True).items():
            ceiling = getattr(policy.ceilings, field)
            assert ceiling is None or value <= ceiling
        assert policy.weight <= policy.max_weight
    assert set(config.pool_templates) == {"big"}
    assert config.tenant_role in {d["metadata"]["name"] for d in documents if d["kind"] == "ClusterRole"}


def test_a_changed_configuration_restarts_the_operator(render: Render) -> None:
    def note(*settings: str) -> str:
        pod = _one(render(*settings), "Deployment", "tenantry-operator")["spec"]["template"]
        return str(pod["metadata"]["annotations"])

    assert note() == note()
    assert note() != note("workers=4")


def test_ports_are_those_of_the_wire_contract(render: Render) -> None:
    documents = render()
    ports = {
        d["metadata"]["name"]: [p["port"] for p in d["spec"]["ports"]]
        for d in documents
        if d["kind"] == "Service"
    }
    assert ports == {"tenantry-gateway": [names.GATEWAY_PORT], "tenantry-fetcher": [names.FETCHER_PORT]}


def test_nobody_else_reaches_engines(render: Render) -> None:
    engine = _one(render(), "NetworkPolicy", "tenantry-engine")["spec"]
    assert engine["egress"] == []
    callers = {
        (peer["podSelector"]["matchLabels"][names.COMPONENT_LABEL], port["port"])
        for rule in engine["ingress"]
        for peer in rule["from"]
        for port in rule["ports"]
    }
    assert callers == {
        ("gateway", names.ENGINE_PORT), ("gateway", names.ENGINE_ADMIN_PORT),
        ("operator", names.ENGINE_ADMIN_PORT), ("fetcher", names.ENGINE_ADMIN_PORT),
    }  # fmt: skip


def test_fetcher_arguments(render: Render) -> None:
    documents = render(
        "fetcher.allowOrigins={registry.example.com,10.0.0.5:5000}",
        "fetcher.allowPrivate=true",
        "fetcher.plainHttp={10.0.0.5:5000}",
        "fetcher.cacheSize=512Mi",
    )
    args = _one(documents, "Deployment", "tenantry-fetcher")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    assert args[-5:] == [
        f"--cache-bytes={512 << 20}",
        "--allow-origin=registry.example.com",
        "--allow-origin=10.0.0.5:5000",
        "--allow-private",
        "--plain-http=10.0.0.5:5000",
    ]


KEY = "-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----"


def test_the_fetcher_reads_secrets_and_trusts_only_where_an_admin_says_so(render: Render) -> None:
    from tenantry.fetcher.main import parser

    def pod(documents: list[Any]) -> tuple[Any, Any]:
        spec = _one(documents, "Deployment", "tenantry-fetcher")["spec"]["template"]["spec"]
        return spec, parser().parse_args(spec["containers"][0]["args"])

    spec, arguments = pod(render())
    assert (arguments.read_secrets, arguments.trust_dir) == (False, None)
    assert spec["automountServiceAccountToken"] is False
    documents = render(
        "fetcher.readSecrets=true", f"fetcher.trust.keys.release={KEY}", "fetcher.trust.trustedRoot=ROOT"
    )
    spec, arguments = pod(documents)
    assert arguments.read_secrets is True
    assert spec["automountServiceAccountToken"] is True
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["trust"] == str(arguments.trust_dir)
    data = _one(documents, "ConfigMap", "tenantry-trust")["data"]
    assert data == {"release.pub": KEY, "trusted_root.json": "ROOT"}
    # The right comes from each namespace's own Role, never from the chart.
    bindings = [d for d in documents if d["kind"] in ("ClusterRoleBinding", "RoleBinding")]
    assert not [b for b in bindings if any(s["name"] == "tenantry-fetcher" for s in b["subjects"])]
    roles = [d for d in documents if d["kind"] in ("ClusterRole", "Role")]
    rules = [rule for role in roles for rule in role.get("rules") or []]  # aggregated roles have none of their own
    assert not [rule for rule in rules if "secrets" in rule["resources"]]


def test_arguments_are_those_of_the_programs(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program's own parser takes what its Deployment passes."""
    from tenantry.fetcher.main import parser as fetcher
    from tenantry.runtime.main import parse as operator
    from tenantry_gateway.settings import parse as gateway

    documents = render("gateway.trustedProxies={10.0.0.0/8}", "gateway.extraArgs={--drain-seconds=1}")
    args = {
        p: _one(documents, "Deployment", f"tenantry-{p}")["spec"]["template"]["spec"]["containers"][0]
        for p in PARTS
    }
    assert operator(args["operator"]["args"]).namespace == NAMESPACE
    assert fetcher().parse_args(args["fetcher"]["args"]).port == names.FETCHER_PORT
    assert gateway(args["gateway"]["args"]).drain_seconds == 1


def test_the_ledger_outlives_the_release(render: Render) -> None:
    documents = render("gateway.ledger.persistent=true", "gateway.ledger.size=5Gi")
    claim = _one(documents, "PersistentVolumeClaim", "tenantry-ledger")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert _one(documents, "Deployment", "tenantry-gateway")["spec"]["strategy"] == {"type": "Recreate"}


def test_crds_are_kept(helm: Helm) -> None:
    done = helm("template", "crds", str(REPOSITORY / "helm/tenantry-crds"))
    documents = list(yaml.safe_load_all(done.stdout))
    assert sorted(d["spec"]["names"]["kind"] for d in documents) == ["Adapter", "AdapterPool", "Tenant"]
    for document in documents:
        assert document["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_nothing_of_ours_stands_between_the_api_server_and_anybody(helm: Helm, render: Render) -> None:
    """What is judged is judged within the API server: no process of ours has to be up, or trusted, for a write."""
    rendered = helm("template", "crds", str(REPOSITORY / "helm/tenantry-crds"))
    crds = list(yaml.safe_load_all(rendered.stdout))
    documents = [*render("monitoring.rules.enabled=true", "monitoring.podMonitors.enabled=true"), *crds]
    assert not [d for d in documents if d["kind"].endswith("WebhookConfiguration") or d["kind"] == "APIService"]
    for crd in crds:
        assert "conversion" not in crd["spec"], "one version: nothing converts and nothing is to be migrated"
        [version] = crd["spec"]["versions"]
        assert version["served"]
        assert version["storage"]
    policies = [d for d in documents if d["kind"] == "ValidatingAdmissionPolicy"]
    assert policies
    assert not [d for d in policies if "paramKind" in d["spec"]], "no object that could be missing decides"


@pytest.mark.apiserver
def test_a_second_release_is_refused(installed: Rest, apiserver: Any, helm: Helm) -> None:
    """Two would claim the same tenants and nodes; names of cluster-wide objects keep the second one out."""
    for release, where in (("tenantry", "default"), ("second", NAMESPACE), ("second", "default")):
        target = ("--namespace", where, "--kubeconfig", str(apiserver.kubeconfig))
        done = helm("install", release, str(CHART), *target, "--dry-run=server")
        assert done.returncode != 0, (release, where)
        assert "cannot be imported into the current release" in done.stderr


def test_nothing_names_a_namespace_of_its_own(helm: Helm) -> None:
    done = helm("template", "t", str(CHART), "--namespace", "elsewhere")
    namespaced = set(re.findall(r"^  namespace: (\S+)$", done.stdout, re.MULTILINE))
    assert namespaced == {"elsewhere"}
    assert "tenantry-system" not in done.stdout


@pytest.mark.apiserver
def test_an_upgrade_changes_choices_and_back(installed: Rest, apiserver: Any, helm: Helm) -> None:
    """Strictly checked by the API server, and no rest of the other choice stays behind."""
    release = ("tenantry", str(CHART), "--namespace", NAMESPACE, "--kubeconfig", str(apiserver.kubeconfig))
    settings = [
        "gateway.ledger.persistent=true",
        "gateway.service.type=NodePort",
        "networkPolicies.metricsNamespaces={monitoring}",
        "images.pullSecrets={registry}",
        "operator.nodeSelector.pool=system",
    ]
    metadata = {"name": "tenantry-gateway", "namespace": NAMESPACE}
    gateway = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
    before = installed.get(gateway)["spec"]
    done = helm("upgrade", *release, *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    assert installed.get(gateway)["spec"]["strategy"] == {"type": "Recreate"}
    done = helm("upgrade", *release, "--reset-values")
    assert done.returncode == 0, done.stderr
    assert installed.get(gateway)["spec"] == before


@pytest.mark.apiserver
def test_pods_pass_pod_security_restricted(installed: Rest, render: Render) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "charts-psa", "labels": labels}}
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": "charts-psa"},
    }
    assert installed.apply(space).complaint == ""
    installed.apply(account)
    for pod in _pods(render()):
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod["containers"][0]["name"], "namespace": "charts-psa"},
            "spec": {**pod, "serviceAccountName": "default"},
        }
        assert installed.create(body, dry_run=True).complaint == ""
    installed.delete(space)


@pytest.mark.apiserver
def test_keys_outlive_an_upgrade(installed: Rest, apiserver: Any, helm: Helm) -> None:
    """The chart finds the keys that are there; a lost certificate is made anew from its key."""
    release = ("tenantry", str(CHART), "--namespace", NAMESPACE, "--kubeconfig", str(apiserver.kubeconfig))
    secrets = [*(f"tenantry-{part}-identity" for part in PARTS), "tenantry-salt"]

    def stored(kind: str, name: str) -> Any:
        metadata = {"name": name, "namespace": NAMESPACE}
        return installed.get({"apiVersion": "v1", "kind": kind, "metadata": metadata})["data"]

    def upgrade() -> dict[str, str]:
        done = helm("upgrade", *release)
        assert done.returncode == 0, done.stderr
        return dict(stored("ConfigMap", names.IDENTITY_CONFIGMAP))

    keys = {name: stored("Secret", name) for name in secrets}
    certificates = stored("ConfigMap", names.IDENTITY_CONFIGMAP)
    assert upgrade() == certificates
    assert {name: stored("Secret", name) for name in secrets} == keys
    metadata = {"name": names.IDENTITY_CONFIGMAP, "namespace": NAMESPACE}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    assert installed.merge(document, {"data": {"gateway.crt": None}}).complaint == ""
    made = x509.load_pem_x509_certificate(upgrade()["gateway.crt"].encode())
    key = load_pem_private_key(base64.b64decode(keys["tenantry-gateway-identity"]["tls.key"]), None)
    assert made.public_key() == key.public_key()
