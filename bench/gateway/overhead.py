"""What the gateway adds to a streamed answer, first byte and each chunk, against the same engine without it.

Open loop, 48 chunks an answer, a stub engine whose streams step together; rounds alternate between direct and through
the gateway, medians are reported. A round is void when the direct p99 of a chunk is above 2 ms: the machine was busy.
The last line is JSON, also left in bench/results.

    python bench/gateway/overhead.py [--quick] [--rate N] [--rounds N] [--seconds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from tenantry.api import keys

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "e2e")]

import report  # noqa: E402
from cluster.process import free_port  # noqa: E402

VOID_MS = 2.0
RANGES: dict[str, report.Bounds] = {
    "added_chunk_p50_ms": (None, 1.0),
    "added_first_byte_p50_ms": (None, 2.0),
    "failed": (None, 0),
    "valid_rounds_share": (0.5, None),
}


@dataclass
class Sample:
    """Milliseconds."""

    first: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)
    failed: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "first_byte_p50_ms": quantile(self.first, 0.5),
            "first_byte_p99_ms": quantile(self.first, 0.99),
            "chunk_p50_ms": quantile(self.chunks, 0.5),
            "chunk_p99_ms": quantile(self.chunks, 0.99),
        }


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * q))] if values else float("nan")


async def one(port: int, request: bytes, sample: Sample) -> None:
    """One streamed answer on a connection of its own, so that direct and proxied runs pay the same."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began = time.monotonic_ns()
        writer.write(request)
        first, done = True, False
        while not done and (line := await reader.readline()):
            now = time.monotonic_ns()
            if line.startswith(b"data: [DONE]"):
                done = True
            elif (at := line.find(b'"content":"')) > 0:
                if first:
                    sample.first.append((now - began) / 1e6)
                    first = False
                else:
                    sample.chunks.append((now - int(line[at + 11 : at + 31])) / 1e6)
        sample.failed += not done
    except (OSError, ValueError):
        sample.failed += 1
    finally:
        writer.close()


async def load(port: int, request: bytes, rate: float, seconds: float) -> Sample:
    """Requests at fixed moments, whatever became of the earlier ones."""
    sample, began, tasks = Sample(), time.monotonic(), []
    for index in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + index / rate - time.monotonic()))
        tasks.append(asyncio.create_task(one(port, request, sample)))
    await asyncio.gather(*tasks)
    return sample


def objects(key: str) -> dict[str, Any]:
    """One Tenant without tight limits, on one replica."""
    limits = dict.fromkeys(
        (
            "requestsPerMinute",
            "tokensPerMinute",
            "maxInFlight",
            "maxQueued",
            "maxInputTokens",
            "maxOutputTokens",
        ),
        10**6,
    )
    lane = {"name": "fast", "service": "base-fast", "slots": 4096, "replicas": ["base-fast-0"]}
    pool = {"name": "base", "uid": "u", "namespace": "system", "lanes": [lane]}
    route = {
        "weight": 1,
        "lane": "Auto",
        "limits": {**limits, "tokensPerMinute": 10**9, "maxOutputTokens": 48},
        "pools": [pool],
        "models": [{"name": "chat", "pool": "base", "targets": [{"servedName": "base"}]}],
    }
    tenant = {
        "metadata": {"name": "bench", "uid": "bench"},
        "spec": {"auth": {"apiKeys": [{"name": "k", "sha256": keys.hash_key(key)}]}},
        "status": {"route": route},
    }
    part = {
        "metadata": {
            "name": "s",
            "namespace": "system",
            "labels": {"kubernetes.io/service-name": "base-fast"},
        },
        "endpoints": [{"addresses": ["127.0.0.1"], "targetRef": {"name": "base-fast-0"}}],
    }
    return {"tenants": [tenant], "slices": [part]}


def post(key: str) -> bytes:
    body = json.dumps(
        {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "hello " * 20}]}
    )
    head = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", body]).encode()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(port: int, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")


def measure(rate: float, rounds: int, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Figures of the gateway and what it adds, and those of the bare engine beside it."""
    engine, admin, port = (free_port() for _ in range(3))
    key = keys.mint("bench").key
    with tempfile.TemporaryDirectory(prefix="tenantry-bench-") as name:
        (Path(name) / "objects.json").write_text(json.dumps(objects(key)))
        with (Path(name) / "gateway.log").open("wb") as log:
            children = [
                subprocess.Popen(
                    [sys.executable, str(HERE / "stub.py"), str(engine), str(admin)],
                    stdout=subprocess.DEVNULL,
                ),
                subprocess.Popen(
                    [sys.executable, str(HERE / "front.py"), name, str(port), str(engine), str(admin)],
                    stdout=log,
                ),
            ]
            try:
                wait_for(engine, children[0])
                wait_for(port, children[1])
                time.sleep(1)
                return rounds_of(
                    rate, rounds, seconds, {"direct": engine, "gateway": port}, post(key), children[1].pid
                )
            finally:
                for child in children:
                    child.terminate()
                for child in children:
                    child.wait()


def rounds_of(
    rate: float, rounds: int, seconds: float, ports: dict[str, int], request: bytes, pid: int
) -> tuple[dict[str, float], dict[str, float]]:
    kept: list[dict[str, dict[str, float]]] = []
    failed, void, cpu, requests = 0, 0, 0.0, 0
    for number in range(rounds):
        found: dict[str, dict[str, float]] = {}
        for side, port in ports.items():
            before = cpu_seconds(pid)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                sample = runner.run(load(port, request, rate, seconds))
            failed += sample.failed
            if side == "gateway":
                cpu += cpu_seconds(pid) - before
                requests += len(sample.first)
            found[side] = sample.figures()
        busy = found["direct"]["chunk_p99_ms"] > VOID_MS
        void += busy
        kept += [found]
        print(
            f"round {number + 1}/{rounds}{' (void: machine busy)' if busy else ''}: {json.dumps(found)}",
            flush=True,
        )
    good = [f for f in kept if f["direct"]["chunk_p99_ms"] <= VOID_MS] or kept
    medians = {
        side: {name: round(statistics.median(f[side][name] for f in good), 3) for name in good[0][side]}
        for side in ports
    }
    added = {name: round(medians["gateway"][name] - medians["direct"][name], 3) for name in medians["direct"]}
    figures = {
        "rate": rate,
        **{f"added_{name}": value for name, value in added.items()},
        **{f"gateway_{name}": value for name, value in medians["gateway"].items()},
        "cpu_ms_per_request": round(1000 * cpu / max(1, requests), 2),
        "failed": failed,
        "valid_rounds_share": round((rounds - void) / rounds, 2),
        "rounds": rounds,
    }
    return figures, {f"direct_{name}": value for name, value in medians["direct"].items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="one short round")
    options.add_argument("--rate", type=float, default=50, help="requests per second (%(default)s)")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=8)
    asked = options.parse_args()
    rounds, seconds = (1, 3.0) if asked.quick else (asked.rounds, asked.seconds)
    figures, peers = measure(asked.rate, rounds, seconds)
    code = report.finish(
        bench="gateway/overhead", figures=figures, peers=peers, ranges=RANGES, keep=not asked.quick
    )
    sys.exit(code)


if __name__ == "__main__":
    main()
