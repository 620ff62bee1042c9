"""What Tenantry promises, each as one action on a live system and what was seen. Demo and e2e tests share it."""

from __future__ import annotations

import re
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .install import DEDICATED_NODE, PROBE_IMAGE, Stack
from .kube import JsonObject, StackError, condition, eventually, is_ready
from .traffic import Answer, Steady, together


@dataclass(frozen=True)
class Flood:
    """What a flood by one tenant did to it and to its neighbour."""

    sent: int
    outcomes: Counter[str]
    shed: int
    retry_after: str | None
    neighbour_sent: int
    neighbour_ok: int
    neighbour_p50: float


def flood(stack: Stack, *, size: int = 40, flooder: str = "birch", neighbour: str = "cedar") -> Flood:
    """`flooder` sends `size` requests at once; `neighbour` sends one after another until the flood is over."""
    client, other = stack.client(flooder), stack.client(neighbour)
    over = threading.Event()
    answers: list[Answer] = []

    def keep_asking() -> None:
        while not over.is_set() or len(answers) < 4:
            answers.append(other.ask("chat", "What is a crankset?", max_tokens=8))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    flooded = together(*[lambda: client.ask("chat", "Tell me a long story.", max_tokens=48)] * size)
    over.set()
    thread.join()
    shed = [answer for answer in flooded if answer.status == 429]
    return Flood(
        sent=size,
        outcomes=Counter(f"{a.status} {a.code}".strip() for a in flooded),
        shed=len(shed),
        retry_after=next((answer.retry_after for answer in shed if answer.retry_after), None),
        neighbour_sent=len(answers),
        neighbour_ok=sum(answer.status == 200 for answer in answers),
        neighbour_p50=statistics.median(answer.seconds for answer in answers),
    )


def promote(stack: Stack, adapter: str, version: str, *, seconds: float = 120) -> float:
    """Change `channels[stable].version`, apply, wait until the adapter says it is served; returns the seconds."""
    start = time.monotonic()
    stack.apply_text(stack.adapter_text(adapter, stable=version))

    def active(found: JsonObject | None) -> bool:
        channels = ((found or {}).get("status") or {}).get("channels") or [{}]
        return is_ready(found) and channels[0].get("activeVersion") == version

    stack.kube.wait(
        f"{adapter} {version} is active", "adapter", adapter, "maple-ml", until=active, seconds=seconds
    )
    return time.monotonic() - start


def served_after(
    stack: Stack, tenant: str, model: str, version: str = "1.1.0", *, seconds: float = 30
) -> str:
    """The served name once an answer came from `version`."""
    client, served = stack.client(tenant), ""

    def switched() -> bool:
        nonlocal served
        served = client.ask(model, "hello", max_tokens=1).served
        return f"--{version}-" in served

    eventually(
        f"`{model}` is answered by {version}", switched, seconds=seconds, said=lambda: f"last: {served}"
    )
    return served


def only_versions(traffic: Steady, *versions: str) -> bool:
    """Whether every good answer named one of the versions."""
    return all(any(f"--{version}-" in name for version in versions) for name in traffic.served)


def probe_pod(name: str, namespace: str, **spec: object) -> JsonObject:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "probe",
                    "image": PROBE_IMAGE,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "600"],
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "16Mi"},
                        "limits": {"cpu": "100m", "memory": "64Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            **spec,
        },
    }


Finding = tuple[str, bool, str]


def foreign_pods(stack: Stack) -> list[Finding]:
    """Three ways onto a dedicated node from outside the tenant's namespace, each tried."""
    node = stack.node(DEDICATED_NODE)
    findings: list[Finding] = []
    tries: list[tuple[str, dict[str, object]]] = [
        (
            "a toleration of the tenant's taint is refused at admission",
            {"tolerations": [{"key": "tenantry.dev/tenant", "operator": "Exists"}]},
        ),
        ("a toleration of everything is refused at admission", {"tolerations": [{"operator": "Exists"}]}),
        ("naming the node is refused at admission", {"nodeName": node}),
    ]
    for what, spec in tries:
        name = f"foreign-{uuid.uuid4().hex[:6]}"
        try:
            result = stack.kube.call("create", "-f", "-", text=stack.yaml(probe_pod(name, "default", **spec)))
            findings.append(
                (what, result.returncode != 0 and "must" in result.stderr, result.stderr.strip()[:200])
            )
        finally:
            stack.kube.run("delete", "pod", name, "-n", "default", "--ignore-not-found", "--wait=false")

    name = f"foreign-{uuid.uuid4().hex[:6]}"
    stack.kube.apply(probe_pod(name, "default", nodeSelector={"kubernetes.io/hostname": node}))
    try:
        message = ""

        def judged() -> bool:
            nonlocal message
            conditions = ((stack.kube.get("pod", name, "default") or {}).get("status") or {}).get(
                "conditions"
            ) or []
            message = next((c.get("message", "") for c in conditions if c["type"] == "PodScheduled"), "")
            return bool(message)

        eventually("the scheduler has judged the foreign pod", judged, seconds=60)
        findings.append(
            ("selecting the node leaves the pod unscheduled, by the taint", "taint" in message, message[:160])
        )
    finally:
        stack.kube.run("delete", "pod", name, "-n", "default", "--wait=false")
    return findings


def network_probe(stack: Stack, tenant: str = "oak") -> list[Finding]:
    """Connections tried from a pod in the tenant's namespace, beside the same from an ordinary one (the control)."""
    namespace, node = f"tenant-{tenant}", stack.node(DEDICATED_NODE)
    targets = {
        "the API server": stack.service_address("kubernetes", "default") + " 443",
        "the cluster's DNS": f"{stack.service_address(*stack.dns_service)} 53",
        "the gateway": f"{stack.service_address('tenantry-gateway', stack.namespace)} 8080",
        "a shared engine's pod": f"{stack.pod_address('shared-fast-0')} 8000",
    }
    tolerate = [{"key": "tenantry.dev/tenant", "operator": "Equal", "value": tenant}]
    probes = {
        namespace: probe_pod(
            "probe", namespace, nodeSelector={"kubernetes.io/hostname": node}, tolerations=tolerate
        ),
        "default": probe_pod("probe", "default"),
    }
    try:
        for where, pod in probes.items():
            stack.kube.run("delete", "pod", "probe", "-n", where, "--ignore-not-found")
            stack.kube.apply(pod)
        for where in probes:
            stack.kube.run("wait", "-n", where, "pod/probe", "--for=condition=Ready", "--timeout=90s")

        def reached(where: str, address: str) -> bool:
            return (
                stack.kube.call(
                    "exec", "-n", where, "probe", "--", "nc", "-z", "-w", "3", *address.split()
                ).returncode
                == 0
            )

        findings: list[Finding] = []
        for what, address in targets.items():
            inside, outside = reached(namespace, address), reached("default", address)
            control = "an ordinary pod reaches it" if outside else "an ordinary pod does not reach it either"
            findings.append((f"{what} cannot be reached", not inside, f"{address}; {control}"))
        engines = {
            "a shared engine": targets["a shared engine's pod"],
            "the tenant's engine": f"{stack.pod_address(f'{namespace}-fast-0', namespace)} 8000",
        }
        findings += [
            (f"{what} cannot be reached by an ordinary pod", not reached("default", address), address)
            for what, address in engines.items()
        ]
        findings.append(
            (
                "the control: an ordinary pod reaches the API server",
                reached("default", targets["the API server"]),
                "",
            )
        )
        return findings
    finally:
        for where in probes:
            stack.kube.run("delete", "pod", "probe", "-n", where, "--ignore-not-found", "--wait=false")


@dataclass(frozen=True)
class Death:
    """What traffic saw of a killed process; seconds until it was there again."""

    outcomes: Counter[str]
    longest_gap: float
    recovered: float
    after: int

    def __str__(self) -> str:
        return f"{dict(self.outcomes)}, longest gap {self.longest_gap:.1f} s, whole again after {self.recovered:.1f} s"


def answered(traffic: Steady, count: int, *, seconds: float = 180) -> None:
    """Wait until `count` more answers came."""
    goal = len(traffic.answers) + count
    eventually(f"{count} more answers", lambda: len(traffic.answers) >= goal, seconds=seconds, every=0.1)


@contextmanager
def operator_down(stack: Stack) -> Iterator[None]:
    """No operator while the block runs."""
    where = ("-n", stack.namespace)
    replicas = (stack.kube.get("deployment", "tenantry-operator", stack.namespace) or {})["spec"]["replicas"]
    stack.kube.run("scale", "deployment/tenantry-operator", *where, "--replicas=0")
    try:
        label = "app.kubernetes.io/component=operator"
        eventually(
            "the operator is gone", lambda: not stack.kube.find("pods", *where, "-l", label), seconds=90
        )
        yield
    finally:
        stack.kube.run("scale", "deployment/tenantry-operator", *where, f"--replicas={replicas}")
        stack.kube.run(
            "rollout", "status", "deployment/tenantry-operator", *where, "--timeout=120s", seconds=150
        )


def _kill(stack: Stack, pod: str) -> None:
    stack.kube.run("delete", "pod", pod, "-n", stack.namespace, "--grace-period=0", "--force", "--wait=false")


def _serves(pod: JsonObject) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def kill_engine(stack: Stack, pod: str) -> Death:
    """Kill one replica of the multi-LoRA pool; recovered when it serves its adapters again."""
    maple = stack.client("maple")
    before = (stack.kube.get("pod", pod, stack.namespace) or {})["metadata"]["uid"]

    def back() -> bool:
        found = stack.kube.get("pod", pod, stack.namespace)
        return (
            found is not None
            and _serves(found)
            and found["metadata"]["uid"] != before
            and is_ready(stack.kube.get("tenant", "maple"))
        )

    with Steady(lambda: maple.ask("tone", "hi", max_tokens=2)) as traffic:
        answered(traffic, 4)
        _kill(stack, pod)
        recovered = eventually(f"{pod} is back", back, seconds=240)
        answered(traffic, 4)
    return Death(
        traffic.outcomes, traffic.longest_gap(), recovered, maple.ask("tone", "hi", max_tokens=2).status
    )


def kill_gateway(stack: Stack) -> Death:
    """Kill every gateway pod; recovered when as many new ones are ready. The killed ones may answer a little longer."""
    cedar = stack.client("cedar")
    where = ("-n", stack.namespace, "-l", "app.kubernetes.io/component=gateway")
    before = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in stack.kube.find("pods", *where)}

    def back() -> bool:
        pods = stack.kube.find("pods", *where)
        fresh = before.keys().isdisjoint(pod["metadata"]["uid"] for pod in pods)
        return fresh and len(pods) >= len(before) and all(map(_serves, pods))

    with Steady(lambda: cedar.ask("chat", "hi", max_tokens=2), pause=0.5) as traffic:
        answered(traffic, 4)
        for name in before.values():
            _kill(stack, name)
        recovered = eventually("the gateway is back", back, seconds=120)
        answered(traffic, 2)
        eventually("it answers", lambda: traffic.answers[-1][1].status == 200, seconds=30, every=0.1)
    return Death(
        traffic.outcomes, traffic.longest_gap(), recovered, cedar.ask("chat", "hi", max_tokens=2).status
    )


def claims(stack: Stack, node: str) -> list[str]:
    """What still says that a tenant holds the node, or keeps others from claiming it; empty when it was given back."""
    found = stack.kube.get("node", stack.node(node)) or {}
    metadata, taints = found["metadata"], found["spec"].get("taints") or []
    told = {**metadata["labels"], **(metadata.get("annotations") or {})}
    marks = ("tenantry.node-restriction.kubernetes.io/tenant", "tenantry.dev/tenant-uid")
    left = [f"{mark}={told[mark]}" for mark in marks if mark in told]
    left += [f"taint {taint['key']}" for taint in taints if taint["key"] == "tenantry.dev/tenant"]
    return left if told.get("tenantry.dev/claimable") == "true" else [*left, "it is not claimable"]


def registered(stack: Stack, pool: str) -> dict[str, int]:
    """How many adapters each replica of the pool knows, as the engines' own metrics say; by pod."""
    read = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8001/metrics').read().decode())"
    found: dict[str, int] = {}
    for pod in stack.kube.find("pods", "-n", stack.namespace, "-l", f"tenantry.dev/pool={pool}"):
        name = pod["metadata"]["name"]
        text = stack.kube.run(
            "exec", "-n", stack.namespace, name, "--", "/opt/tenantry/bin/python", "-c", read
        )
        sample = re.search(
            r'^tenantry_engine_adapters\{[^}]*state="registered"[^}]*\} ([0-9.]+)$', text, re.MULTILINE
        )
        if sample is None:
            raise StackError(f"the metrics of {name} must count registered adapters")
        found[name] = int(float(sample.group(1)))
    return found
