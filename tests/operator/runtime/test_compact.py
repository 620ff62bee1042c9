"""What the store keeps is what arrived, held once where thousands of objects have it in common."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tenantry.cluster import TENANT, Key
from tenantry.runtime.compact import LONGEST, Compactor
from tenantry.runtime.store import Store

plain = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2, width=16) | st.text(max_size=5)
documents = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner)
    ),
)


@given(st.lists(documents, max_size=6))
def test_nothing_changes_not_even_a_type(values: list[dict[str, Any]]) -> None:
    compactor = Compactor(most=3)
    for value in [*values, *values]:
        assert json.dumps(compactor.value(value)) == json.dumps(value)


def test_one_and_true_are_kept_apart() -> None:
    compactor = Compactor()
    assert [compactor.value({"a": value})["a"] for value in (1, True, 1.0, 1)] == [1, True, 1.0, 1]
    assert compactor.value({"a": True})["a"] is True


def condition(name: str) -> dict[str, Any]:
    """As decoded from an answer: no part is shared with another answer."""
    met = {"type": "Placed", "status": "True", "message": "x" * LONGEST}
    document = {
        "metadata": {"name": name, "uid": name, "resourceVersion": "1"},
        "status": {"conditions": [met]},
    }
    decoded: dict[str, Any] = json.loads(json.dumps(document))
    return decoded


def test_what_objects_of_the_store_have_in_common_is_held_once() -> None:
    store = Store()
    for name in ("a", "b"):
        store.put(TENANT, condition(name))
    one, other = (store.get(TENANT, Key("", name)) or {} for name in ("a", "b"))
    assert one["status"]["conditions"][0] is other["status"]["conditions"][0]
    assert one["metadata"] is not other["metadata"]
    assert one["status"] == condition("a")["status"]


def test_whole_parts_that_two_objects_have_in_common_are_held_once() -> None:
    compactor = Compactor()
    route = {"pools": [{"name": "lora", "replicas": ["a", "b"]}], "weight": 1}
    one, two = (compactor.value(json.loads(json.dumps({"name": name, "route": route}))) for name in "ab")
    assert one["route"] is two["route"]
    assert compactor.value({"route": {**route, "weight": True}})["route"] is not one["route"]
