"""`tenantry top`: who uses how much now, and how full the replicas are, from the processes' own metrics.

Metrics are read through forwarded ports of the pods, so it works without Prometheus and through network policies; it
needs the right to `pods/portforward`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tenantry.api import names

from .cluster import Obj
from .errors import CliError
from .output import View, document
from .table import table

GATEWAYS = "app.kubernetes.io/name=tenantry,app.kubernetes.io/component=gateway"
ENGINES = f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY},{names.COMPONENT_LABEL}=engine"


class Source(Protocol):
    """What `top` asks of a cluster."""

    def pods(self, selector: str) -> list[Obj]: ...
    def ask(self, namespace: str, pod: str, port: int, path: str) -> str: ...


@dataclass(frozen=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """Raises CliError for what is no metrics page."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield Sample(sample.name, dict(sample.labels), float(sample.value))
    except (ValueError, IndexError) as error:
        raise CliError(f"a pod's metrics cannot be read: {error}") from error


def tenants(source: Source, interval: float, view: View, sleep: Callable[[float], None] = time.sleep) -> str:
    """Rates of each tenant over `interval` seconds, the busiest first. Raises CliError."""
    before = _use(source)
    sleep(interval)
    after = _use(source)
    found: list[Obj] = []
    for tenant in sorted({tenant for tenant, _ in after}):
        rate = {
            what: max(0.0, after[tenant, what] - before[tenant, what]) / interval
            for what in ("requests", "failed", "shed", "input", "output")
        }
        found.append(
            {"tenant": tenant, **{f"{what}PerSecond": round(value, 3) for what, value in rate.items()}}
        )
    found.sort(key=lambda row: (-row["outputPerSecond"], -row["requestsPerSecond"], row["tenant"]))
    if view.structured:
        return document(found, view)
    columns = ["requests", "failed", "shed", "input", "output"] if view is View.WIDE else [
        "requests", "shed", "output"
    ]  # fmt: skip
    rows = [[row["tenant"], *(f"{row[f'{column}PerSecond']:.1f}" for column in columns)] for row in found]
    return table(["tenant", *(f"{column}/s" for column in columns)], rows) + "\n"


def replicas(source: Source, view: View) -> str:
    """Every engine replica: what runs and waits there, how full it is. Raises CliError."""
    found = [_replica(source, pod) for pod in source.pods(ENGINES)]
    if not found:
        raise CliError("no engine runs: is there an AdapterPool, and has it replicas?")
    found.sort(key=lambda row: (row["pool"], row["replica"]))
    if view.structured:
        return document(found, view)
    header = ["pool", "replica", "running", "waiting", "pages"]
    rows = [
        [row["pool"], row["replica"], f"{row['running']}", f"{row['waiting']}", f"{row['pagesUsed']:.0%}"]
        for row in found
    ]
    if view is View.WIDE:
        header += ["namespace", "registered", "resident", "active"]
        more = ("namespace", "adaptersRegistered", "adaptersResident", "adaptersActive")
        rows = [[*row, *(str(entry[key]) for key in more)] for row, entry in zip(rows, found, strict=True)]
    return table(header, rows) + "\n"


def _use(source: Source) -> Counter[tuple[str, str]]:
    """Counters of all gateways by (tenant, what)."""
    pods = source.pods(GATEWAYS)
    if not pods:
        raise CliError("no gateway runs: is Tenantry installed in this cluster?")
    found: Counter[tuple[str, str]] = Counter()
    for pod in pods:
        page = source.ask(pod["namespace"], pod["name"], names.METRICS_PORT, "/metrics")
        for sample in samples(page):
            tenant = sample.labels.get("tenant")
            if not tenant:
                continue
            match sample.name:
                case "tenantry_gateway_requests_total":
                    found[tenant, "requests"] += int(sample.value)
                    if sample.labels.get("status", "").startswith("5"):
                        found[tenant, "failed"] += int(sample.value)
                case "tenantry_gateway_shed_total":
                    found[tenant, "shed"] += int(sample.value)
                case "tenantry_gateway_tokens_total" if sample.labels.get("type") in ("input", "output"):
                    found[tenant, sample.labels["type"]] += int(sample.value)
    return found


def _replica(source: Source, pod: Obj) -> Obj:
    values: dict[str, float] = {}
    page = source.ask(pod["namespace"], pod["name"], names.ENGINE_ADMIN_PORT, "/metrics")
    for sample in samples(page):
        key = sample.name
        if key == "tenantry_engine_adapters":
            key = f"{key}/{sample.labels.get('state')}"
        values[key] = sample.value
    return {
        "pool": pod["labels"].get(names.POOL_LABEL, ""),
        "namespace": pod["namespace"],
        "replica": pod["name"],
        "running": int(values.get("vllm:num_requests_running", 0)),
        "waiting": int(values.get("vllm:num_requests_waiting", 0)),
        "pagesUsed": round(values.get("vllm:kv_cache_usage_perc", 0.0), 4),
        "adaptersRegistered": int(values.get("tenantry_engine_adapters/registered", 0)),
        "adaptersResident": int(values.get("tenantry_engine_adapters/resident", 0)),
        "adaptersActive": int(values.get("tenantry_engine_adapters/active", 0)),
    }
