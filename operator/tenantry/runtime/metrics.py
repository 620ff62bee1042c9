"""Metrics under controller-runtime's names, so that dashboards and alerts made for it work, and our own beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .workset import Priority, Workset

_QUEUE = ["name", "controller"]
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

RECONCILES = Counter("controller_runtime_reconcile_total", "Reconciles, by result.", ["controller", "result"])
RECONCILE_ERRORS = Counter(
    "controller_runtime_reconcile_errors_total", "Reconciles that failed.", ["controller"]
)
RECONCILE_TIMEOUTS = Counter(
    "controller_runtime_reconcile_timeouts_total", "Reconciles that hit their deadline.", ["controller"]
)
RECONCILE_SECONDS = Histogram(
    "controller_runtime_reconcile_time_seconds", "Length of a reconcile.", ["controller"], buckets=_SECONDS
)
RECONCILE_PANICS = Counter(
    "controller_runtime_reconcile_panics_total",
    "Reconciles that crashed; they are tried again.",
    ["controller"],
)
MAX_WORKERS = Gauge("controller_runtime_max_concurrent_reconciles", "Workers.", ["controller"])
ACTIVE_WORKERS = Gauge("controller_runtime_active_workers", "Workers that are busy.", ["controller"])

QUEUE_ADDS = Counter("workqueue_adds_total", "Keys that turned dirty.", _QUEUE)
QUEUE_RETRIES = Counter("workqueue_retries_total", "Retries with back-off.", _QUEUE)
QUEUE_DURATION = Histogram(
    "workqueue_queue_duration_seconds", "Waiting time of a key.", _QUEUE, buckets=_SECONDS
)
WORK_DURATION = Histogram(
    "workqueue_work_duration_seconds", "Processing time of a key.", _QUEUE, buckets=_SECONDS
)

MASTER = Gauge("leader_election_master_status", "1 while this process leads.", ["name"])

STORE_OBJECTS = Gauge("tenantry_store_objects", "Objects in the operator's store.", ["kind"])
DRIFT = Counter(
    "tenantry_resync_drift_total",
    "Differences that a resync found, which no event had told of.",
    ["kind", "what"],
)
SYNCED = Gauge("tenantry_synced", "1 once every watched kind is complete in the store.")


def begin(controller: str) -> None:
    """Show the series of a controller from its start on: a rate over a series that springs up at 1 sees no increase."""
    for result in ("success", "error", "requeue", "requeue_after"):
        RECONCILES.labels(controller, result)
    for counter in (RECONCILE_ERRORS, RECONCILE_TIMEOUTS, RECONCILE_PANICS):
        counter.labels(controller)


class _Queues(Collector):
    """Depths and ages are read when asked for: they would be stale otherwise."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Workset, Callable[[], float]]] = {}

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        depth = GaugeMetricFamily("workqueue_depth", "Dirty keys.", labels=[*_QUEUE, "priority"])
        unfinished = GaugeMetricFamily(
            "workqueue_unfinished_work_seconds", "Sum of the ages of keys being processed.", labels=_QUEUE
        )
        longest = GaugeMetricFamily(
            "workqueue_longest_running_processor_seconds", "Age of the oldest of them.", labels=_QUEUE
        )
        for name, (workset, clock) in list(self.known.items()):
            for priority in Priority:
                depth.add_metric([name, name, priority.name.lower()], workset.depth(priority))
            ages = [clock() - since for since in workset.processing().values()]
            unfinished.add_metric([name, name], sum(ages))
            longest.add_metric([name, name], max(ages, default=0.0))
        yield from (depth, unfinished, longest)


_queues = _Queues()
REGISTRY.register(_queues)


def watch_queue(name: str, workset: Workset, clock: Callable[[], float]) -> None:
    """Show the queue's depth and ages; a queue of the same name replaces the earlier one."""
    _queues.known[name] = (workset, clock)
