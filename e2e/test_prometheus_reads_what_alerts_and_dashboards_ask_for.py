"""A real Prometheus reads every process of a release at work: alerts are silent, dashboards have something to show."""

from __future__ import annotations

from stack import prometheus
from stack.install import Stack
from stack.kube import eventually
from stack.traffic import Steady

# What a release at rest does: no canary, no shed request, no failure.
MOST_EMPTY = 0.15


def test_every_process_is_read_no_alert_fires_and_panels_show_something(
    stack: Stack, seen: list[str]
) -> None:
    maple = stack.client("maple")
    with (
        Steady(lambda: maple.ask("tone", "Where is my parcel?", max_tokens=4)) as traffic,
        prometheus.reading(stack) as found,
    ):
        eventually("some answers came", lambda: len(traffic.answers) > 5, seconds=60)
        eventually(
            "Prometheus has seen requests being answered",
            lambda: bool(found.ask("query", query="rate(tenantry_gateway_requests_total[1m]) > 0")["result"]),
            seconds=60,
        )
        wrong = {process: error for process, error in found.targets().items() if error}
        eventually(
            "every rule was evaluated", lambda: all(rule["health"] != "unknown" for rule in found.rules())
        )
        rules = found.rules()
        shown = {title: found.ask("query", query=query)["result"] for title, query in prometheus.panels()}
    assert wrong == {}
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
    empty = sorted(title for title, result in shown.items() if not result)
    seen.append(
        f"Prometheus: {len(rules)} rules hold, {len(shown) - len(empty)} of {len(shown)} panels show data"
    )
    assert len(empty) <= MOST_EMPTY * len(shown), empty
