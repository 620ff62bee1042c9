"""Logits equal PEFT's in every configuration that PEFT can write and this engine serves, all of them in one batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_world as world
import pytest
import torch
from safetensors.torch import load_file, save_file
from tenantry_engine.adapters.base import Base, weights_of
from tenantry_engine.adapters.check import check
from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import LoraConfig
from tenantry_engine.digest import folder_blob, folder_digest
from tenantry_engine.errors import AdapterError
from tenantry_engine.executor import Executor
from tenantry_engine.loader import Weights
from tenantry_engine.models import load_model
from tenantry_engine.rows import Rows
from tenantry_kernels import PAGE_TOKENS, PagedAdapter

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[7], [1, 10, 20, 30, 5], list(range(40, 75)), [300, 301, 2, 0, 299]]

CONFIGS: dict[str, dict[str, Any]] = {
    "embed": {"r": 4, "target_modules": ["embed_tokens"]},
    "head": {"r": 4, "target_modules": ["lm_head"]},
    "embed-head-odd": {
        "r": 5, "lora_alpha": 3, "target_modules": ["embed_tokens", "lm_head", "v_proj"],
        "rank_pattern": {"lm_head": 1, "embed_tokens": 33}, "alpha_pattern": {"lm_head": 4},
    },
    "everything-rslora": {
        "r": 6, "lora_alpha": 9, "use_rslora": True, "target_modules": [*ALL, "embed_tokens", "lm_head"],
        "rank_pattern": {r"layers\.1\..*": 3, "lm_head": 7}, "alpha_pattern": {"embed_tokens": 2},
    },
    "tied": {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "tied-head": {"r": 3, "target_modules": ["lm_head", "up_proj"], "ensure_weight_tying": True},
    "regex-with-head": {"r": 2, "target_modules": r"lm_head|model\.layers\.\d+\.mlp\.(up|down)_proj"},
    "all-linear": {"r": 8, "target_modules": "all-linear"},
    "excluded": {"r": 4, "target_modules": ALL, "exclude_modules": r".*k_proj|model\.layers\.0\.mlp.*"},
    "layers": {"r": 4, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "layers-pattern": {
        "r": 4, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0], "layers_pattern": "layers",
    },
    "path-beside-layers": {
        "r": 4, "target_modules": ["model.layers.0.mlp.down_proj", "v_proj"], "layers_to_transform": [1],
    },
    "pattern-order": {
        "r": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"layers\.1\..*": 9, "v_proj": 2},
    },
    "rank-1": {"r": 1, "lora_alpha": 1.5, "target_modules": ALL},
    "rank-31": {"r": 31, "target_modules": ALL},
    "fan-in": {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "fan_in_fan_out": True},
    "gaussian": {
        "r": 64, "target_modules": ["q_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.3, "task_type": None,
    },
}  # fmt: skip
UNTIED = ("embed", "head", "embed-head-odd", "everything-rslora", "tied")


@dataclass
class Bench:
    """A model with its pool, adapters in pages, and a way to see logits."""

    model: world.TinyModel
    store: BlobStore
    dtype: torch.dtype = torch.float32
    paged: dict[str, PagedAdapter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with Weights(self.model.folder, self.dtype) as weights:
            network = load_model(weights)
        network.prepare(128)
        self.executor = Executor(network, 1500, "cpu", positions=128, max_rank=64)
        self.base = Base(
            network.lora_shape, network.kv_shape.page_elems, self.dtype, 1000,
            tied=network.config.tied, weight=weights_of(self.model.folder),
        )  # fmt: skip
        self._next = 1

    def load(self, name: str, folder: Path, host_bytes: int = 0) -> PagedAdapter:
        """Checks a folder and fills pages with it, in an order that is not the rising one."""
        digest = folder_digest(folder)
        blob = b"".join(folder_blob(folder))
        with self.store.receive(digest, len(blob)) as incoming:
            incoming.write(blob)
            incoming.commit()
        checked = check(memoryview(blob), self.base, LoraConfig())
        pages = list(range(self._next, self._next + checked.plan.pages))[::-1]
        self._next += len(pages)
        loader = PageLoader(self.store, self.executor.memory, host_bytes)
        loader.fill(digest, checked, pages, loader.settled())
        self.paged[name] = loader.place(checked, pages)
        return self.paged[name]

    def logits(self, asked: list[tuple[str | None, list[int]]]) -> list[torch.Tensor]:
        """Of every position of every prompt `[n, vocab]`, in one batch."""
        rows = Rows([], [], [], [], [0], [], [], [], [])
        page = self._next
        for name, prompt in asked:
            count = -(-len(prompt) // PAGE_TOKENS)
            first = page * PAGE_TOKENS
            rows.tokens.extend(prompt)
            rows.positions.extend(range(len(prompt)))
            rows.slots.extend(range(first, first + len(prompt)))
            rows.tables.append(list(range(page, page + count)))
            rows.starts.append(len(rows.tokens))
            rows.lengths.append(len(prompt))
            rows.runs.append((name, len(prompt)))
            page += count
        rows.sampled.extend(range(len(rows.tokens)))
        [found] = self.executor.run(rows, self.paged.__getitem__)
        return list(found.split([len(prompt) for _, prompt in asked]))


@pytest.fixture(scope="module", params=[True, False], ids=["tied-base", "untied-base"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Every configuration loaded; some twice, so that segments are of several rows and of one."""
    folder = tmp_path_factory.mktemp("parity")
    (folder / "model").mkdir()
    model = world.TinyModel.make(folder / "model", seed=5, tie_word_embeddings=request.param)
    made = Bench(model, BlobStore(folder / "data"))
    for seed, (name, config) in enumerate(CONFIGS.items()):
        if request.param or name in UNTIED:
            made.load(name, model.adapter(name, seed, scale=0.1, **config))
    return made


def test_logits_equal_pefts_alone_and_in_one_batch(bench: Bench) -> None:
    tiny, plain = bench.model, bench.model.reference()
    names = [None, *bench.paged]
    asked = [(name, PROMPTS[1 + index % 3]) for index, name in enumerate(names)]
    asked += [(name, PROMPTS[0]) for name in names]
    found = dict(zip([(name, len(prompt)) for name, prompt in asked], bench.logits(asked), strict=True))
    for name in names:
        model = plain if name is None else world.with_adapter(tiny.folder, tiny.adapters[name])
        for _, prompt in [pair for pair in asked if pair[0] == name]:
            mine = found[name, len(prompt)]
            with torch.inference_mode():
                want, base = (m(torch.tensor([prompt])).logits[0] for m in (model, plain))
            torch.testing.assert_close(
                mine, want, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
            [alone] = bench.logits([(name, prompt)])
            assert torch.equal(alone, mine), f"{name} must not depend on the batch"
            if name is not None and len(prompt) > 1:
                assert (mine - base).abs().max() > 0.01, (
                    f"{name} must change the answer for this to mean anything"
                )


def test_the_host_tier_fills_pages_with_the_same_bytes(bench: Bench) -> None:
    name = "everything-rslora"
    [direct] = bench.logits([(name, PROMPTS[2])])
    bench.load("again", bench.model.adapters[name], host_bytes=1 << 24)
    [copied] = bench.logits([("again", PROMPTS[2])])
    assert torch.equal(direct, copied)


def edited(bench: Bench, name: str, target: Path, edit: Any) -> Path:
    source = bench.model.adapters[name]
    tensors = load_file(str(source / "adapter_model.safetensors"))
    edit(tensors)
    target.mkdir()
    save_file({k: v.clone() for k, v in tensors.items()}, str(target / "adapter_model.safetensors"))
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    return target


def test_weights_of_the_base_must_be_the_bases_own(bench: Bench, tmp_path: Path) -> None:
    name = "base_model.model.model.embed_tokens.base_layer.weight"

    def narrow(t: dict[str, torch.Tensor]) -> None:
        assert name in t, "PEFT writes the embeddings of the base beside their LoRA"
        t[name] = t[name].half()

    bench.load("half", edited(bench, "embed", tmp_path / "half", narrow))  # the base's own, as half floats
    for label, edit in {
        "changed": lambda t: t[name].view(-1)[-1:].add_(1),
        "longer": lambda t: t.update({name: torch.cat([t[name], t[name][:1]])}),
        "elsewhere": lambda t: t.update({name.replace("embed_tokens", "layers.9.mlp.up_proj"): t[name]}),
    }.items():
        folder = edited(bench, "embed", tmp_path / label, edit)
        with pytest.raises(AdapterError, match=r"base_layer.weight") as caught:
            bench.load(label, folder)
        assert caught.value.reason == "BaseModelMismatch"


@pytest.mark.parametrize(
    ("label", "text", "edit"),
    [
        (
            "added-tokens", "added vocabulary is not served",
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 310)}),
        ),
        (
            "resized", "whole vocabulary is not served",
            lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(310, 64)}),
        ),
        (
            "token-deltas", "would be ignored",
            lambda t: t.update({"base_model.model.model.embed_tokens.trainable_tokens_delta": torch.zeros(1, 64)}),
        ),
        (
            "named-as-linear", "named as PEFT does",
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(4, 302)}),
        ),
    ],
)  # fmt: skip
def test_an_added_vocabulary_is_refused_by_name(
    bench: Bench, tmp_path: Path, label: str, text: str, edit: Any
) -> None:
    with pytest.raises(AdapterError, match=text):
        bench.load(label, edited(bench, "embed", tmp_path / label, edit))


def test_a_tied_head_must_have_the_weights_of_the_embeddings(bench: Bench, tmp_path: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        t["base_model.model.lm_head.lora_A.weight"] += 1

    if not bench.base.tied:
        return
    with pytest.raises(AdapterError, match="ensure_weight_tying"):
        bench.load("torn", edited(bench, "tied", tmp_path / "torn", change))
