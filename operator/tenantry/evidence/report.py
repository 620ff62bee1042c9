"""The report of one subject as it is stored: observations with their times, one ConfigMap a subject.

It tells what was seen and until when that counts, so that a reader can judge it without the operator: findings grow
stale by the reader's own clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tenantry.api import names
from tenantry.desired.conditions import shorten
from tenantry.desired.objects import Obj, metadata

from .book import Page, Subject
from .findings import ASPECTS, Finding, clock, seconds

FIELD: Final = "report.json"
TENANT_REPORT: Final = "tenantry-report"
POOL_PREFIX: Final = "tenantry-report-"
MAX_FACTS: Final = 100
MAX_FACT: Final = 200
MAX_REASON: Final = 500
"""A ConfigMap holds 1 MiB."""
_FORM: Final = 1


@dataclass(frozen=True)
class Report:
    """A stored report. Times in seconds since 1970; `max_age`: seconds that a finding counts."""

    subject: Subject
    uid: str
    written: float
    max_age: float
    page: Page


def where(subject: Subject, release_namespace: str) -> tuple[str, str]:
    """(namespace, name) of the subject's ConfigMap."""
    if subject.kind == "Tenant":
        return names.tenant_namespace(subject.name), TENANT_REPORT
    return release_namespace, POOL_PREFIX + subject.name


def config_map(report: Report, release_namespace: str) -> Obj:
    """The ConfigMap that holds the report."""
    namespace, name = where(report.subject, release_namespace)
    label = names.TENANT_LABEL if report.subject.kind == "Tenant" else names.POOL_LABEL
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(name, namespace, {label: report.subject.name}),
        "data": {FIELD: json.dumps(wire(report), indent=1, sort_keys=True)},
    }


def wire(report: Report) -> Obj:
    """As JSON. Guarantees and aspects in order, facts bounded."""
    page = report.page
    return {
        "form": _FORM,
        "subject": {"kind": report.subject.kind, "name": report.subject.name, "uid": report.uid},
        "writtenAt": clock(report.written),
        "maxAgeSeconds": report.max_age,
        "observations": [
            {"guarantee": guarantee, "aspect": aspect, **_finding(page.findings[guarantee][aspect])}
            for guarantee in sorted(page.findings)
            for aspect in ASPECTS[guarantee]
            if aspect in page.findings[guarantee]
        ],
        "violations": [
            {"guarantee": guarantee, **_finding(finding)}
            for guarantee, finding in sorted(page.violations.items())
        ],
    }


def _finding(finding: Finding) -> Obj:
    entry = {
        "holds": finding.holds,
        "reason": shorten(finding.reason, MAX_REASON),
        "observedAt": clock(finding.at),
        "facts": [shorten(fact, MAX_FACT) for fact in finding.facts[:MAX_FACTS]],
    }
    return {**entry, "idle": True} if finding.idle else entry


def read(config_map: Obj | None, subject: Subject, uid: str) -> Report | None:
    """The report of that very subject; None when there is none that can be read."""
    text = ((config_map or {}).get("data") or {}).get(FIELD)
    if not isinstance(text, str):
        return None
    try:
        document = json.loads(text)
        about = document["subject"]
        if document["form"] != _FORM or (about["kind"], about["name"], about["uid"]) != (*subject, uid):
            return None
        page = Page()
        for entry in document["observations"]:
            guarantee, aspect = entry["guarantee"], entry["aspect"]
            if aspect in ASPECTS.get(guarantee, ()):
                page.findings.setdefault(guarantee, {})[aspect] = _read(entry)
        for entry in document["violations"]:
            page.violations[str(entry["guarantee"])] = _read(entry)
        return Report(subject, uid, seconds(document["writtenAt"]), float(document["maxAgeSeconds"]), page)
    except (KeyError, TypeError, ValueError):
        return None


def _read(entry: Mapping[str, Any]) -> Finding:
    holds = entry["holds"]
    if holds is not None and not isinstance(holds, bool):
        raise ValueError("`holds` must be true, false or null")
    facts = tuple(str(fact) for fact in entry.get("facts") or [])
    idle = entry.get("idle") is True
    return Finding(holds, str(entry["reason"]), seconds(str(entry["observedAt"])), facts, idle=idle)
