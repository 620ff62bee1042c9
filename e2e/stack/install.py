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
from functools import partial
from pathlib import Path

import yaml
from cluster import binaries, images, lifecycle
from cluster.images import Image
from cluster.paths import (
    API_PORT,
    HOST_ADDRESS,
    IMAGE_HOST,
    POD_NETWORK,
    REPOSITORY,
    SERVICE_NETWORK,
    cache_dir,
)

from .kube import JsonObject, Kube, StackError, condition, eventually, is_ready
from .traffic import Client

NAMESPACE = "tenantry-system"
EXAMPLES = REPOSITORY / "examples"
MODEL = "smollm2-135m"
SHARED_NODE, LORA_NODE, DEDICATED_NODE = "tenantry-shared", "tenantry-lora", "tenantry-dedicated"
STRANGER, ACCESS_SECRET = "elm", "tenantry-access"
TAG = "e2e"
PERIOD_SECONDS = 60
"""From one look at a guarantee to the next."""
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


def tenantry(*arguments: str, kubeconfig: Path | None = None) -> str:
    """Standard output of the `tenantry` command line."""
    cluster = {} if kubeconfig is None else {"KUBECONFIG": str(kubeconfig)}
    result = subprocess.run(
        [sys.executable, "-m", "tenantry.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, **cluster},
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
    stranger: JsonObject = field(default_factory=dict)
    dns_service: tuple[str, str] = ("kube-dns", "kube-system")

    def tenantry(self, *arguments: str) -> str:
        """What the command line prints of this cluster."""
        return tenantry(*arguments, kubeconfig=self.kube.kubeconfig)

    def client(self, tenant: str) -> Client:
        """The tenant's client with its key."""
        return Client(self.url, self.keys[tenant])

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
        """The example Adapter's YAML with `stable` served: the file with one line changed."""
        text = (EXAMPLES / "adapters" / f"{name}.yaml").read_text().replace(REGISTRY_INSIDE, self.registry)
        head, channels, tail = text.partition("  channels:\n")
        return head + channels + re.sub(r"version: \S+", f"version: {stable}", tail, count=1)

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
    wheels = Path(os.environ.get("TENANTRY_WHEELS") or REPOSITORY.parent / "shared" / "wheels")
    mounts = [f"{model_dir()}:/mnt/models/{MODEL}"]
    if list(wheels.glob("torch-*.whl")):
        mounts.append(f"{wheels}:/mnt/wheels")
    else:
        print(
            "   no CPU wheel of torch at hand (TENANTRY_WHEELS): the default build is installed, about 5 GB",
            flush=True,
        )
    return Image(
        tag,
        REPOSITORY / "engine-image" / "Dockerfile",
        REPOSITORY,
        {"BASE_IMAGE": f"{IMAGE_HOST}/base:bookworm"},
        mounts,
    )


def load_images(tags: dict[str, str]) -> None:
    """Imports each image into the nodes that run it."""
    workers = {worker.node.name: worker for worker in lifecycle.workers()}
    images.ensure(PROBE_IMAGE)
    images.load([tags["engine"], PROBE_IMAGE], list(workers.values()))
    images.load([tags["operator"], tags["gateway"]], [workers[SHARED_NODE]])
    images.load([tags["operator"]], [workers[DEDICATED_NODE]])  # probes and gates run there


def given(name: str, example: str) -> str:
    """A setting that a cluster of one's own needs."""
    value = os.environ.get(name, "")
    if not value:
        raise StackError(
            f"`{name}` must be set with KUBECONFIG, e.g. {name}={example} (see e2e/stack/install.py)"
        )
    return value


def connect() -> Stack:
    """The running cluster, whether or not Tenantry is on it."""
    kube = Kube(binaries.ensure(["kubectl"])["kubectl"], lifecycle.kubeconfig())
    if lifecycle.foreign_kubeconfig() is not None:
        url, registry = (
            given("TENANTRY_URL", "http://127.0.0.1:8080"),
            given("TENANTRY_REGISTRY", "10.0.0.5:5000"),
        )
        return Stack(kube, url, False, registry)
    return Stack(kube, "", True, REGISTRY_INSIDE)


def values(stack: Stack, tags: dict[str, str]) -> JsonObject:
    """Helm values: the demo's file, and what only this cluster knows."""
    found: JsonObject = yaml.safe_load((EXAMPLES / "demo" / "values.yaml").read_text())
    found["images"] = {**tags, "pullPolicy": "IfNotPresent"}
    found["fetcher"] = {
        **found.get("fetcher", {}),
        "allowOrigins": [stack.registry],
        "plainHttp": [stack.registry],
        "allowPrivate": True,
    }
    found["evidence"] = {
        "periodSeconds": PERIOD_SECONDS,
        "maxAgeSeconds": 3 * PERIOD_SECONDS,
        "accessKeySecret": ACCESS_SECRET,
    }
    if stack.own_cluster:
        found["evidence"]["outside"] = f"{HOST_ADDRESS}:{API_PORT}"
        found["protectedCidrs"] = [SERVICE_NETWORK, POD_NETWORK]
        for part in ("operator", "fetcher", "gateway"):
            found[part] = {**found.get(part, {}), "nodeSelector": {"kubernetes.io/hostname": SHARED_NODE}}
    return found


def helm_install(stack: Stack, tags: dict[str, str]) -> None:
    """CRDs first, then Tenantry; waits until every process is ready."""
    helm = binaries.ensure(["helm"])["helm"]
    charts = REPOSITORY / "helm"

    def helm_upgrade(release: str, *more: str, text: str | None = None) -> None:
        command = [
            str(helm),
            "upgrade",
            "--install",
            release,
            str(charts / release),
            "-n",
            NAMESPACE,
            "--create-namespace",
        ]
        result = subprocess.run(
            [*command, *more, f"--kubeconfig={stack.kube.kubeconfig}"],
            input=text,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        if result.returncode:
            pods = stack.kube.run("get", "pods", "-n", NAMESPACE, check=False)
            raise StackError(f"helm upgrade {release}: {result.stderr.strip()}\n{pods}")

    helm_upgrade("tenantry-crds")
    set_aside_a_key(stack)
    text = yaml.safe_dump(values(stack, tags))
    helm_upgrade("tenantry", "-f", "-", "--wait", "--timeout=300s", text=text)


def set_aside_a_key(stack: Stack) -> None:
    """A tenant made to be a stranger to all others, whose key the operator asks for others' models with."""
    key, sha256 = mint(STRANGER)
    stack.stranger = {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": STRANGER},
        "spec": {
            "tier": "Smb",
            "models": [{"name": "own", "baseModel": MODEL}],
            "auth": {"apiKeys": [{"name": "demo", "sha256": sha256}]},
        },
    }
    stack.kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": ACCESS_SECRET, "namespace": NAMESPACE},
            "stringData": {"key": key},
        }
    )


def push_adapters(stack: Stack) -> None:
    """Every version of every example adapter into the registry, by the command line that users have."""
    outside = (
        f"{stack.service_address('registry', 'tenantry-registry')}:5000"
        if stack.own_cluster
        else stack.registry
    )
    for name, versions in ADAPTERS.items():
        for version, folder in versions.items():
            source = EXAMPLES / "adapters" / folder
            tenantry(
                "adapters", "push", str(source), f"oci://{outside}/maple/{name}:{version}", "--plain-http"
            )


def apply_examples(stack: Stack) -> None:
    """Pools, tenants with fresh keys, adapters; on foreign clusters without our nodes' labels."""
    for pool in ("shared", "lora"):
        found: JsonObject = yaml.safe_load((EXAMPLES / "pools" / f"{pool}.yaml").read_text())
        if not stack.own_cluster:
            found["spec"].pop("scheduling", None)
        stack.kube.apply(found)
    stack.kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "maple-ml"}})
    stack.kube.apply(*[stack.tenant(name) for name in TENANTS], stack.stranger)
    stack.apply_text(stack.adapter_text("tone"))
    stack.apply_text(stack.adapter_text("triage"))


def _answers(client: Client, model: str) -> bool:
    return client.ask(model, "hi", max_tokens=1).status == 200


def wait_ready(stack: Stack) -> None:
    """Every pool, tenant and adapter that can be served is."""
    for pool in ("shared", "lora"):
        stack.kube.wait(f"pool {pool} is ready", "adapterpool", pool, until=is_ready, seconds=300)
    for name in TENANTS[:-1]:
        stack.kube.wait(f"tenant {name} is ready", "tenant", name, until=is_ready, seconds=300)
    for name in ADAPTERS:
        stack.kube.wait(f"adapter {name} is ready", "adapter", name, "maple-ml", until=is_ready, seconds=180)

    def regulated() -> bool:
        return condition(stack.kube.get("tenant", "yew"), "Stalled").get("status") == "True"

    eventually("the Regulated tenant is Stalled", regulated, seconds=60)
    for tenant, model in (("birch", "chat"), ("cedar", "chat"), ("maple", "tone"), ("oak", "chat")):
        eventually(f"the gateway serves {tenant}", partial(_answers, stack.client(tenant), model))


def up() -> Stack:
    """A cluster with Tenantry and its example tenants, ready to answer."""
    lifecycle.up()
    stack = connect()
    if stack.own_cluster:
        with step("images of operator, gateway and engine"):
            tags = build_images()
        with step("images into the nodes"):
            load_images(tags)
        for node, role in ((SHARED_NODE, "shared"), (LORA_NODE, "lora")):
            stack.kube.run("label", "node", node, f"tenantry.dev/demo-node={role}", "--overwrite")
    else:
        prefix = given("TENANTRY_IMAGES", "ghcr.io/acme")
        tags = {name: f"{prefix}/{name}:{TAG}" for name in ("operator", "gateway", "engine")}
    with step("helm install tenantry-crds, tenantry"):
        helm_install(stack, tags)
    if stack.own_cluster:
        stack.url = f"http://{stack.service_address('tenantry-gateway', NAMESPACE)}:8080"
    with step("adapters into the registry"):
        push_adapters(stack)
    with step("pools, tenants, adapters"):
        apply_examples(stack)
    with step("everything that can be served is ready"):
        wait_ready(stack)
    return stack
