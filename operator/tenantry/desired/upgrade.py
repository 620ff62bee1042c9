"""Which pods of a lane end next, so that its wanted revision comes to run on all of them. Pure.

A pod's way out: its tenants find another replica (leaving), then it takes no new request and ends the ones it has
(draining), then it is deleted, and the StatefulSet makes it anew from the wanted revision. Canaries go first; others
follow when those have proven themselves. A new pod that fails ends all of it: whoever called goes back to the revision
that ran before, by the same rules but without canaries, since that one has proven itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Stage(Enum):
    """How far a pod is on its way out."""

    SERVING = auto()
    LEAVING = auto()
    DRAINING = auto()


@dataclass(frozen=True)
class PodState:
    """One pod of the lane as seen now.

    current: made from the wanted revision, and fit to stay. ready: takes traffic, and its engine answers with the
    pool's model. proven: has been ready for as long as the pool asks. over: its stage has come to its end. ending: is
    being deleted. fault: why this pod of the wanted revision will not come to count; empty while it may.
    """

    name: str
    current: bool
    ready: bool
    proven: bool = False
    stage: Stage = Stage.SERVING
    over: bool = False
    ending: bool = False
    fault: str = ""

    @property
    def serves(self) -> bool:
        return self.ready and self.stage is Stage.SERVING and not self.ending


@dataclass(frozen=True)
class Plan:
    """What to do now: pods to send on their way, one stage further each; whether all is done; why it cannot be."""

    leave: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    complete: bool = False
    failure: str = ""


def plan(pods: Sequence[PodState], wanted: int, *, canaries: int, max_unavailable: int) -> Plan:
    """The next step of a lane with `wanted` replicas, whose present pods are given in the order of their ordinals.

    Never more than `max_unavailable` replicas are down for it, and no more than `canaries` run the wanted revision
    before as many have proven themselves. Pods that serve nobody are replaced first, and cost nobody anything.
    """
    faulty = next((pod for pod in pods if pod.current and pod.fault), None)
    if faulty is not None:
        return Plan(failure=f"{faulty.name}: {faulty.fault}")
    on_their_way = [pod for pod in pods if pod.stage is not Stage.SERVING and not pod.ending]
    drain = tuple(pod.name for pod in on_their_way if pod.stage is Stage.LEAVING and pod.over)
    delete = [pod.name for pod in on_their_way if pod.stage is Stage.DRAINING and pod.over]
    waiting = [pod for pod in pods if not pod.current and pod.stage is Stage.SERVING and not pod.ending]
    if not waiting and not on_their_way:
        whole = len(pods) == wanted and all(pod.current and pod.serves and pod.proven for pod in pods)
        return Plan(complete=whole and wanted > 0)
    proven = sum(pod.current and pod.proven and pod.serves for pod in pods)
    first = min(canaries, wanted)
    room = (wanted if proven >= first else first) - (wanted - len(waiting))
    budget = max_unavailable - (wanted - sum(pod.serves for pod in pods))
    leave = []
    waiting.reverse()  # as a StatefulSet does, the last first
    for pod in sorted(waiting, key=lambda pod: pod.ready):
        if room <= 0:
            break
        if not pod.ready:
            delete.append(pod.name)
        elif budget > 0:
            budget -= 1
            leave.append(pod.name)
        else:
            break
        room -= 1
    return Plan(tuple(leave), drain, tuple(delete))
