"""The limits that hold for a tenant: what it asks for inside what its tier allows."""

from __future__ import annotations

from typing import Final

from tenantry.api.config import TierPolicy
from tenantry.api.tenant import EffectiveLimits, Limits

from .problems import Problem

LIMIT_FIELDS: Final = {
    "requests_per_minute": "requestsPerMinute",
    "tokens_per_minute": "tokensPerMinute",
    "max_in_flight": "maxInFlight",
    "max_queued": "maxQueued",
    "max_input_tokens": "maxInputTokens",
    "max_output_tokens": "maxOutputTokens",
    "monthly_tokens": "monthlyTokens",
}


def limit_problems(limits: Limits, weight: int | None, policy: TierPolicy) -> list[Problem]:
    """Every limit that lies above the tier's ceiling. A ceiling without `monthlyTokens` bounds no month."""
    problems = []
    for field, wire in LIMIT_FIELDS.items():
        asked, ceiling = getattr(limits, field), getattr(policy.ceilings, field)
        if asked is not None and ceiling is not None and asked > ceiling:
            problems.append(
                Problem(
                    f"limits.{wire}", f"must be at most {ceiling} (the tier's ceiling), not {asked}: lower it"
                )
            )
    if weight is not None and weight > policy.max_weight:
        problems.append(
            Problem("weight", f"must be at most {policy.max_weight} (the tier's ceiling), not {weight}")
        )
    return problems


def effective_limits(limits: Limits, policy: TierPolicy) -> EffectiveLimits:
    """Absent fields take the tier's default. Call it on limits without problems only."""
    values = {field: getattr(limits, field) for field in LIMIT_FIELDS}
    defaults = policy.defaults.effective()
    ceiling = policy.ceilings.monthly_tokens
    merged = {
        field: value if value is not None else getattr(defaults, field) for field, value in values.items()
    }
    if merged["monthly_tokens"] is None:
        merged["monthly_tokens"] = ceiling
    return EffectiveLimits.model_validate(merged)


def limits_within(limits: Limits, policy: TierPolicy) -> EffectiveLimits:
    """The same for limits that may be meant for another tier: what lies above this tier's ceiling is cut to it."""
    cut = {}
    for field in LIMIT_FIELDS:
        asked, ceiling = getattr(limits, field), getattr(policy.ceilings, field)
        cut[field] = asked if asked is None or ceiling is None else min(asked, ceiling)
    return effective_limits(Limits.model_validate(cut), policy)


def weight_of(weight: int | None, policy: TierPolicy) -> int:
    """The fair share in a tier: what is asked for inside the tier's ceiling, else the tier's own."""
    return policy.weight if weight is None else min(weight, policy.max_weight)
