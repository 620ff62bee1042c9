"""NetworkPolicies of a dedicated tenant's namespace: nothing in, nothing out, but what is listed here."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from tenantry.api import names
from tenantry.api.tenant import GatewayPlace

from .objects import (
    FETCHER_COMPONENT,
    GATEWAY_COMPONENT,
    OPERATOR_COMPONENT,
    OWN_GATEWAY_COMPONENT,
    Obj,
    metadata,
)
from .problems import Problem

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NEVER: Final = {
    "link-local (there are the metadata services)": ("169.254.0.0/16", "fe80::/10"),
    "a metadata service": ("fd00:ec2::254/128", "100.100.100.200/32"),
    "loopback": ("127.0.0.0/8", "::1/128"),
    "unspecified": ("0.0.0.0/8", "::/128"),
    "multicast": ("224.0.0.0/4", "ff00::/8"),
    "reserved": ("240.0.0.0/4",),
    "an IPv4 address in IPv6 form": ("::ffff:0:0/96", "64:ff9b::/96"),
}


def egress_problems(cidrs: Sequence[str], protected: Iterable[tuple[str, str]]) -> list[Problem]:
    """Refuses what would open more than the outside world.

    `protected` pairs a CIDR of the cluster with what it is ("pods of node a"); see `cluster_ranges`.
    """
    ranges = [(ipaddress.ip_network(cidr), what) for what, group in NEVER.items() for cidr in group]
    for cidr, what in protected:
        try:
            ranges.append((ipaddress.ip_network(cidr, strict=False), what))
        except ValueError:
            continue
    problems = []
    for index, text in enumerate(cidrs):
        field = f"isolation.egress[{index}]"
        try:
            network = ipaddress.ip_network(text)
        except ValueError as error:
            problems.append(
                Problem(field, f"must be a CIDR such as 203.0.113.0/24, without host bits: {error}")
            )
            continue
        hit = next((what for other, what in ranges if _overlap(network, other)), None)
        if hit is not None:
            problems.append(
                Problem(field, f"must not overlap {hit}, as {text} does: list only the networks you need")
            )
    return problems


def permitted(cidrs: Sequence[str], protected: Iterable[tuple[str, str]]) -> list[str]:
    """The entries that touch nothing protected: what stays open while the others wait for an edit."""
    guarded = list(protected)
    return [cidr for cidr in cidrs if not egress_problems([cidr], guarded)]


def _overlap(one: Network, other: Network) -> bool:
    if isinstance(one, ipaddress.IPv4Network) and isinstance(other, ipaddress.IPv4Network):
        return one.overlaps(other)
    if isinstance(one, ipaddress.IPv6Network) and isinstance(other, ipaddress.IPv6Network):
        return one.overlaps(other)
    return False


def policies(
    namespace: str,
    tenant: str,
    release_namespace: str,
    egress: Sequence[str],
    *,
    gated: bool = False,
    gateways: Collection[GatewayPlace] = (GatewayPlace.SHARED,),
) -> list[Obj]:
    """Default deny in both directions, the release's own callers in, the listed networks out.

    `gated`: the operator reaches the gates of the tenant's pods too. `gateways`: which ones call its engines.
    """
    labels = {names.TENANT_LABEL: tenant}
    pods = {
        GatewayPlace.SHARED: _release_pods(release_namespace, GATEWAY_COMPONENT),
        GatewayPlace.DEDICATED: _release_pods(release_namespace, OWN_GATEWAY_COMPONENT, labels),
    }
    denied: Obj = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata("tenantry-default-deny", namespace, labels),
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }
    ingress: Obj = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata("tenantry-ingress", namespace, labels),
        "spec": {
            "podSelector": {"matchLabels": {names.MANAGED_BY_LABEL: names.MANAGED_BY}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [pods[place] for place in GatewayPlace if place in gateways],
                    "ports": [_port(names.ENGINE_PORT), _port(names.ENGINE_ADMIN_PORT)],
                },
                {
                    "from": [
                        _release_pods(release_namespace, OPERATOR_COMPONENT),
                        _release_pods(release_namespace, FETCHER_COMPONENT),
                    ],
                    "ports": [_port(names.ENGINE_ADMIN_PORT)],
                },
            ],
        },
    }
    if gated:
        ingress["spec"]["ingress"].append(
            {
                "from": [_release_pods(release_namespace, OPERATOR_COMPONENT)],
                "ports": [_port(names.ENGINE_GATE_PORT)],
            }
        )
    if not egress:
        return [denied, ingress]
    outward: Obj = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata("tenantry-egress", namespace, labels),
        "spec": {
            "podSelector": {},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": {"cidr": cidr}} for cidr in sorted(set(egress))]}],
        },
    }
    return [denied, ingress, outward]


def _release_pods(namespace: str, component: str, labels: Mapping[str, str] | None = None) -> Obj:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": {names.COMPONENT_LABEL: component, **(labels or {})}},
    }


def _port(number: int) -> Obj:
    return {"protocol": "TCP", "port": number}
