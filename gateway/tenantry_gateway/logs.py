"""Logs as JSON, one line each. Only fields from a list get in: no header, key or prompt can, by whatever mistake."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

FIELDS = frozenset(
    [
        "id",
        "tenant",
        "key",
        "client",
        "route",
        "model",
        "served",
        "outcome",
        "status",
        "code",
        "attempts",
        "replica",
        "queued_seconds",
        "total_seconds",
        "input_tokens",
        "output_tokens",
        "estimated",
        "stream",
        "client_request_id",
        "why",
        "slice",
        "count",
        "records",
        "kind",
        "leases",
        "port",
        "signal",
    ]
)
_NOISY = ("uvicorn.access", "kubernetes.client.rest")


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, the allowed fields, and where an exception was raised."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in record.__dict__.items() if name in FIELDS})
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
            trace = record.exc_info[2]
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            if trace is not None:
                line["at"] = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        return orjson.dumps(line, default=str).decode()


def configure(level: int = logging.INFO) -> None:
    """Send everything to stdout."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
