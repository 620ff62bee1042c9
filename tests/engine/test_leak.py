"""No tenant learns from the prefix cache what another one asked: the suite, and the faults that it must catch.

An attacker shares the replica with a victim and may guess the victim's whole prompt. What it can see: the cached tokens
that its own answers report, how long its first token takes (here the tokens that were computed for it: seconds follow
from these), and the order of answers. Each check is a function of a `Lab`; `test_every_fault_is_caught` makes labs with
one fault each and wants at least one check to fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import NormalDist
from unittest import mock

import pytest
from schedule_world import PAGE, SPACE, World
from tenantry_engine import kv, prefix
from tenantry_engine.kv import KvPages
from tenantry_engine.pages import PagePool
from tenantry_engine.prefix import Space
from tenantry_engine.sequence import Sequence

VICTIM, ATTACKER = "salt of victim", "salt of attacker"


class Lab:
    """One replica, its tenants, and what each can see."""

    def __init__(self, pages: int = 2000, **more: int) -> None:
        self.world = World(pages, slots=8, step_tokens=128, strict=False, tone=4, voice=4, **more)
        self.world.scheduler._size = None

    def ask(self, tenant: str, prompt: list[int], output: int = 1, **more: object) -> Sequence:
        sequence = self.world.add(tenant, prompt=prompt, output=output, **more)
        self.world.run()
        return sequence

    def cost(self, tenant: str, prompt: list[int], **more: object) -> int:
        """Tokens computed for a request that runs alone: what its time to first token shows."""
        before = self.world.served[tenant]
        self.ask(tenant, prompt, **more)
        return self.world.served[tenant] - before


def prompt(draw: random.Random, length: int = 6 * PAGE) -> list[int]:
    return [draw.randrange(50_000) for _ in range(length)]


# the checks


def control(lab: Lab) -> None:
    """The same tenant hits: all full blocks, and of a prompt that is wholly there all but the last token."""
    draw = random.Random(1)
    for length, cached in ((6 * PAGE, 6 * PAGE - 1), (6 * PAGE + 5, 6 * PAGE), (PAGE - 1, 0)):
        text = prompt(draw, length)
        assert lab.ask("victim", text).cached == 0
        assert lab.ask("victim", text).cached == cached
        assert lab.ask("victim", text[: 3 * PAGE] + prompt(draw)).cached == min(3 * PAGE, cached)
        assert lab.cost("victim", text) == length - cached


def oracle(lab: Lab) -> None:
    """Not one token of another tenant is ever cached: same prompt, same adapter, guessed token by token."""
    draw = random.Random(2)
    for adapter in (None, "tone"):
        secret = prompt(draw)
        lab.ask("victim", secret, output=40, adapter=adapter)
        for length in range(PAGE, len(secret) + 1, PAGE):
            guess = secret[:length] + prompt(draw, 5)
            assert lab.ask(f"attacker {length} {adapter}", guess, adapter=adapter).cached == 0
        assert lab.ask("victim", secret, adapter=adapter).cached > 0


def client_words(lab: Lab) -> None:
    """What a client may send (its prompt, the names of its adapters) never stands for a salt, or another tenant."""
    draw = random.Random(3)
    secret = prompt(draw)
    lab.world.adapters.pages |= {VICTIM: 4, "": 4}
    lab.ask("victim", secret)
    assert lab.ask("attacker", secret, adapter=VICTIM).cached == 0
    assert lab.ask("attacker", secret, salt="", adapter=VICTIM).cached == 0
    for salt, adapter in ((VICTIM + "tone", None), (VICTIM, "tone"), (VICTIM[:-1], VICTIM[-1] + "tone")):
        lab.world.adapters.pages |= {adapter: 4} if adapter else {}
        name = f"tenant of {salt}"
        assert lab.ask(name, secret, salt=salt, adapter=adapter).cached == 0, (salt, adapter)


def tokens(lab: Lab) -> None:
    """A prompt that differs in one bit of one token finds nothing from there on."""
    draw = random.Random(9)
    text = prompt(draw, 3 * PAGE)
    lab.ask("victim", text)
    for bit in range(17):
        for place in (0, PAGE + 1, 2 * PAGE - 1):
            other = [token ^ (1 << bit) if at == place else token for at, token in enumerate(text)]
            assert lab.ask("victim", other).cached == place // PAGE * PAGE, (bit, place)


def adapters(lab: Lab) -> None:
    """K and V of one adapter never serve another one, nor the base, nor the same name with new bytes."""
    draw = random.Random(4)
    text = prompt(draw)
    for adapter in ("tone", "voice", None):
        assert lab.ask("victim", text, adapter=adapter).cached == 0
        assert lab.ask("victim", text, adapter=adapter).cached > 0
    lab.world.pool.drop("tone")
    assert lab.ask("victim", text, adapter="tone").cached == 0, "what an adapter left behind goes with it"


def spaces(lab: Lab) -> None:
    """Another base model, dtype or RoPE never finds these blocks."""
    draw = random.Random(5)
    text = prompt(draw)
    lab.ask("victim", text)
    for other in (replace(SPACE, base="x"), replace(SPACE, dtype="x"), replace(SPACE, rope="x")):
        lab.world.scheduler._kv._space = other
        assert lab.ask("victim", text).cached == 0, other
    lab.world.scheduler._kv._space = SPACE


def unfinished(lab: Lab) -> None:
    """Blocks whose step has not ended, or failed, are nobody's: their pages hold something else."""
    draw = random.Random(6)
    text = prompt(draw)
    first = lab.world.add("victim", prompt=text)
    works = lab.world.plan()
    assert lab.world.pool.counts().kv
    second = lab.world.add("victim", prompt=text)
    lab.world.take(lab.world.scheduler.abort_all("error"))  # the step failed
    assert works
    assert first.cached == second.cached == 0
    assert lab.ask("victim", text).cached == 0
    third = lab.world.add("victim", prompt=prompt(draw, 600))  # more than one step takes
    lab.world.plan()
    fourth = lab.world.add("victim", prompt=third.tokens[:64])
    lab.world.plan()
    assert fourth.cached == 0
    lab.world.take(lab.world.scheduler.abort_all("abort"))
    part = lab.world.add("victim", prompt=prompt(draw, 600))
    lab.world.step()
    eager = lab.world.add("also of victim", prompt=part.tokens[:320], salt=VICTIM)
    lab.world.plan()
    assert eager.cached == part.computed == 128, "what is computed so far, and no more"
    lab.world.take(lab.world.scheduler.abort_all("abort"))


def timing(lab: Lab, rounds: int = 150) -> None:
    """What the attacker's requests cost does not depend on whether the victim asked the same before.

    n = 150 a side. One-sided Kolmogorov and Smirnov at 1 %, and the upper bound of the attacker's AUC at 99 %.
    """
    draw = random.Random(7)
    seen: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * rounds):
        asked = turn % 2 == 0
        secret = prompt(draw, draw.randint(2 * PAGE, 6 * PAGE))
        lab.ask("victim", secret if asked else prompt(draw, len(secret)))
        seen[asked].append(lab.cost("attacker", secret) / len(secret))
    assert ks_statistic(seen[True], seen[False]) < 1.517 * (2 / rounds) ** 0.5
    assert auc_upper_bound(seen[True], seen[False]) < 0.62


def order(lab: Lab, rounds: int = 24) -> None:
    """Of two requests sent together, the one that the victim asked before is not answered first.

    They come from two tenants, so that neither waits for the other in one line. The engine favours none of the two, so
    the known one comes first just when it was sent by the tenant that is served first, which is every other time.
    """
    draw = random.Random(8)
    known_first = 0
    for turn in range(rounds):
        secret, other = prompt(draw, 400), prompt(draw, 400)  # several steps each
        lab.ask("victim", secret)
        pair = [secret, other] if turn % 2 else [other, secret]
        names = ("first attacker", "second attacker")
        sent = [lab.world.add(name, prompt=text, output=1) for name, text in zip(names, pair, strict=True)]
        while not any(lab.world.ended[s.id] for s in sent):
            lab.world.step()
        known_first += next(s for s in sent if lab.world.ended[s.id]).tokens[:400] == secret
        lab.world.run()
    assert known_first == rounds // 2, known_first


CHECKS: list[Callable[[Lab], None]] = [
    control, oracle, client_words, tokens, adapters, spaces, unfinished, timing, order,
]  # fmt: skip


def ks_statistic(known: list[float], unknown: list[float]) -> float:
    """By how much `known` is stochastically smaller: the greatest lead of its distribution function."""
    return max(
        sum(x <= at for x in known) / len(known) - sum(x <= at for x in unknown) / len(unknown)
        for at in [*known, *unknown]
    )


def auc_upper_bound(known: list[float], unknown: list[float]) -> float:
    """Upper bound at 99 % of the chance that a known prompt costs less than an unknown one (Hanley, McNeil 1982)."""
    auc = sum((k < u) + 0.5 * (k == u) for k in known for u in unknown) / (len(known) * len(unknown))
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    n, m = len(known), len(unknown)
    variance = (auc * (1 - auc) + (n - 1) * (q1 - auc * auc) + (m - 1) * (q2 - auc * auc)) / (n * m)
    return auc + NormalDist().inv_cdf(0.99) * max(variance, 0.0) ** 0.5


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_engine_keeps_the_rule(check: Callable[[Lab], None]) -> None:
    check(Lab())


def test_keys_tell_apart_whatever_their_fields_hold() -> None:
    inner = f"base{SPACE.base}adapter"
    assert SPACE.root("s", f"y{inner}a") != SPACE.root(f"s{inner}y", "a"), "a field that looks like others"
    assert prefix._hash((b"salt", b"x")) != prefix._hash((b"adapter", b"x"))
    config = {"head_dim": 64, "rope_theta": 1e4, "rope_scaling": {"factor": 2.0}, "rope_parameters": {"a": 1}}
    changes = {
        "head_dim": 32,
        "rope_theta": 1e5,
        "rope_scaling": {"factor": 4.0},
        "rope_parameters": {"a": 2},
    }
    spaces = {Space.of("b", "d", {**config, name: value}) for name, value in changes.items()}
    assert len(spaces | {Space.of("b", "d", config)}) == 5


# the faults


@contextmanager
def root(make: Callable[[Space, str, str | None], bytes]) -> Iterator[None]:
    with mock.patch.object(Space, "root", make):
        yield


def _joined(*parts: str | None) -> bytes:
    """Fields without tags and lengths."""
    return "".join(part or "" for part in parts).encode()


TRUE_ROOT = Space.root
FAULTS: dict[str, Callable[[], object]] = {
    "the salt is dropped": lambda: root(lambda space, salt, adapter: TRUE_ROOT(space, "", adapter)),
    "the salt is what a client sends": lambda: root(
        lambda space, salt, adapter: TRUE_ROOT(space, adapter or salt, None)
    ),
    "an adapter may be named like a salt": lambda: root(
        lambda space, salt, adapter: TRUE_ROOT(space, adapter or salt, adapter and None)
    ),
    "fields run into each other": lambda: root(
        lambda space, salt, adapter: _joined(salt, adapter, space.base, space.dtype, space.rope)
    ),
    "the adapter is left out": lambda: root(lambda space, salt, adapter: TRUE_ROOT(space, salt, None)),
    "the base is left out": lambda: root(lambda s, salt, a: TRUE_ROOT(replace(s, base=""), salt, a)),
    "the dtype is left out": lambda: root(lambda s, salt, a: TRUE_ROOT(replace(s, dtype=""), salt, a)),
    "RoPE is left out": lambda: root(lambda s, salt, a: TRUE_ROOT(replace(s, rope=""), salt, a)),
    "blocks do not hang on each other": lambda: mock.patch.object(
        prefix, "block_key", lambda parent, tokens: TRUE_KEY(b"", tokens)
    ),
    "tokens are cut to a byte": lambda: mock.patch.object(
        prefix, "block_key", lambda parent, tokens: TRUE_KEY(parent, [token & 255 for token in tokens])
    ),
    "blocks are published before they are computed": lambda: mock.patch.object(
        KvPages, "reserve", _publish_too_early
    ),
    "blocks outlive their adapter": lambda: mock.patch.object(
        PagePool, "publish", lambda pool, page, key, group=None: TRUE_PUBLISH(pool, page, key)
    ),
    "nothing is ever cached": lambda: mock.patch.object(PagePool, "matching", return_value=0),
    "a full hit computes nothing": lambda: mock.patch.object(kv, "min", lambda a, b: a, create=True),
}
TRUE_KEY, TRUE_PUBLISH, TRUE_RESERVE = prefix.block_key, PagePool.publish, KvPages.reserve


def _publish_too_early(pages: KvPages, sequence: Sequence, adapter_pages: int) -> bool:
    done = TRUE_RESERVE(pages, sequence, adapter_pages)
    for index, key in enumerate(sequence.blocks[sequence.shared :] if done else [], sequence.shared):
        sequence.pages[index] = pages._pool.publish(sequence.pages[index], key, sequence.adapter)
    if done:
        sequence.shared = max(sequence.shared, len(sequence.blocks))
    return done


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught(fault: str) -> None:
    with FAULTS[fault]():  # type: ignore[attr-defined]
        assert any(fails(check) for check in CHECKS), "no check of the suite fails"


def fails(check: Callable[[Lab], None]) -> bool:
    """Whether the check fails on a fresh lab, by what it asserts or by the engine's own assertions."""
    try:
        check(Lab())
    except (AssertionError, KeyError):
        return True
    return False


def test_timing_and_order_alone_would_have_shown_a_dropped_salt() -> None:
    """Sensitivity of the two statistical checks: each catches the fault without the exact oracle."""
    with FAULTS["the salt is dropped"]():  # type: ignore[attr-defined]
        assert fails(timing)
        assert fails(order)
