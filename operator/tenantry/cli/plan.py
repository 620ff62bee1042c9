"""`tenantry plan`: what the operator would apply for a file, offline, from the very functions that it uses itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import ValidationError

from tenantry.api import names
from tenantry.api.adapter import AdapterSpec
from tenantry.api.common import API_VERSION, Model, Tier
from tenantry.api.config import OperatorConfig
from tenantry.api.pool import AdapterPoolSpec
from tenantry.api.tenant import TenantSpec
from tenantry.desired import engine, gate, gateway, namespace, network, nodepool, quota
from tenantry.desired.objects import Obj
from tenantry.desired.tenant import cluster_ranges, dedicated_to, derived_pool, tenant_problems
from tenantry.evidence import probe

from .errors import CliError, first_problem, read_text
from .placed import Fleet

if TYPE_CHECKING:
    from .cluster import Cluster

M = TypeVar("M", bound=Model)

UID = "00000000-0000-0000-0000-000000000000"


@dataclass
class Plan:
    """Objects that would be applied, and sentences about what is no object."""

    notes: list[str] = field(default_factory=list)
    objects: list[Obj] = field(default_factory=list)

    def text(self) -> str:
        """YAML documents, the notes ahead as comments."""
        head = "".join(f"# {note}\n" for note in self.notes)
        documents = [yaml.safe_dump(obj, sort_keys=False, width=110) for obj in self.objects]
        return head + "".join(f"---\n{document}" for document in documents)


def run(file: Path, config: Path | None, cluster: Cluster | None = None) -> str:
    """The whole command. Raises CliError."""
    return plan(read_text(file, "file"), None if config is None else load_config(config), cluster).text()


def load_config(path: Path) -> OperatorConfig:
    """Raises CliError."""
    try:
        return OperatorConfig.model_validate(yaml.safe_load(read_text(path, "configuration")))
    except ValidationError as error:
        raise CliError(f"configuration `{path}`: {first_problem(error)}") from error
    except yaml.YAMLError as error:
        raise CliError(f"configuration `{path}` must be YAML: {str(error).splitlines()[0]}") from error


def plan(text: str, config: OperatorConfig | None, cluster: Cluster | None = None) -> Plan:
    """Plan every Tenantry object of a text with YAML documents; among what `cluster` holds, if given.

    Raises CliError.
    """
    result = Plan()
    documents = list(_documents(text))
    pools = {
        name: _spec(AdapterPoolSpec, document)
        for name, document in ((_name(d), d) for d in documents if d["kind"] == "AdapterPool")
    }
    fleet = Fleet.offline(pools) if cluster is None else Fleet.live(pools, cluster)
    for document in documents:
        name = _name(document)
        match document["kind"]:
            case "AdapterPool":
                _plan_pool(result, name, pools[name], config)
            case "Tenant":
                _plan_tenant(result, name, _spec(TenantSpec, document), fleet, config)
            case "Adapter":
                _plan_adapter(result, document)
            case kind:
                raise CliError(f"`kind` must be Tenant, AdapterPool or Adapter, not {kind}")
    return result


def _plan_pool(result: Plan, name: str, spec: AdapterPoolSpec, config: OperatorConfig | None) -> None:
    release = config.release_namespace if config else "tenantry-system"
    result.notes.append(f"AdapterPool {name}: {_lanes(spec)} in namespace {release}")
    result.objects += engine.render(spec, _facts(name, release, spec, config))


def _facts(
    name: str,
    where: str,
    spec: AdapterPoolSpec,
    config: OperatorConfig | None,
    dedicated: engine.DedicatedTo | None = None,
) -> engine.PoolFacts:
    return engine.PoolFacts(
        name=name,
        uid=UID,
        namespace=where,
        image=config.engine_image if config else "engine-image-of-the-release",
        pull_policy=config.image_pull_policy if config else "IfNotPresent",
        region_label=config.region_label if config else "topology.kubernetes.io/region",
        replicas={lane.name: lane.replicas.min for lane in spec.lanes},
        dedicated=dedicated,
    )


def _plan_tenant(
    result: Plan,
    name: str,
    spec: TenantSpec,
    fleet: Fleet,
    config: OperatorConfig | None,
) -> None:
    if config is None:
        raise CliError(
            f"`--config` must be given to plan Tenant `{name}`: its tier's limits and templates stand there"
        )
    problems = tenant_problems(name, spec, config, cluster_ranges([], config.protected_cidrs))
    if problems:
        raise CliError(f"Tenant `{name}`: " + "; ".join(str(problem) for problem in problems))
    if spec.tier is Tier.REGULATED and spec.isolation.attestation is None:
        result.notes.append(f"Tenant {name}: Stalled/AttestationNotAvailable, nothing is applied")
    elif spec.tier.dedicated:
        _plan_dedicated(result, name, spec, config)
    else:
        _plan_shared(result, name, spec, fleet, config)


def _plan_shared(result: Plan, name: str, spec: TenantSpec, fleet: Fleet, config: OperatorConfig) -> None:
    """A shared tenant owns no object: what it gets is a place."""
    weight = spec.weight if spec.weight is not None else config.tiers[spec.tier].weight
    result.notes += fleet.explain(name, spec, weight)


def _plan_dedicated(result: Plan, name: str, spec: TenantSpec, config: OperatorConfig) -> None:
    isolation = spec.isolation
    where = names.tenant_namespace(name)
    wishes = [f"region {isolation.region}"] if isolation.region else []
    wishes += [f"{key}={value}" for key, value in sorted(isolation.node_selector.items())]
    made = isolation.node_pool_template_ref
    result.notes.append(
        f"Tenant {name}: Karpenter makes its nodes by template {made}; owns namespace {where}"
        if made is not None
        else f"Tenant {name}: claims {isolation.nodes} node(s) labelled {names.CLAIMABLE_LABEL}=true"
        f"{' with ' + ', '.join(wishes) if wishes else ''}; owns namespace {where}"
    )
    result.notes.append(
        f"Tenant {name}: runs on every replica of its own pool {names.dedicated_pool(name)}: "
        f"tier {spec.tier.value} shares none"
    )
    assert spec.dedicated is not None
    pool = derived_pool(name, spec, config.pool_templates[spec.dedicated.pool_template_ref])
    pool_spec = AdapterPoolSpec.model_validate(pool["spec"])
    facts = _facts(names.dedicated_pool(name), where, pool_spec, config, dedicated_to(name, spec, config))
    policy = gate.policy_of(spec, config)
    result.objects += [
        namespace.namespace(name),
        namespace.role_binding(name, config.service_account, config.release_namespace, config.tenant_role),
        *network.policies(
            where,
            name,
            config.release_namespace,
            isolation.egress,
            gated=gate.is_secured(spec),
            gateways={gateway.place(spec)},
        ),
        *([] if policy is None else [gate.config_map(name, policy)]),
        namespace.service_account(name),
        probe.service_account(name),
        quota.resource_quota(name, config.quota),
        quota.limit_range(name),
        pool,
        *engine.render(pool_spec, facts),
    ]
    if made is not None:
        region = None if isolation.region is None else (config.region_label, isolation.region)
        template = config.node_pool_templates[made]
        result.objects.append(nodepool.render(name, UID, template, region, isolation.node_selector))
    if gateway.is_own(spec) and config.gateway is not None:
        result.objects += gateway.render(name, config.release_namespace, config.gateway)


def _plan_adapter(result: Plan, document: dict[str, Any]) -> None:
    name, spec = _name(document), _spec(AdapterSpec, document)
    home = str(document["metadata"].get("namespace", "default"))
    listed = {version.version: version for version in spec.versions}
    for channel in spec.channels:
        version = listed.get(channel.version)
        if version is None:
            raise CliError(
                f"Adapter `{home}/{name}`: `channels[{channel.name}].version` must be one of `versions`: "
                f"{', '.join(listed)}"
            )
        served = names.served_name(home, name, version.version, version.digest)
        result.notes.append(f"Adapter {home}/{name}: {channel.name} is {served} for Tenant {spec.tenant_ref}")


def _documents(text: str) -> Iterator[dict[str, Any]]:
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise CliError(f"the file must be YAML: {str(error).splitlines()[0]}") from error
    if not found:
        raise CliError("the file must hold at least one Tenant, AdapterPool or Adapter")
    for document in found:
        if not isinstance(document, dict) or "kind" not in document:
            raise CliError("every document of the file must be an object with `kind`")
        if (
            document["kind"] in ("Tenant", "AdapterPool", "Adapter")
            and document.get("apiVersion") != API_VERSION
        ):
            raise CliError(f"`apiVersion` must be {API_VERSION}")
        yield document


def _name(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise CliError(f"`metadata.name` must be set for {document['kind']}")
    return name


def _spec(model: type[M], document: dict[str, Any]) -> M:
    try:
        return model.model_validate(document.get("spec"))
    except ValidationError as error:
        raise CliError(f"{document['kind']} `{_name(document)}`: {first_problem(error)}") from error


def _lanes(spec: AdapterPoolSpec) -> str:
    return ", ".join(f"lane {lane.name.value} x{lane.replicas.min}" for lane in spec.lanes)
