"""The command line: what is wrong is said with the flag and the remedy; a process starts, serves and ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import engine_world as world
import httpx
import pytest
from tenantry_engine.config import EngineConfig, configure
from tenantry_engine.digest import model_digest
from tenantry_engine.errors import EngineError
from tenantry_engine.memory import size_pool
from tenantry_engine.options import parser
from tenantry_engine.replica import Replica


def config(model: Path, tmp_path: Path, *flags: str) -> EngineConfig:
    required = ["--model", str(model), "--data-dir", str(tmp_path / "d"), "--dtype", "float32"]
    return configure(parser().parse_args([*required, *flags]))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--slots", "0"], "`--slots`"),
        (["--max-rank", "0"], "`--max-rank`"),
        (["--target-modules", "q_proj,nothing"], "`--target-modules`"),
        (["--step-tokens", "4"], "`--step-tokens`"),
        (["--max-model-len", "100000"], "`--max-model-len`"),
        (["--pool-bytes", "1000"], "`--pool-bytes`"),
        (["--model-digest", "sha256:" + "0" * 64], "`--model-digest`"),
    ],
)
def test_wrong_flags_are_named(tiny: world.TinyModel, tmp_path: Path, flags: list[str], text: str) -> None:
    with pytest.raises(EngineError, match=text):
        Replica.load(config(tiny.folder, tmp_path, *flags), None)


def copy_of(model: Path, target: Path, **change: object) -> Path:
    target.mkdir()
    for path in model.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    raw = json.loads((target / "config.json").read_text()) | change
    (target / "config.json").write_text(json.dumps(raw))
    return target


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "VLLM"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": 1}, "does not use"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"vocab_size": 999}, "shape"),
    ],
)
def test_models_that_are_not_served_are_refused_clearly(
    tiny: world.TinyModel, tmp_path: Path, change: dict[str, object], text: str
) -> None:
    folder = copy_of(tiny.folder, tmp_path / "m", **change)
    with pytest.raises(EngineError, match=text):
        Replica.load(config(folder, tmp_path), None)


def test_model_digest_covers_names_and_contents(tiny: world.TinyModel, tmp_path: Path) -> None:
    folder = copy_of(tiny.folder, tmp_path / "m")
    (folder / "config.json").write_bytes((tiny.folder / "config.json").read_bytes())
    first = model_digest(folder)
    assert first == model_digest(tiny.folder)
    (folder / "README.md").write_text("no part of the model")
    assert model_digest(folder) == first
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert model_digest(folder) != first


def test_pool_fits_the_memory_and_one_request(tiny: world.TinyModel, tmp_path: Path) -> None:
    replica = Replica.load(config(tiny.folder, tmp_path), None)
    model = replica.engine._runner.model
    common = {
        "shape": model.lora_shape, "page_elems": model.kv_shape.page_elems, "page_bytes": 8192,
        "lora": replica.engine.config.lora, "max_model_len": 500, "slots": 4, "pool_bytes": None,
    }  # fmt: skip
    ample = size_pool(**common, available=1 << 40)
    assert ample.pages == 4 * (ample.sequence_pages + ample.adapter_pages)
    scarce = size_pool(**common, available=1)
    assert scarce.pages == ample.sequence_pages + ample.adapter_pages


def test_a_process_from_start_to_end(tiny: world.TinyModel, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "tone").symlink_to(tiny.adapter("one", 61, r=8, target_modules="all-linear"))
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.bind(("127.0.0.1", 0))
        port, admin = first.getsockname()[1], second.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "tenantry_engine.main", "--model", str(tiny.folder), "--model-name", "base",
         "--dev-open", "--port", str(port), "--admin-port", str(admin), "--data-dir", str(tmp_path / "data"),
         "--adapters", str(adapters), "--dtype", "float32"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:

        def ready() -> bool:
            assert process.poll() is None
            try:
                listed = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).json()
            except httpx.TransportError:
                return False
            return [model["id"] for model in listed["data"]] == ["base", "tone"]

        world.wait_for(ready, timeout=120)
        body = {
            "model": "tone",
            "messages": [{"role": "user", "content": "the"}],
            "max_tokens": 400,
            "ignore_eos": True,
        }
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream(
            "POST", url, json={**body, "ignore_eos": True, "stream": True}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]", "running requests finish first"
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        for word in (
            "kernels: ",
            "weights: ",
            "pages: ",
            "adapter: tone sha256:",
            "ready after",
            "--dev-open",
        ):
            assert word in said
    finally:
        process.kill()
        process.wait()


def test_identities_or_an_open_door_must_be_chosen(tiny: world.TinyModel) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tenantry_engine.main", "--model", str(tiny.folder)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "`--identity-dir`" in done.stderr
    assert "Traceback" not in done.stderr
