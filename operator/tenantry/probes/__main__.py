"""`python -m tenantry.probes PLAN`: tries the targets of a JSON plan and writes what it saw as its last words.

The plan: `targets` ({id, host, port, query}), `allowed` and `closed` (ports to listen on), `settle` (seconds after
which an open target counts as open, since policies reach a new pod late) and `deadline` (seconds). It ends when every
target is settled and a caller on the allowed port has said "done", or at its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .look import OPEN, reach_wire

LAST_WORDS = Path("/dev/termination-log")
LIMIT = 4000
"""The kubelet keeps 4,096 bytes."""


class Doors:
    """The two ports, and who came in."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._ports = (int(plan["allowed"]), int(plan["closed"]))
        self.accepted = dict.fromkeys(self._ports, 0)
        self.done = asyncio.Event()
        self._servers: list[asyncio.Server] = []

    async def open(self, host: str = "") -> None:
        for port in self._ports:
            listener = _listen(host, port)
            self._servers.append(await asyncio.start_server(self._serve(port), sock=listener, limit=64))

    def _serve(self, port: int) -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted[port] += 1
            try:
                async with asyncio.timeout(5):
                    line = await reader.readline()
            except (TimeoutError, ValueError, OSError):
                line = b""
            writer.close()
            if line == b"done\n" and port == self._ports[0]:
                self.done.set()

        return serve

    def close(self) -> None:
        for server in self._servers:
            server.close()


def _listen(host: str, port: int) -> socket.socket:
    """On every address of the pod, of whichever family it has."""
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


async def settle(target: Mapping[str, Any], until: float) -> str:
    """The outcome once it is not `open` any more, or `open` when it still is at `until` (monotonic seconds)."""
    while True:
        outcome = await reach_wire(target)
        if outcome != OPEN or time.monotonic() >= until:
            return outcome
        await asyncio.sleep(0.5)


async def look(plan: Mapping[str, Any], host: str = "") -> dict[str, Any]:
    """Carry out the plan; what was seen."""
    start = time.monotonic()
    doors = Doors(plan)
    await doors.open(host)
    targets = list(plan["targets"])
    until = start + float(plan["settle"])
    outcomes = await asyncio.gather(*(settle(target, until) for target in targets))
    left = start + float(plan["deadline"]) - time.monotonic()
    with contextlib.suppress(TimeoutError):  # that nobody came is told too
        async with asyncio.timeout(max(0.0, left)):
            await doors.done.wait()
    doors.close()
    return {
        "kernel": platform.release(),
        "reached": {str(target["id"]): outcome for target, outcome in zip(targets, outcomes, strict=True)},
        "accepted": {str(port): count for port, count in doors.accepted.items()},
    }


def main(arguments: list[str] | None = None, last_words: Path = LAST_WORDS) -> int:
    """Exit code 0 whatever was seen, 2 when the plan cannot be read or carried out."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        seen = asyncio.run(look(json.loads(words[0])))
    except (IndexError, KeyError, TypeError, ValueError, OSError) as error:
        last_words.write_text(json.dumps({"fault": f"{type(error).__name__}: {error}"[:200]}))
        return 2
    last_words.write_text(json.dumps(seen, separators=(",", ":"))[:LIMIT])
    return 0


if __name__ == "__main__":
    sys.exit(main())
