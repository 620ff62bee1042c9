"""What was seen of every guarantee, shared by all controllers: remembered, reported, measured, and passed on.

Whoever can see an aspect of a guarantee calls `record`; the tenants that it concerns look again when it says something
new. Times stay here, in metrics and in the report store: a Tenant's status changes only with the verdict.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Counter, Gauge

from tenantry.api import OperatorConfig
from tenantry.api.identity import Signer
from tenantry.cluster import CONFIG_MAP, Client, Key, Obj, uid_of
from tenantry.desired.isolation import Observation
from tenantry.evidence import report
from tenantry.evidence.book import Book, Page, Subject
from tenantry.evidence.findings import ASPECTS, Finding
from tenantry.evidence.report import Report
from tenantry.evidence.seal import is_sealed, sealed

from .reading import read

_LABELS = ["kind", "name", "guarantee"]
OBSERVED = Gauge(
    "tenantry_isolation_observed_timestamp_seconds",
    "When everything that a guarantee needs was last seen, the oldest part of it.",
    _LABELS,
)
HOLDS = Gauge("tenantry_isolation_holds", "1 seen to hold, 0 seen broken, -1 not known now.", _LABELS)
VIOLATIONS = Counter("tenantry_isolation_violations", "Times that a guarantee was found broken.", _LABELS)


class Evidence:
    """To be used from one event loop. `now`: seconds since 1970."""

    def __init__(
        self,
        config: OperatorConfig,
        signer: Signer | None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._signer = signer
        self._config = config
        self._book = Book()
        self._restored: set[tuple[Subject, str]] = set()
        self._told: dict[Subject, dict[str, bool | None]] = {}
        self._concerns: Callable[[Subject], None] = lambda subject: None
        self.now = now

    def on_news(self, concerns: Callable[[Subject], None]) -> None:
        """Who is to be told when something new is known of a subject."""
        self._concerns = concerns

    @property
    def max_age(self) -> float:
        return float(self._config.evidence.max_age_seconds)

    def record(self, subject: Subject, guarantee: str, aspect: str, finding: Finding) -> bool:
        """Take in what an observer saw; whether it says something new. See `ASPECTS` for what there is to see."""
        page = self._book.page(subject)
        before = page.findings.get(guarantee, {}).get(aspect) if page is not None else None
        news = self._book.record(subject, guarantee, aspect, finding)
        if finding.holds is False and (before is None or before.holds is not False):
            VIOLATIONS.labels(*subject, guarantee).inc()
        self._measure(subject, guarantee)
        if news:
            self._concerns(subject)
        self.expire(subject)
        return news

    def expire(self, subject: Subject) -> None:
        """Tell whom it concerns when time alone has changed what counts; to be called now and then."""
        holds = {
            name: seen.holds
            for name, seen in self._book.observations(subject, self.now(), self.max_age).items()
        }
        if self._told.get(subject) != holds:
            self._told[subject] = holds
            self._concerns(subject)

    def record_all(self, subject: Subject, found: Iterable[tuple[str, str, Finding]]) -> bool:
        """The same for many; whether any says something new."""
        return sum(self.record(subject, *entry) for entry in found) > 0

    def observations(self, subject: Subject) -> Mapping[str, Observation]:
        """What counts now."""
        return self._book.observations(subject, self.now(), self.max_age)

    async def restore(self, subject: Subject, obj: Obj, client: Client) -> None:
        """Read the stored report, once for each incarnation of the subject: only what this operator's key sealed.

        Raises ApiError.
        """
        mark = (subject, uid_of(obj))
        if mark in self._restored:
            self.expire(subject)
            return
        found = await read(client, CONFIG_MAP, Key(*report.where(subject, self._config.release_namespace)))
        self._restored.add(mark)
        keys = [self._signer.key.public_key()] if self._signer is not None else []
        stored = report.read(found, subject, uid_of(obj)) if is_sealed(found, keys) else None
        if stored is not None:
            self._book.restore(subject, stored.page)
            for guarantee in stored.page.findings:
                self._measure(subject, guarantee)

    def page(self, subject: Subject) -> Page | None:
        return self._book.page(subject)

    def report(self, subject: Subject, obj: Obj) -> Obj | None:
        """The ConfigMap to store; None when nothing is known."""
        page = self._book.page(subject)
        if page is None:
            return None
        written = Report(subject, uid_of(obj), self.now(), self.max_age, page)
        made = report.config_map(written, self._config.release_namespace)
        return made if self._signer is None else sealed(made, self._signer.key)

    def forget(self, subject: Subject) -> None:
        """The subject is gone, or not watched over any more."""
        self._restored = {mark for mark in self._restored if mark[0] != subject}
        self._told.pop(subject, None)
        if self._book.forget(subject):
            for guarantee in ASPECTS:
                for series in (OBSERVED, HOLDS, VIOLATIONS):
                    with contextlib.suppress(KeyError):
                        series.remove(*subject, guarantee)

    def _measure(self, subject: Subject, guarantee: str) -> None:
        page = self._book.page(subject)
        if page is None:
            return
        at = page.observed_at(guarantee)
        if at is not None:
            OBSERVED.labels(*subject, guarantee).set(at)
        observation = page.observations(self.now(), self.max_age).get(guarantee)
        holds = observation.holds if observation is not None else None
        HOLDS.labels(*subject, guarantee).set(-1 if holds is None else int(holds))
