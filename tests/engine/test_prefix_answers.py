"""Answers from the prefix cache are those without it."""

from __future__ import annotations

import random
from pathlib import Path

import engine_world as world
import pytest
from schedule_world import PAGE


def test_answers_from_the_cache_are_those_without_it(tiny: world.TinyModel, engines: world.Engines) -> None:
    """With and without adapter, whole and partial hits, in company: the same tokens, bit for bit."""
    folders: dict[str, Path] = {
        name: tiny.adapter(name, seed, r=8) for seed, name in enumerate(("tone", "voice"), 31)
    }
    plain = engines.client(tiny.folder, adapters=folders.items(), prefix_cache=False)
    cached = engines.client(tiny.folder, adapters=folders.items())
    draw = random.Random(9)
    stem = [draw.randrange(3, 250) for _ in range(64)]
    asked = [
        ([*stem[: draw.choice((16, 32, 48, 64))], *[draw.randrange(3, 250) for _ in range(tail)]], name)
        for tail in (0, 0, 1, 15, 20)
        for name in ("base", "tone", "voice")
    ]
    answers = []
    for client in (plain, cached):
        alone = [client.wait(client.submit(p, name, salt="s"))[0] for p, name in asked[:6]]
        crowd = client.wait(*[client.submit(p, name, salt="s") for p, name in asked])
        answers.append((alone, crowd))
    assert answers[0] == answers[1]
    assert plain.engine.scheduler.cached_tokens == 0
    assert cached.engine.scheduler.cached_tokens > 15 * PAGE


@pytest.mark.parametrize("salt", ["", None])
def test_only_salted_sequences_share(tiny: world.TinyModel, engines: world.Engines, salt: str | None) -> None:
    client = engines.client(tiny.folder)
    for _ in range(2):
        client.wait(client.submit(list(range(3, 60)), salt=salt))
    assert client.engine.scheduler.cached_tokens == (0 if salt is None else 48)
