"""Two versions of one model: who is answered by which, what is counted of them, and that no request fails over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest
from gateway_fakes import Behaviour
from gateway_world import chat, error_of, until
from hypothesis import given
from hypothesis import strategies as st
from tenantry.api import names
from tenantry_gateway.body import parse
from tenantry_gateway.routing import choose_target, session_of
from tenantry_gateway.state import Model, Target

if TYPE_CHECKING:
    from gateway_world import World

OLD = "acme-ml.tone--1.0.0-0123456789ab"
NEW = "acme-ml.tone--2.0.0-ba9876543210"
DIGESTS = {OLD: "sha256:" + "0123456789ab" + "0" * 52, NEW: "sha256:" + "ba9876543210" + "0" * 52}


def session(*messages: tuple[str, Any], conversation: str = "", **fields: Any) -> str:
    body = {"model": "chat", "messages": [{"role": r, "content": c} for r, c in messages], **fields}
    return session_of(conversation, parse(orjson.dumps(body), True), "request-1")


def completion(*prompts: str) -> str:
    return session_of("", parse(orjson.dumps({"model": "chat", "prompt": list(prompts)}), False), "request-1")


def test_a_conversation_is_known_by_its_id_its_user_or_its_first_message() -> None:
    first = session(("user", "hello"))
    assert session(("user", "hello"), ("assistant", "yes?"), ("user", "more")) == first
    assert session(("system", "Be kind."), ("user", "hello")) == first
    assert session(("developer", "Be brief."), ("user", [{"type": "text", "text": "hello"}])) == first
    assert session(("user", "good day")) != first
    assert session(("user", "hello"), user="u-1") == session(("user", "other"), user="u-1") != first
    assert session(("user", "a"), user="u-1", conversation="c-1") == session(
        ("user", "b"), conversation="c-1"
    )


def test_ids_users_and_texts_are_not_taken_for_each_other() -> None:
    assert (
        len(
            {
                session(("user", "x")),
                session(("user", "y"), user="x"),
                session(("user", "y"), conversation="x"),
            }
        )
        == 3
    )


def test_a_plain_prompt_is_known_by_its_first_line_and_nothing_at_all_by_the_request() -> None:
    assert completion("User: hi\nBot: yes?\nUser: more") == completion("\nUser: hi\nBot:")
    assert completion("User: hi", "other") == completion("User: hi")
    assert completion("  ") == "request/request-1"
    assert session(("system", "Be kind.")) == "request/request-1"


def model(weight: int, new: str = NEW) -> Model:
    return Model("chat", "base", (Target(OLD, DIGESTS[OLD], 100 - weight), Target(new, "", weight)), None)


@given(st.text(max_size=20), st.integers(0, 100), st.integers(0, 100))
def test_a_session_never_goes_back_while_the_weight_rises(session: str, one: int, other: int) -> None:
    low, high = sorted((one, other))
    if choose_target(model(low), False, "uid", session).served_name == NEW:
        assert choose_target(model(high), False, "uid", session).served_name == NEW
    assert choose_target(model(0), False, "uid", session).served_name == OLD
    assert choose_target(model(100), False, "uid", session).served_name == NEW
    assert choose_target(model(low), True, "uid", session).served_name == NEW


def test_shares_are_as_weights_say_and_others_try_the_next_version() -> None:
    sessions = [f"user/{i}" for i in range(4000)]

    def chosen(new: str) -> set[str]:
        found = model(20, new)
        return {s for s in sessions if choose_target(found, False, "uid", s).served_name == new}

    one, two = chosen(NEW), chosen("acme-ml.tone--3.0.0-000000000000")
    assert 640 < len(one) < 960
    assert 640 < len(two) < 960
    assert len(one & two) < 320, "about a fifth of a fifth"


async def put(world: World, weight: int, *, old: bool = True, new: bool = True) -> httpx.AsyncClient:
    """Two versions behind `chat`; which of them replicas hold."""
    held = {name for name, there in ((OLD, old), (NEW, new)) if there}
    for engine in world.engines:
        engine.registered = held
    await until(lambda: all(set(r.load.registered) == held for r in world.gateway.replicas.all()))
    targets = [
        {"servedName": name, "digest": DIGESTS[name], "weight": share}
        for name, share in ((OLD, 100 - weight), (NEW, weight))
    ]
    world.put("acme", models=[{"name": "chat", "pool": "base", "targets": targets}])
    return world.http("acme")


async def post(client: httpx.AsyncClient, user: str = "u", **more: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**chat(user=user), **more})


def counted(world: World, served: str, outcome: str) -> float:
    metrics = world.gateway.metrics.rollouts
    metrics.forget_others(world.state.tenants.values())
    found = metrics.registry.get_sample_value(
        "tenantry_gateway_rollout_requests_total", {"served": served, "outcome": outcome}
    )
    return found or 0.0


async def test_where_no_replica_holds_the_new_version_the_stable_one_answers(world: World) -> None:
    client = await put(world, 100, new=False)
    answer = await post(client)
    assert (answer.status_code, answer.headers[names.SERVED_HEADER]) == (200, OLD)
    asked = await post(client, model="chat:canary")
    assert (asked.status_code, error_of(asked)["code"]) == (503, "adapter_unavailable"), (
        "it was asked for by name"
    )


async def test_the_new_version_never_stands_in_for_the_stable_one(world: World) -> None:
    client = await put(world, 0, old=False)
    assert (await post(client)).status_code == 503


async def test_a_conversation_header_keeps_a_conversation_together(world: World) -> None:
    client = await put(world, 50)
    by_name: dict[str, set[str]] = {}
    for conversation in range(12):
        for turn in range(2):
            answer = await client.post(
                "/v1/chat/completions",
                json=chat(f"turn {turn} of {conversation}"),
                headers={names.CONVERSATION_HEADER: f"c-{conversation}"},
            )
            by_name.setdefault(f"c-{conversation}", set()).add(answer.headers[names.SERVED_HEADER])
    assert all(len(served) == 1 for served in by_name.values())
    assert set().union(*by_name.values()) == {OLD, NEW}


async def test_versions_that_share_a_model_are_counted_and_forgotten(world: World) -> None:
    client = await put(world, 100)
    for _ in range(3):
        assert (await post(client)).status_code == 200
    assert (counted(world, NEW, "answered"), counted(world, OLD, "answered")) == (3, 0)
    registry = world.gateway.metrics.rollouts.registry
    for histogram in ("first_token", "duration"):
        name = f"tenantry_gateway_rollout_{histogram}_seconds_count"
        assert registry.get_sample_value(name, {"served": NEW}) == 3
    world.put(
        "acme",
        models=[{"name": "chat", "pool": "base", "targets": [{"servedName": NEW, "digest": DIGESTS[NEW]}]}],
    )
    assert (await post(client)).status_code == 200
    assert counted(world, NEW, "answered") == 0
    await put(world, 100)
    await post(client)
    assert counted(world, NEW, "answered") == 1, "it counts from 0 again"


@pytest.mark.parametrize(
    ("behaviour", "failed"),
    [
        (Behaviour(status=500), 1),
        (Behaviour(status=400, error={"message": "m", "type": "t", "param": None, "code": "c"}), 0),
        (Behaviour(cut_after=1), 1),
    ],
    ids=["500", "400", "cut"],
)
async def test_only_what_the_version_itself_failed_counts_against_it(
    world: World, behaviour: Behaviour, failed: int
) -> None:
    client = await put(world, 100)
    for engine in world.engines:
        engine.behaviour = behaviour
    await post(client, stream=behaviour.cut_after is not None)
    await until(lambda: counted(world, NEW, "failed") == failed)
    assert counted(world, NEW, "answered") == 0


async def test_the_metrics_port_tells_them_alone(world: World) -> None:
    client = await put(world, 100)
    await post(client)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(world.gateway.health),  # type: ignore[arg-type]
        base_url="http://gateway",
    ) as metrics:
        alone = (await metrics.get(names.ROLLOUT_METRICS_PATH)).text
        whole = (await metrics.get("/metrics")).text
    line = f'tenantry_gateway_rollout_requests_total{{outcome="answered",served="{NEW}"}} 1.0'
    assert line in alone
    assert line in whole
    assert "tenantry_gateway_in_flight" not in alone
