"""Grafana dashboards of the chart, from the queries below: `python tools/dashboards.py [--check]`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "helm/tenantry/files/dashboards"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 7


@dataclass(frozen=True)
class Panel:
    """`queries` are (PromQL, legend). `unit` is Grafana's: short, s, percentunit, reqps, ops."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def one(title: str, unit: str, query: str, legend: str = "") -> Panel:
    return Panel(title, unit, ((query, legend),))


def quantiles(title: str, series: str, by: str = "") -> Panel:
    """Median and 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    legend = " ".join(f"{{{{{name.strip()}}}}}" for name in by.split(",") if name)
    return Panel(
        title,
        "s",
        tuple(
            (
                f"histogram_quantile({q}, sum by ({labels}) (rate({series}_bucket[$__rate_interval])))",
                f"p{int(q * 100)} {legend}".strip(),
            )
            for q in (0.5, 0.99)
        ),
    )


DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "operator": (
        "Tenantry / Operator",
        (
            one("Leaders", "short", "sum(leader_election_master_status)"),
            one("Tenants by tier in force", "short", "sum by (tier) (tenantry_tenants)", "{{tier}}"),
            one(
                "Objects that wait for an edit or a repair",
                "short",
                'sum by (kind) (tenantry_objects{condition="Stalled",status="True"})',
                "{{kind}}",
            ),
            one(
                "Objects that are not ready",
                "short",
                'sum by (kind) (tenantry_objects{condition="Ready",status!="True"})',
                "{{kind}}",
            ),
            one(
                "Guarantees by what was seen",
                "short",
                "sum by (guarantee, state) (tenantry_isolation_guarantees)",
                "{{guarantee}} {{state}}",
            ),
            Panel(
                "Moves between tiers",
                "short",
                (
                    (
                        "sum by (from_tier, to_tier) (increase(tenantry_tenant_moves_total[$__rate_interval]))",
                        "{{from_tier}} to {{to_tier}}",
                    ),
                    ("sum(tenantry_tenants_leaving)", "places not empty yet"),
                ),
            ),
            one(
                "Reconciles a second",
                "ops",
                "sum by (controller, result) (rate(controller_runtime_reconcile_total[$__rate_interval]))",
                "{{controller}} {{result}}",
            ),
            quantiles("Length of a reconcile", "controller_runtime_reconcile_time_seconds", "controller"),
            one(
                "Reconciles that fail",
                "ops",
                "sum by (controller) (rate(controller_runtime_reconcile_errors_total[$__rate_interval]))",
                "{{controller}}",
            ),
            one("Dirty keys", "short", "sum by (name, priority) (workqueue_depth)", "{{name}} {{priority}}"),
            quantiles("Waiting time of a key", "workqueue_queue_duration_seconds", "name"),
            one(
                "Oldest key at work",
                "s",
                "max by (name) (workqueue_longest_running_processor_seconds)",
                "{{name}}",
            ),
            one(
                "Requests to the API server",
                "reqps",
                "sum by (method, code) (rate(rest_client_requests_total[$__rate_interval]))",
                "{{method}} {{code}}",
            ),
            quantiles("Answers of the API server", "rest_client_request_duration_seconds", "verb"),
            one(
                "Changes that only a resync found",
                "short",
                "sum by (kind, what) (increase(tenantry_resync_drift_total[$__rate_interval]))",
                "{{kind}} {{what}}",
            ),
            one("Objects in the store", "short", "sum by (kind) (tenantry_store_objects)", "{{kind}}"),
            one("Memory", "bytes", "process_resident_memory_bytes", "{{pod}}"),
            one("CPU", "short", "rate(process_cpu_seconds_total[$__rate_interval])", "{{pod}}"),
        ),
    ),
    "traffic": (
        "Tenantry / Traffic",
        (
            Panel(
                "Requests that failed (budget: 0.1 %)",
                "percentunit",
                (
                    ("tenantry:request_errors:ratio_rate5m", "5 minutes"),
                    ("tenantry:request_errors:ratio_rate1h", "1 hour"),
                    ("tenantry:request_errors:ratio_rate3d", "3 days"),
                ),
            ),
            Panel(
                "First tokens after more than 2.5 s (budget: 1 %)",
                "percentunit",
                (
                    ("tenantry:slow_first_tokens:ratio_rate5m", "5 minutes"),
                    ("tenantry:slow_first_tokens:ratio_rate1h", "1 hour"),
                    ("tenantry:slow_first_tokens:ratio_rate3d", "3 days"),
                ),
            ),
            one(
                "Requests by how they ended",
                "reqps",
                "sum by (outcome) (rate(tenantry_gateway_requests_total[$__rate_interval]))",
                "{{outcome}}",
            ),
            one(
                "Requests by tenant (20 largest)",
                "reqps",
                "topk(20, sum by (tenant) (rate(tenantry_gateway_requests_total[$__rate_interval])))",
                "{{tenant}}",
            ),
            one(
                "Tokens by tenant (20 largest)",
                "short",
                "topk(20, sum by (tenant) (rate(tenantry_gateway_tokens_total[$__rate_interval])))",
                "{{tenant}}",
            ),
            one(
                "Requests refused, by reason",
                "reqps",
                "sum by (code) (rate(tenantry_gateway_shed_total[$__rate_interval]))",
                "{{code}}",
            ),
            quantiles("Time to first token", "gen_ai_server_time_to_first_token_seconds", "pool, lane"),
            quantiles("Length of a request", "gen_ai_server_request_duration_seconds", "pool, lane"),
            quantiles("Waiting for a place", "tenantry_gateway_queue_time_seconds", "pool, lane"),
            Panel(
                "Requests now",
                "short",
                (
                    ("sum(tenantry_gateway_in_flight)", "in flight"),
                    ("sum(tenantry_gateway_queued)", "waiting"),
                ),
            ),
            one(
                "Replicas as gateways see them",
                "short",
                "sum by (state) (tenantry_gateway_replicas)",
                "{{state}}",
            ),
            one("Stalest request", "s", "max(tenantry_gateway_oldest_lease_seconds)"),
            Panel(
                "What should be zero",
                "short",
                (
                    ("sum(tenantry_gateway_rejected_objects)", "objects that cannot be read"),
                    ("sum(tenantry_gateway_ledger_failures)", "writes that the ledger refused"),
                    (
                        "sum(increase(tenantry_gateway_expired_leases_total[$__rate_interval]))",
                        "requests lost track of",
                    ),
                ),
            ),
        ),
    ),
    "engines": (
        "Tenantry / Engines",
        (
            Panel(
                "Replicas",
                "short",
                (("sum by (pool, lane, state) (tenantry_pool_replicas)", "{{pool}} {{lane}} {{state}}"),),
            ),
            Panel(
                "Sequences",
                "short",
                (
                    ("sum by (pool) (vllm:num_requests_running)", "{{pool}} running"),
                    ("sum by (pool) (vllm:num_requests_waiting)", "{{pool}} waiting"),
                ),
            ),
            one("Pages in use", "percentunit", "avg by (pool) (vllm:kv_cache_usage_perc)", "{{pool}}"),
            one(
                "Pages by use", "short", "sum by (pool, state) (tenantry_engine_pages)", "{{pool}} {{state}}"
            ),
            one(
                "Adapters",
                "short",
                "sum by (pool, state) (tenantry_engine_adapters)",
                "{{pool}} {{state}}",
            ),
            Panel(
                "Pushed out",
                "ops",
                (
                    (
                        "sum by (pool) (rate(tenantry_engine_adapter_evictions_total[$__rate_interval]))",
                        "{{pool}} adapters",
                    ),
                    (
                        "sum by (pool) (rate(vllm:num_preemptions_total[$__rate_interval]))",
                        "{{pool}} sequences",
                    ),
                ),
            ),
            Panel(
                "Tokens a second",
                "short",
                (
                    ("sum by (pool) (rate(vllm:prompt_tokens_total[$__rate_interval]))", "{{pool}} input"),
                    (
                        "sum by (pool) (rate(vllm:generation_tokens_total[$__rate_interval]))",
                        "{{pool}} output",
                    ),
                ),
            ),
            one(
                "Input found in the prefix cache",
                "percentunit",
                "sum by (pool) (rate(vllm:prefix_cache_hits_total[$__rate_interval]))"
                " / sum by (pool) (rate(vllm:prefix_cache_queries_total[$__rate_interval]))",
                "{{pool}}",
            ),
            quantiles("Time to first token, at the engine", "vllm:time_to_first_token_seconds", "pool"),
            quantiles("Time per output token", "vllm:request_time_per_output_token_seconds", "pool"),
            quantiles("Length of a step", "tenantry_engine_step_seconds", "pool"),
            one(
                "Ended requests",
                "reqps",
                "sum by (pool, finished_reason) (rate(vllm:request_success_total[$__rate_interval]))",
                "{{pool}} {{finished_reason}}",
            ),
            Panel(
                "Fetcher",
                "ops",
                (
                    (
                        "sum by (result) (rate(tenantry_fetcher_pulls_total[$__rate_interval]))",
                        "pulls {{result}}",
                    ),
                    (
                        "sum by (result) (rate(tenantry_fetcher_pushes_total[$__rate_interval]))",
                        "pushes {{result}}",
                    ),
                ),
            ),
            one("Adapters on the fetcher's disk", "bytes", "sum(tenantry_fetcher_cache_bytes)"),
        ),
    ),
}


def render(name: str) -> dict[str, Any]:
    """Grafana's JSON of a dashboard."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"tenantry-{name}",
        "title": title,
        "tags": ["tenantry"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    per_row = 24 // WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {
            "x": WIDTH * (number % per_row),
            "y": HEIGHT * (number // per_row),
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend or "total",
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name in DASHBOARDS:
        path = FOLDER / f"{name}.json"
        text = json.dumps(render(name), indent=1) + "\n"
        if check and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif not check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        sys.stderr.write(f"stale, run `make generate`: {', '.join(stale)}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
