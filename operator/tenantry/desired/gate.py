"""The gate in the pods of tenants with mutual TLS or attestation, and what the engine is told of it."""

from __future__ import annotations

from typing import Final

from tenantry.api import TenantSpec, Tier, names
from tenantry.api.config import OperatorConfig
from tenantry.api.pool import EngineType
from tenantry.attestation.policy import GatePolicy, gate_policy

from .objects import Obj, metadata
from .problems import Problem, join

RUN_DIR: Final = "/run/tenantry"
POLICY_DIR: Final = "/etc/tenantry/gate"
POLICY_FILE: Final = "policy.json"
IDENTITY_DIR: Final = "/etc/tenantry/identity"


def is_secured(spec: TenantSpec) -> bool:
    """Whether a gate stands before the tenant's engines and every hop to them is by mutual TLS."""
    isolation = spec.isolation
    asked = isolation.mutual_tls or isolation.attestation is not None
    return spec.tier is Tier.REGULATED or (spec.tier.dedicated and asked)


def problems(spec: TenantSpec, config: OperatorConfig) -> list[Problem]:
    """References that the tier is not offered, and what Regulated must not have or must have."""
    isolation, policy = spec.isolation, config.tiers[spec.tier]
    found = []
    if (
        isolation.runtime_class_name is not None
        and isolation.runtime_class_name not in policy.runtime_classes
    ):
        found.append(_not_offered("isolation.runtimeClassName", spec.tier, policy.runtime_classes))
    if isolation.attestation is not None:
        for field, wanted, allowed, known in (
            ("verifierRef", isolation.attestation.verifier_ref, policy.verifiers, config.verifiers),
            (
                "policyRef",
                isolation.attestation.policy_ref,
                policy.attestation_policies,
                config.attestation_policies,
            ),
        ):
            if wanted not in allowed or wanted not in known:
                found.append(_not_offered(f"isolation.attestation.{field}", spec.tier, allowed))
    template = config.pool_templates.get(spec.dedicated.pool_template_ref) if spec.dedicated else None
    if is_secured(spec) and template is not None and template.engine.type is EngineType.VLLM:
        text = "must name a template of engine type Tenantry: no gate stands before vLLM"
        found.append(Problem("dedicated.poolTemplateRef", text))
    if spec.tier is Tier.REGULATED and isolation.egress:
        found.append(
            Problem("isolation.egress", "must be empty in tier Regulated, whose pods reach nothing: drop it")
        )
    if spec.tier is Tier.REGULATED and isolation.attestation and isolation.runtime_class_name is None:
        offered = join(sorted(policy.runtime_classes)) or "none is"
        text = f"must be set in tier Regulated: name a RuntimeClass that the tier is offered ({offered})"
        found.append(Problem("isolation.runtimeClassName", text))
    return found


def _not_offered(field: str, tier: Tier, allowed: list[str]) -> Problem:
    offered = join(sorted(allowed)) or "none is"
    return Problem(
        field, f"must be one that tier {tier.value} is offered ({offered}): see the chart's `tiers`"
    )


def policy_of(spec: TenantSpec, config: OperatorConfig) -> GatePolicy | None:
    """By what the tenant's gates judge tokens; None where no proof is asked. Call it on specs without problems."""
    wanted = spec.isolation.attestation
    if wanted is None or not spec.tier.dedicated:
        return None
    return gate_policy(
        config.verifiers[wanted.verifier_ref],
        config.attestation_policies[wanted.policy_ref],
        wanted.max_age_seconds,
    )


def config_map(tenant: str, policy: GatePolicy) -> Obj:
    """The policy as gates read it. Nothing in it is secret: public keys, names, measurements."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(
            names.GATE_CONFIGMAP, names.tenant_namespace(tenant), {names.TENANT_LABEL: tenant}
        ),
        "data": {POLICY_FILE: policy.model_dump_json(by_alias=True)},
    }


def attach(pod: Obj, image: str, pull_policy: str, audience: str, *, attested: bool) -> None:
    """Put the gate before the engine of a rendered pod: it must have opened before the engine starts."""
    container = next(entry for entry in pod["containers"] if entry["name"] == "engine")
    check = ["tenantry-gate", "--folder", RUN_DIR, *_policy(attested), "--check"]
    mounts = [
        {"name": "run", "mountPath": RUN_DIR},
        {"name": "identity", "mountPath": IDENTITY_DIR, "readOnly": True},
    ]
    if attested:
        mounts.append({"name": "gate", "mountPath": POLICY_DIR, "readOnly": True})
        pod["volumes"].append({"name": "gate", "configMap": {"name": names.GATE_CONFIGMAP}})
    pod["volumes"].append({"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    pod["initContainers"] = [
        {
            "name": "gate",
            "image": image,
            "imagePullPolicy": pull_policy,
            "restartPolicy": "Always",
            "command": ["tenantry-gate"],
            "args": [
                *("--folder", RUN_DIR),
                *_policy(attested),
                *("--identity-dir", IDENTITY_DIR),
                *("--audience", audience),
                *("--port", str(names.ENGINE_GATE_PORT)),
            ],
            "ports": [{"name": "gate", "containerPort": names.ENGINE_GATE_PORT, "protocol": "TCP"}],
            "resources": {
                "requests": {"cpu": "10m", "memory": "96Mi"},
                "limits": {"memory": "192Mi"},
            },
            "securityContext": container["securityContext"],
            # Until somebody opens it: a node that cannot prove what it is waits for ever, and is told so in status.
            "startupProbe": {
                "exec": {"command": check},
                "periodSeconds": 5,
                "timeoutSeconds": 10,
                "failureThreshold": 1_000_000,
            },
            "volumeMounts": mounts,
        }
    ]
    container["args"] += ["--tls-dir", RUN_DIR, "--health-port", str(names.ENGINE_HEALTH_PORT)]
    if attested:
        container["args"] += ["--lease", f"{RUN_DIR}/lease"]
    container["volumeMounts"].append({"name": "run", "mountPath": RUN_DIR, "readOnly": True})
    container["ports"].append(
        {"name": "health", "containerPort": names.ENGINE_HEALTH_PORT, "protocol": "TCP"}
    )
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        container[probe]["httpGet"]["port"] = "health"


def stands(pod: Obj) -> bool:
    """Whether a pod's spec has a gate."""
    return any(container.get("name") == "gate" for container in pod.get("initContainers") or [])


def _policy(attested: bool) -> list[str]:
    return ["--policy", f"{POLICY_DIR}/{POLICY_FILE}"] if attested else []
