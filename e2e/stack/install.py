"""Brings Tenantry onto the cluster: images, charts, pools, adapters in a registry, tenants with fresh keys.

Every step looks first and does only what is missing, so a second call is quick. On a cluster of one's own
(`KUBECONFIG`) images and registry are given: `TENANTRY_IMAGES` (the prefix under which the three images were pushed,
e.g. `ghcr.io/acme`), `TENANTRY_REGISTRY` (an OCI registry, HOST:PORT, that both this machine and the cluster reach
over plain HTTP) and `TENANTRY_URL` (where this machine reaches the gateway, e.g. by `kubectl port-forward`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from cluster import images, lifecycle
from cluster.images import Image
from cluster.paths import IMAGE_HOST, REPOSITORY, cache_dir

from .kube import JsonObject, Kube, StackError
from .traffic import Client

NAMESPACE = "tenantry-system"
EXAMPLES = REPOSITORY / "examples"
MODEL = "smollm2-135m"
SHARED_NODE, LORA_NODE, DEDICATED_NODE = "tenantry-shared", "tenantry-lora", "tenantry-dedicated"
TAG = "e2e"
PROBE_IMAGE = f"{IMAGE_HOST}/probe:1"
REGISTRY_INSIDE = "registry.tenantry-registry.svc:5000"
TENANTS = ("birch", "cedar", "maple", "oak", "yew")
FILES = {"birch": "free", "cedar": "smb", "maple": "midmarket", "oak": "enterprise", "yew": "regulated"}
ADAPTERS = {"tone": {"1.0.0": "pirate", "1.1.0": "formal"}, "triage": {"1.0.0": "triage"}}


def model_dir() -> Path:
    """The folder that `make model` made."""
    return Path(os.environ.get("TENANTRY_MODEL_DIR") or cache_dir() / "models" / MODEL)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Says what happens and how long it took."""
    print(f"-- {text}", flush=True)
    start = time.monotonic()
    yield
    print(f"   done in {time.monotonic() - start:.0f} s", flush=True)


def tenantry(*arguments: str) -> str:
    """Standard output of the `tenantry` command line."""
    result = subprocess.run(
        [sys.executable, "-m", "tenantry.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=REPOSITORY,
    )
    if result.returncode:
        raise StackError(f"tenantry {arguments[0]}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


@dataclass
class Stack:
    """An installed Tenantry and the secrets of its demo tenants, which live in this process only."""

    kube: Kube
    url: str
    own_cluster: bool
    registry: str
    namespace: str = NAMESPACE
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    digests: dict[str, str] = field(default_factory=dict)
    dns_service: tuple[str, str] = ("kube-dns", "kube-system")

    def client(self, tenant: str) -> Client:
        """The tenant's client with its key."""
        return Client(self.url, self.keys[tenant])

    def keys_hint(self, tenant: str) -> str:
        """The key of a demo tenant, for a person at this terminal."""
        return self.keys[tenant]

    def node(self, name: str) -> str:
        """A node of ours, checked to be there."""
        if self.kube.get("node", name) is None:
            raise StackError(
                f"node `{name}` must exist for this; it does on the cluster of `make cluster-up`"
            )
        return name

    def service_address(self, name: str, namespace: str) -> str:
        """ClusterIP of a Service."""
        found = self.kube.get("service", name, namespace)
        if found is None:
            raise StackError(f"service {namespace}/{name} is not there")
        return str(found["spec"]["clusterIP"])

    def pod_address(self, name: str, namespace: str | None = None) -> str:
        """Address of a running pod."""
        found = self.kube.get("pod", name, namespace or self.namespace)
        if found is None or not found["status"].get("podIP"):
            raise StackError(f"pod {name} has no address")
        return str(found["status"]["podIP"])

    def yaml(self, *objects: JsonObject) -> str:
        return str(yaml.safe_dump_all(objects, sort_keys=False))

    def apply_text(self, text: str) -> None:
        """Apply YAML text as `kubectl apply -f` would."""
        self.kube.apply(*[document for document in yaml.safe_load_all(text) if document])

    def adapter_text(self, name: str, stable: str = "1.0.0") -> str:
        """The Adapter's YAML with every version listed and `stable` served."""
        versions = [
            {
                "version": version,
                "digest": self.digests[folder],
                "source": f"oci://{self.registry}/maple/{name}:{version}",
                "rank": adapter_rank(folder),
            }
            for version, folder in ADAPTERS[name].items()
        ]
        return str(
            yaml.safe_dump(
                {
                    "apiVersion": "tenantry.dev/v1alpha1",
                    "kind": "Adapter",
                    "metadata": {"name": name, "namespace": "maple-ml"},
                    "spec": {
                        "tenantRef": "maple",
                        "versions": versions,
                        "channels": [{"name": "stable", "version": stable}],
                        "rollout": {"drainSeconds": 10},
                    },
                },
                sort_keys=False,
            )
        )

    def tenant(self, name: str) -> JsonObject:
        """The example's Tenant with a freshly minted key's hash; the key is kept here."""
        found: JsonObject = yaml.safe_load((EXAMPLES / "tenants" / f"{FILES[name]}.yaml").read_text())
        key, sha256 = mint(name)
        self.keys[name] = key
        found["spec"].setdefault("auth", {})["apiKeys"] = [{"name": "demo", "sha256": sha256}]
        return found


def mint(tenant: str) -> tuple[str, str]:
    """A key for the tenant as the command line makes it, and its hash."""
    text = tenantry("keys", "mint", tenant, "--name", "demo")
    key = re.search(rf"tk_{tenant}_[A-Za-z0-9_-]+", text)
    digest = re.search(r"[0-9a-f]{64}", text)
    if key is None or digest is None:
        raise StackError("`tenantry keys mint` printed no key and hash")
    return key.group(), digest.group()


def adapter_rank(folder: str) -> int:
    """Rank that the adapter's own configuration states."""
    return int(yaml.safe_load((EXAMPLES / "adapters" / folder / "adapter_config.json").read_text())["r"])


def build_images() -> dict[str, str]:
    """Builds the product's images where something changed; names by component."""
    tags = {name: f"{IMAGE_HOST}/{name}:{TAG}" for name in ("operator", "gateway", "engine")}
    for name, folder in (("operator", "operator"), ("gateway", "gateway")):
        images.build(
            Image(
                tags[name],
                REPOSITORY / folder / "Dockerfile",
                REPOSITORY,
                {"BASE_IMAGE": f"{IMAGE_HOST}/base:bookworm"},
            )
        )
    images.build(engine_image(tags["engine"]))
    return tags


def engine_image(tag: str) -> Image:
    """The engine on the CPU with the example model inside."""
    raise NotImplementedError(tag)


def load_images(tags: dict[str, str]) -> None:
    """Imports each image into the nodes that run it."""
    workers = {worker.node.name: worker for worker in lifecycle.workers()}
    images.ensure(PROBE_IMAGE)
    images.load([tags["engine"]], list(workers.values()))
    images.load([tags["operator"], tags["gateway"], PROBE_IMAGE], [workers[SHARED_NODE], workers[LORA_NODE]])
    images.load([PROBE_IMAGE], [workers[DEDICATED_NODE]])
