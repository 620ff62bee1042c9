"""A bad object is refused with the field and the remedy, or ends in a condition; all others serve on."""

from __future__ import annotations

import copy

import pytest
import yaml
from stack.install import Stack
from stack.kube import JsonObject, condition
from stack.traffic import Steady


def tone(stack: Stack, name: str, **changes: object) -> JsonObject:
    """An Adapter like `tone` under another name, its one version changed."""
    found: JsonObject = yaml.safe_load(stack.adapter_text("tone"))
    found["metadata"]["name"] = name
    version = copy.deepcopy(found["spec"]["versions"][0])
    version.update(changes)
    found["spec"]["versions"] = [version]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tier": "Gold"}, "spec.tier"),
        ({"models": []}, "spec.models"),
        ({"limits": {"requestsPerMinute": 0}}, "spec.limits.requestsPerMinute"),
        ({"tier": "Enterprise"}, "`dedicated`"),
        ({"modells": []}, "modells"),
    ],
)
def test_a_bad_tenant_is_refused_at_apply_with_the_field(
    stack: Stack, change: JsonObject, words: str
) -> None:
    tenant = {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "bad"},
        "spec": {"tier": "Free", "models": [{"name": "chat", "baseModel": "smollm2-135m"}], **change},
    }
    result = stack.kube.call("apply", "--server-side", "-f", "-", text=stack.yaml(tenant))
    assert result.returncode != 0
    assert words in result.stderr


def test_a_tenant_without_a_pool_says_so(stack: Stack) -> None:
    tenant: JsonObject = {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "lost"},
        "spec": {"tier": "Free", "models": [{"name": "chat", "baseModel": "no-such-model"}]},
    }
    stack.kube.apply(tenant)
    try:
        seen = stack.kube.wait(
            "the tenant says that no pool serves its model",
            "tenant",
            "lost",
            until=lambda found: condition(found, "Stalled").get("status") == "True",
            seconds=60,
        )
        assert "no-such-model" in condition(seen, "Stalled")["message"]
        assert condition(seen, "Ready")["status"] != "True"
    finally:
        stack.kube.run("delete", "tenant", "lost", "--wait=true")


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("wrong-digest", {"digest": "sha256:" + "0" * 64}, "DigestMismatch"),
        ("wrong-rank", {"rank": 512}, "RankMismatch"),
        ("wrong-source", {"source": "oci://elsewhere.example/x/y:1"}, "SourceNotAllowed"),
    ],
)
def test_a_bad_adapter_ends_in_a_condition_while_others_serve(
    stack: Stack, name: str, change: JsonObject, reason: str
) -> None:
    maple = stack.client("maple")
    with Steady(lambda: maple.ask("tone", "hi", max_tokens=2)) as traffic:
        stack.kube.apply(tone(stack, name, **change))
        try:
            seen = stack.kube.wait(
                f"the adapter says {reason}",
                "adapter",
                name,
                "maple-ml",
                until=lambda found: reason in str((found or {}).get("status", {}).get("conditions")),
                seconds=90,
            )
            assert condition(seen, "Ready").get("status") != "True"
            assert condition(stack.kube.get("adapter", "tone", "maple-ml"), "Ready")["status"] == "True"
        finally:
            stack.kube.run("delete", "adapter", name, "-n", "maple-ml", "--wait=true")
    assert traffic.failures == []


def test_a_bad_request_is_a_400_that_names_the_field(stack: Stack) -> None:
    answer = stack.client("cedar").ask("chat", "hi", max_tokens=-1)
    assert answer.status == 400
    assert "max_tokens" in answer.message
