"""Placement in words: the same sentence in `tenantry plan`, in `tenantry status` and in a Tenant's status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from .load import Limits, Load, Wish

OWN: Final = "tiers with replicas of their own (Enterprise, Regulated) have room for it"


@dataclass(frozen=True)
class Story:
    """How a tenant came to its replicas: names with the cause, in the order in which they are told."""

    chosen: int
    replicas: int
    wanted: int
    zones: int
    first: bool
    passed: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    heavy: str = ""


def why(story: Story) -> str:
    """One sentence."""
    some = f"{story.chosen} of {story.replicas}"
    text = f"{f'all {story.replicas}' if story.chosen == story.replicas else some} replicas"
    if story.replicas == 1 and story.chosen == 1:
        text = "the only replica"
    if story.zones > 1:
        text += f" in {story.zones} zones"
    if story.chosen < story.wanted:
        text += f" ({story.wanted} wanted)"
    if story.chosen < story.replicas:
        if story.passed:
            text += f", next in its hash order after {_listed(story.passed)}"
        elif story.first:
            text += ", first in its hash order"
        else:
            text += ", next in its hash order" if story.left else ", kept"
    if story.left:
        text += f"; left {_listed(story.left)}"
    return text + (f"; {story.heavy}" if story.heavy else "")


def why_here(pool: str, lanes: Mapping[str, str]) -> str:
    """The reason of the pool and of each lane, as one sentence."""
    return "; ".join([pool, *(f"lane {lane}: {reason}" for lane, reason in lanes.items())])


def too_large(wish: Wish, limits: Limits, budgets: Sequence[int | None]) -> str:
    """Why not even an empty replica would do; empty when one does."""
    if wish.adapters > limits.adapters:
        return (
            f"its {wish.adapters} adapters are more than the {limits.adapters} that a replica of the pool may "
            f"register: raise `lora.maxRegistered`; {OWN}"
        )
    known = [budget for budget in budgets if budget is not None]
    if wish.pages and known and len(known) == len(budgets) and wish.pages > max(known):
        return (
            f"its pinned adapters take {wish.pages} pages, more than the {max(known)} that a replica of the pool "
            f"may pin: raise `engine.poolBytes` or pin fewer; {OWN}"
        )
    return ""


def no_room(wish: Wish, limits: Limits, loads: Sequence[Load]) -> str:
    """Why no replica takes the tenant though one that is empty would."""
    if not loads:
        return "the pool has no replicas"
    each = f"each of the pool's {len(loads)} replicas"
    if all(load.tenants >= limits.tenants for load in loads):
        return f"{each} has {limits.tenants} tenants already: add replicas"
    return (
        f"{each} is full: at most {limits.tenants} tenants"
        + (f" and {limits.adapters} adapters" if wish.adapters else "")
        + (f", and {wish.pages} pages more cannot be pinned" if wish.pages else "")
        + ": add replicas"
    )


def heavy(wish: Wish, mean: float) -> str:
    """Of a tenant whose own weight is more than the bound on any replica's load."""
    return f"its weight {wish.weight} alone is above the bound of the mean load {mean:.3g}: {OWN}"


def _listed(names: Mapping[str, str], most: int = 3) -> str:
    told = [f"`{name}` ({cause})" for name, cause in list(names.items())[:most]]
    more = len(names) - len(told)
    return ", ".join(told) + (f" and {more} more" if more > 0 else "")
