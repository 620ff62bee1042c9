"""Tiny random models of every family, adapters of every kind, and transformers + PEFT as the oracle for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import engine_world as world
import torch
from tenantry_engine.work import Event
from tokenizers import Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Cell = tuple[str, str, str, int]
"""Family, adapter kind, batch mix, tensor-parallel size."""

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (
        LlamaConfig, LlamaForCausalLM,
        {"tie_word_embeddings": False, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "mistral": (
        MistralConfig, MistralForCausalLM, {"tie_word_embeddings": False, "sliding_window": None},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
}  # fmt: skip

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "mlp, odd rank": {"r": 3, "lora_alpha": 5, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "rsLoRA": {"r": 16, "use_rslora": True, "lora_alpha": 6, "target_modules": "all-linear"},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"],
        "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"o_proj": 20},
    },
    "vocabulary": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
}  # fmt: skip

TOLERANCE = 1e-4
"""Of a logprob in fp32."""

TIE = 1e-3
"""Logits closer than this may be chosen in either order."""


class Models:
    """Folders, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = cache(self._folder)
        self.adapter = cache(self._adapter)
        self.oracle = cache(self._oracle)

    def kinds(self, family: str) -> list[str]:
        """Adapter kinds of a family: with a tied head, LoRA of embeddings and head is another matter."""
        tied = FAMILIES[family][2]["tie_word_embeddings"]
        return [kind for kind in ADAPTERS if not (tied and kind == "vocabulary")]

    def adapters(self, family: str) -> list[tuple[str, Path]]:
        """Served name (a number by kind) and folder of each kind."""
        return [(served(kind), self.adapter(family, kind)) for kind in self.kinds(family)]

    def _folder(self, family: str, **overrides: Any) -> Path:
        return make(self._root / f"{family}{len(list(self._root.iterdir()))}", family, **overrides)

    def _adapter(self, family: str, kind: str) -> Path:
        folder = self._root / f"{family}-{served(kind)}"
        seed = 100 + list(ADAPTERS).index(kind)
        return world.make_adapter(self.folder(family), folder, seed, scale=0.15, **ADAPTERS[kind])

    def _oracle(self, family: str, kind: str) -> Any:
        """transformers, with PEFT's adapter unless `kind` is `base`."""
        if kind == "base":
            return world.AutoModelForCausalLM.from_pretrained(self.folder(family), dtype=torch.float32).eval()
        return world.with_adapter(self.folder(family), self.adapter(family, kind))


def make(folder: Path, family: str, **overrides: Any) -> Path:
    """A random model of two layers with four heads, two of keys and values, and a tokenizer."""
    folder.mkdir(parents=True)
    world.make_tokenizer(folder)
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(len(family))
    config = config_class(
        **{
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.3,
            "vocab_size": Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
            "bos_token_id": 1, "eos_token_id": 2, **own, **overrides,
        }
    )  # fmt: skip
    model = model_class(config).float()
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes with them
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.5))
    model.save_pretrained(folder)
    return folder


def served(kind: str) -> str:
    """The served name of an adapter kind."""
    return "base" if kind == "base" else f"kind-{list(ADAPTERS).index(kind)}"


class ScoringClient(world.Client):
    """Keeps the logprob of every token too."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.logprobs: dict[str, list[float]] = {}

    def take(self, event: Event) -> None:
        super().take(event)
        if event.scores is not None:
            self.logprobs.setdefault(event.sequence.id, []).append(event.scores.logprob)


@torch.no_grad()
def assert_right(oracle: Any, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    """Every token is the oracle's most likely one (or as likely, within `TIE`) and has its logprob there."""
    logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    own = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    worst = float((logits.max(-1).values - own).max())
    assert worst <= TIE, f"another token is more likely, by {worst}"
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    worst = float((expected - torch.tensor(logprobs)).abs().max())
    assert worst <= TOLERANCE, f"a logprob is off by {worst}"


def table(cells: Iterable[Cell]) -> list[str]:
    """The matrix as lines of text: a row for each family and adapter kind, a column for each mix and size."""
    cells = set(cells)
    columns = sorted({(mix, tp) for _, _, mix, tp in cells})
    rows = [(f, k) for f in FAMILIES for k in ("base", *ADAPTERS) if any(c[:2] == (f, k) for c in cells)]
    heads = [f"{mix} tp={tp}" for mix, tp in columns]
    lines = [f"{'family':10}{'adapter':16}" + "".join(f"{head:>14}" for head in heads)]
    for family, kind in rows:
        marks = ["right" if (family, kind, *column) in cells else "-" for column in columns]
        lines.append(f"{family:10}{kind:16}" + "".join(f"{mark:>14}" for mark in marks))
    lines.append(f"{len(cells)} cells: greedy tokens equal, logprobs within {TOLERANCE:g} in fp32")
    return lines
