"""Operator, gateway and an engine pod are killed one at a time under light traffic."""

from __future__ import annotations

from stack import promises
from stack.install import Stack
from stack.traffic import Steady


def test_traffic_flows_while_the_operator_is_down(stack: Stack, seen: list[str]) -> None:
    maple = stack.client("maple")
    with promises.operator_down(stack), Steady(lambda: maple.ask("tone", "hi", max_tokens=2)) as traffic:
        promises.answered(traffic, 20)
    seen.append(f"operator down: {dict(traffic.outcomes)}, longest gap {traffic.longest_gap():.1f} s")
    assert traffic.failures == []


def test_an_engine_pod_s_death_is_survived_by_the_other_replica(stack: Stack, seen: list[str]) -> None:
    death = promises.kill_engine(stack, "lora-fast-0")
    seen.append(f"engine pod killed: {death}")
    assert death.longest_gap < 10
    assert death.after == 200
    assert set(death.outcomes) <= {"200", "502 upstream_error", "503 no_endpoint", "0 connection"}


def test_a_gateway_s_death_ends_in_a_new_one_with_the_same_answers(stack: Stack, seen: list[str]) -> None:
    death = promises.kill_gateway(stack)
    seen.append(f"gateway killed: {death}")
    assert death.after == 200
