"""What the store keeps is what arrived, held once where thousands of objects have it in common."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tenantry.api import TenantSpec
from tenantry.api.tenant import Isolation, Limits, Prompt
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


def spec_of(name: str, tokens: int = 100) -> TenantSpec:
    """As parsed from a document of its own, in which defaults are not told."""
    model = {"name": "chat", "baseModel": "m", "adapterRef": {"namespace": "ml", "name": name}}
    told = {"tier": "MidMarket", "models": [model], "limits": {"maxOutputTokens": tokens}}
    return TenantSpec.model_validate(json.loads(json.dumps(told)))


def test_models_stay_what_they_are_and_hold_equal_parts_once() -> None:
    compactor = Compactor()
    one, two, other = (compactor.value(spec_of(*arguments)) for arguments in (("a",), ("b",), ("c", 200)))
    for found, made in ((one, spec_of("a")), (two, spec_of("b")), (other, spec_of("c", 200))):
        assert found == made
        assert found.model_dump(exclude_unset=True) == made.model_dump(exclude_unset=True)
        assert found.models[0].model_fields_set == made.models[0].model_fields_set
    assert one.limits is two.limits
    assert one.limits is not other.limits
    assert one.prompt is other.prompt
    assert one.models[0] is not two.models[0]
    assert compactor.value(spec_of("a")) is one


def test_models_of_two_kinds_and_models_with_other_fields_told_are_kept_apart() -> None:
    compactor = Compactor()
    told, untold = (compactor.value(Limits.model_validate(v)) for v in ({"maxQueued": None}, {}))
    assert told == untold
    assert told is not untold
    assert compactor.value(Prompt()) is not compactor.value(Isolation())
