"""The conditions of an AdapterPool, from what was seen of its lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenantry.api.pool import AdapterPoolSpec, EngineType

from . import vllm
from .conditions import Verdict, no, not_ready, progress, settled, stall, yes
from .objects import Obj


@dataclass(frozen=True)
class LaneView:
    """A lane as seen now.

    `updated` and `outdated` pods run the wanted revision and an earlier one. `failure`: why the revision that is asked
    for was given up. `kept`: this release would make another template of the same spec. `scaling`: what is wrong with
    the number of replicas.
    """

    name: str
    workload: str
    replicas: int
    ready: int
    updated: int
    outdated: int
    rolling: bool = False
    failure: str = ""
    kept: bool = False
    scaling: str = ""

    def wire(self) -> Obj:
        return {
            "name": self.name,
            "statefulSet": self.workload,
            "replicas": self.replicas,
            "readyReplicas": self.ready,
            "updatedReplicas": self.updated,
        }


def verdicts(
    stored: Obj, spec: AdapterPoolSpec, lanes: Sequence[LaneView], halted: tuple[Verdict, Verdict] | None
) -> list[Verdict]:
    """Every condition. `stored` is the status as it is now; `halted` what keeps the operator from doing anything."""
    wanted, ready = sum(lane.replicas for lane in lanes), sum(lane.ready for lane in lanes)
    message = f"{ready} of {wanted} replicas are ready"
    found = [
        _summary(stored, lanes, wanted, message, halted),
        *(halted or _progress(lanes, wanted, ready, message)),
        _degraded(wanted, ready, message),
        _rolled_back(lanes),
        _template(lanes),
        _scaled(spec, lanes),
    ]
    if spec.engine.type is EngineType.VLLM:
        found.append(no("Guaranteed", "EngineLacks", f"vLLM does not give: {'; '.join(vllm.MISSING)}"))
    return found


def refused(stored: Obj, message: str) -> list[Verdict]:
    """Of a spec that cannot be read."""
    return [
        *stall("InvalidSpec", message),
        not_ready(stored, "InvalidSpec", message, provisioning=False),
    ]


def _summary(
    stored: Obj,
    lanes: Sequence[LaneView],
    wanted: int,
    message: str,
    halted: tuple[Verdict, Verdict] | None,
) -> Verdict:
    empty = [lane.name for lane in lanes if not lane.ready]
    if halted is not None:
        return not_ready(stored, halted[1].reason, halted[1].message, provisioning=False)
    if wanted == 0:
        return not_ready(stored, "ScaledToZero", "the pool has no replicas", provisioning=False)
    if empty:
        lacking = f"no replica is ready in lane {', '.join(empty)}"
        return not_ready(stored, "NoReplicaReady", lacking, provisioning=True)
    return yes("Ready", "Serving", message)


def _progress(lanes: Sequence[LaneView], wanted: int, ready: int, message: str) -> tuple[Verdict, Verdict]:
    outdated = sum(lane.outdated for lane in lanes)
    failure = next((lane.failure for lane in lanes if lane.failure), "")
    if failure:
        text = f"the upgrade failed and was taken back: {failure}; change the spec or `upgrade.retryToken` to try again"
        idle, stalled = stall("UpgradeFailed", text)
        if outdated:
            return yes("Reconciling", "RollingBack", text), stalled
        if any(lane.updated < lane.replicas for lane in lanes):  # a pod is between its end and its successor
            return yes("Reconciling", "Starting", message), stalled
        return idle, stalled
    if outdated:
        return progress("Rolling", f"{outdated} replicas run an earlier template")
    if any(lane.rolling and lane.replicas for lane in lanes):
        return progress("Proving", "new replicas are watched before the upgrade counts as done")
    if ready < wanted:
        return progress("Starting", message)
    return settled()


def _degraded(wanted: int, ready: int, message: str) -> Verdict:
    if ready == wanted:
        return no("Degraded", "AllReady" if wanted else "ScaledToZero", message)
    return yes("Degraded", "ReplicasMissing", message) if ready else no("Degraded", "NotServing", message)


def _rolled_back(lanes: Sequence[LaneView]) -> Verdict:
    failure = next((lane.failure for lane in lanes if lane.failure), "")
    return yes("RolledBack", "UpgradeFailed", failure) if failure else no("RolledBack", "NoFailure")


def _template(lanes: Sequence[LaneView]) -> Verdict:
    """Whether pods run what this release would make of the spec: an upgrade of the operator alone rolls nothing."""
    failed = any(lane.failure for lane in lanes)
    kept = [lane.name for lane in lanes if lane.kept]
    if not kept or failed:
        return yes("TemplateCurrent", "AsAsked") if not failed else no("TemplateCurrent", "RolledBack")
    text = (
        f"lane {', '.join(kept)} runs the template of an earlier release: change `upgrade.retryToken` to roll to "
        "this one's"
    )
    return no("TemplateCurrent", "KeptFromEarlierRelease", text)


def _scaled(spec: AdapterPoolSpec, lanes: Sequence[LaneView]) -> Verdict:
    wrong = [f"lane {lane.name}: {lane.scaling}" for lane in lanes if lane.scaling]
    if wrong:
        return no("Scaled", "NotAsAsked", "; ".join(wrong))
    handed = [lane.name.value for lane in spec.lanes if lane.replicas.max is not None]
    if handed:
        return yes("Scaled", "Autoscaler", f"an autoscaler may set the replicas of lane {', '.join(handed)}")
    return yes("Scaled", "Fixed")
