"""The kinds that the operator reads or writes, as typed descriptors: where each lives in the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from tenantry.api import GROUP, VERSION

Obj = dict[str, Any]


class Key(NamedTuple):
    """Namespace and name of an object; the namespace of a cluster-scoped object is empty."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True)
class Resource:
    """One kind in one version. Hashable, so that it serves as a key of the store."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of an object, or of the collection where `name` is empty.

        An empty `namespace` of a namespaced kind means all namespaces, which only a collection may have.
        """
        if name and self.namespaced != bool(namespace):
            raise ValueError(f"`namespace` must {'' if self.namespaced else 'not '}be given for {self.kind}")
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(quote(part, safe="") for part in parts)


def _ours(plural: str, kind: str, namespaced: bool = False) -> Resource:
    return Resource(GROUP, VERSION, plural, kind, namespaced)


TENANT: Final = _ours("tenants", "Tenant")
ADAPTER_POOL: Final = _ours("adapterpools", "AdapterPool")
ADAPTER: Final = _ours("adapters", "Adapter", namespaced=True)

NAMESPACE: Final = Resource("", "v1", "namespaces", "Namespace", False)
NODE: Final = Resource("", "v1", "nodes", "Node", False)
POD: Final = Resource("", "v1", "pods", "Pod", True)
SERVICE: Final = Resource("", "v1", "services", "Service", True)
SERVICE_ACCOUNT: Final = Resource("", "v1", "serviceaccounts", "ServiceAccount", True)
CONFIG_MAP: Final = Resource("", "v1", "configmaps", "ConfigMap", True)
RESOURCE_QUOTA: Final = Resource("", "v1", "resourcequotas", "ResourceQuota", True)
LIMIT_RANGE: Final = Resource("", "v1", "limitranges", "LimitRange", True)
DEPLOYMENT: Final = Resource("apps", "v1", "deployments", "Deployment", True)
STATEFUL_SET: Final = Resource("apps", "v1", "statefulsets", "StatefulSet", True)
ENDPOINT_SLICE: Final = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", True)
NETWORK_POLICY: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", True)
SERVICE_CIDR: Final = Resource("networking.k8s.io", "v1", "servicecidrs", "ServiceCIDR", False)
NODE_POOL: Final = Resource("karpenter.sh", "v1", "nodepools", "NodePool", False)
POD_DISRUPTION_BUDGET: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True)
ROLE_BINDING: Final = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", True)
LEASE: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease", True)
EVENT: Final = Resource("events.k8s.io", "v1", "events", "Event", True)

ALL: Final = (
    TENANT,
    ADAPTER_POOL,
    ADAPTER,
    NAMESPACE,
    NODE,
    POD,
    SERVICE,
    SERVICE_ACCOUNT,
    CONFIG_MAP,
    RESOURCE_QUOTA,
    LIMIT_RANGE,
    DEPLOYMENT,
    STATEFUL_SET,
    ENDPOINT_SLICE,
    NETWORK_POLICY,
    SERVICE_CIDR,
    NODE_POOL,
    POD_DISRUPTION_BUDGET,
    ROLE_BINDING,
    LEASE,
    EVENT,
)

_BY_KIND: Final = {(resource.api_version, resource.kind): resource for resource in ALL}


def resource_of(obj: Obj) -> Resource:
    """The descriptor of an object with `apiVersion` and `kind`. Raises KeyError for a kind not listed here."""
    return _BY_KIND[obj["apiVersion"], obj["kind"]]


def key_of(obj: Obj) -> Key:
    metadata = obj["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])
