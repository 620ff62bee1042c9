"""Faults in single requests of the operator, aimed at the reconciles of one test instance among many.

A call is what a reconcile sends, without the instance's name: which controller, which verb, which object. So the calls
of a clean run name the places where a later run is to fail.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from tenantry.runtime import hub

Answer = tuple[int, Mapping[str, str], str]
Send = Callable[..., Awaitable[Answer]]

WRITES = frozenset({"POST", "APPLY", "MERGE", "JSON", "PUT", "DELETE"})
_PATCHES = {"apply-patch+yaml": "APPLY", "merge-patch+json": "MERGE", "json-patch+json": "JSON"}


class Call(NamedTuple):
    """`target` is the resource with its subresource and the object's name, the instance's own name in it as `*`."""

    controller: str
    verb: str
    target: str

    def __str__(self) -> str:
        return f"{self.controller}: {self.verb} {self.target}"


@dataclass(frozen=True)
class Fault:
    """What the operator gets instead of an answer, and whether the request reached the API server before."""

    name: str
    answer: Callable[[], Awaitable[Answer]]
    verbs: frozenset[str]
    reaches: bool = False


def refusal(status: int, reason: str, **headers: str) -> Callable[[], Awaitable[Answer]]:
    """A Status object."""
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": "injected", "code": status}

    async def answer() -> Answer:
        return status, headers, json.dumps(body)

    return answer


async def _gateway() -> Answer:
    return 502, {}, "<html>bad gateway</html>"


async def _cut() -> Answer:
    raise ConnectionResetError("injected")


async def _hang() -> Answer:
    await asyncio.sleep(0.3)  # as if the client's own time-out ended it
    raise TimeoutError("injected")


_READS = frozenset({"GET", "LIST"})
_CHANGES = WRITES - {"POST"}
FAULTS = (
    Fault("cut after the write", _cut, WRITES, reaches=True),
    Fault("409", refusal(409, "Conflict"), _CHANGES),
    Fault("409 exists", refusal(409, "AlreadyExists"), frozenset({"POST"})),
    Fault("410", refusal(410, "Expired"), frozenset({"LIST"})),
    Fault("422", refusal(422, "Invalid"), WRITES),
    Fault("429", refusal(429, "TooManyRequests", **{"Retry-After": "1"}), _READS | WRITES),
    Fault("500", refusal(500, "InternalError"), _READS | WRITES),
    Fault("502 html", _gateway, _READS | WRITES),
    Fault("403", refusal(403, "Forbidden"), _READS | WRITES),
    Fault("time-out", _hang, _READS | WRITES),
    Fault("time-out after the write", _hang, WRITES, reaches=True),
    Fault("cut", _cut, _READS | WRITES),
)


@dataclass
class Aim:
    """One fault at one call, spent when it is met."""

    call: Call
    fault: Fault
    spent: bool = False


@dataclass
class Record:
    """What an instance's reconciles sent in the current phase, and what is to fail in it."""

    calls: Counter[Call] = field(default_factory=Counter)
    aims: list[Aim] = field(default_factory=list)

    def take(self, call: Call) -> Fault | None:
        """Count the call; the fault that meets it."""
        self.calls[call] += 1
        aim = next((aim for aim in self.aims if aim.call == call and not aim.spent), None)
        if aim is None:
            return None
        aim.spent = True
        return aim.fault


class Saboteur:
    """Stands between the operator's client and the API server."""

    def __init__(self, send: Send, instance: re.Pattern[str]) -> None:
        self._send = send
        self._instance = instance
        self.records: dict[str, Record] = {}

    async def __call__(self, method: str, path: str, **options: Any) -> Answer:
        writer = hub._writer.get()
        text = f"{path} {writer.key if writer else ''} {_regarding(options.get('body'))}"
        found = self._instance.search(text)
        record = self.records.get(found[0]) if found else None
        if found is None or record is None:
            return await self._send(method, path, **options)
        call = Call(
            writer.controller if writer else "events",
            _verb(method, path, options),
            _target(path, self._instance),
        )
        fault = record.take(call)
        if fault is None:
            return await self._send(method, path, **options)
        if fault.reaches:
            await self._send(method, path, **options)
        return await fault.answer()


def _regarding(body: Any) -> str:
    regarding = body.get("regarding") if isinstance(body, dict) else None
    return str(regarding.get("name", "")) if isinstance(regarding, dict) else ""


def _verb(method: str, path: str, options: Mapping[str, Any]) -> str:
    if method == "PATCH":
        return _PATCHES[options["content_type"].partition("/")[2]]
    if method == "GET" and not _parts(path)[1]:
        return "LIST"
    return method


def _target(path: str, instance: re.Pattern[str]) -> str:
    plural, name, part = _parts(path)
    if plural == "events":
        name = ""  # drawn at random
    return f"{plural}{'/' + part if part else ''} {instance.sub('*', name)}".strip()


def _parts(path: str) -> tuple[str, str, str]:
    """(plural, name, subresource) of an API path."""
    words = [unquote(word) for word in path.strip("/").split("/")]
    words = words[2:] if words[0] == "api" else words[3:]
    if words[0] == "namespaces" and len(words) > 2 and words[2] not in ("status", "finalize"):
        words = words[2:]
    return words[0], words[1] if len(words) > 1 else "", words[2] if len(words) > 2 else ""
