"""Events as evidence. What guards a tenant is put right within one event, so a look that comes later sees it whole:
the event itself is the only witness that it was broken, and is recorded as such."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tenantry.api import TenantSpec, Tier, names
from tenantry.cluster import NAMESPACE, Key, Obj, controller_of, is_deleting, uid_of
from tenantry.desired import nodes
from tenantry.desired.isolation import GUARANTEES
from tenantry.desired.problems import SpecError
from tenantry.evidence import checks, probe
from tenantry.evidence.book import Subject
from tenantry.evidence.findings import Finding
from tenantry.runtime.controller import own_key
from tenantry.runtime.store import Store

from . import networks, pods
from .claims import subject_of
from .world import World

DEDICATED = {tier.value for tier in Tier if tier.dedicated}
SOON_SECONDS = 1.0
"""Many events come together, and most of what they tell is put right by the tenant's own reconcile."""


class _Owner(NamedTuple):
    name: str
    obj: Obj
    spec: TenantSpec


class EvidenceWatches:
    """Mappers of the controllers `evidence` and `pool-evidence`. `look_now` lets a tenant be looked at out of turn."""

    def __init__(self, world: World, look_now: Callable[[str], None]) -> None:
        self.world = world
        self._look_now = look_now

    def news(self, subject: Subject) -> None:
        """Whose status may say something else now."""
        if subject.kind == "Tenant":
            self.world.wake_tenants([subject.name])
        else:
            self.world.wake_tenants(sorted(self.world.placements.tenants_on(subject.name)))

    def tenant(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """A dedicated tenant came, went or changed; the many shared ones have nothing of their own to look at."""
        tiers = {((obj or {}).get("spec") or {}).get("tier") for obj in (old, new)}
        return own_key(old, new, store) if tiers & DEDICATED else ()

    def node(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """A node that a tenant holds came, went, or lost a taint."""
        for obj in (old, new):
            self._soon(((obj or {}).get("metadata") or {}).get("labels", {}).get(names.NODE_TENANT_LABEL))
        tenant = (new or {"metadata": {}})["metadata"].get("labels", {}).get(names.NODE_TENANT_LABEL)
        owner = self._tenant(tenant)
        if old is None or new is None or owner is None:
            return ()
        whole = nodes.holds(old, owner.name, uid_of(owner.obj)) and nodes.fully_claimed(old, owner.name)
        if whole and not nodes.fully_claimed(new, owner.name):
            now = self.world.evidence.now()
            self._broken(
                owner, "DedicatedNodes", "taints", checks.taints(owner.name, uid_of(owner.obj), [new], now)
            )
        return ()

    def namespace(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """The tenant's namespace came, went, or is labelled anew."""
        owner = self._owner(old, new)
        if owner is None or old is None or new is None or is_deleting(new):
            return ()
        before, after = (obj["metadata"].get("labels", {}).get(checks.PSA_LABEL) for obj in (old, new))
        if before == "restricted" and after != before:
            at = self.world.evidence.now()
            self._broken(owner, "PodHardening", "refusal", checks.hardening(new, 0, "", at))
        return ()

    def quota(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """The quota was deleted or changed by hand."""
        owner = self._owner(old, new)
        if owner is None or old is None:
            return ()
        hard, at = self.world.config.quota.hard, self.world.evidence.now()
        after = checks.quota(new, hard, at)
        if after.holds is False and checks.quota(old, hard, at).holds is not False:
            self._broken(owner, "QuotaEnforced", "quota", after)
        return ()

    def policy(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """A NetworkPolicy that the spec asks for was deleted or changed by hand."""
        owner = self._owner(old, new)
        if owner is None or old is None:
            return ()
        wanted = [
            policy
            for policy in networks.policies(self.world, owner.obj, owner.spec)
            if policy["metadata"]["name"] == old["metadata"]["name"]
        ]
        at = self.world.evidence.now()
        after = checks.policies(wanted, [new] if new is not None else [], at)
        if wanted and after.holds is False and checks.policies(wanted, [old], at).holds:
            for guarantee in ("NetworkIsolation", "NoEgress"):
                self._broken(owner, guarantee, "policies", after)
        return ()

    def pod(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """A probe came on; a replica of a dedicated pool came or went."""
        labels = (new or old or {})["metadata"].get("labels", {})
        tenant = labels.get(names.TENANT_LABEL)
        if not tenant:
            return ()
        if labels.get(names.COMPONENT_LABEL) == probe.PROBE_COMPONENT:
            return (Key("", tenant),)
        if _readiness_differs(old, new):
            self._soon(tenant)
        return ()

    def pool_pod(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """A replica of a shared pool came or went."""
        labels = (new or old or {})["metadata"].get("labels", {})
        pool = labels.get(names.POOL_LABEL)
        if pool and names.TENANT_LABEL not in labels and _readiness_differs(old, new):
            self.world.setup.enqueue("pool-evidence", Key("", pool), after=SOON_SECONDS)
        return ()

    def _soon(self, tenant: str | None) -> None:
        if tenant:
            self._look_now(tenant)
            self.world.setup.enqueue("evidence", Key("", tenant), after=SOON_SECONDS)

    def _owner(self, old: Obj | None, new: Obj | None) -> _Owner | None:
        """The dedicated tenant that controls the object, as long as both are to stay."""
        reference = controller_of(new or old or {"metadata": {}})
        if reference is None or reference.get("kind") != "Tenant":
            return None
        self._soon(reference.get("name"))
        owner = self._tenant(reference.get("name"))
        return owner if owner is not None and uid_of(owner.obj) == reference.get("uid") else None

    def _tenant(self, name: str | None) -> _Owner | None:
        tenant = self.world.tenant(name) if name else None
        if tenant is None or name is None or is_deleting(tenant):
            return None
        space = self.world.store.get(NAMESPACE, Key("", names.tenant_namespace(name)))
        if space is None or is_deleting(space):
            return None
        try:
            spec = self.world.tenant_spec(tenant)
        except SpecError:
            return None
        return _Owner(name, tenant, spec) if spec.tier.dedicated else None

    def _broken(self, owner: _Owner, guarantee: str, aspect: str, finding: Finding) -> None:
        if owner.spec.tier not in GUARANTEES[guarantee]:
            return
        self.world.evidence.record(subject_of(owner.name), guarantee, aspect, finding)
        note = f"{guarantee}: {finding.reason}"
        self.world.setup.recorder.event(owner.obj, "IsolationBroken", note, action="Observe", type="Warning")


def _readiness_differs(old: Obj | None, new: Obj | None) -> bool:
    return (old is not None and pods.is_ready(old)) != (new is not None and pods.is_ready(new))
