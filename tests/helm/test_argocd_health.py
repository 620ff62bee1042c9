"""The health check for Argo CD: what it says of statuses as the operator writes them."""

from __future__ import annotations

from typing import Any

import pytest
from support.argocd import SCRIPT, health
from tenantry.api.kinds import KINDS

Object = dict[str, Any]


def seen(
    *conditions: tuple[str, str, str], kind: str = "Adapter", generation: int = 3, observed: int = 3
) -> Object:
    """An object as recorded: (type, status, reason) of its conditions."""
    listed = [
        {
            "type": name,
            "status": status,
            "reason": reason,
            "message": f"because {reason}",
            "observedGeneration": observed,
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
        for name, status, reason in conditions
    ]
    return {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": "x", "generation": generation},
        "status": {"observedGeneration": observed, "conditions": listed},
    }


SETTLED = (("Reconciling", "False", "Settled"), ("Stalled", "False", "Settled"))
ROLLING = (("Reconciling", "True", "Shifting"), ("Stalled", "False", "Progressing"))
STALLED = (("Reconciling", "False", "Stalled"), ("Stalled", "True", "AnalysisFailed"))


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ((*SETTLED, ("Ready", "True", "Serving")), "Healthy"),
        ((*ROLLING, ("Ready", "True", "Serving")), "Progressing"),
        ((*ROLLING, ("Ready", "Unknown", "Verifying")), "Progressing"),
        ((*STALLED, ("Ready", "True", "Serving"), ("RolledBack", "True", "AnalysisFailed")), "Degraded"),
        ((*STALLED, ("Ready", "False", "NoPool")), "Degraded"),
        ((*SETTLED, ("Ready", "False", "NoReplicaReady")), "Degraded"),
        ((*SETTLED, ("Ready", "Unknown", "Waiting")), "Progressing"),
        ((*SETTLED, ("Ready", "True", "Serving"), ("Suspended", "True", "BySpec")), "Suspended"),
        ((("Reconciling", "True", "PausedByHand"), ("Ready", "True", "Serving")), "Suspended"),
        ((), "Progressing"),
    ],
)
def test_health(kind: str, conditions: tuple[tuple[str, str, str], ...], expected: str) -> None:
    status, message = health(seen(*conditions, kind=kind))
    assert status == expected
    assert message


def test_a_status_of_an_earlier_generation_says_nothing() -> None:
    old = seen(*SETTLED, ("Ready", "True", "Serving"), generation=4)
    assert health(old)[0] == "Progressing"
    fresh = seen(generation=1, observed=-1)
    assert health(fresh)[0] == "Progressing"
    del fresh["status"]
    assert health(fresh)[0] == "Progressing"


def test_an_object_on_its_way_out_is_not_healthy() -> None:
    leaving = seen(*SETTLED, ("Ready", "True", "Serving"))
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert health(leaving)[0] == "Progressing"


def test_the_reason_is_told() -> None:
    assert health(seen(*STALLED))[1] == "AnalysisFailed: because AnalysisFailed"
    bare = seen(*SETTLED, ("Ready", "True", "Serving"))
    for condition in bare["status"]["conditions"]:
        del condition["message"]
    assert health(bare)[1] == "Serving: Serving"


def test_the_chart_carries_it_for_every_kind(render: Any) -> None:
    (found,) = [d for d in render() if d["metadata"]["name"] == "tenantry-argocd-health"]
    wanted = {f"resource.customizations.health.tenantry.dev_{kind.name}" for kind in KINDS}
    assert set(found["data"]) == wanted
    for script in found["data"].values():
        assert script.strip() == SCRIPT.read_text().strip()
        assert health(seen(*SETTLED, ("Ready", "True", "Serving")), script)[0] == "Healthy"
