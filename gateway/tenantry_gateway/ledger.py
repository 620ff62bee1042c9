"""The ledger: one durable `opened` record before a request goes to an engine, one closing record after. Never a prompt.

SQLite in WAL mode, written by one thread in batches; both tables are append-only and idempotent by id. Requests that
were open when the process ended are closed at the next start as `unknown`, with all that they had reserved, since
nobody saw what the engine did.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from .limits import month_of, month_start

log = logging.getLogger(__name__)
MAX_BATCH = 512
RETRY_SECONDS = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known before dispatch. `opened_at` in Unix seconds; tokens are upper bounds."""

    id: str
    opened_at: float
    tenant: str
    tenant_uid: str
    key_name: str
    route: str
    model: str
    served_name: str
    digest: str
    pool: str
    lane: str
    stream: bool
    sequences: int
    input_bound: int
    output_bound: int
    client_request_id: str


@dataclass(frozen=True, slots=True)
class Closed:
    """How it ended. `estimated`: the engine did not tell the tokens. Seconds are counted from the arrival."""

    id: str
    closed_at: float
    outcome: str
    status: int
    attempts: int
    replica: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    delivered_tokens: int
    estimated: bool
    queued_seconds: float
    first_byte_seconds: float | None
    total_seconds: float


_COLUMNS = {
    "str": "TEXT NOT NULL",
    "float": "REAL NOT NULL",
    "int": "INTEGER NOT NULL",
    "bool": "INTEGER NOT NULL",
}


def _table(name: str, kind: type) -> str:
    columns = [
        f"{f.name} {_COLUMNS.get(str(f.type), 'REAL')}" + (" PRIMARY KEY" if f.name == "id" else "")
        for f in fields(kind)
    ]
    return f"CREATE TABLE IF NOT EXISTS {name} ({', '.join(columns)}) STRICT, WITHOUT ROWID"


def _insert(name: str, kind: type) -> str:
    marks = ", ".join("?" for _ in fields(kind))
    return f"INSERT OR IGNORE INTO {name} VALUES ({marks})"  # noqa: S608 - both are ours


_INSERT = {Opened: _insert("opened", Opened), Closed: _insert("closed", Closed)}

_RECONCILE = """
INSERT OR IGNORE INTO closed
SELECT o.id, ?, 'unknown', 0, 0, '', o.input_bound, 0, o.output_bound, 0, 1, 0, NULL, MAX(0, ? - o.opened_at)
FROM opened o LEFT JOIN closed c ON c.id = o.id WHERE c.id IS NULL
"""
_TOTALS = """
SELECT o.tenant_uid, SUM(c.input_tokens + c.output_tokens)
FROM opened o JOIN closed c ON c.id = o.id WHERE o.opened_at >= ? GROUP BY o.tenant_uid
"""
_USAGE = """
SELECT o.model, COUNT(*), SUM(c.input_tokens), SUM(c.cached_tokens), SUM(c.output_tokens), SUM(c.delivered_tokens)
FROM opened o JOIN closed c ON c.id = o.id WHERE o.tenant_uid = ? AND o.opened_at >= ? GROUP BY o.model ORDER BY o.model
"""


class LedgerError(Exception):
    """The ledger cannot be written or read; nothing may be served that it would not hold."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Without a future nobody waits for it, so it is kept until it succeeds."""

    run: Callable[[sqlite3.Connection], Any]
    future: Future[Any] | None


class Ledger:
    """Owns the file. `open` is awaited before dispatch; `close` never blocks and keeps on trying."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._month = ""
        self._totals: dict[str, int] = {}
        self.reconciled = 0
        self.failures = 0

    @classmethod
    def parse(cls, url: str) -> Ledger:
        """`sqlite:////var/lib/tenantry/ledger.db`. Raises ValueError."""
        if not url.startswith("sqlite:///") or len(url) <= len("sqlite:///"):
            raise ValueError(
                "`--ledger` must be `sqlite:///` and the path of a file, e.g. sqlite:////var/lib/tenantry/ledger.db"
            )
        return cls(Path(url.removeprefix("sqlite:///")))

    def start(self) -> None:
        """Open or make the file, close what a former process left open, sum up the month. Raises LedgerError."""
        try:
            connection = self._connect()
            now = time.time()
            with connection:
                for name, kind in (("opened", Opened), ("closed", Closed)):
                    connection.execute(_table(name, kind))
                connection.execute(
                    "CREATE INDEX IF NOT EXISTS opened_by_tenant ON opened (tenant_uid, opened_at)"
                )
                self.reconciled = connection.execute(_RECONCILE, (now, now)).rowcount
            self._month = month_of(now)
            self._totals = dict(connection.execute(_TOTALS, (month_start(self._month),)).fetchall())
            connection.close()
        except sqlite3.Error as error:
            raise LedgerError(f"`{self._path}` cannot be used as ledger: {error}") from error
        if self.reconciled:
            log.warning(
                "requests left open by an earlier process were closed as unknown",
                extra={"count": self.reconciled},
            )
        self._thread.start()

    def stop(self) -> None:
        """Write what is pending, then end."""
        self._jobs.put(None)
        self._thread.join()

    def month_total(self, uid: str, month: str) -> int:
        """Tokens that the tenant used in that month, by all closed records."""
        return self._totals.get(uid, 0) if month == self._month else 0

    async def open(self, record: Opened) -> None:
        """Returns once the record is on disk. Raises LedgerError."""
        await self._submit(lambda connection: self._insert_opened(connection, record))

    def close(self, record: Closed, uid: str) -> None:
        """Append the closing record soon; written again until the file takes it."""
        month = month_of(record.closed_at)
        if month != self._month:
            self._month, self._totals = month, {}
        self._totals[uid] = self._totals.get(uid, 0) + record.input_tokens + record.output_tokens
        values = astuple(record)
        self._jobs.put(_Job(lambda connection: connection.execute(_INSERT[Closed], values), None))

    async def usage(self, uid: str, since: float) -> list[dict[str, Any]]:
        """Sums of one tenant by model, of requests opened since (Unix seconds) and closed."""
        rows = await self._submit(lambda connection: connection.execute(_USAGE, (uid, since)).fetchall())
        names = ("model", "requests", "input_tokens", "cached_tokens", "output_tokens", "delivered_tokens")
        return [dict(zip(names, row, strict=True)) for row in rows]

    async def flush(self) -> None:
        """Returns once everything submitted before is on disk."""
        await self._submit(lambda _connection: None)

    @staticmethod
    def _insert_opened(connection: sqlite3.Connection, record: Opened) -> None:
        connection.execute(_INSERT[Opened], astuple(record))

    async def _submit(self, run: Callable[[sqlite3.Connection], T]) -> T:
        future: Future[T] = Future()
        self._jobs.put(_Job(run, future))
        try:
            return await asyncio.wrap_future(future)
        except sqlite3.Error as error:
            raise LedgerError(str(error)) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=5)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _work(self) -> None:
        connection = self._connect()
        kept: list[_Job] = []
        stopping = False
        while not stopping:
            batch = [*kept, *self._take(RETRY_SECONDS if kept else None)]
            stopping = None in batch
            kept = self._write(connection, [job for job in batch if job is not None])
        if kept:
            log.error("closing records could not be written", extra={"count": len(kept)})
        connection.close()

    def _take(self, timeout: float | None) -> list[_Job | None]:
        """All that waits, at most a batch; blocks for the first, or until the timeout (seconds)."""
        batch: list[_Job | None] = []
        try:
            batch.append(self._jobs.get(timeout=timeout))
            while len(batch) < MAX_BATCH:
                batch.append(self._jobs.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _write(self, connection: sqlite3.Connection, batch: list[_Job]) -> list[_Job]:
        """One transaction for the batch; success is told after its commit. Returns what to try again."""
        try:
            with connection:
                results = [job.run(connection) for job in batch]
        except sqlite3.Error as error:
            self.failures += 1
            log.error("ledger not written", extra={"why": str(error), "records": len(batch)})
            for job in batch:
                if job.future is not None and job.future.set_running_or_notify_cancel():
                    job.future.set_exception(error)
            return [job for job in batch if job.future is None]
        for job, result in zip(batch, results, strict=True):
            if job.future is not None and job.future.set_running_or_notify_cancel():
                job.future.set_result(result)
        return []
