"""One bridge, one network namespace per node, and the routes that let this machine reach pods and Services.

The machine itself is 172.30.0.1 on the bridge. It reaches a pod through the pod's node and a Service through any
node, whose kube-proxy translates. Nodes know each other's pod networks, so the machine forwards nothing and no
setting of it changes.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ClusterError
from .paths import BRIDGE, HOST_ADDRESS, NODE_NETWORK, NODES, POD_NETWORK, SERVICE_NETWORK, Node
from .shell import run, succeeds

NAMESPACES = Path("/run/netns")


def create(nodes: Sequence[Node] = NODES) -> None:
    """Makes bridge, namespaces, links and routes. Raises ClusterError where a network of ours is in use already."""
    refuse_overlap()
    mask = NODE_NETWORK.partition("/")[2]
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{HOST_ADDRESS}/{mask}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for node in nodes:
        _create_node(node, mask, [other for other in nodes if other != node])
        run("ip", "route", "add", node.pod_cidr, "via", node.address)
    run("ip", "route", "add", SERVICE_NETWORK, "via", nodes[0].address)


def _create_node(node: Node, mask: str, others: Sequence[Node]) -> None:
    run("ip", "netns", "add", node.name)
    run("ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.name)
    run("ip", "link", "set", node.link, "master", BRIDGE, "up")
    inside = ("ip", "-n", node.name)
    run(*inside, "link", "set", "lo", "up")
    run(*inside, "addr", "add", f"{node.address}/{mask}", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    run(*inside, "route", "add", "default", "via", HOST_ADDRESS)
    for other in others:
        run(*inside, "route", "add", other.pod_cidr, "via", other.address)


def remove(nodes: Sequence[Node] = NODES) -> None:
    """Removes all of it, also half of it. A namespace dies later than its name, so its link goes first."""
    for node in nodes:
        if succeeds("ip", "link", "show", node.link):
            run("ip", "link", "del", node.link)
        if (NAMESPACES / node.name).exists():
            run("ip", "netns", "del", node.name)
    if succeeds("ip", "link", "show", BRIDGE):
        run("ip", "link", "del", BRIDGE)
    # `ip netns add` mounts this folder onto itself and leaves that behind.
    if NAMESPACES.exists() and not any(NAMESPACES.iterdir()):
        while succeeds("mountpoint", "-q", NAMESPACES):
            run("umount", NAMESPACES)
        NAMESPACES.rmdir()


def left(nodes: Sequence[Node] = NODES) -> list[str]:
    """Names of ours that exist now: links, namespaces and routes."""
    links = {BRIDGE, *(node.link for node in nodes)}
    found = [f"link {item['ifname']}" for item in _ip("link") if item["ifname"] in links]
    found += [f"netns {node.name}" for node in nodes if (NAMESPACES / node.name).exists()]
    ours = [ipaddress.IPv4Network(item) for item in (NODE_NETWORK, POD_NETWORK, SERVICE_NETWORK)]
    for route in _ip("route"):
        network = _network(route["dst"])
        if network is not None and any(network.subnet_of(item) for item in ours):
            found.append(f"route {network} dev {route['dev']}")
    return found


def refuse_overlap() -> None:
    """A route into one of our networks that is not ours would swallow the cluster's traffic."""
    wanted = [ipaddress.IPv4Network(item) for item in (NODE_NETWORK, POD_NETWORK, SERVICE_NETWORK)]
    for route in _ip("route"):
        network = _network(route["dst"])
        if network is not None and network.prefixlen and any(network.overlaps(item) for item in wanted):
            raise ClusterError(
                f"network {network} (on `{route['dev']}`) overlaps {NODE_NETWORK}, {POD_NETWORK} or "
                f"{SERVICE_NETWORK}, which the cluster uses: take that route away, or point `KUBECONFIG` at "
                "another cluster."
            )


def _network(destination: str) -> ipaddress.IPv4Network | None:
    return None if destination == "default" else ipaddress.IPv4Network(destination)


def _ip(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("ip", "-4", "-json", kind, "show") or "[]")
    return found
