"""The host one step ahead of the device: the same answers as in order, and everything given back on every way out.

There is no device with streams here: the engine's loop is told that steps overlap, while the host itself runs them. It
knows no token before it takes it, as on a GPU. `test_schedule_property` does the same without a model, at random.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import engine_world as world
import pytest
from schedule_world import World
from tenantry_engine import grammar
from tenantry_engine.runner import Pending, Runner
from tenantry_engine.sequence import UNKNOWN, Sampling, Sequence
from tenantry_engine.work import Event, Work

EOS = 2


class Client(world.Client):
    """Keeps the scores too."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.scores: defaultdict[str, list[object]] = defaultdict(list)

    def take(self, event: Event) -> None:
        super().take(event)
        self.scores[event.sequence.id].append((event.scores, event.prompt_scores))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Steps overlap from now on; of each one, whether it held a token that the host did not know."""
    seen: list[bool] = []
    run = Runner.run

    def watched(self: Runner, works: list[Work], paged: Any, before: Pending | None = None) -> Pending:
        seen.append(any(work.sequence.tokens[-1] == UNKNOWN for work in works))
        return run(self, works, paged, before)

    monkeypatch.setattr(Runner, "overlaps", True)
    monkeypatch.setattr(Runner, "run", watched)
    return seen


def kinds() -> list[Sampling]:
    """What requests may ask of the sampler."""
    stops = frozenset({EOS, *range(10, 60)})
    return [
        Sampling(temperature=0, max_tokens=20),
        Sampling(temperature=0, max_tokens=1),
        Sampling(temperature=0.9, seed=5, max_tokens=24, top_p=0.9),
        Sampling(temperature=1.3, seed=6, max_tokens=24, stop_ids=stops),
        Sampling(temperature=1.3, seed=7, max_tokens=24, stop_ids=stops, min_tokens=5, logit_bias={11: 4.0}),
        Sampling(temperature=1.0, seed=8, max_tokens=12, logprobs=3),
        Sampling(temperature=0, max_tokens=12, logprobs=0, prompt_logprobs=2),
    ]


def waiting_kinds() -> list[Sampling]:
    """Those for which a step waits for the one before."""
    return [
        Sampling(temperature=1.0, seed=9, max_tokens=12, presence_penalty=0.7, repetition_penalty=1.2),
        Sampling(temperature=1.0, seed=10, max_tokens=12, grammar=grammar.from_regex("[a-f]{4,8}")),
    ]


def ask(client: Client, asked: list[tuple[list[int], str, Sampling]]) -> list[object]:
    """All at once; of each: tokens, why it ended, scores."""
    for sampling in (s for _, _, s in asked if s.grammar is not None):
        client.engine.prepare("t", sampling.grammar).result(timeout=60)
    names = [client.submit(prompt, served, sampling=s, salt="s") for prompt, served, s in asked]
    client.wait(*names)
    return [(client.tokens[name], client.finish[name], client.scores[name]) for name in names]


def test_answers_are_those_of_steps_in_order(
    tiny: world.TinyModel, engines: world.Engines, steps: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens, reasons and scores of every kind, with and without adapters, in company: bit for bit."""
    draw = random.Random(3)
    folders: dict[str, Path] = {"tone": tiny.adapter("tone", 31, r=8)}
    stem = [draw.randrange(3, 250) for _ in range(32)]

    def crowd(samplings: list[Sampling]) -> list[tuple[list[int], str, Sampling]]:
        return [
            ([*stem, *[draw.randrange(3, 250) for _ in range(draw.randint(1, 50))]], served, sampling)
            for sampling in samplings
            for served in ("base", "tone")
        ]

    asked = [crowd(kinds()), *(crowd([*kinds()[2:5], waiting]) for waiting in waiting_kinds())]
    ahead = Client(engines.replica(tiny.folder, adapters=folders.items()).engine)
    with caplog.at_level(logging.INFO):
        answers = [ask(ahead, some) for some in asked[:1]]
        overlapped, count = sum(steps), len(steps)
        answers += [ask(ahead, some) for some in asked[1:]]
    assert overlapped > count / 2, "steps must overlap for this to mean anything"
    for reason in ("a grammar is followed on the host", "penalties count tokens on the host"):
        assert caplog.text.count(reason) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "overlaps", False)
        steps.clear()
        in_order = Client(engines.replica(tiny.folder, adapters=folders.items()).engine)
        assert [ask(in_order, some) for some in asked] == answers
    assert not any(steps)
    reasons = {finish for some in answers for _, finish, _ in some}  # type: ignore[misc, attr-defined]
    assert reasons == {"stop", "length"}


def failing_once(where: str) -> Any:
    """In place of `Runner.run`: the next step fails when it is given, or when it ends."""
    real, left = Runner.run, [where]

    def fail(at: str) -> None:
        if at in left:
            left.remove(at)
            raise RuntimeError("out of memory")

    def run(self: Runner, *arguments: Any) -> Pending:
        fail("run")
        pending = real(self, *arguments)

        def take() -> Any:
            fail("take")
            return pending.take()

        return Pending(take, pending.ids, pending.rows)

    return run


def test_every_way_out_gives_everything_back(
    tiny: world.TinyModel, engines: world.Engines, steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abort, unload, a step that fails when it is given or when it ends, and the end of the engine: each with a step
    in flight. The books are checked in between, and when the engine has ended."""
    folder = tiny.adapter("tone", 31, r=8)
    client = Client(engines.replica(tiny.folder, adapters=[("tone", folder)]).engine)
    engine = client.engine
    prompt = list(range(3, 40))
    [want] = client.wait(client.submit(prompt, count=12))

    def begin(*served: str) -> list[str]:
        names = [client.submit(prompt, name, count=400) for name in served]
        for name in names:
            client.wait_tokens(name, 3)
        return names

    def given_back() -> bool:
        counts = engine.call(lambda: (engine.pool.check(), engine.pool.counts())).result(timeout=60)[1]
        return counts.kv == 0 and not engine.scheduler._residents._leaving

    gone, other = begin("base", "base")
    engine.abort(gone)
    client.settle()
    client.wait_tokens(other, len(client.tokens[other]) + 3)
    engine.abort(other)
    world.wait_for(given_back)

    (unloaded,) = begin("tone")
    fence = engine.registry.fence
    engine.call(lambda: engine.registry.declare(fence, [], 0.0)).result(timeout=60)
    client.wait(unloaded)
    world.wait_for(given_back)
    assert engine.pool.counts().adapter == 0

    for where in ("run", "take"):
        failed = begin("base", "base")
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "run", failing_once(where))
            client.wait(*failed)
        assert {client.finish[name] for name in failed} == {"error"}
        world.wait_for(given_back)
        assert client.wait(client.submit(prompt, count=12)) == [want]

    assert any(steps)
    begin("base", "base")  # the fixture ends the engine, and checks its books


def test_nobody_gives_way_to_a_step_that_is_planned_ahead() -> None:
    """Pages run out while a step is in flight: the next one is planned without whoever lacks one, then in order."""
    world = World(pages=7, slots=2, step_tokens=40, overlaps=True)
    for _ in range(2):
        world.add(prompt=30, output=40)
    residents = world.scheduler._residents
    preempt = residents._preempt

    def watched(sequence: Sequence, works: dict[Sequence, Work]) -> None:
        assert not world.device.running
        assert UNKNOWN not in sequence.tokens
        preempt(sequence, works)

    residents._preempt = watched  # type: ignore[method-assign]
    while world.turn():
        pass
    assert world.scheduler.preemptions > 0
    assert world.device.overlapped > 10
    world.check_empty()
    world.check_answers()


def test_a_row_too_many_is_dropped_and_its_page_kept_until_its_step_has_ended() -> None:
    """A sequence stops in step n: its end is told with n, and n + 1 holds its pages until it ends."""
    world = World(overlaps=True)
    sequence = world.add(prompt=8, output=30, stop_ids=frozenset({0, 1, 2, 9}))  # its first token ends it
    assert world.turn()
    assert world.reasons[sequence.id] == "stop"
    assert sequence.pages
    assert world.pool.counts().kv > 0
    assert world.scheduler.running == world.scheduler.waiting == 0
    assert world.turn()
    assert not sequence.pages
    assert not world.turn()
    world.check_empty()
    world.check_answers()
