"""No byte that a client sends changes who it is, what it may use, or what serves it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from gateway_fakes import tenant
from gateway_world import chat, error_of, until
from hypothesis import given
from hypothesis import strategies as st
from tenantry.api import keys, names
from tenantry_gateway.auth import client_address, identify
from tenantry_gateway.errors import ApiError
from tenantry_gateway.state import State

if TYPE_CHECKING:
    from gateway_world import World

URL = "/v1/chat/completions"
FORGED = {
    names.IDENTITY_HEADER: "eyJhbGciOiJub25lIn0.e30.",
    names.SERVED_HEADER: "other",
    "x-tenantry-tenant": "other",
    "x-tenantry-salt": "0" * 64,
    "x-tenant-id": "other",
    "x-forwarded-user": "other",
    "x-request-id": "mine",
    "x-priority": "100",
    "x-slo-class": "critical",
    "x-gateway-destination-endpoint": "10.0.0.1:8000",
    "x-session-id": "other",
    "x-cache-salt": "other",
    "x-lora": "other",
    "cookie": "tenant=other",
    "openai-organization": "other",
    "openai-project": "other",
    "traceparent": "zz",
    "forwarded": "for=1.2.3.4",
    "x-forwarded-for": "1.2.3.4",
    "host": "engine",
}


@pytest.mark.parametrize("header", FORGED)
async def test_a_forged_header_reaches_no_engine_and_changes_nothing(world: World, header: str) -> None:
    world.put("other")
    client = world.http("acme")
    await client.post(URL, json=chat(user="same"))
    answer = await client.post(URL, json=chat(user="same"), headers={header: FORGED[header]})
    assert answer.status_code == 200
    plain, forged = sorted(
        world.engines[0].calls + world.engines[1].calls, key=lambda call: call.claims["jti"]
    )
    volatile = {"jti", "iat", "exp"}
    assert {k: v for k, v in plain.claims.items() if k not in volatile} == {
        k: v for k, v in forged.claims.items() if k not in volatile
    }
    allowed = {"host", "content-type", "content-length", names.IDENTITY_HEADER, "x-request-id"}
    assert set(forged.headers) == allowed
    assert forged.headers["x-request-id"] == answer.headers["x-request-id"] == forged.claims["jti"]
    assert world.keys["acme"] not in json.dumps(forged.headers)
    rows = await world.rows()
    assert rows[1]["client_request_id"] == ("mine" if header == "x-request-id" else "")


async def test_every_wrong_key_gets_the_same_answer(world: World) -> None:
    world.put("other")
    acme, other = world.keys["acme"], world.keys["other"]
    client = world.http()
    secret = acme.removeprefix("tk_acme_")
    bad: list[dict[str, str]] = [
        {},
        *(
            {"authorization": value}
            for value in (
                "", "Bearer", "Basic eDp5", acme, f"Bearer {acme}x", f"Bearer {acme[:-1]}",
                f"Bearer tk_other_{secret}", f"Bearer tk_nobody_{secret}", f"Bearer tk__{secret}", "Bearer tk_acme_",
                f"Bearer {keys.hash_key(acme)}", "Bearer " + "x" * 5000,
            )
        ),
        {"x-api-key": acme},
        {"api-key": acme},
    ]  # fmt: skip
    answers = [await client.post(URL, json=chat(), headers=headers) for headers in bad]
    answers.append(await client.get(f"/v1/models?key={acme}"))
    assert {a.status_code for a in answers} == {401}
    assert len({a.text for a in answers}) == 1
    assert error_of(answers[0])["code"] == "invalid_api_key"
    twice = await client.post(
        URL, json=chat(), headers=[("authorization", f"Bearer {acme}"), ("authorization", f"Bearer {other}")]
    )
    assert twice.status_code == 401
    assert await world.rows() == []


def found(state: State, key: str, now: float) -> Any:
    try:
        return identify([(b"authorization", f"Bearer {key}".encode())], state, now).key_name
    except ApiError as error:
        return error.status


def test_several_keys_overlap_and_expire() -> None:
    state, mine = State(), [keys.mint("acme").key for _ in range(3)]
    entries: list[dict[str, Any]] = [
        {"name": f"k{i}", "sha256": keys.hash_key(key)} for i, key in enumerate(mine)
    ]
    entries[1]["expiresAt"] = "2026-03-01T00:00:00Z"
    assert found(state, mine[0], 0) == 503, "nothing is known yet"
    state.replace_tenants([tenant("acme", entries)])
    state.replace_slices([])
    march = 1772323200.0
    assert [found(state, key, march - 1) for key in mine] == ["k0", "k1", "k2"]
    assert [found(state, key, march) for key in mine] == ["k0", 401, "k2"]
    state.put_tenant(tenant("acme", entries[2:]))
    assert [found(state, key, march) for key in mine] == [401, 401, "k2"]
    state.drop_tenant("acme")
    assert found(state, mine[2], march) == 401


def test_a_key_counts_only_within_the_tenant_that_it_names() -> None:
    state, key = State(), keys.mint("acme").key
    entry = {"name": "stolen", "sha256": keys.hash_key(key)}
    state.replace_tenants([tenant("acme", []), tenant("evil", [entry])])
    state.replace_slices([])
    assert found(state, key, time.time()) == 401


@given(st.binary(max_size=80))
def test_any_bytes_as_credentials_are_a_401(raw: bytes) -> None:
    state = State()
    state.replace_tenants([tenant("acme", [])])
    state.replace_slices([])
    with pytest.raises(ApiError) as caught:
        identify([(b"authorization", raw)], state, 0)
    assert caught.value.status == 401


def test_addresses_only_from_trusted_proxies() -> None:
    def address(peer: str, forwarded: bytes, *trusted: str) -> str:
        networks = tuple(ipaddress.ip_network(t) for t in trusted)
        return client_address(peer, [(b"x-forwarded-for", forwarded)], networks)

    assert address("9.9.9.9", b"1.2.3.4") == "9.9.9.9"
    assert address("9.9.9.9", b"1.2.3.4", "10.0.0.0/8") == "9.9.9.9"
    assert address("10.0.0.1", b"6.6.6.6, 1.2.3.4", "10.0.0.0/8") == "1.2.3.4"
    assert address("10.0.0.1", b"1.2.3.4, 10.0.0.2", "10.0.0.0/8") == "1.2.3.4"
    assert address("10.0.0.1", b"nonsense", "10.0.0.0/8") == "10.0.0.1"


async def raw_request(world: World, data: bytes, seconds: float = 5.0) -> bytes:
    port = int(world.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(seconds):
            return await reader.read()
    finally:
        writer.close()


async def test_bodies_and_headers_are_bounded(world: World) -> None:
    client = world.http("acme")
    declared = await client.post(URL, json=chat("x" * 200_000))
    assert (declared.status_code, error_of(declared)["code"]) == (413, "body_too_large")

    async def endless() -> Any:
        for _ in range(100):
            yield b"x" * 10_000

    streamed = await client.post(URL, content=endless())
    assert streamed.status_code == 413
    assert b" 431 " in await raw_request(world, b"GET /v1/models HTTP/1.1\r\n" + b"a: " + b"x" * 100_000)
    assert (await client.get("/v1/models")).status_code == 200


async def test_slow_clients_are_dropped(world: World) -> None:
    assert await raw_request(world, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n") == b""
    lines = [
        f"POST {URL} HTTP/1.1",
        f"authorization: Bearer {world.keys['acme']}",
        "content-length: 50",
        "",
        "{",
    ]
    assert b" 408 " in await raw_request(world, "\r\n".join(lines).encode())


async def test_wrong_paths_and_methods(world: World) -> None:
    client = world.http("acme")
    for method, path, status in (
        ("GET", URL, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/admin/v1/load", 404),
        ("POST", "/tokenize", 404),
        ("GET", "/metrics", 404),
        ("GET", "/v1/models/../usage", 200),
    ):
        answer = await client.request(method, path)
        assert answer.status_code == status, path
        if status != 200:
            error_of(answer)


async def test_logs_hold_no_key_and_no_prompt(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    client = world.http("acme")
    await client.post(URL, json=chat("a very private matter"))
    await client.post(URL, json={**chat("a very private matter"), "bogus": "a very private matter"})
    await client.post(URL, json=chat(), headers={"authorization": "Bearer tk_acme_wrongsecret"})
    await until(lambda: len([r for r in caplog.records if r.name == "tenantry.audit"]) == 3)
    for record in caplog.records:
        if record.name.startswith("tenantry"):
            text = str(record.__dict__)
            assert "private" not in text
            assert world.keys["acme"] not in text
            assert "wrongsecret" not in text
    first = next(r for r in caplog.records if r.name == "tenantry.audit")
    assert (first.tenant, first.key, first.outcome, first.status) == ("acme", "main", "done", 200)  # type: ignore[attr-defined]
