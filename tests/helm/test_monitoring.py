"""What Prometheus and Grafana get: names that some process exposes, alerts that fire as they should and have a page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import binaries

from .conftest import CHART, NAMESPACE, REPOSITORY, Render

sys.path.insert(0, str(REPOSITORY / "tools"))

from exposed import exposed

RULES = CHART / "files/rules.yaml"
DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
# What Prometheus adds to each series, and our PodMonitor to those of engines.
TARGET_LABELS = {"pod", "namespace", "job", "instance", "container", "pool", "lane", "le"}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_KEYWORDS = {"and", "or", "unless", "bool", "offset"}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every rule and panel."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]


def names_in(expression: str) -> tuple[set[str], set[str]]:
    """(metrics, labels) of a PromQL expression."""
    text = re.sub(r'"[^"]*"', "''", expression)
    labels = {
        label.strip() for group in _GROUPING.findall(text) for label in group.split(",") if label.strip()
    }
    text = _GROUPING.sub(" ", text)
    metrics = set()
    for name, matchers in _SELECTOR.findall(text):
        metrics.add(name)
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    text = re.sub(r"\[[^\]]*\]", " ", _SELECTOR.sub(" ", text))
    rest = re.findall(r"(?<![\w.:])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])", text)
    return metrics | (set(rest) - _KEYWORDS), labels


def test_names_are_found_in_expressions() -> None:
    metrics, labels = names_in(
        'sum by (a, b) (rate(x_total{c!~"d{e}"}[5m])) / on () y:z > 0.5 and topk(3, w)'
    )
    assert (metrics, labels) == ({"x_total", "y:z", "w"}, {"a", "b", "c"})


def test_every_metric_and_label_is_one_that_we_expose() -> None:
    known = {name: set(series.labels) for series in exposed() for name in series.names}
    known |= {rule["record"]: set() for rule in rules() if "record" in rule}
    for where, expression in expressions():
        metrics, labels = names_in(expression)
        assert metrics, where
        assert metrics <= set(known), f"{where}: {metrics - set(known)}"
        allowed = TARGET_LABELS.union(*(known[name] for name in metrics))
        assert labels <= allowed, f"{where}: {labels - allowed}"


def test_names_of_controller_runtime_are_complete() -> None:
    """What dashboards made for controller-runtime and client-go ask for."""
    ours = {name for series in exposed() if series.process == "operator" for name in series.names}
    wanted = {
        *(f"controller_runtime_reconcile_{name}" for name in ("total", "errors_total", "panics_total")),
        *(f"controller_runtime_reconcile_time_seconds_{part}" for part in ("bucket", "sum", "count")),
        "controller_runtime_max_concurrent_reconciles",
        "controller_runtime_active_workers",
        *(
            f"workqueue_{name}"
            for name in ("depth", "adds_total", "retries_total", "unfinished_work_seconds")
        ),
        "workqueue_longest_running_processor_seconds",
        *(f"workqueue_{name}_duration_seconds_bucket" for name in ("queue", "work")),
        "rest_client_requests_total",
        "rest_client_request_duration_seconds_bucket",
        "leader_election_master_status",
    }
    assert wanted <= ours, wanted - ours


def test_every_alert_has_a_severity_a_summary_and_a_runbook() -> None:
    page = (REPOSITORY / "docs/runbooks.md").read_text()
    sections = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    alerts = [rule for rule in rules() if "alert" in rule]
    assert sorted(sections) == sorted(rule["alert"] for rule in alerts)
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
        assert rule["annotations"]["runbook_url"] == f"runbooks.md#{rule['alert'].lower()}"


@pytest.fixture(scope="module")
def promtool() -> Path:
    return binaries.ensure(["promtool"])["promtool"]


def run(promtool: Path, *arguments: object) -> None:
    done = subprocess.run(
        [promtool, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_and_stay_silent_as_they_should(promtool: Path) -> None:
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES)
    run(promtool, "test", "rules", Path(__file__).parent / "alerts.yaml")


def test_every_alert_is_tested() -> None:
    tested = {
        case["alertname"]
        for test in yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}


def test_dashboards(promtool: Path, tmp_path: Path) -> None:
    """Made from their source, laid out without overlaps, each query one that Prometheus can run."""
    subprocess.run([sys.executable, REPOSITORY / "tools/dashboards.py", "--check"], check=True)
    queries = []
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        assert board["uid"].startswith("tenantry-")
        assert board["schemaVersion"] >= 36
        assert [variable["name"] for variable in board["templating"]["list"]] == ["source"]
        taken: set[tuple[int, int]] = set()
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 5
        for panel in board["panels"]:
            spot = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(spot["x"], spot["x"] + spot["w"])
                for y in range(spot["y"], spot["y"] + spot["h"])
            }
            assert spot["x"] + spot["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells
            assert panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            for target in panel["targets"]:
                assert target["datasource"]["uid"] == "${source}"
                queries.append(target["expr"].replace("$__rate_interval", "5m"))
    listed = [{"record": f"panel:query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": listed}]}))
    run(promtool, "check", "rules", file)


def test_nothing_of_it_is_made_unless_asked_for(render: Render) -> None:
    kinds = {document["kind"] for document in render()}
    assert not kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
    assert not [d for d in render() if "dashboard" in d["metadata"]["name"]]


def test_monitors_rules_and_dashboards_of_the_chart(render: Render) -> None:
    documents = render(
        "monitoring.podMonitors.enabled=true",
        "monitoring.podMonitors.labels.release=prom",
        "monitoring.rules.enabled=true",
        "monitoring.rules.runbooks=https://runbooks.example/tenantry",
        "monitoring.dashboards.enabled=true",
    )
    ports = {
        d["metadata"]["name"].removeprefix("tenantry-"): {
            port["name"] for c in d["spec"]["template"]["spec"]["containers"] for port in c["ports"]
        }
        for d in documents
        if d["kind"] == "Deployment"
    }
    ports["engine"] = {"serve", "admin"}
    monitors = {
        d["metadata"]["name"].removeprefix("tenantry-"): d for d in documents if d["kind"] == "PodMonitor"
    }
    assert set(monitors) == {"operator", "gateway", "fetcher", "engine"}
    for part, monitor in monitors.items():
        assert monitor["metadata"]["labels"]["release"] == "prom"
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports[part]
    for deployment in (d for d in documents if d["kind"] == "Deployment"):
        wanted = monitors[deployment["metadata"]["name"].removeprefix("tenantry-")]["spec"]["selector"][
            "matchLabels"
        ]
        assert wanted.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    [rule] = [d for d in documents if d["kind"] == "PrometheusRule"]
    source = RULES.read_text().replace(
        "runbook_url: runbooks.md", "runbook_url: https://runbooks.example/tenantry"
    )
    assert rule["spec"] == yaml.safe_load(source)
    boards = {
        name: json.loads(text)
        for d in documents
        if d["kind"] == "ConfigMap" and d["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in d["data"].items()
    }
    assert boards == {path.name: json.loads(path.read_text()) for path in DASHBOARDS}
    assert {
        d["metadata"]["namespace"] for d in documents if d["kind"] in ("PodMonitor", "PrometheusRule")
    } == {NAMESPACE}
