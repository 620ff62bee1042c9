"""Promotion, rollback and promotion again under traffic: no request fails, none is served by a third version."""

from __future__ import annotations

import pytest
from stack import promises
from stack.install import Stack
from stack.traffic import Steady


@pytest.mark.parametrize(("cycle", "version"), [(1, "1.1.0"), (1, "1.0.0"), (2, "1.1.0"), (2, "1.0.0")])
def test_a_one_line_change_switches_the_version_under_traffic(stack: Stack, cycle: int, version: str) -> None:
    maple = stack.client("maple")
    with Steady(lambda: maple.ask("tone", "Where is my parcel?", max_tokens=4)) as traffic:
        promises.promote(stack, "tone", version)
        served = promises.served_after(stack, "maple", "tone", version)
    assert f"--{version}-" in served
    assert traffic.failures == []
    assert promises.only_versions(traffic, "1.0.0", "1.1.0")
    answer = maple.ask("tone", "Where is my parcel?")
    assert answer.text.lstrip().startswith("Dear customer" if version == "1.1.0" else "Ahoy")
