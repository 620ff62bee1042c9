"""The engine answers as transformers + PEFT do, token for token in fp32: alone, in any mix, and under churn."""

from __future__ import annotations

import random
from pathlib import Path

import engine_world as world
import pytest
import torch

PROMPTS = [
    [1, 10, 20, 30],
    list(range(40, 75)),
    [7],
    [5, 9, 200, 33, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72],
    [250 - i for i in range(130)],
]

ADAPTERS = {
    "r1-q": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]},
    "r3-odd": {"r": 3, "lora_alpha": 5, "target_modules": ["k_proj", "o_proj", "down_proj"]},
    "r8-attention": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "r16-all": {"r": 16, "lora_alpha": 8, "target_modules": "all-linear"},
    "r32-mlp": {"r": 32, "lora_alpha": 32, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "rslora": {
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "gate_proj"],
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"v_proj": 20, "layers.0.self_attn.q_proj": 3},
    },
    "regex": {"r": 5, "target_modules": r".*layers\.1\.(self_attn\.[qv]_proj|mlp\.down_proj)"},
    "full-path": {"r": 6, "target_modules": ["model.layers.0.self_attn.o_proj", "layers.1.mlp.gate_proj"]},
    "some-layers": {"r": 4, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]},
    "fan-in": {"r": 4, "target_modules": ["q_proj"], "fan_in_fan_out": True},
}


@pytest.fixture(scope="module")
def folders(tiny: world.TinyModel) -> dict[str, Path]:
    return {
        name: tiny.adapter(name, seed, **config) for seed, (name, config) in enumerate(ADAPTERS.items(), 1)
    }


@pytest.fixture(scope="module")
def expected(tiny: world.TinyModel, folders: dict[str, Path]) -> dict[tuple[str, int], list[int]]:
    """Greedy tokens of transformers for every adapter and prompt, 12 each."""
    models = {"base": tiny.reference(), **{n: world.with_adapter(tiny.folder, f) for n, f in folders.items()}}
    return {
        (name, index): world.greedy(model, prompt, 12)
        for name, model in models.items()
        for index, prompt in enumerate(PROMPTS)
    }


def test_the_reference_tells_adapters_apart(expected: dict[tuple[str, int], list[int]]) -> None:
    for index in range(len(PROMPTS)):
        answers = {tuple(expected[name, index]) for name in ["base", *ADAPTERS]}
        assert len(answers) >= len(ADAPTERS) - 1, (
            "adapters must change the answer for this test to mean anything"
        )


def test_each_alone(
    tiny: world.TinyModel,
    folders: dict[str, Path],
    expected: dict[tuple[str, int], list[int]],
    engines: world.Engines,
) -> None:
    client = engines.client(tiny.folder, adapters=folders.items())
    for name in ["base", *folders]:
        for index, prompt in enumerate(PROMPTS):
            [tokens] = client.wait(client.submit(prompt, name, count=12))
            assert tokens == expected[name, index], (name, index)


@pytest.mark.parametrize("step_tokens", [17, 64, 1024])
def test_all_in_one_batch_under_chunked_prefill(
    tiny: world.TinyModel,
    folders: dict[str, Path],
    expected: dict[tuple[str, int], list[int]],
    engines: world.Engines,
    step_tokens: int,
) -> None:
    client = engines.client(tiny.folder, adapters=folders.items(), step_tokens=step_tokens)
    asked = {(n, i): client.submit(p, n, count=12) for n in ["base", *folders] for i, p in enumerate(PROMPTS)}
    client.wait(*asked.values())
    for key, sequence in asked.items():
        assert client.tokens[sequence] == expected[key], key


def test_under_churn_of_load_unload_eviction_and_preemption(
    tiny: world.TinyModel, folders: dict[str, Path], engines: world.Engines
) -> None:
    count, names = 45, ["r16-all", "r32-mlp", "patterns"]
    models = {"base": tiny.reference(), **{n: world.with_adapter(tiny.folder, folders[n]) for n in names}}
    expected = {
        (name, index): world.greedy(model, PROMPTS[index], count)
        for name, model in models.items()
        for index in range(4)
    }
    page = 2 * 2 * 2 * 16 * 16 * 4  # bytes: layers, K and V, KV heads, tokens, head size, fp32
    chosen = [(name, folders[name]) for name in names]
    client = engines.client(
        tiny.folder, adapters=chosen, step_tokens=20, pool_bytes=46 * page, max_model_len=100
    )
    engine = client.engine
    draw = random.Random(4)
    keys = list(expected) * 3
    draw.shuffle(keys)
    asked: list[tuple[tuple[str, int], str]] = []
    for number, key in enumerate(keys):
        tenant = f"t{number % 3}"
        asked.append((key, client.submit(PROMPTS[key[1]], key[0], count=count, tenant=tenant)))
        if number % 16 == 15:  # a name goes once its requests have ended, and comes back with the same bytes
            client.wait(*[sequence for _, sequence in asked])
            world.declare(engine, [(n, f) for n, f in chosen if n != "r16-all"])
            world.wait_for(lambda: "r16-all" not in world.reports(engine))
            world.declare(engine, chosen)
    client.wait(*[sequence for _, sequence in asked])
    for key, sequence in asked:
        assert client.tokens[sequence] == expected[key], key
    assert engine.scheduler.preemptions > 0, "the pool must be small enough for this test to mean anything"
    assert engine.registry.evictions > len(names), "adapters must have been evicted and loaded again"


def test_llama3_rope_and_untied_head(tmp_path: Path, engines: world.Engines) -> None:
    model = world.TinyModel.make(
        tmp_path,
        seed=3,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    client = engines.client(model.folder)
    reference = model.reference()
    for prompt in PROMPTS:
        [tokens] = client.wait(client.submit(prompt, count=12))
        assert tokens == world.greedy(reference, prompt, 12)


def test_smollm2_and_the_example_adapters(smollm2: Path, engines: world.Engines) -> None:
    """The real model in fp32: base and the trained adapters (ranks 4, 8 and 16) mixed in one batch."""
    examples = Path(__file__).resolve().parents[2] / "examples" / "adapters"
    folders = {path.parent.name: path.parent for path in sorted(examples.glob("*/adapter_config.json"))}
    assert len(folders) >= 3
    replica = engines.replica(
        smollm2, adapters=folders.items(), max_model_len=256, slots=8, step_tokens=40, pool_bytes=300 << 20
    )
    client = world.Client(replica.engine)
    prompts = [
        replica.serving._tokenizer.encode_chat([{"role": "user", "content": text}])
        for text in ("What is the capital of France?", "My printer is on fire.")
    ]
    asked = {(n, i): client.submit(p, n, count=10) for n in ["base", *folders] for i, p in enumerate(prompts)}
    client.wait(*asked.values(), timeout=120)
    base = world.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    expected = {("base", i): world.greedy(base, p, 10) for i, p in enumerate(prompts)}
    name, *others = folders
    tuned = world.PeftModel.from_pretrained(base, folders[name], adapter_name=name)
    for other in others:
        tuned.load_adapter(str(folders[other]), adapter_name=other)
    for name in folders:
        tuned.set_adapter(name)
        expected |= {(name, i): world.greedy(tuned.eval(), p, 10) for i, p in enumerate(prompts)}
    assert len({tuple(tokens) for tokens in expected.values()}) >= 6, "the adapters must speak differently"
    for key, sequence in asked.items():
        assert client.tokens[sequence] == expected[key], key
