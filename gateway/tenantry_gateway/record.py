"""What is known of one request while it runs, and what is kept of it afterwards: ledger, audit line, metrics."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from .auth import Caller
from .dispatch import Grant, Ticket
from .errors import ApiError
from .ids import uuid7
from .ledger import Closed, Ledger, Opened
from .metrics import Metrics
from .sse import TokenCount

audit = logging.getLogger("tenantry.audit")


@dataclass
class Record:
    """Filled in as the request goes its way. Times by the monotonic clock, but `arrived_at` (Unix)."""

    route: str
    client: str
    client_request_id: str
    conversation: str = ""
    id: str = field(default_factory=uuid7)
    started: float = field(default_factory=time.monotonic)
    arrived_at: float = field(default_factory=time.time)
    caller: Caller | None = None
    model: str = ""
    stream: bool = False
    ticket: Ticket | None = None
    input_bound: int = 0
    output_bound: int = 0
    opened: bool = False
    closed: bool = False
    outcome: str = ""
    code: str = ""
    status: int = 0
    attempts: int = 0
    replica: str = ""
    tokens: TokenCount = field(default_factory=TokenCount)
    estimated: bool = False
    delivered: int = 0
    queued_seconds: float = 0.0
    first_byte: float | None = None

    @property
    def used(self) -> int:
        """Tokens charged."""
        return self.tokens.input + self.tokens.output

    @property
    def tokens_seen(self) -> bool:
        """Whether the engine told anything of what it made."""
        return self.tokens.told or self.tokens.output > 0

    def refuse(self, error: ApiError) -> None:
        self.status, self.code = error.status, error.code
        self.outcome = self.outcome or ("refused" if error.status < 500 else "failed")

    def as_opened(self) -> Opened:
        assert self.caller is not None
        assert self.ticket is not None
        ticket = self.ticket
        return Opened(
            id=self.id,
            opened_at=time.time(),
            tenant=ticket.tenant.name,
            tenant_uid=ticket.tenant.uid,
            key_name=self.caller.key_name,
            route=self.route,
            model=self.model,
            served_name=ticket.target.served_name,
            digest=ticket.target.digest,
            pool=ticket.pool.name,
            lane=ticket.lane.name,
            stream=self.stream,
            sequences=ticket.sequences,
            input_bound=self.input_bound,
            output_bound=self.output_bound,
            client_request_id=self.client_request_id,
        )

    def take_usage(self, tokens: TokenCount, outcome: str) -> None:
        """Charge what the engine told. Where it did not: the input's bound, and the chunks that were seen."""
        self.outcome = outcome
        if tokens.told:
            self.tokens = tokens
        else:
            self.tokens = TokenCount(input=self.input_bound, output=tokens.output)
            self.estimated = True

    def close(self, ledger: Ledger, grant: Grant | None) -> None:
        """The closing record, for what was opened. Never blocks."""
        if not self.opened or grant is None:
            return
        self.replica = grant.replica.name
        ledger.close(
            Closed(
                id=self.id,
                closed_at=time.time(),
                outcome=self.outcome,
                status=self.status,
                attempts=self.attempts,
                replica=self.replica,
                input_tokens=self.tokens.input,
                cached_tokens=self.tokens.cached,
                output_tokens=self.tokens.output,
                delivered_tokens=self.delivered,
                estimated=self.estimated,
                queued_seconds=self.queued_seconds,
                first_byte_seconds=self.first_byte,
                total_seconds=time.monotonic() - self.started,
            ),
            grant.ticket.tenant.uid,
        )

    def report(self, metrics: Metrics) -> None:
        """Audit line and metrics, for every request, however it ended."""
        tenant = metrics.tenant(self.caller.tenant.name) if self.caller else ""
        metrics.requests.labels(tenant, self.route, self.outcome, str(self.status)).inc()
        if self.status in (429, 503):
            metrics.shed.labels(tenant, self.code).inc()
        if self.opened:
            metrics.tokens.labels(tenant, "input").inc(self.tokens.input)
            metrics.tokens.labels(tenant, "cached").inc(self.tokens.cached)
            metrics.tokens.labels(tenant, "output").inc(self.tokens.output)
        if self.ticket is not None and self.opened:
            labels = (self.ticket.pool.name, self.ticket.lane.name)
            metrics.queue_time.labels(*labels).observe(self.queued_seconds)
            metrics.duration.labels(*labels).observe(time.monotonic() - self.started)
            if self.first_byte is not None:
                metrics.first_token.labels(*labels).observe(self.first_byte)
            if self.attempts:
                metrics.rollouts.ended(
                    self.ticket.tenant,
                    self.ticket.target.served_name,
                    self.outcome,
                    first_byte=self.first_byte,
                    seconds=time.monotonic() - self.started,
                )
        audit.info(
            "request",
            extra={
                "id": self.id,
                "tenant": self.caller.tenant.name if self.caller else None,
                "key": self.caller.key_name if self.caller else None,
                "client": self.client,
                "client_request_id": self.client_request_id,
                "route": self.route,
                "model": self.model,
                "served": self.ticket.target.served_name if self.ticket else None,
                "outcome": self.outcome,
                "status": self.status,
                "code": self.code,
                "attempts": self.attempts,
                "replica": self.replica,
                "input_tokens": self.tokens.input,
                "output_tokens": self.tokens.output,
                "estimated": self.estimated,
                "queued_seconds": round(self.queued_seconds, 4),
                "total_seconds": round(time.monotonic() - self.started, 4),
            },
        )
