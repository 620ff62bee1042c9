"""Where things lie and what they are called: the only module that knows folders, names and addresses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

PREFIX = "tenantry"
"""Every bridge, namespace, cgroup and folder of ours starts with it, so that nothing foreign is touched."""

IMAGE_HOST = "tenantry.local"
"""Host part of our images' names. No such registry exists: images are imported, never pulled."""


def cache_dir() -> Path:
    """Folder outside the checkout for binaries and images: `$TENANTRY_CACHE`, else `~/.cache/tenantry`."""
    return (
        Path(os.environ.get("TENANTRY_CACHE") or Path.home() / ".cache" / "tenantry").expanduser().absolute()
    )


def cluster_dir() -> Path:
    """Folder of the running cluster's state. Short, since unix socket paths may have 107 bytes at most."""
    return cache_dir() / "cluster"


@dataclass(frozen=True)
class Node:
    """One worker node: a network, mount, UTS and process namespace of its own on this machine."""

    role: str
    index: int
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{PREFIX}-{self.role}"

    @property
    def address(self) -> str:
        return f"172.30.0.{10 + self.index}"

    @property
    def pod_cidr(self) -> str:
        return f"10.244.{self.index}.0/24"

    @property
    def link(self) -> str:
        """Name of the veth's end on the machine; interface names have 15 characters at most."""
        return f"tnt-{self.role}"[:15]


HOST_ADDRESS = "172.30.0.1"
NODE_NETWORK = "172.30.0.0/24"
POD_NETWORK = "10.244.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
KUBERNETES_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
REGISTRY_SERVICE = "10.96.0.20"
API_PORT = 6443
BRIDGE = "tnt0"

ZONE = "topology.kubernetes.io/zone"
REGION = "topology.kubernetes.io/region"
CLAIMABLE = "tenantry.dev/claimable"

NODES = (
    Node("shared", 1, ((ZONE, "zone-a"), (REGION, "local"))),
    Node("lora", 2, ((ZONE, "zone-b"), (REGION, "local"))),
    Node("dedicated", 3, ((ZONE, "zone-c"), (REGION, "local"), (CLAIMABLE, "true"))),
)
