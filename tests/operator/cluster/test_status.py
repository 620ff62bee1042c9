"""Status semantics: what counts as a change, and which times stay."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tenantry.cluster import condition
from tenantry.cluster.status import complete, same

OLD, NOW = "2026-01-01T00:00:00Z", "2026-02-02T00:00:00Z"


def test_the_time_of_a_condition_moves_only_when_its_status_flips() -> None:
    first = complete({"conditions": [condition("Ready", True, "Serving", "a")]}, 1, {}, OLD)
    again = complete({"conditions": [condition("Ready", True, "Serving", "b")]}, 1, first, NOW)
    assert again["conditions"][0]["lastTransitionTime"] == OLD
    assert not same(again, first)
    flipped = complete({"conditions": [condition("Ready", False, "Down")]}, 1, again, NOW)
    assert flipped["conditions"][0]["lastTransitionTime"] == NOW
    unknown = complete({"conditions": [condition("Ready", None, "Starting")]}, 1, flipped, "later")
    assert unknown["conditions"][0]["status"] == "Unknown"
    assert unknown["conditions"][0]["lastTransitionTime"] == "later"


def test_the_time_of_a_guarantee_moves_only_with_its_state() -> None:
    entry = {"guarantee": "Network", "state": "Enforced", "reason": "probed"}
    first = complete({"isolation": [entry]}, 1, {}, OLD)
    assert (
        complete({"isolation": [{**entry, "reason": "again"}]}, 1, first, NOW)["isolation"][0]["since"] == OLD
    )
    lost = complete({"isolation": [{**entry, "state": "NotProvided"}]}, 1, first, NOW)
    assert lost["isolation"][0]["since"] == NOW


def test_times_alone_and_the_order_of_conditions_are_no_change() -> None:
    ready, stalled = condition("Ready", True, "Serving"), condition("Stalled", False, "Fine")
    left = complete({"conditions": [ready, stalled]}, 3, {}, OLD)
    right = complete({"conditions": [stalled, ready]}, 3, {}, NOW)
    assert same(left, right)


def test_a_new_generation_is_a_change() -> None:
    status = {"conditions": [condition("Ready", True, "Serving")]}
    assert not same(complete(status, 1, {}, OLD), complete(status, 2, {}, OLD))


def test_absent_null_and_empty_mean_the_same() -> None:
    assert same({"placement": [], "route": None, "message": ""}, {})
    assert not same({"replicas": 0}, {})


STATES = st.sampled_from([True, False, None])


@given(st.lists(st.tuples(st.sampled_from(["Ready", "Placed"]), STATES, st.sampled_from("xy")), max_size=12))
def test_completing_twice_changes_nothing(history: list[tuple[str, bool | None, str]]) -> None:
    current: dict[str, Any] = {}
    for step, (kind, state, reason) in enumerate(history):
        status = {"conditions": [condition(kind, state, reason)]}
        once = complete(status, 1, current, f"t{step}")
        assert same(complete(status, 1, once, "never"), once)
        assert complete(status, 1, once, "never") == once
        current = once
