"""Everything that is known now, by subject: a dedicated Tenant, or the AdapterPool that shared tenants run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tenantry.desired.isolation import Observation

from .findings import ASPECTS, Finding, clock, current

_BLIND = "could not be looked at"


class Subject(NamedTuple):
    """Of what something was seen; `kind` is Tenant or AdapterPool."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} `{self.name}`"


@dataclass
class Page:
    """One subject's findings by guarantee and aspect, and how each guarantee was last seen broken."""

    findings: dict[str, dict[str, Finding]] = field(default_factory=dict)
    violations: dict[str, Finding] = field(default_factory=dict)

    def observations(self, now: float, max_age: float) -> dict[str, Observation]:
        """What every guarantee that somebody looked at says at `now`."""
        found = {name: current(name, seen, now, max_age) for name, seen in self.findings.items()}
        return {name: observation for name, observation in found.items() if observation is not None}

    def observed_at(self, guarantee: str) -> float | None:
        """Of the oldest finding that the guarantee needs; None while one is missing."""
        seen, aspects = self.findings.get(guarantee, {}), ASPECTS.get(guarantee, ())
        times = [seen[aspect].at for aspect in aspects if aspect in seen]
        return min(times) if times and len(times) == len(aspects) else None


class Book:
    """The pages of all subjects. To be used from one event loop."""

    def __init__(self) -> None:
        self._pages: dict[Subject, Page] = {}

    def page(self, subject: Subject) -> Page | None:
        return self._pages.get(subject)

    def restore(self, subject: Subject, page: Page) -> None:
        """What an earlier process reported: taken only where nothing is known yet."""
        self._pages.setdefault(subject, page)

    def record(self, subject: Subject, guarantee: str, aspect: str, finding: Finding) -> bool:
        """Whether it says something else than before. Raises KeyError for an aspect that no guarantee has.

        A finding older than the one that is known changes nothing. One that could not look leaves the last one that
        could, to grow stale.
        """
        if aspect not in ASPECTS[guarantee]:
            raise KeyError(aspect)
        page = self._pages.setdefault(subject, Page())
        seen = page.findings.setdefault(guarantee, {})
        before = seen.get(aspect)
        if before is not None and before.at > finding.at:
            return False
        if finding.blind and before is not None and before.holds is not None:
            facts = tuple(fact for fact in before.facts if not fact.startswith(_BLIND))
            note = f"{_BLIND} at {clock(finding.at)}: {finding.reason}"
            seen[aspect] = replace(before, facts=(*facts, note))
            return False
        seen[aspect] = finding
        if finding.holds is False:
            page.violations[guarantee] = finding
        return not finding.says_the_same(before)

    def observations(self, subject: Subject, now: float, max_age: float) -> Mapping[str, Observation]:
        page = self._pages.get(subject)
        return {} if page is None else page.observations(now, max_age)

    def forget(self, subject: Subject) -> bool:
        """Whether there was something to forget."""
        return self._pages.pop(subject, None) is not None

    def subjects(self) -> list[Subject]:
        return sorted(self._pages)
