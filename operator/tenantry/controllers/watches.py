"""Which change of which object makes which key dirty."""

from __future__ import annotations

from collections.abc import Iterable

from tenantry.api import names
from tenantry.cluster import Key, Obj, Resource, controller_of, is_deleting, key_of, uid_of
from tenantry.runtime.controller import Mapper, own_key, owner_key
from tenantry.runtime.store import Store

from . import pods
from .metrics import Census
from .world import World, dedicated_to


class Watches:
    """Mappers that need the shared state."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.census = Census()

    def counted(self, resource: Resource) -> Mapper:
        """Wakes nobody: the census of a kind follows its changes."""

        def mapper(old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
            self.census.changed(resource, old, new)
            return ()

        return mapper

    # tenant keys

    def pool_to_tenants(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """Everybody on the pool and everybody without a place, when more than the pool's status changed."""
        if not _spec_changed(old, new):
            return ()
        name = (new or old or {})["metadata"]["name"]
        owner = dedicated_to(new or old or {})
        return _tenants({*self._concerned(name), *([owner] if owner is not None else [])})

    def workload_to_tenants(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """The same when a lane gains or loses replicas."""
        before, after = (obj.get("spec", {}).get("replicas") if obj else None for obj in (old, new))
        if before == after and (old is None) == (new is None):
            return ()
        owner = controller_of(new or old or {"metadata": {}})
        if owner is None or owner.get("kind") != "AdapterPool":
            return ()
        return _tenants(self._concerned(str(owner["name"])))

    def _concerned(self, pool: str) -> set[str]:
        return {*self.world.placements.tenants_on(pool), *self.world.links.unplaced}

    def pod_to_tenants(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """Tenants of a replica that starts or stops to take traffic; the tenant in whose namespace it runs."""
        ready = [obj is not None and pods.is_ready(obj) for obj in (old, new)]
        replica = _replica(new or old)
        if replica is None:
            return ()
        found: set[str] = set()
        if ready[0] != ready[1]:
            found |= self.world.placements.tenants_of(replica) | self.world.links.routed_to(replica)
        if ready[1] and self.world.placements.standings.is_lost(replica, self.world.clock()):
            found |= self._concerned(replica.namespace)  # it may take them back
        tenant = (new or old or {})["metadata"].get("labels", {}).get(names.TENANT_LABEL)
        if tenant and (old is None or new is None):
            found.add(tenant)
        return _tenants(found)

    def adapter_to_tenants(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        self.world.links.adapter_changed(old, new)
        before, after = _channels(old), _channels(new)
        if before == after and _stalled(old) == _stalled(new) and not _spec_changed(old, new):
            return ()
        users = self.world.links.users_of(key_of(new or old or {}))
        return _tenants({*users, *({obj["spec"].get("tenantRef") for obj in (old, new) if obj} - {None})})

    def node_to_tenants(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """Holders of the node, and whoever lacks one."""
        holders = {
            (obj or {}).get("metadata", {}).get("labels", {}).get(names.NODE_TENANT_LABEL)
            for obj in (old, new)
        }
        concerned = {*(holders - {None}), *self.world.links.short_of_nodes}
        if _networks(old) != _networks(new):
            concerned |= self.world.links.with_egress
        return _tenants(concerned)

    # pool keys

    def tenant_to_pool(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """The pool of a dedicated tenant is rendered by the tenant's spec too."""
        spec = (new or {}).get("spec") or {}
        if not _spec_changed(old, new) or "dedicated" not in spec:
            return ()
        return (Key("", names.dedicated_pool((new or {})["metadata"]["name"])),)

    # replica keys

    def pod_to_replica(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        return dict.fromkeys(key for key in (_replica(old), _replica(new)) if key is not None)

    def tenant_to_replicas(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """Debounced: one commit may change many tenants of a replica."""
        routed = self.world.links.tenant_changed(old, new)
        if not _spec_changed(old, new) and _route(old) == _route(new):
            return ()
        name = (new or old or {})["metadata"]["name"]
        self.world.wake_replicas(sorted(routed | self._placed(name)))
        return ()

    def adapter_to_replicas(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        if _channels(old) == _channels(new) and not _spec_changed(old, new):
            return ()
        for obj in (old, new):
            tenant = (obj or {}).get("spec", {}).get("tenantRef")
            if tenant:
                self.world.wake_replicas(sorted(self._placed(tenant)))
        return ()

    def _placed(self, tenant: str) -> frozenset[Key]:
        placement = self.world.placements.get(tenant)
        return frozenset(
            Key(pool, replica) for pool, placed in placement.pools.items() for replica in placed.replicas
        )

    # adapter keys

    def own_adapter(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        self.world.links.adapter_changed(old, new)
        return own_key(old, new, store)

    def tenant_to_adapters(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """Its adapters, when its spec changed or it came or went."""
        if not _spec_changed(old, new):
            return ()
        return sorted(self.world.links.adapters_of((new or old or {})["metadata"]["name"]))

    def pool_to_adapters(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        if not _spec_changed(old, new):
            return ()
        tenants = self.world.placements.tenants_on((new or old or {})["metadata"]["name"])
        return sorted({key for tenant in tenants for key in self.world.links.adapters_of(tenant)})

    def pod_to_adapters(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """Adapters on a replica that starts or stops to take traffic."""
        ready = [obj is not None and pods.is_ready(obj) for obj in (old, new)]
        replica = _replica(new or old)
        if replica is None or ready[0] == ready[1]:
            return ()
        tenants = self.world.placements.tenants_of(replica)
        return sorted({key for tenant in tenants for key in self.world.links.adapters_of(tenant)})


owner_tenant: Mapper = owner_key("Tenant")
owner_pool: Mapper = owner_key("AdapterPool")


def _networks(node: Obj | None) -> object:
    return (node or {}).get("spec", {}).get("podCIDRs"), (node or {}).get("status", {}).get("addresses")


def _tenants(found: Iterable[str]) -> list[Key]:
    return [Key("", name) for name in sorted(found)]


def _replica(pod: Obj | None) -> Key | None:
    pool = (pod or {}).get("metadata", {}).get("labels", {}).get(names.POOL_LABEL)
    return Key(pool, key_of(pod).name) if pod is not None and pool else None


def _spec_changed(old: Obj | None, new: Obj | None) -> bool:
    if old is None or new is None:
        return True
    return (
        uid_of(old) != uid_of(new)
        or old["metadata"].get("generation") != new["metadata"].get("generation")
        or is_deleting(old) != is_deleting(new)
    )


def _route(tenant: Obj | None) -> object:
    return ((tenant or {}).get("status") or {}).get("route")


def _channels(adapter: Obj | None) -> object:
    return ((adapter or {}).get("status") or {}).get("channels")


def _stalled(adapter: Obj | None) -> object:
    conditions = ((adapter or {}).get("status") or {}).get("conditions") or []
    return next((entry.get("status") for entry in conditions if entry.get("type") == "Stalled"), None)
