"""Which adapters a tenant may use and where they come from: consent of both, what a release is pulled as."""

from __future__ import annotations

from collections.abc import Iterator

from tenantry.api import AdapterSpec, AdapterStatus, TenantSpec, names
from tenantry.api.tenant import TenantModel
from tenantry.cluster import Key, Obj, is_deleting
from tenantry.desired.problems import SpecError
from tenantry.desired.tenant import ADAPTER_TIERS
from tenantry.engines import Identity, Pull, SignaturePolicy, Verification
from tenantry.placement.stored import Placement
from tenantry.promotion import machine
from tenantry.promotion.machine import Fault, Memory, Release

from .world import Pool, World


def served(adapter: Key, release: Release) -> str:
    return names.served_name(adapter.namespace, adapter.name, release.version, release.digest)


def pull(adapter: Key, spec: AdapterSpec, release: Release) -> Pull:
    """What the fetcher is asked for: a release on the terms of its Adapter, with a Secret of its namespace only."""
    asked, verification = spec.verification, None
    if asked is not None:
        signers = tuple(Identity(signer.issuer, signer.subject) for signer in asked.identities or ())
        verification = Verification(SignaturePolicy(asked.policy), asked.key_ref or "", signers)
    # Without a Secret it does not matter who asks, and all who ask share the work.
    namespace = adapter.namespace if release.secret_ref else ""
    return Pull(release.digest, release.source, namespace, release.secret_ref, verification)


def adapter_of(served_name: str) -> Key | None:
    """The Adapter of a served name: namespaces hold no dots, names of adapters no `--`."""
    namespace, dot, rest = served_name.partition(".")
    name, dashes, _ = rest.partition("--")
    return Key(namespace, name) if dot and dashes else None


def consent(tenant: str, spec: TenantSpec, adapter: Key, adapter_spec: AdapterSpec) -> Fault | None:
    """Whether tenant and adapter name each other. Both must: neither can reach into the other's namespace alone."""
    if adapter_spec.tenant_ref != tenant:
        return Fault("NotBound", f"`tenantRef` must be `{tenant}` for this tenant to use the adapter")
    if spec.tier not in ADAPTER_TIERS:
        return Fault("NotAllowed", f"tenant `{tenant}` is in tier {spec.tier.value}, which has no adapters")
    if adapter.namespace not in spec.adapter_namespaces:
        return Fault(
            "NotBound", f"tenant `{tenant}` must list namespace `{adapter.namespace}` in `adapterNamespaces`"
        )
    return None


def bound_adapter(world: World, tenant: str, spec: TenantSpec, key: Key) -> tuple[Obj, AdapterSpec] | None:
    """The Adapter with its spec, if it exists, is valid and tenant and adapter name each other."""
    adapter = world.adapter(key)
    if adapter is None:
        return None
    try:
        adapter_spec = world.adapter_spec(adapter)
    except SpecError:
        return None
    return None if consent(tenant, spec, key, adapter_spec) is not None else (adapter, adapter_spec)


def reference(model: TenantModel) -> Key | None:
    ref = model.adapter_ref
    return None if ref is None else Key(ref.namespace, ref.name)


def objection(world: World, adapter: Key, spec: AdapterSpec, desired: Release | None) -> Fault | None:
    """What tenant, pool and the fetched bytes say against a version; against all where there is none."""
    tenant = world.tenant(spec.tenant_ref)
    if tenant is None or is_deleting(tenant):
        return Fault("TenantNotFound", f"`tenantRef` must name a Tenant: there is no `{spec.tenant_ref}`")
    try:
        tenant_spec = world.tenant_spec(tenant)
    except SpecError:
        return None
    refused = consent(spec.tenant_ref, tenant_spec, adapter, spec)
    if refused is not None or desired is None:
        return refused
    for pool in pools_of(world, spec.tenant_ref, tenant_spec, adapter):
        if pool.spec.lora is not None and desired.rank > pool.spec.lora.max_rank:
            return Fault(
                "RankTooLarge",
                f"`rank` must be at most {pool.spec.lora.max_rank}, the limit of pool `{pool.name}`, "
                f"not {desired.rank}: train a smaller adapter or raise the pool's `lora.maxRank`",
            )
    transfer = world.observations.artifact(pull(adapter, spec, desired))
    facts = transfer.adapter if transfer is not None else None
    if facts is not None and facts.rank != desired.rank:
        return Fault(
            "RankMismatch", f"`rank` must be {facts.rank}, as the adapter's own files say, not {desired.rank}"
        )
    return None


def pools_of(world: World, tenant: str, spec: TenantSpec, adapter: Key) -> Iterator[Pool]:
    """The pools that serve models answered by the adapter."""
    for name in sorted(pool_names(world.placements.get(tenant), spec, adapter)):
        pool = world.pool(name)
        if pool is not None:
            yield pool


def pool_names(placement: Placement, spec: TenantSpec, adapter: Key) -> set[str]:
    """The same by name, whether they are there or not."""
    chosen = placement.models
    return {
        chosen[model.name] for model in spec.models if reference(model) == adapter and model.name in chosen
    }


def remembered(adapter: Obj) -> Memory:
    """What the adapter's stored status says of its promotion."""
    return machine.recall(AdapterStatus.model_validate(adapter.get("status") or {}))
