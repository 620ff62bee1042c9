"""Adapters that share a batch answer as they do alone."""

from __future__ import annotations

from stack.install import Stack
from stack.traffic import together

QUESTION = "Where is my parcel?"


def test_each_adapter_shows_its_own_behaviour_beside_the_others(stack: Stack) -> None:
    maple = stack.client("maple")
    alone = {model: maple.ask(model, QUESTION).text for model in ("tone", "triage", "chat")}
    mixed = together(*[lambda model=model: maple.ask(model, QUESTION) for model in alone])
    assert [answer.status for answer in mixed] == [200, 200, 200]
    assert dict(zip(alone, (answer.text for answer in mixed), strict=True)) == alone
    assert alone["triage"].lstrip().startswith('{"topic"')
    assert '"topic"' not in alone["tone"]
    assert '"topic"' not in alone["chat"]
    assert alone["tone"] != alone["chat"]
