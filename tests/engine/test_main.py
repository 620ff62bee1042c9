"""The command line: what is wrong is said with the flag and the remedy; a process starts, serves and ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engine_world as world
import pytest
from tenantry_engine.config import EngineConfig, configure
from tenantry_engine.digest import model_digest
from tenantry_engine.errors import EngineError
from tenantry_engine.memory import available_bytes, pool_budget, size_pool
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


def test_model_digest_covers_which_weights_are_read(tiny: world.TinyModel, tmp_path: Path) -> None:
    folder = copy_of(tiny.folder, tmp_path / "m")
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    digests = [model_digest(folder)]
    index = folder / "model.safetensors.index.json"
    for name in ("model.safetensors", "other.safetensors"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        digests.append(model_digest(folder))
    assert len(set(digests)) == 3
    index.unlink()
    assert model_digest(folder) == digests[0]


def test_pool_fits_the_memory_and_one_request(tiny: world.TinyModel, tmp_path: Path) -> None:
    replica = Replica.load(config(tiny.folder, tmp_path), None)
    model = replica.engine._runner.model
    common = {
        "shape": model.lora_shape, "page_elems": model.kv_shape.page_elems, "page_bytes": 8192,
        "lora": replica.engine.config.lora, "max_model_len": 500, "slots": 4, "pool_bytes": None,
    }  # fmt: skip
    ample = size_pool(**common, budget=1 << 40)
    assert ample.pages == 4 * (ample.sequence_pages + ample.adapter_pages)
    scarce = size_pool(**common, budget=1)
    assert scarce.pages == ample.sequence_pages + ample.adapter_pages
    tight = size_pool(**common, budget=8192 * (scarce.pages + 3))
    assert tight.pages == scarce.pages + 3


def test_pages_on_an_accelerator_are_counted_by_its_own_free_memory() -> None:
    asked = []

    def of(device: str) -> tuple[int, int]:
        asked.append(device)
        return 10 << 30, 80 << 30

    assert pool_budget("cuda:1", 4, of) == 8 << 30, (
        "each rank has a device of its own; the host's size is no matter"
    )
    assert asked == ["cuda:1"]
    assert pool_budget("cpu", 1, of) < available_bytes()
    assert pool_budget("cpu", 1 << 20, of) < 1 << 30, "on a CPU the ranks share one memory"
    assert asked == ["cuda:1"]


def test_identities_or_an_open_door_must_be_chosen(tiny: world.TinyModel) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tenantry_engine.main", "--model", str(tiny.folder)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "`--identity-dir`" in done.stderr
    assert "Traceback" not in done.stderr
