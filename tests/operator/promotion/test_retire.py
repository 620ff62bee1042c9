"""A name leaves a replica only after routes, stale gateways and running requests are done with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tenantry.promotion.retire import RETIRE_SECONDS, retire

NAMES = st.sampled_from(["a", "b", "c"])


def test_grace_holds_even_without_requests_or_drain() -> None:
    held = retire({"a": 100.0}, {}, {"a": 0.0}, 100.0 + RETIRE_SECONDS - 1)
    assert held.keep == {"a"}
    assert held.again_in == 1.0
    assert retire({"a": 100.0}, {}, {}, 100.0 + RETIRE_SECONDS).keep == frozenset()


def test_running_requests_hold_it_until_the_drain_ends() -> None:
    drains = {"a": 60.0}
    assert retire({"a": 0.0}, {"a": 2}, drains, 40.0).keep == {"a"}
    assert retire({"a": 0.0}, {"a": 0}, drains, 40.0).keep == frozenset()
    assert retire({"a": 0.0}, {"a": 2}, drains, 60.0).keep == frozenset()


@given(
    st.dictionaries(NAMES, st.floats(0, 100)),
    st.dictionaries(NAMES, st.integers(0, 3)),
    st.dictionaries(NAMES, st.floats(0, 60)),
    st.floats(100, 300),
)
def test_it_always_ends(
    last: dict[str, float], requests: dict[str, int], drains: dict[str, float], now: float
) -> None:
    held = retire(last, requests, drains, now)
    assert (held.again_in is None) == (not held.keep)
    assert held.again_in is None or held.again_in > 0
    for name in held.keep:
        assert now - last[name] < max(RETIRE_SECONDS, drains.get(name, 0.0))
