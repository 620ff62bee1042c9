"""What a lane's pods are made from, kept beside what was asked for, so that a pool rolls when its spec says so only.

The StatefulSet carries its history in one annotation: the template as it was rendered when it was asked for, the last
one that ran on every replica, and what was asked when a revision failed. A later release that would render the same
wish in another way sends the template that is there already. What was asked is compared as the API's models read it: a
field that a later release adds counts with its default.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from tenantry.api.common import Model
from tenantry.api.pool import BaseModelRef, Engine, Lora, Scheduling

from .objects import Obj

ANNOTATION: Final = "tenantry.dev/history"


@dataclass(frozen=True)
class DedicatedTo:
    """The tenant whose nodes and namespace the pool runs in. `gate_image`: of the gate before the engine, if any."""

    tenant: str
    region: str | None
    runtime_class: str | None = None
    gate_image: str | None = None
    attested: bool = False


class Asked(Model):
    """Everything that a template depends on and that a person chose: in the pool's spec, or in the release's settings.

    `image` is the release's engine image, None where the pool names its own; `region_label` counts with a region only.
    """

    pool: str
    uid: str
    namespace: str
    base_model: BaseModelRef
    engine: Engine
    lora: Lora | None = None
    scheduling: Scheduling
    slots: int
    image: str | None = None
    pull_policy: str
    dedicated: DedicatedTo | None = None
    region_label: str | None = None
    retry_token: str | None = None


@dataclass(frozen=True)
class Revision:
    """A wish and the pod template that was made of it."""

    asked: Obj
    template: Obj

    @property
    def name(self) -> str:
        """Ten hex digits that tell revisions apart."""
        return hashlib.blake2b(_text(self.template).encode(), digest_size=5).hexdigest()


@dataclass(frozen=True)
class History:
    """`current`: what pods are made from now. `stable`: ran on every replica last. `failed`: was asked for in vain."""

    current: Revision | None = None
    stable: Revision | None = None
    failed: Obj | None = None
    why: str = ""

    @property
    def rolling(self) -> bool:
        """Whether the current revision has not yet run on every replica."""
        return self.current is not None and self.current != self.stable

    def annotation(self) -> str:
        """The text to keep; the same history is the same text."""
        wire: dict[str, Any] = {}
        if self.current is not None:
            wire["current"] = {"asked": self.current.asked, "template": self.current.template}
        if self.stable is not None:
            settled = self.stable == self.current
            wire["stable"] = (
                "current" if settled else {"asked": self.stable.asked, "template": self.stable.template}
            )
        if self.failed is not None:
            wire["failed"] = {"asked": self.failed, "why": self.why}
        return _text(wire)


def read(workload: Obj | None) -> History:
    """The history that a StatefulSet carries; none where it carries none or one that cannot be read."""
    text = ((workload or {}).get("metadata", {}).get("annotations") or {}).get(ANNOTATION)
    try:
        wire = json.loads(text) if text else {}
        current = _revision(wire.get("current"))
        stable = current if wire.get("stable") == "current" else _revision(wire.get("stable"))
        failed = wire.get("failed") or {}
        return History(current, stable, failed.get("asked"), str(failed.get("why", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return History()


def advance(history: History, asked: Asked, template: Obj) -> History:
    """The history once this is asked for, of which this release would make this template."""
    if same(history.failed, asked):
        return replace(history, current=history.stable or history.current)
    if history.current is not None and same(history.current.asked, asked):
        return replace(history, failed=None, why="")
    if history.stable is not None and same(history.stable.asked, asked):
        return History(history.stable, history.stable)
    return History(Revision(asked.wire(), template), history.stable)


def settle(history: History) -> History:
    """The current revision runs on every replica of the pool."""
    return replace(history, stable=history.current)


def fail(history: History, asked: Asked, why: str) -> History:
    """Back to the revision that ran last; what is asked now is not tried again. Without an earlier one, as it was."""
    if history.stable is None:
        return history
    return History(history.stable, history.stable, asked.wire(), why)


def same(kept: Obj | None, wanted: Asked) -> bool:
    """Whether that was asked before, as this release reads it."""
    return kept is not None and _read(kept) == wanted


def asked(current: Revision) -> Asked | None:
    """What a revision was made of, as this release reads it; None where it cannot."""
    return _read(current.asked)


def _read(kept: Obj) -> Asked | None:
    try:
        return Asked.model_validate(kept, extra="ignore")
    except ValidationError:
        return None


def _revision(wire: Any) -> Revision | None:
    return None if wire is None else Revision(dict(wire["asked"]), dict(wire["template"]))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
