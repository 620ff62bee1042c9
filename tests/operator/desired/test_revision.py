"""When a pool's pods change, and when they do not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tenantry.api import AdapterPoolSpec
from tenantry.api.pool import LaneName
from tenantry.desired import engine, revision
from tenantry.desired.revision import Asked, History, Revision


def facts(**changes: Any) -> engine.PoolFacts:
    values: dict[str, Any] = {
        "name": "lora",
        "uid": "u",
        "namespace": "tenantry-system",
        "image": "registry.example/engine:1",
        "pull_policy": "IfNotPresent",
        "region_label": "region",
        "replicas": {LaneName.FAST: 1, LaneName.BULK: 1},
    }
    return engine.PoolFacts(**{**values, **changes})


def asked(wire: dict[str, Any], **changes: Any) -> Asked:
    spec = AdapterPoolSpec.model_validate(wire)
    return engine.asked(spec, facts(**changes), spec.lanes[0])


OLD, NEW = {"spec": "old"}, {"spec": "new"}


def running(wire: dict[str, Any]) -> History:
    made = Revision(asked(wire).wire(), OLD)
    return History(made, made)


def carried(history: History) -> History:
    """As it comes back from the API server."""
    annotations = {revision.ANNOTATION: history.annotation()}
    return revision.read({"metadata": {"annotations": annotations}})


def test_a_new_operator_with_another_rendering_changes_nothing(pool_wire: dict[str, Any]) -> None:
    history = running(pool_wire)
    after = revision.advance(carried(history), asked(pool_wire), NEW)
    assert after == history
    assert after.current is not None
    assert after.current.template == OLD
    assert after.annotation() == history.annotation()


def test_a_field_that_a_later_release_adds_changes_nothing(pool_wire: dict[str, Any]) -> None:
    """What is stored by an earlier release lacks the field; what a later one stored has one that we do not know."""
    wire = json.loads(running(pool_wire).annotation())
    for entry in (wire["current"]["asked"], wire["current"]["asked"]["engine"]):
        entry["inventedLater"] = 7
    del wire["current"]["asked"]["engine"]["tensorParallel"]
    kept = revision.read({"metadata": {"annotations": {revision.ANNOTATION: json.dumps(wire)}}})
    after = revision.advance(kept, asked(pool_wire), NEW)
    assert after.current is not None
    assert after.current.template == OLD


@pytest.mark.parametrize(
    "change",
    [
        {"lanes": [{"name": "fast", "replicas": {"min": 9}, "slots": 8}]},
        {"placement": {"replicasPerTenant": 3, "headroomPercent": 20}},
        {"tiers": ["Free", "MidMarket"]},
        {"upgrade": {"maxUnavailable": 3, "canarySeconds": 5}},
    ],
    ids=["replicas", "placement", "tiers", "how it is rolled"],
)
def test_what_changes_no_pod_rolls_nothing(pool_wire: dict[str, Any], change: dict[str, Any]) -> None:
    after = revision.advance(running(pool_wire), asked({**pool_wire, **change}), NEW)
    assert not after.rolling


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ({"upgrade": {"retryToken": "again"}}, {}),
        ({}, {"image": "registry.example/engine:2"}),
        ({}, {"pull_policy": "Always"}),
    ],
    ids=["retryToken", "the release's image", "the release's pull policy"],
)
def test_what_an_admin_asks_for_rolls(
    pool_wire: dict[str, Any], spec: dict[str, Any], settings: dict[str, Any]
) -> None:
    history = running(pool_wire)
    after = revision.advance(history, asked({**pool_wire, **spec}, **settings), NEW)
    assert after.rolling
    assert after.current is not None
    assert after.current.template == NEW
    assert after.stable == history.stable


def test_a_pool_with_its_own_image_takes_no_notice_of_the_releases(pool_wire: dict[str, Any]) -> None:
    pool_wire["engine"]["image"] = "registry.example/own:1"
    after = revision.advance(running(pool_wire), asked(pool_wire, image="registry.example/engine:2"), NEW)
    assert not after.rolling


def test_a_failed_revision_is_not_tried_again_until_something_else_is_asked(
    pool_wire: dict[str, Any],
) -> None:
    first = running(pool_wire)
    wish = copy.deepcopy(pool_wire)
    wish["engine"]["maxModelLen"] = 64
    rolling = revision.advance(first, asked(wish), NEW)
    back = carried(revision.fail(rolling, asked(wish), "lora-fast-1: its containers ended 3 times"))
    assert (back.current, back.stable, back.rolling) == (first.current, first.stable, False)
    again = revision.advance(back, asked(wish), NEW)
    assert again.current == first.current
    assert again.why == "lora-fast-1: its containers ended 3 times"
    reverted = revision.advance(again, asked(pool_wire), OLD)
    assert reverted == first
    assert revision.advance(reverted, asked(wish), NEW).rolling
    wish["upgrade"] = {"retryToken": "again"}
    assert revision.advance(again, asked(wish), NEW).rolling


def test_a_revert_takes_the_template_that_ran_before(pool_wire: dict[str, Any]) -> None:
    first = running(pool_wire)
    wish = copy.deepcopy(pool_wire)
    wish["engine"]["maxModelLen"] = 64
    rolling = revision.advance(first, asked(wish), NEW)
    assert revision.advance(rolling, asked(pool_wire), {"spec": "of this release"}) == first


def test_a_first_revision_has_nowhere_to_go_back_to(pool_wire: dict[str, Any]) -> None:
    fresh = revision.advance(History(), asked(pool_wire), NEW)
    assert fresh.rolling
    assert revision.fail(fresh, asked(pool_wire), "why") == fresh
    settled = revision.settle(fresh)
    assert not settled.rolling
    assert carried(settled) == settled


@pytest.mark.parametrize("text", ["", "{", "[]", '{"current": 3}', '{"current": {"asked": {}}}', '"x"'])
def test_a_history_that_nobody_can_read_is_none(text: str) -> None:
    assert revision.read({"metadata": {"annotations": {revision.ANNOTATION: text}}}) == History()
