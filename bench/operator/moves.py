"""A tenant changes its tier, every pair of tiers once, while its clients go on asking.

On the cluster of `make cluster-up` with Tenantry on it (made where it is missing): one tenant walks through the tiers
under traffic of whole and streamed answers. Told for each pair: seconds from the edit until the new place serves, until
the old place is empty, and requests that failed. Tier Regulated is in it only where the release can serve it.

    python bench/operator/moves.py [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "e2e"), str(REPOSITORY / "bench")]

import report  # noqa: E402
from stack import install  # noqa: E402
from stack.install import MODEL, Stack, mint  # noqa: E402
from stack.kube import JsonObject, condition, eventually, is_ready, summary  # noqa: E402
from stack.traffic import Steady  # noqa: E402

TENANT = "moss"
TIERS = ("Free", "Smb", "MidMarket", "Enterprise")
QUICK = ("Free", "Enterprise", "MidMarket", "Free", "Smb")
RANGES: dict[str, report.Bounds] = {"failed_requests": (0, 0), "old_places_left": (0, 0)}
PAUSE_SECONDS = 1.3
"""Between requests: the tier with the lowest ceiling takes 60 a minute."""


def walk() -> tuple[str, ...]:
    """A way from tier to tier that takes every ordered pair exactly once (Hierholzer, 1873)."""
    left = {tier: [other for other in TIERS if other != tier] for tier in TIERS}
    stack, way = [TIERS[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            way.append(stack.pop())
    return tuple(reversed(way))


def tenant(tier: str, sha256: str) -> JsonObject:
    """The tenant in a tier: the same aliases, keys and limits in all of them."""
    spec: JsonObject = {
        "tier": tier,
        "models": [{"name": "chat", "baseModel": MODEL}],
        "limits": {"requestsPerMinute": 60, "tokensPerMinute": 60_000},
        "auth": {"apiKeys": [{"name": "bench", "sha256": sha256}]},
    }
    if tier == "Enterprise":
        spec["dedicated"] = {"poolTemplateRef": "dedicated", "replicas": 1}
    return {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": TENANT},
        "spec": spec,
    }


@contextmanager
def alone(stack: Stack) -> Iterator[str]:
    """The bench's tenant on a cluster whose dedicated node is free; its key. All is put back at the end."""
    oak = stack.kube.get("tenant", "oak")
    if oak is not None:
        stack.kube.run("delete", "tenant", "oak", "--wait=true", "--timeout=240s", seconds=260)
    key, sha256 = mint(TENANT)
    stack.keys[TENANT] = key
    stack.kube.apply(tenant(TIERS[0], sha256))
    stack.kube.wait("the tenant is ready", "tenant", TENANT, until=is_ready, seconds=180)
    try:
        yield sha256
    finally:
        stack.kube.run("delete", "tenant", TENANT, "--wait=true", "--timeout=240s", seconds=260)
        if oak is not None:
            stack.kube.apply(stack.tenant("oak"))


def move(stack: Stack, to: str, sha256: str) -> tuple[float, float]:
    """(seconds until the new place serves, seconds until the old one is empty)."""
    began = time.monotonic()
    stack.kube.apply(tenant(to, sha256))
    seen: JsonObject | None = None

    def status() -> JsonObject:
        nonlocal seen
        seen = stack.kube.get("tenant", TENANT)
        return dict((seen or {}).get("status") or {})

    eventually(
        f"tier {to} is in force", lambda: status().get("tier") == to, seconds=300, said=lambda: summary(seen)
    )
    served = time.monotonic() - began

    def settled() -> bool:
        now = status()
        done = condition(seen, "Reconciling").get("status") == "False"
        return done and is_ready(seen) and not now.get("leaving")

    eventually("the old place is empty", settled, seconds=300, said=lambda: summary(seen))
    return served, time.monotonic() - began


def measure(way: tuple[str, ...]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    stack = install.up()
    moves: list[dict[str, Any]] = []
    with alone(stack) as sha256:
        client = stack.client(TENANT)
        whole = Steady(
            lambda: client.ask("chat", "What is a crankset?", max_tokens=12),
            workers=1,
            pause=PAUSE_SECONDS * 2,
        )
        streamed = Steady(
            lambda: client.ask_streamed("chat", "Count from one to ten.", max_tokens=24),
            workers=1,
            pause=PAUSE_SECONDS * 2,
        )
        with whole, streamed:
            for before, to in itertools.pairwise(way):
                failed, asked = _failed(whole, streamed), len(whole.answers) + len(streamed.answers)
                serves, empty = move(stack, to, sha256)
                time.sleep(2 * PAUSE_SECONDS)  # a request that the move broke ends before it is judged
                found = {
                    "from": before,
                    "to": to,
                    "serves_seconds": round(serves, 1),
                    "empty_seconds": round(empty, 1),
                    "requests": len(whole.answers) + len(streamed.answers) - asked,
                    "failed": _failed(whole, streamed) - failed,
                }
                moves.append(found)
                print("  ".join(f"{value}" for value in found.values()), file=sys.stderr, flush=True)
        for answer in [*whole.failures, *streamed.failures]:
            print(f"failed: {answer}", file=sys.stderr)
        left = (stack.kube.get("tenant", TENANT) or {}).get("status", {}).get("leaving", [])
    figures = {
        "pairs": float(len(moves)),
        "requests": float(len(whole.answers) + len(streamed.answers)),
        "failed_requests": float(_failed(whole, streamed)),
        "old_places_left": float(len(left)),
        "longest_gap_seconds": round(max(whole.longest_gap(), streamed.longest_gap()), 2),
        "serves_seconds_median": statistics.median(entry["serves_seconds"] for entry in moves),
        "serves_seconds_max": max(entry["serves_seconds"] for entry in moves),
        "empty_seconds_median": statistics.median(entry["empty_seconds"] for entry in moves),
        "empty_seconds_max": max(entry["empty_seconds"] for entry in moves),
    }
    return figures, moves


def _failed(*traffic: Steady) -> int:
    return sum(len(steady.failures) for steady in traffic)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four moves instead of all twelve")
    quick = parser.parse_args().quick
    figures, moves = measure(QUICK if quick else walk())
    sys.exit(
        report.finish(
            bench="operator/moves",
            figures=figures,
            peers={},
            ranges=RANGES,
            keep=not quick,
            details={"moves": moves},
        )
    )


if __name__ == "__main__":
    main()
