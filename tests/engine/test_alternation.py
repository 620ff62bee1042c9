"""Adapters that alternate quickly on one prompt, a name whose bytes change, and loads beside running requests."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import engine_world as world
import pytest
from tenantry_engine.config import LoraConfig

SALT = "salt of one tenant"
COUNT = 6


@pytest.fixture(scope="module")
def folders(tiny: world.TinyModel) -> dict[str, Path]:
    """Seven adapters of four pages each."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return {
        f"a{seed}": tiny.adapter(f"alternating-{seed}", 400 + seed, r=8, target_modules=targets)
        for seed in range(7)
    }


def test_alternating_on_one_prompt_answers_as_alone(
    tiny: world.TinyModel, folders: dict[str, Path], engines: world.Engines
) -> None:
    """More adapters than the pages hold, and the base, on prompts that begin alike, each a moment after the other."""
    draw = random.Random(8)
    stem = [draw.randrange(3, 250) for _ in range(48)]
    prompts = [[*stem[:length], *[draw.randrange(3, 250) for _ in range(3)]] for length in (16, 32, 48, 48)]
    names = ["base", *folders]
    plain = engines.client(tiny.folder, adapters=folders.items(), prefix_cache=False)
    alone = {
        (name, index): plain.wait(plain.submit(prompt, name, count=COUNT))[0]
        for name in names
        for index, prompt in enumerate(prompts)
    }
    assert len({tuple(alone[name, 0]) for name in names}) == len(names), "the adapters must speak differently"
    page = 2 * 2 * 2 * 16 * 16 * 4  # bytes: layers, K and V, KV heads, tokens, head size, fp32
    client = engines.client(
        tiny.folder, adapters=folders.items(), step_tokens=20, slots=8, max_model_len=96,
        pool_bytes=24 * page, lora=LoraConfig(max_rank=8),
    )  # fmt: skip
    asked: list[tuple[tuple[str, int], str]] = []
    for number in range(90):
        if number % 30 < 20:  # two of them and the base in turns, then any
            pair = ("base", names[1 + number // 30], names[2 + number // 30])
            key = pair[number % 3], number // 3 % len(prompts)
        else:
            key = draw.choice(names), draw.randrange(len(prompts))
        asked.append((key, client.submit(prompts[key[1]], key[0], count=COUNT, salt=SALT)))
        while len(asked) - len(client.finish) > 5:
            client.take(client._events.get(timeout=60))
    client.wait(*[sequence for _, sequence in asked])
    for key, sequence in asked:
        assert client.finish[sequence] == "length"
        assert client.tokens[sequence] == alone[key], key
    assert client.engine.registry.evictions > 10, "adapters must have come and gone for this to mean anything"
    assert client.engine.scheduler.cached_tokens > 10 * 16, "the prefix cache must be in use"


def test_a_name_that_comes_back_with_new_bytes_finds_nothing_of_the_old_ones(
    tiny: world.TinyModel, folders: dict[str, Path], engines: world.Engines
) -> None:
    client = engines.client(tiny.folder)
    engine = client.engine
    prompt = list(range(5, 70))
    answers, hits = [], []
    for folder in (folders["a0"], folders["a1"], folders["a0"]):
        world.declare(engine, [("tone", folder)])
        for _ in range(2):
            before = engine.scheduler.cached_tokens
            answers += client.wait(client.submit(prompt, "tone", salt=SALT))
            hits.append(engine.scheduler.cached_tokens - before)
        engine.call(lambda: engine.registry.declare((0, 0), [], 0.0)).result()
        world.wait_for(lambda: not world.reports(engine))
        assert engine.pool.counts().free == engine.pool.total, (
            "what was computed with an adapter goes with it"
        )
    assert hits == [0, 64] * 3
    first, second = (
        world.greedy(world.with_adapter(tiny.folder, folders[name]), prompt, 8) for name in ("a0", "a1")
    )
    assert answers == [first] * 2 + [second] * 2 + [first] * 2
    assert first != second


def test_a_load_holds_nobody_up_but_its_own_requests(
    tiny: world.TinyModel, folders: dict[str, Path], engines: world.Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer: other adapters that are here, and the base, go on."""
    client = engines.client(tiny.folder, adapters=folders.items())
    registry = client.engine.registry
    client.wait(client.submit([1, 2, 3], "a0"))
    answered = threading.Event()
    fill = registry.loader.fill
    monkeypatch.setattr(registry.loader, "fill", lambda *arguments: answered.wait(60) and fill(*arguments))
    try:
        slow = client.submit([1, 2, 3], "a1")
        others = [client.submit([1, 2, 3], name, count=40) for name in ("base", "a0")]
        client.wait(*others)
        assert slow not in client.finish
        assert not client.tokens[slow]
        assert world.reports(client.engine)["a1"].state == "Registered"
    finally:
        answered.set()
    client.wait(slow, client.submit([1, 2, 3], "a2"))
    assert client.finish[slow] == "length"
