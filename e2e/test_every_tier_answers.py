"""A tenant of every tier gets what its tier is; Regulated gets nothing less than it asks for."""

from __future__ import annotations

import pytest
from stack.install import Stack
from stack.kube import condition


@pytest.mark.parametrize(
    ("tenant", "model", "served"),
    [
        ("birch", "chat", "smollm2-135m"),
        ("cedar", "chat", "smollm2-135m"),
        ("maple", "chat", "smollm2-135m"),
        ("maple", "tone", "maple-ml.tone--1."),
        ("oak", "chat", "smollm2-135m"),
    ],
)
def test_a_tenant_is_answered_by_what_it_asked_for(
    stack: Stack, tenant: str, model: str, served: str
) -> None:
    answer = stack.client(tenant).ask(model, "What is the capital of France?")
    assert answer.status == 200, answer
    assert answer.text.strip()
    assert answer.served.startswith(served)


def test_a_stream_comes_in_pieces_and_equals_the_whole_answer(stack: Stack) -> None:
    client = stack.client("cedar")
    pieces = list(client.stream("chat", "Name two parts of a bicycle.", max_tokens=16))
    assert len(pieces) > 3
    assert "".join(pieces) == client.ask("chat", "Name two parts of a bicycle.", max_tokens=16).text


def test_each_key_lists_its_own_models_only(stack: Stack) -> None:
    assert stack.client("birch").models() == ["chat"]
    assert stack.client("maple").models() == ["chat", "tone", "triage"]


def test_a_foreign_model_is_the_same_404_as_an_unknown_one(stack: Stack) -> None:
    cedar = stack.client("cedar")
    foreign, unknown = cedar.ask("tone", "hello"), cedar.ask("nothing", "hello")
    assert (foreign.status, foreign.code) == (404, "model_not_found")
    assert foreign.message.replace("tone", "X") == unknown.message.replace("nothing", "X")
    assert (unknown.status, unknown.code) == (404, "model_not_found")


def test_a_regulated_tenant_is_stalled_and_not_served_on_less(stack: Stack) -> None:
    tenant = stack.kube.get("tenant", "yew")
    assert condition(tenant, "Stalled")["status"] == "True"
    assert condition(tenant, "Ready")["status"] == "False"
    assert condition(tenant, "Stalled")["reason"] == "AttestationNotAvailable"
    assert not (tenant or {}).get("status", {}).get("route")
    assert stack.client("yew").ask("chat", "hello").status in (404, 503)
    assert stack.kube.get("namespace", "tenant-yew") is None


def test_a_dedicated_tenant_runs_on_its_own_node_in_its_own_namespace(stack: Stack) -> None:
    pods = stack.kube.find("pods", "-n", "tenant-oak", "-l", "app.kubernetes.io/component=engine")
    assert {pod["spec"]["nodeName"] for pod in pods} == {"tenantry-dedicated"}
    node = stack.kube.get("node", "tenantry-dedicated") or {}
    assert node["metadata"]["labels"]["tenantry.node-restriction.kubernetes.io/tenant"] == "oak"
    effects = {taint["effect"] for taint in node["spec"]["taints"] if taint["key"] == "tenantry.dev/tenant"}
    assert effects == {"NoSchedule", "NoExecute"}
