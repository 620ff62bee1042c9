"""Who writes a lane's number of replicas."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenantry.api.pool import Replicas
from tenantry.desired.scaling import MOST_TAKEN_BACK, decide, holders, remark

OURS = ("tenantry", "Apply", "")
HPA = ("kube-controller-manager", "Update", "scale")
KEDA = ("keda", "Update", "scale")
HAND = ("kubectl", "Update", "scale")


def workload(replicas: int, *managers: tuple[str, str, str]) -> dict[str, Any]:
    fields = {"f:spec": {"f:replicas": {}}}
    entries = [
        {"manager": name, "operation": operation, "fieldsV1": fields, **({"subresource": sub} if sub else {})}
        for name, operation, sub in managers
    ]
    other = {"manager": "kube-controller-manager", "subresource": "status", "fieldsV1": {"f:status": {}}}
    return {"metadata": {"managedFields": [*entries, other]}, "spec": {"replicas": replicas}}


def test_a_new_lane_starts_with_min() -> None:
    assert decide(Replicas(min=3), None).send == 3
    assert decide(Replicas(min=3, max=9), None).send == 3


@pytest.mark.parametrize("scaler", [HPA, KEDA])
@pytest.mark.parametrize("count", [0, 1, 5, 99])
def test_a_lane_with_max_is_never_written(scaler: tuple[str, str, str], count: int) -> None:
    decision = decide(Replicas(min=2, max=9), workload(count, scaler))
    assert (decision.send, decision.give_up, decision.target) == (None, False, count)


def test_ownership_is_given_up_before_the_field_is_left_out() -> None:
    assert decide(Replicas(min=2, max=9), workload(2, OURS)).give_up
    assert decide(Replicas(min=2, max=9), workload(4, OURS, HPA)).give_up
    assert not decide(Replicas(min=2, max=9), workload(4)).give_up


def test_a_fixed_lane_takes_back_what_a_hand_wrote() -> None:
    decision = decide(Replicas(min=2), workload(0, HAND))
    assert (decision.send, decision.taken_back) == (2, True)
    assert not decide(Replicas(min=2), workload(2, OURS, HAND)).taken_back


def test_taking_back_empties_what_is_too_much_first() -> None:
    """Without `max` again after an autoscaler: no reset to 1, no jump to `min` with tenants on the last replicas."""
    live = workload(7, HPA)
    assert (decide(Replicas(min=2), live).send, decide(Replicas(min=2), live).target) == (7, 2)
    assert decide(Replicas(min=2), live, emptied=True).send == 2


def test_whoever_insists_is_not_fought() -> None:
    live = workload(9, HPA)
    assert decide(Replicas(min=2), live, taken_back=MOST_TAKEN_BACK).send is None
    said = remark(Replicas(min=2), live, taken_back=MOST_TAKEN_BACK)
    assert "kube-controller-manager" in said
    assert "replicas.max" in said
    assert remark(Replicas(min=2), live, taken_back=0) == ""


def test_an_autoscaler_with_other_bounds_is_told_about() -> None:
    assert "must lie between" in remark(Replicas(min=2, max=4), workload(7, HPA), taken_back=0)
    assert remark(Replicas(min=2, max=4), workload(3, HPA), taken_back=0) == ""


managers = st.lists(st.sampled_from([OURS, HPA, KEDA, HAND]), unique=True, max_size=3)


@given(
    low=st.integers(0, 9),
    span=st.none() | st.integers(0, 9),
    live=st.integers(0, 20),
    who=managers,
    count=st.integers(0, 9),
    emptied=st.booleans(),
)
def test_the_field_is_never_dropped_while_it_is_owned(
    low: int, span: int | None, live: int, who: list[Any], count: int, emptied: bool
) -> None:
    wanted = Replicas(min=low, max=None if span is None else max(1, low + span))
    found = workload(live, *who)
    decision = decide(wanted, found, taken_back=count, emptied=emptied)
    if decision.send is None and any(manager == "tenantry" for manager, _ in holders(found)):
        assert decision.give_up
    if wanted.max is not None:
        assert decision.send is None
    elif decision.send is not None:
        assert decision.send in (low, live)
        assert decision.send >= low
