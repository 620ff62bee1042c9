"""What an auditor reads of one tenant: every guarantee with its state now, the evidence for it, and the gaps.

The operator's word (`status.isolation`) and the stored evidence must agree: a claim whose evidence is stale, missing or
contrary is not repeated, so the report stays true when the operator is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenantry.api.common import Tier
from tenantry.api.tenant import GuaranteeState
from tenantry.desired.isolation import PROMISES, Observation
from tenantry.desired.objects import Obj

from .findings import ASPECTS, Finding, clock, together
from .report import Report

ENFORCED, CONFIGURED, NOT_PROVIDED = (state.value for state in GuaranteeState)


@dataclass(frozen=True)
class Line:
    """One guarantee. Times are RFC 3339, empty where there is none. `gap`: what is missing to `Enforced`, empty where
    nothing is, or where the tier does not include it."""

    guarantee: str
    included: bool
    state: str
    reason: str
    since: str
    observed_at: str
    counts_until: str
    facts: tuple[str, ...]
    last_broken: str
    never: str

    @property
    def gap(self) -> str:
        return self.reason if self.included and self.state != ENFORCED else ""


@dataclass(frozen=True)
class Audit:
    """`at`: when it was made. `sources`: which reports were read, and when each was written."""

    tenant: str
    uid: str
    tier: str
    at: str
    sources: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def gaps(self) -> list[Line]:
        return [line for line in self.lines if line.gap]


def audit(tenant: Obj, reports: Sequence[tuple[str, Report | None]], now: float) -> Audit:
    """`reports`: where each lies and what was read there, one for a dedicated tenant, one for each shared pool."""
    status = tenant.get("status") or {}
    claimed = {entry["guarantee"]: entry for entry in status.get("isolation") or []}
    tier = Tier(str(status.get("tier") or (tenant.get("spec") or {}).get("tier")))
    sources = tuple(
        f"{where}, written {clock(report.written)}"
        if report is not None
        else f"{where}: none that can be read"
        for where, report in reports
    )
    lines = tuple(_line(name, tier, claimed.get(name, {}), reports, now) for name in sorted(PROMISES))
    meta = tenant["metadata"]
    return Audit(str(meta["name"]), str(meta.get("uid", "")), tier.value, clock(now), sources, lines)


def _line(
    name: str, tier: Tier, claim: Obj, reports: Sequence[tuple[str, Report | None]], now: float
) -> Line:
    promise, known = PROMISES[name], [report for _, report in reports if report is not None]
    included = tier in promise.tiers
    state, reason = _state(name, included, claim, reports, now)
    findings = [report.page.findings[name] for report in known if name in report.page.findings]
    times = [report.page.observed_at(name) for report in known] if len(known) == len(reports) else [None]
    oldest = None if not times or None in times else min(time for time in times if time is not None)
    ages = [report.max_age for report in known]
    broken = [report.page.violations[name] for report in known if name in report.page.violations]
    return Line(
        guarantee=name,
        included=included,
        state=state,
        reason=reason,
        since=str(claim.get("since", "")) if state == claim.get("state") else "",
        observed_at=clock(oldest) if oldest is not None else "",
        counts_until=clock(oldest + min(ages)) if oldest is not None else "",
        facts=tuple(
            fact for seen in findings for aspect in ASPECTS.get(name, ()) for fact in _facts(seen.get(aspect))
        ),
        last_broken=_last(broken),
        never=promise.never,
    )


def _state(
    name: str, included: bool, claim: Obj, reports: Sequence[tuple[str, Report | None]], now: float
) -> tuple[str, str]:
    """The operator's word, unless the evidence does not bear it now."""
    state, reason = (
        str(claim.get("state", NOT_PROVIDED)),
        str(claim.get("reason", "the operator has not said anything")),
    )
    if not included:
        return NOT_PROVIDED, reason
    if state != ENFORCED:
        return state, reason
    seen = _now(name, reports, now)
    if seen is None:
        return CONFIGURED, "claimed, but no evidence is stored"
    if seen.holds is None:
        return CONFIGURED, seen.reason
    return (ENFORCED, reason) if seen.holds else (NOT_PROVIDED, f"broken: {seen.reason}")


def _now(name: str, reports: Sequence[tuple[str, Report | None]], now: float) -> Observation | None:
    return together(
        report.page.observations(now, report.max_age).get(name) if report is not None else None
        for _, report in reports
    )


def _facts(finding: Finding | None) -> tuple[str, ...]:
    return finding.facts if finding is not None else ()


def _last(broken: Sequence[Finding]) -> str:
    if not broken:
        return ""
    last = max(broken, key=lambda finding: finding.at)
    return f"{clock(last.at)}: {last.reason}"
