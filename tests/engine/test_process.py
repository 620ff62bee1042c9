"""Two processes that live and die together: signals, deaths, bounds, and what a real client sees of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import engine_world as world
import httpx
import openai
import psutil
import pytest
from replica_process import ReplicaProcess, running
from support.collector import Collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDLESS = {"model": "base", "prompt": "the", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> world.TinyModel:
    """A model whose answers may be long enough to outlive what is done to its replica."""
    return world.TinyModel.make(tmp_path_factory.mktemp("slow"), max_position_embeddings=8192)


def test_a_laptop_serves_adapters_to_the_openai_client_and_ends_when_asked(
    tiny: world.TinyModel, tmp_path: Path
) -> None:
    collector = Collector()
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "tone").symlink_to(tiny.adapter("one", 61, r=8, target_modules="all-linear"))
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with running(tiny.folder, tmp_path, "--adapters", str(adapters), **traced) as replica:
        client = openai.OpenAI(base_url=replica.url + "/v1", api_key="none", max_retries=0)
        world.wait_for(lambda: [model.id for model in client.models.list()] == ["base", "tone"])
        answers = {
            name: client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "lazy dog"}], temperature=0, max_tokens=8,
                extra_body={"ignore_eos": True}, extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
            )
            for name in ("base", "tone")
        }  # fmt: skip
        texts = {name: answer.choices[0].message.content for name, answer in answers.items()}
        assert texts["base"] != texts["tone"]
        check_spans(collector, answers)
        body = {**ENDLESS, "model": "tone", "max_tokens": 400}
        with httpx.stream("POST", f"{replica.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            replica.send_all(signal.SIGINT)  # as Ctrl-C does: the engine must not go first
            assert [line for line in lines if line][-1] == "data: [DONE]", "running requests finish first"
        assert replica.process.wait(timeout=60) == 0
        for word in (
            "kernels: ",
            "weights: ",
            "pages: ",
            "adapter: tone sha256:",
            "traces: ",
            "ready after",
            "--dev-open",
        ):
            assert word in replica.said
        assert "Traceback" not in replica.said


def check_spans(collector: Collector, answers: dict[str, Any]) -> None:
    """One span a request below the caller's, with sizes and never a text."""
    world.wait_for(lambda: len(collector.spans) == len(answers))
    spans = {span.name: span for span in collector.spans}
    for name, answer in answers.items():
        span = spans[f"chat {name}"]
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        told = {item.key: item.value for item in span.attributes}
        assert told["gen_ai.usage.input_tokens"].int_value == answer.usage.prompt_tokens
        assert told["gen_ai.usage.output_tokens"].int_value == 8
        assert told["gen_ai.latency.time_to_first_token"].double_value > 0
        assert answer.choices[0].message.content.encode() not in collector.raw
    assert b"lazy" not in collector.raw


def test_the_engines_death_ends_the_replica_at_once(slow: world.TinyModel, tmp_path: Path) -> None:
    with running(slow.folder, tmp_path) as replica:
        with httpx.stream("POST", f"{replica.url}/v1/completions", json=ENDLESS, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            replica.engine.kill()
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
        assert "data: [DONE]" not in rest, "an answer that was cut never ends cleanly"
        assert replica.process.wait(timeout=20) == 1
        assert "the engine ended (signal 9; killed from outside" in replica.said


def test_the_engine_ends_with_its_http_process_while_it_loads_and_while_it_serves(
    tiny: world.TinyModel, slow: world.TinyModel, tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    shutil.copytree(tiny.folder, stuck)
    (stuck / "config.json").unlink()
    os.mkfifo(stuck / "config.json")  # reading it never ends, as reading weights from a slow disk
    loading = ReplicaProcess(stuck, tmp_path)
    try:
        world.wait_for(lambda: bool(psutil.Process(loading.process.pid).children()), timeout=60)
        engine = loading.engine
        world.wait_for(lambda: "kernels: " in loading.said, timeout=60)
        loading.send(signal.SIGKILL)
        assert psutil.wait_procs([engine], timeout=30) == ([engine], [])
    finally:
        loading.close()
    with (
        running(slow.folder, tmp_path) as replica,
        httpx.stream("POST", f"{replica.url}/v1/completions", json=ENDLESS, timeout=60) as answer,
    ):
        next(answer.iter_lines())
        engine = replica.engine
        replica.send(signal.SIGKILL)
        assert psutil.wait_procs([engine], timeout=30) == ([engine], [])


def test_the_end_comes_within_its_bound_whatever_runs(slow: world.TinyModel, tmp_path: Path) -> None:
    with (
        running(slow.folder, tmp_path, "--shutdown-seconds", "1") as replica,
        httpx.stream("POST", f"{replica.url}/v1/completions", json=ENDLESS, timeout=60) as answer,
    ):
        next(answer.iter_lines())
        engine = replica.engine
        replica.send(signal.SIGTERM)
        assert replica.process.wait(timeout=30) == 0
        assert not engine.is_running()
        assert "ending: running requests may take 1 s" in replica.said


def test_what_cannot_start_says_why_and_leaves_nothing(tiny: world.TinyModel, tmp_path: Path) -> None:
    replica = ReplicaProcess(tiny.folder, tmp_path, "--pool-bytes", "1000")
    try:
        assert replica.process.wait(timeout=60) == 2
        assert "`--pool-bytes` must be at least" in replica.said
        assert "Traceback" not in replica.said
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            other = ReplicaProcess(tiny.folder, tmp_path, "--port", port)
            try:
                assert other.process.wait(timeout=60) == 2
                assert "must be free" in other.said
            finally:
                other.close()
    finally:
        replica.close()
