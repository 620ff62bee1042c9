"""Events for what turned in a status: that something stalled and why, that it no longer serves, that it does again.

That what is new came to serve as it should is no turn: the status tells it, and ten thousand events would not.
"""

from __future__ import annotations

from tenantry.cluster import Obj, Recorder, find_condition


def announce(recorder: Recorder, root: Obj, status: Obj) -> None:
    """`root` with the status that was stored before, `status` as it was written."""
    written = {"status": status}
    stalled, before = find_condition(written, "Stalled") or {}, find_condition(root, "Stalled") or {}
    if stalled.get("status") == "True" and (stalled["status"], stalled["reason"]) != (
        before.get("status"),
        before.get("reason"),
    ):
        recorder.event(root, stalled["reason"], stalled["message"], action="Reconcile", type="Warning")
    ready, before = find_condition(written, "Ready") or {}, find_condition(root, "Ready") or {}
    if ready.get("status") == before.get("status"):
        return
    if ready.get("status") == "True" and before.get("status") == "False":
        recorder.event(root, "Ready", ready["message"], action="Reconcile")
    elif before.get("status") == "True":
        recorder.event(
            root, "NotReady", f"{ready['reason']}: {ready['message']}", action="Reconcile", type="Warning"
        )
