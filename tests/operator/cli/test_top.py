"""`top`: rates between two looks at the gateways' own metrics, and what replicas say of themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tenantry.cli.errors import CliError
from tenantry.cli.output import View
from tenantry.cli.top import ENGINES, GATEWAYS, replicas, tenants


class Pods:
    """Answers with the next page of a pod at each look."""

    def __init__(self, pods: dict[str, list[dict[str, Any]]], pages: dict[str, list[str]]) -> None:
        self._pods = pods
        self._pages: dict[str, Iterator[str]] = {name: iter(texts) for name, texts in pages.items()}
        self.asked: list[tuple[str, int, str]] = []

    def pods(self, selector: str) -> list[dict[str, Any]]:
        return self._pods.get(selector, [])

    def ask(self, namespace: str, pod: str, port: int, path: str) -> str:
        self.asked.append((f"{namespace}/{pod}", port, path))
        return next(self._pages[pod])


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {"name": name, "namespace": "sys", "labels": labels}


def page(done: int, failed: int, shed: int, output: int, tenant: str = "acme") -> str:
    return f"""\
# TYPE tenantry_gateway_requests_total counter
tenantry_gateway_requests_total{{tenant="{tenant}",outcome="done",status="200"}} {done}
tenantry_gateway_requests_total{{tenant="{tenant}",outcome="failed",status="503"}} {failed}
tenantry_gateway_requests_total{{tenant="",outcome="refused",status="401"}} 900
# TYPE tenantry_gateway_shed_total counter
tenantry_gateway_shed_total{{tenant="{tenant}",code="rate_tokens"}} {shed}
# TYPE tenantry_gateway_tokens_total counter
tenantry_gateway_tokens_total{{tenant="{tenant}",type="output"}} {output}
tenantry_gateway_tokens_total{{tenant="{tenant}",type="cached"}} 77
"""


def test_rates_of_all_gateways_together() -> None:
    source = Pods(
        {GATEWAYS: [pod("g0"), pod("g1")]},
        {
            "g0": [page(10, 0, 0, 100), page(20, 2, 4, 300)],
            "g1": [page(5, 0, 0, 0), page(5, 0, 0, 0) + page(8, 0, 0, 900, "birch")],
        },
    )
    slept: list[float] = []
    found = json.loads(tenants(source, 2.0, View.JSON, slept.append))
    assert slept == [2.0]
    assert {port for _, port, _ in source.asked} == {9090}
    assert [row["tenant"] for row in found] == ["birch", "acme"]
    assert found[1] == {
        "tenant": "acme",
        "requestsPerSecond": 6.0,
        "failedPerSecond": 1.0,
        "shedPerSecond": 2.0,
        "inputPerSecond": 0.0,
        "outputPerSecond": 100.0,
    }


def test_a_gateway_that_began_anew_makes_no_negative_rates() -> None:
    source = Pods({GATEWAYS: [pod("g0")]}, {"g0": [page(50, 0, 0, 0), page(1, 0, 0, 0)]})
    text = tenants(source, 1.0, View.TABLE, lambda _: None)
    assert text.splitlines()[1].split() == ["acme", "0.0", "0.0", "0.0"]


def test_replicas() -> None:
    text = """\
vllm:num_requests_running{model_name="m"} 3
vllm:num_requests_waiting{model_name="m"} 1
vllm:kv_cache_usage_perc{model_name="m"} 0.25
tenantry_engine_adapters{model_name="m",state="resident"} 7
"""
    source = Pods(
        {ENGINES: [pod("lora-fast-0", **{"tenantry.dev/pool": "lora"})]}, {"lora-fast-0": [text] * 2}
    )
    assert replicas(source, View.TABLE).splitlines()[1].split() == ["lora", "lora-fast-0", "3", "1", "25%"]
    assert json.loads(replicas(source, View.JSON))[0]["adaptersResident"] == 7


def test_what_is_not_there_or_not_readable_is_one_sentence() -> None:
    with pytest.raises(CliError, match="no gateway runs"):
        tenants(Pods({}, {}), 1.0, View.TABLE)
    with pytest.raises(CliError, match="no engine runs"):
        replicas(Pods({}, {}), View.TABLE)
    with pytest.raises(CliError, match="metrics cannot be read"):
        tenants(Pods({GATEWAYS: [pod("g")]}, {"g": ["<html> {"]}), 1.0, View.TABLE)
