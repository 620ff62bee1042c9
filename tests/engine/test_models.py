"""Every family's logits are those of transformers, and what is not served is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import engine_world as world
import families
import pytest
import torch
from tenantry_engine.errors import EngineError
from tenantry_engine.executor import Executor
from tenantry_engine.loader import Weights
from tenantry_engine.models import FAMILIES, load_model
from tenantry_engine.models.config import read_decoder
from tenantry_engine.rows import Rows
from torch import Tensor

FIRST, SECOND = list(range(40, 81)), [7, 3, 250, 9, 9, 100, 30, 2, 5]


def logits_in_pieces(folder: Path, dtype: torch.dtype, prompts: list[list[int]], piece: int) -> list[Tensor]:
    """float32 logits [tokens, vocab] of each prompt: all of them together, so many tokens of each in a step."""
    with Weights(folder, dtype) as weights:
        model = load_model(weights)
    model.prepare(64)
    executor = Executor(model, 4 * len(prompts) + 1, "cpu", positions=64, max_rank=1)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for begin in range(0, max(map(len, prompts)), piece):
        rows, whose = Rows([], [], [], [], [0], [], [], [], []), []
        for index, prompt in enumerate(prompts):
            part = prompt[begin : begin + piece]
            if part:
                end, first = begin + len(part), rows.starts[-1]
                pages = [1 + 4 * index + n for n in range(4)]
                rows.tokens.extend(part)
                rows.positions.extend(range(begin, end))
                rows.slots.extend(pages[at // 16] * 16 + at % 16 for at in range(begin, end))
                rows.tables.append(pages)
                rows.starts.append(first + len(part))
                rows.lengths.append(end)
                rows.runs.append((None, len(part)))
                rows.scored.append((first, len(part)))
                whose.append(index)
        parts = list(executor.run(rows, lambda name: pytest.fail(f"no adapter {name}")))
        for index, part in zip(whose, parts, strict=True):
            found[index].append(part)
    return [torch.cat(parts) for parts in found]


@torch.no_grad()
def expected(folder: Path, prompt: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    model = world.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    logits: Tensor = model(torch.tensor([prompt])).logits[0].float()
    return logits


@pytest.mark.parametrize("piece", [1, 17, 64])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_are_those_of_transformers(family: str, piece: int, models: families.Models) -> None:
    folder = models.folder(family)
    found = logits_in_pieces(folder, torch.float32, [FIRST, SECOND], piece)
    for prompt, logits in zip([FIRST, SECOND], found, strict=True):
        torch.testing.assert_close(logits, expected(folder, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_half_precision_stays_near(
    family: str, dtype: torch.dtype, bound: float, models: families.Models
) -> None:
    """Against fp32: within a share of the logits' own spread, and no further than twice what transformers is off."""
    folder = models.folder(family)
    [logits] = logits_in_pieces(folder, dtype, [FIRST], 17)
    exact = expected(folder, FIRST)
    off = float((logits - exact).square().mean().sqrt() / exact.std())
    theirs = float((expected(folder, FIRST, dtype) - exact).square().mean().sqrt() / exact.std())
    assert off < max(bound, 2 * theirs)


def test_smollm2_logprobs(smollm2: Path) -> None:
    """Its logits reach 33, where fp32 itself is good for some 1e-4: what is compared is what a client is told."""
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    [logits] = logits_in_pieces(smollm2, torch.float32, [prompt], 5)
    torch.testing.assert_close(
        logits.log_softmax(-1), expected(smollm2, prompt).log_softmax(-1), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": 41}),
        ("qwen2", {"sliding_window": 41, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"sliding_window": 41, "use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_a_sliding_window_is_the_longest_sequence(
    family: str, fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the window every token sees all others, so the answer is exact there; beyond it nothing is served."""
    folder = families.make(tmp_path / "m", family, **fields)
    with caplog.at_level(logging.WARNING), Weights(folder, torch.float32) as weights:
        assert load_model(weights).max_positions == 41
    assert "`sliding_window`" in caplog.text
    assert "VLLM" in caplog.text
    [logits] = logits_in_pieces(folder, torch.float32, [FIRST], 64)
    torch.testing.assert_close(logits, expected(folder, FIRST), atol=1e-4, rtol=0)
    longer = [*FIRST, 5]  # transformers itself tells the difference from here on
    whole = families.make(tmp_path / "w", family)
    same = torch.allclose(expected(folder, longer)[-1], expected(whole, longer)[-1], atol=1e-4)
    assert not same, "the window must matter for this test to mean anything"


RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def read(family: str = "LlamaForCausalLM", **fields: Any) -> Any:
    return read_decoder({**RAW, **fields}, FAMILIES[family])


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"quantization_config": {"bits": 4}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"attn_logit_softcapping": 30.0},
        {"residual_multiplier": 0.22},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
        {"num_experts": 8},
    ],
)
def test_what_would_change_the_answer_is_refused_with_a_way_out(fields: dict[str, Any]) -> None:
    [name] = fields
    nested = fields[name]
    with pytest.raises(EngineError, match=r"`spec\.engine\.type: VLLM`") as error:
        read(**fields)
    words = [name, *nested] if isinstance(nested, dict) else [name]
    assert any(f"`{word}" in str(error.value) or f".{word}`" in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineError, match=f"`{field}` in config.json must be"):
        read(**fields)


def test_both_spellings_of_rotary_fields() -> None:
    rule = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **rule})
    new = read(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **rule})
    assert old.rope_theta == new.rope_theta == 5e5
    assert {**new.rope_scaling, "rope_theta": None} == {**old.rope_scaling, "rope_theta": None}


def test_fields_without_meaning_and_empty_ones_are_no_matter() -> None:
    assert read(
        torch_dtype="bfloat16", pretraining_tp=1, use_cache=True, new_thing=None, other=False, more={}
    )
    assert read("Qwen2ForCausalLM", sliding_window=4096, use_sliding_window=False).positions == 512
    assert read("MistralForCausalLM", sliding_window=None).positions == 512


@pytest.mark.parametrize("names", [["MambaForCausalLM"], [], None, ["LlamaForCausalLM", "Other"], "Llama"])
def test_other_architectures_go_to_the_other_driver(names: object, tmp_path: Path) -> None:
    folder = families.make(tmp_path / "m", "llama")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps({**json.loads(text), "architectures": names}))
    with (
        Weights(folder, torch.float32) as weights,
        pytest.raises(EngineError, match=r"`spec\.engine\.type: VLLM`"),
    ):
        load_model(weights)
