"""The link between HTTP and engine, and what callers see when something behind it goes wrong."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_world as world
import httpx
import pytest
import tenantry_engine.server.listening as ports
from tenantry_engine.config import EngineConfig, LoraConfig
from tenantry_engine.errors import RequestError
from tenantry_engine.ipc.messages import (
    MAX_FRAME,
    Ask,
    Fault,
    Frames,
    Ready,
    Reply,
    Step,
    Submit,
    frame,
    to_engine,
    to_http,
)
from tenantry_engine.ipc.service import Service
from tenantry_engine.replica import Replica
from tenantry_engine.sequence import Sampling, Sequence
from tenantry_engine.startup import load_engine

ANY_DIGEST = "sha256:" + "0" * 64


@dataclass
class Room:
    """A whole replica on the test's own loop, asked without sockets."""

    replica: Replica
    serving: httpx.AsyncClient
    admin: httpx.AsyncClient

    @property
    def engine(self) -> Any:
        return self.replica.engine

    async def complete(self, **body: Any) -> httpx.Response:
        body = {"model": "base", "prompt": "the quick", "max_tokens": 4, "ignore_eos": True, **body}
        return await self.serving.post("/v1/completions", json=body)


@asynccontextmanager
async def room(model: Path, data: Path, **config: Any) -> AsyncIterator[Room]:
    settings = {"slots": 4, "step_tokens": 64, "lora": LoraConfig(max_rank=32), **config}
    replica = Replica.load(EngineConfig(model, "base", data, dtype=world.torch.float32, **settings), None)
    replica.start(asyncio.get_running_loop())

    def client(app: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica", timeout=60)

    async with client(replica.serving.app) as serving, client(replica.admin.app) as admin:
        try:
            yield Room(replica, serving, admin)
        finally:
            await asyncio.to_thread(replica.engine.stop)
            replica.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for happens on other threads
            await asyncio.sleep(0.005)


# messages


def test_frames_come_out_as_they_went_in_however_the_stream_is_cut() -> None:
    draw = random.Random(0)
    sent = [frame(Ask(number, "names", {"x": "y" * draw.randrange(300)})) for number in range(200)]
    stream, at, frames = b"".join(sent), 0, Frames()
    got: list[bytes] = []
    while at < len(stream):
        size = draw.choice((1, 2, 3, 5, 300, 2000))
        got += frames.push(stream[at : at + size])
        at += size
    assert got == [whole[4:] for whole in sent]
    with pytest.raises(ValueError, match="must not come"):
        list(Frames().push((MAX_FRAME + 1).to_bytes(4, "little")))


def test_a_request_crosses_whole() -> None:
    sampling = Sampling(
        temperature=0.5, seed=7, logit_bias={3: -1.5}, stop_ids=frozenset({1, 2}), grammar="x", logprobs=3
    )
    sequence = Sequence("a", "t", [1, 2, 300], sampling, "base", weight=3, cap=2, bulk=True, salt="5a" * 32)
    message = to_engine.decode(frame(Submit(1, [sequence], "d", "u"))[4:])
    assert isinstance(message, Submit)
    [arrived] = message.sequences
    assert vars(arrived) == vars(sequence)


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\x93\xa6Submit\x01", b"\x93\xa3Ask\xa1x\xa1y", b"\xc1" * 9])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises((ValueError, EOFError)):
        to_engine.decode(raw)


def test_faults_cross_with_all_that_a_client_needs_and_no_more() -> None:
    error = RequestError("`n` must be 1", status=400, code="c", param="n", retry_after=3)
    reply = to_http.decode(frame(Reply(1, fault=Fault.of(error)))[4:])
    assert isinstance(reply, Reply)
    assert reply.fault is not None
    assert vars(reply.fault.error()) == vars(error)
    inner = Fault.of(RuntimeError("/secret/path"))
    assert (inner.status, inner.code) == (500, "internal_error")
    assert "secret" not in inner.message


# faults behind the link


async def test_a_question_that_fails_fails_alone(
    tiny: world.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with room(tiny.folder, tmp_path) as here:
        with monkeypatch.context() as patch:
            patch.setattr(here.engine.registry, "reports", lambda flights: 1 / 0)
            answer = await here.admin.get("/admin/v1/adapters")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "ZeroDivisionError" in caplog.text
        assert (await here.admin.get("/admin/v1/adapters")).status_code == 200
        assert (await here.complete()).status_code == 200


async def test_a_lost_background_result_fails_who_waits_for_it(
    tiny: world.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.adapter("one", 61, r=8, target_modules="all-linear")
    digest = world.folder_digest(folder)
    async with room(tiny.folder, tmp_path) as here:
        declared = {"fence": {"epoch": 1, "counter": 1}, "adapters": [{"name": "a", "digest": digest}]}
        assert (await here.admin.put("/admin/v1/adapters", json=declared)).status_code == 200
        monkeypatch.setattr(
            here.engine.registry, "blob_stored", lambda digest, then: here.engine._post(lambda: 1 / 0)
        )
        async with asyncio.timeout(20):
            body = b"".join(world.folder_blob(folder))
            answer = await here.admin.put(f"/admin/v1/blobs/{digest}", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "a result could not be taken in" in caplog.text
        assert (await here.complete()).status_code == 200


async def test_steps_that_go_on_failing_end_the_engine(
    tiny: world.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with room(tiny.folder, tmp_path) as here:
        reasons: list[str | None] = []
        close = here.engine.ended
        here.engine.ended = lambda reason: (reasons.append(reason), close(reason))
        calls = 0

        def fail(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(here.engine._runner, "run", fail)
        for _ in range(3):
            answer = await here.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_error")
        await until(here.replica.front.link.lost.is_set)
        assert reasons == ["3 steps failed one after another"]
        assert calls == 3
        assert caplog.text.count("RuntimeError: the device is lost") == 3
        assert here.engine.pool.counts().kv == 0
        answer = await here.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_gone")
        health = await here.admin.get("/healthz")
        assert (health.status_code, health.json()["reason"]) == (503, "the engine has ended")
        assert (await here.admin.get("/readyz")).status_code == 503


async def test_failures_count_only_one_after_another(
    tiny: world.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with room(tiny.folder, tmp_path) as here:
        real = here.engine._runner.run
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(here.engine._runner, "run", lambda *arguments: 1 / 0)
                assert (await here.complete()).status_code == 503
                assert (await here.complete()).status_code == 503
            assert here.engine._runner.run == real
            assert (await here.complete()).status_code == 200


async def test_the_loops_own_failure_ends_the_engine_too(
    tiny: world.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with room(tiny.folder, tmp_path) as here:
        monkeypatch.setattr(here.engine.scheduler, "plan", lambda: 1 / 0)
        monkeypatch.setattr(here.engine.scheduler, "abort_all", lambda reason: 1 / 0)
        answer = await here.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_error")
        await until(here.replica.front.link.lost.is_set)


# bounds


async def test_more_answers_than_may_wait_are_refused_for_good(tiny: world.TinyModel, tmp_path: Path) -> None:
    async with room(tiny.folder, tmp_path, max_waiting=4) as here:
        answer = await here.complete(prompt=["the"] * 5)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert (await here.complete(prompt=["the"] * 4)).status_code == 200


def test_tokens_that_nobody_takes_are_not_made(tiny: world.TinyModel, tmp_path: Path) -> None:
    """An HTTP process that stands still holds the engine up instead of filling its memory; nothing is lost."""
    engine, facts = load_engine(
        EngineConfig(tiny.folder, "base", tmp_path, dtype=world.torch.float32, slots=4, step_tokens=64)
    )
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    service = Service(engine, facts, theirs, gone=lambda: None)
    engine.start()
    service.start()
    sequence = Sequence("s", "t", [5, 9], Sampling(temperature=0, max_tokens=500), "base")
    ours.sendall(frame(Submit(1, [sequence], None, None)))
    stuck = 0

    def stands_still() -> bool:
        nonlocal stuck
        stuck = stuck + 1 if service._lock.locked() else 0
        return stuck > 40

    world.wait_for(stands_still)
    [held] = engine.scheduler.sequences()
    made = held.generated
    assert 0 < made < 500
    world.wait_for(stands_still)
    assert held.generated == made
    frames, tokens, finish = Frames(), [], None
    ours.settimeout(30)
    while finish is None:
        for body in frames.push(ours.recv(1 << 16)):
            message = to_http.decode(body)
            assert isinstance(message, Ready | Reply | Step)
            for event in message.events if isinstance(message, Step) else []:
                tokens.append(event.token)
                finish = event.finish
    assert (len(tokens), finish) == (500, "length")
    assert tokens == held.tokens[2:]
    engine.stop()
    service.close()
    ours.close()


async def test_a_client_that_does_not_read_is_gone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_STUCK_CLIENT_SECONDS", 1)
    gone = asyncio.Event()
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def pour() -> None:
            nonlocal sent
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                sent += 65536

        pouring = asyncio.create_task(pour())
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        pouring.cancel()

    listening = ports.listen("127.0.0.1", 0)
    server = ports.Server(ports.configuration(app))
    serving = asyncio.create_task(server.serve([listening]))
    await until(lambda: server.started)
    with socket.create_connection(listening.getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(30):
            await gone.wait()
        assert sent < 64 << 20
    server.should_exit = True
    await serving


async def test_a_body_that_does_not_come_is_not_waited_for(
    tiny: world.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenantry_engine.server.http.BODY_SECONDS", 0.05)

    async def drip() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with room(tiny.folder, tmp_path) as here:
        answer = await here.serving.post("/v1/completions", content=drip())
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "body_too_slow")


# numbers


async def test_metrics_under_vllms_names_with_bounded_labels(tiny: world.TinyModel, tmp_path: Path) -> None:
    async with room(tiny.folder, tmp_path) as here:
        folder = tiny.adapter("one", 61, r=8, target_modules="all-linear")
        await asyncio.to_thread(world.declare, here.engine, [("acme-tone", folder), ("acme-idle", folder)])
        prompt = list(range(10, 60))
        for _ in range(2):
            assert (await here.complete(model="acme-tone", prompt=prompt)).status_code == 200
        held = threading.Event()
        blocked = here.engine.call(lambda: held.wait(30))
        running = asyncio.create_task(here.complete(model="acme-tone", prompt=prompt, n=2))
        await until(lambda: here.engine._inbox)
        held.set()
        await asyncio.wrap_future(blocked)
        await running
        text = (await here.admin.get("/metrics")).text
        series = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if not line.startswith("#")
        }
        label = 'model_name="base"'
        assert series[f"vllm:prompt_tokens_total{{{label}}}"] == 3 * 50
        assert series[f"vllm:generation_tokens_total{{{label}}}"] == 4 * 4
        assert series[f'vllm:request_success_total{{finished_reason="length",{label}}}'] == 3
        assert series[f"vllm:time_to_first_token_seconds_count{{{label}}}"] == 3
        assert series[f"vllm:prefix_cache_queries_total{{{label}}}"] == 150
        assert series[f"vllm:prefix_cache_hits_total{{{label}}}"] == 2 * 48
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            assert series[f"{name}{{{label}}}"] == 0
        # residency is not activity: both names' one adapter is in pages, no request uses it
        assert series[f'tenantry_engine_adapters{{{label},state="registered"}}'] == 2
        assert series[f'tenantry_engine_adapters{{{label},state="resident"}}'] == 2
        assert series[f'tenantry_engine_adapters{{{label},state="active"}}'] == 0
        pages = {name: value for name, value in series.items() if name.startswith("tenantry_engine_pages{")}
        assert sum(pages.values()) == here.engine.pool.total
        assert series[f"vllm:kv_cache_usage_perc{{{label}}}"] == 0
        assert "acme" not in text, "no series is labelled by adapter or tenant"
