"""A model's folder is read as its index says, only the bytes that are needed, and never beyond the folder."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from tenantry_engine.digest import INDEX_FILE
from tenantry_engine.errors import EngineError
from tenantry_engine.loader import Weights, read_config, weight_files
from tenantry_engine.models import load_model
from transformers import AutoModelForCausalLM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    tensors = {"a": torch.arange(24.0).view(6, 4), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, path / "model.safetensors")
    return path


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_only_the_asked_part(folder: Path) -> None:
    shares: list[float] = []
    with Weights(folder, torch.float32, progress=shares.append) as weights:
        whole = weights.get("a", 6, 4)
        assert torch.equal(weights.get("a", 6, 4, rows=(2, 5)), whole[2:5])
        assert torch.equal(weights.get("a", 6, 4, columns=(1, 3)), whole[:, 1:3])
        assert weights.get("b", 4).dtype == torch.float32
        assert "b" in weights
        assert "c" not in weights
        weights.check_all_read()
    assert shares == [0.5, 0.5, 0.5, 1.0]


def test_what_is_wrong_is_named(folder: Path) -> None:
    with Weights(folder, torch.float32) as weights:
        with pytest.raises(EngineError, match="`c`; it is missing"):
            weights.get("c", 1)
        with pytest.raises(EngineError, match=r"`a` must have shape \[4, 6\], not \[6, 4\]"):
            weights.get("a", 4, 6)
        with pytest.raises(EngineError, match=r"2 tensors that this model family does not use.*VLLM"):
            weights.check_all_read()


def test_quantised_weights_go_to_the_other_driver(folder: Path) -> None:
    save_file({"q": torch.ones(4, dtype=torch.int8)}, folder / "model.safetensors")
    with Weights(folder, torch.float32) as weights, pytest.raises(EngineError, match=r"`q` must be of.*VLLM"):
        weights.get("q", 4)


def test_shards_are_those_of_the_index(models: families.Models, tmp_path: Path) -> None:
    """Published folders hold the same weights twice under other names: those are not read."""
    source, folder = models.folder("llama"), tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(
        folder, max_shard_size="40KB"
    )
    shards = weight_files(folder)
    assert len(shards) > 2
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert weight_files(folder) == shards
    with Weights(folder, torch.float32) as sharded, Weights(source, torch.float32) as whole:
        load_model(sharded)
        for name, tensor in load_file(source / "model.safetensors").items():
            assert torch.equal(sharded.get(name, *tensor.shape), whole.get(name, *tensor.shape))


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "model.bin", "", 7,
     ".hidden.safetensors", "..", "model.safetensors\0.safetensors"],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_alone(folder: Path, name: object) -> None:
    (folder.parent / "other").mkdir()
    save_file({"a": torch.zeros(1)}, folder.parent / "other" / "model.safetensors")
    index(folder, {"a": name})
    with pytest.raises(EngineError, match="`weight_map`"):
        weight_files(folder)


def test_a_broken_index_is_refused(folder: Path) -> None:
    for broken in ({}, [], None, "model.safetensors"):
        index(folder, broken)
        with pytest.raises(EngineError, match="`weight_map`"):
            weight_files(folder)
    index(folder, {"a": "gone.safetensors"})
    with pytest.raises(EngineError, match=r"gone\.safetensors.*is missing"):
        weight_files(folder)
    (folder / INDEX_FILE).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(EngineError, match="stands twice"):
        weight_files(folder)
    (folder / INDEX_FILE).write_text("[" * 100_000)
    with pytest.raises(EngineError, match=INDEX_FILE):
        weight_files(folder)


def test_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "part-2.safetensors")
    with pytest.raises(EngineError, match="`a` stands in two files"):
        Weights(folder, torch.float32)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(EngineError, match=r"at least one \*\.safetensors"):
        Weights(folder, torch.float32)


@pytest.mark.parametrize("cut", [0, 4, 40, -1])
def test_damaged_files_are_named(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(EngineError, match=r"model\.safetensors is damaged"):
        Weights(folder, torch.float32)


def test_config_must_be_sound(folder: Path) -> None:
    for text in (None, "{", "[]", '{"a": 1, "a": 2}'):
        if text is not None:
            (folder / "config.json").write_text(text)
        with pytest.raises(EngineError, match=r"`--model` must .*config\.json"):
            read_config(folder)
