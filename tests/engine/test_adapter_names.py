"""Tensors that other tools name otherwise, and files beside an adapter: nothing is guessed, nothing is ignored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import engine_world as world
import pytest
import torch
from safetensors.torch import load_file, save_file
from tenantry_engine.adapters.base import Base, weights_of
from tenantry_engine.adapters.check import check
from tenantry_engine.config import LoraConfig
from tenantry_engine.digest import folder_blob, folder_digest
from tenantry_engine.errors import AdapterError
from tenantry_engine.loader import Weights
from tenantry_engine.models import load_model

TARGETS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def base(tiny: world.TinyModel) -> Base:
    with Weights(tiny.folder, torch.float32) as weights:
        model = load_model(weights)
    return Base(
        model.lora_shape, model.kv_shape.page_elems, torch.float32, 100, True, weights_of(tiny.folder)
    )


@pytest.fixture(scope="module")
def good(tiny: world.TinyModel) -> Path:
    return tiny.adapter("names", 77, r=4, target_modules=TARGETS)


def refusal(
    good: Path, target: Path, base: Base, tensors: dict[str, torch.Tensor], targets: list[str] = TARGETS
) -> AdapterError:
    """What the check says of the adapter with other tensors."""
    target.mkdir()
    config = json.loads((good / "adapter_config.json").read_text()) | {"target_modules": targets}
    (target / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, str(target / "adapter_model.safetensors"))
    with pytest.raises(AdapterError) as caught:
        check(memoryview(b"".join(folder_blob(target))), base, LoraConfig())
    return caught.value


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix(PREFIX),
        lambda name: name.replace(PREFIX, "base_model.model.language_model.", 1),
        lambda name: name.replace(PREFIX + "model.", PREFIX, 1),
        lambda name: name.replace(PREFIX, "base_model.model.model.", 1),
        lambda name: name.replace(PREFIX, "model.", 1),
        lambda name: name.replace(".lora_A.weight", ".lora_A.default.weight"),
        lambda name: name.replace("layers.", "h."),
        lambda name: name.upper(),
    ],
    ids=["none", "of a larger model", "shorter", "longer", "another", "adapter's name", "other tree", "capitals"],
)  # fmt: skip
def test_tensors_under_another_prefix_are_refused(
    good: Path, tmp_path: Path, base: Base, rename: Callable[[str], str]
) -> None:
    """All of them, and a single one among good ones: it would have been silence before, and the base's answer."""
    tensors = tensors_of(good)
    everything = refusal(good, tmp_path / "all", base, {rename(n): t for n, t in tensors.items()})
    assert everything.reason in ("InvalidTensors", "BaseModelMismatch")
    assert "adapter_model.safetensors`" in everything.message or "must match a module" in everything.message
    chosen = next(name for name in tensors if "lora_A" in name)
    refusal(good, tmp_path / "one", base, {(rename(n) if n == chosen else n): t for n, t in tensors.items()})
    beside = tensors | {rename(chosen): tensors[chosen].clone()}
    refusal(good, tmp_path / "beside", base, beside)


@pytest.mark.parametrize(
    ("fused", "parts"), [("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))]
)  # fmt: skip
def test_projections_fused_by_another_tool_are_refused_by_name(
    good: Path, tmp_path: Path, base: Base, fused: str, parts: tuple[str, ...]
) -> None:
    """One A for three layers is no adapter of a base that has three: with its own target or under the parts' names."""
    tensors = {}
    for name, tensor in tensors_of(good).items():
        first, *others = parts
        if f".{first}." in name:
            joined = [tensor]
            if "lora_B" in name:
                joined += [tensors_of(good)[name.replace(first, other)] for other in others]
            tensors[name.replace(first, fused)] = torch.cat(joined)
        elif not any(f".{part}." in name for part in parts):
            tensors[name] = tensor
    kept = [target for target in TARGETS if target not in parts]
    for label, targets in (("own", [*kept, fused]), ("parts", TARGETS)):
        error = refusal(good, tmp_path / label, base, tensors, targets)
        assert error.reason == "BaseModelMismatch"
        assert fused in error.message
        assert "must match a module of the base model" in error.message


def test_files_beside_an_adapter_change_nothing(good: Path, tmp_path: Path, base: Base) -> None:
    """Training tools copy the base's tokenizer beside an adapter: the two files of PEFT are all that is read."""
    folder = tmp_path / "crowded"
    shutil.copytree(good, folder)
    (folder / "added_tokens.json").write_text('{"<|im_start|>": 1, "<tool_call>": 99999}')
    (folder / "tokenizer.json").write_text("no tokenizer")
    (folder / "special_tokens_map.json").write_bytes(b"\x80")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    assert folder_digest(folder) == folder_digest(good)
    checked = [check(memoryview(b"".join(folder_blob(f))), base, LoraConfig()) for f in (good, folder)]
    assert checked[0].tensors == checked[1].tensors
