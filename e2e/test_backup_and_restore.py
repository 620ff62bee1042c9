"""A running cluster's export brings a deleted tenant back: the same key, the promoted version, and no secret in it."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
import yaml
from stack import promises
from stack.install import ADAPTERS, Stack
from stack.kube import JsonObject, condition, eventually, is_ready
from stack.traffic import Answer, Steady

TENANT, SPACE = "maple", "maple-ml"
QUESTION = "Where is my parcel?"
HOUR_SECONDS = 3600


@pytest.fixture
def promoted(stack: Stack) -> Iterator[None]:
    """`tone` 1.1.0 is promoted; Git asks for a newer one that fails, by steps that would take an hour."""
    promises.promote(stack, "tone", "1.1.0")
    adapter = yaml.safe_load(stack.adapter_text("tone", stable="1.2.0"))
    wrong = {**adapter["spec"]["versions"][1], "version": "1.2.0", "digest": "sha256:" + "0" * 64}
    adapter["spec"]["versions"].append(wrong)
    adapter["spec"]["rollout"]["steps"] = [{"weight": 10, "pauseSeconds": HOUR_SECONDS}]
    stack.kube.apply(adapter)
    try:
        stack.kube.wait(
            "1.2.0 is refused", "adapter", "tone", SPACE,
            until=lambda found: condition(found, "Stalled").get("reason") == "DigestMismatch",
        )  # fmt: skip
        yield
    finally:
        if stack.kube.get("tenant", TENANT) is None:
            stack.kube.apply(stack.tenant(TENANT))
        stack.apply_text(stack.adapter_text("triage"))
        promises.promote(stack, "tone", "1.0.0")


def secrets(stack: Stack) -> Iterator[str]:
    """Keys that clients hold, and every value of every Secret of the cluster, as it is stored and as it is read."""
    yield from stack.keys.values()
    for secret in stack.kube.find("secrets", "-A"):
        for value in (secret.get("data") or {}).values():
            yield value
            yield base64.b64decode(value).decode(errors="replace")


def generations(stack: Stack) -> dict[str, int]:
    """Of every object of ours: raised by the API server when a spec changes."""
    kinds = ("adapterpools", "tenants", "adapters")
    found = [entry["metadata"] for kind in kinds for entry in stack.kube.find(kind, "-A")]
    return {f"{meta.get('namespace', '')}/{meta['name']}": meta["generation"] for meta in found}


def delete(stack: Stack) -> None:
    """The tenant and its adapters, until nobody knows them."""
    stack.kube.run("delete", "adapter", *ADAPTERS, "-n", SPACE, "--wait=true")
    stack.kube.run("delete", "tenant", TENANT, "--wait=true")
    eventually("its key opens nothing", lambda: stack.client(TENANT).ask("tone", "hi").status == 401)
    eventually(
        "no replica holds an adapter of it", lambda: not any(promises.registered(stack, "lora").values())
    )


def test_a_deleted_tenant_is_served_again_from_the_export(
    promoted: None, stack: Stack, seen: list[str]
) -> None:
    maple, cedar = stack.client(TENANT), stack.client("cedar")
    models = ("chat", *sorted(ADAPTERS))

    def answers() -> dict[str, tuple[str, str]]:
        given = {model: maple.ask(model, QUESTION) for model in models}
        return {model: (answer.served, answer.text) for model, answer in given.items()}

    before = answers()
    assert "--1.1.0-" in before["tone"][0]
    assert before["tone"][1].lstrip().startswith("Dear customer")

    text = stack.tenantry("export")
    documents: list[JsonObject] = [document for document in yaml.safe_load_all(text) if document]
    assert {document["kind"] for document in documents} == {"Namespace", "AdapterPool", "Tenant", "Adapter"}
    assert not [document["metadata"] for document in documents if "status" in document]
    hidden = {value for value in secrets(stack) if len(value) >= 8}
    assert len(hidden) > len(stack.keys), "there are Secrets to be found"
    assert not [value[:4] for value in hidden if value in text]

    others = generations(stack)
    with Steady(lambda: cedar.ask("chat", "hi", max_tokens=2), workers=1, pause=1.0) as neighbour:
        delete(stack)
        first: list[Answer] = []

        def served() -> bool:
            answer = maple.ask("tone", QUESTION)
            first[:] = [answer]
            return answer.status == 200

        stack.apply_text(text)
        seconds = eventually(
            "the same key is served again", served, seconds=120, every=0.2, said=lambda: str(first)
        )
        for name in ADAPTERS:
            stack.kube.wait(f"{name} is ready", "adapter", name, SPACE, until=is_ready)
        stack.kube.wait("the tenant is ready", "tenant", TENANT, until=is_ready)
    seen.append(f"restored from {len(text)} bytes: the old key is served {seconds:.1f} s after the apply")
    assert "--1.1.0-" in first[0].served, "the first answer came from the promoted version"
    assert answers() == before
    assert maple.models() == list(models)

    status = (stack.kube.get("adapter", "tone", SPACE) or {})["status"]
    told = (status["rollout"]["phase"], status["rollout"]["attempt"], status["channels"][0]["activeVersion"])
    assert told == ("Promoted", 1, "1.1.0")
    assert not status.get("history")
    assert not status.get("failedRevisions")

    assert neighbour.failures == []
    ours = {f"/{TENANT}", *(f"{SPACE}/{name}" for name in ADAPTERS)}
    after = generations(stack)
    assert {name: after[name] for name in others if name not in ours} == {
        name: count for name, count in others.items() if name not in ours
    }, "what was still there was not touched"
