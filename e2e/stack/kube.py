"""kubectl with patience: apply, read, and wait for what a person would wait for, saying so."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

JsonObject = dict[str, Any]


class StackError(RuntimeError):
    """Says what did not come to pass and what was seen instead."""


@dataclass(frozen=True)
class Kube:
    """One cluster, seen through one kubeconfig."""

    kubectl: Path
    kubeconfig: Path

    def run(self, *arguments: str, text: str | None = None, check: bool = True, seconds: float = 120) -> str:
        """Standard output of a kubectl call. Raises StackError with its complaint when `check` and it fails."""
        result = self.call(*arguments, text=text, seconds=seconds)
        if check and result.returncode:
            raise StackError(
                f"kubectl {' '.join(arguments)}: {result.stderr.strip() or result.stdout.strip()}"
            )
        return result.stdout

    def call(
        self, *arguments: str, text: str | None = None, seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """The finished kubectl call, whatever its end."""
        return subprocess.run(
            [str(self.kubectl), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )

    def apply(self, *objects: JsonObject) -> None:
        """Server-side apply, as a user of GitOps would."""
        text = yaml.safe_dump_all(objects, sort_keys=False)
        self.run("apply", "--server-side", "--force-conflicts", "-f", "-", text=text)

    def get(self, kind: str, name: str, namespace: str | None = None) -> JsonObject | None:
        """The object, or None when it is not there."""
        where = ["-n", namespace] if namespace else []
        result = self.call("get", kind, name, *where, "-o", "json")
        if result.returncode:
            if "NotFound" in result.stderr:
                return None
            raise StackError(result.stderr.strip())
        found: JsonObject = json.loads(result.stdout)
        return found

    def find(self, kind: str, *selection: str) -> list[JsonObject]:
        """Objects of a kind; `selection` is kubectl's own, e.g. `-A`, `-n x`, `-l a=b`."""
        items: list[JsonObject] = json.loads(self.run("get", kind, *selection, "-o", "json"))["items"]
        return items

    def wait(
        self,
        what: str,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        until: Callable[[JsonObject | None], bool],
        seconds: float = 180,
    ) -> JsonObject | None:
        """Poll the object until `until` holds. Raises StackError with the last state otherwise."""
        seen: JsonObject | None = None

        def reached() -> bool:
            nonlocal seen
            seen = self.get(kind, name, namespace)
            return until(seen)

        eventually(what, reached, seconds=seconds, said=lambda: summary(seen))
        return seen


def eventually(
    what: str,
    holds: Callable[[], bool],
    *,
    seconds: float = 120,
    every: float = 0.5,
    said: Callable[[], str] = lambda: "",
) -> float:
    """Wait until a condition holds; returns the seconds it took. Raises StackError naming what was waited for."""
    start = time.monotonic()
    spoke = start
    while not holds():
        now = time.monotonic()
        if now - start > seconds:
            raise StackError(f"not within {seconds:.0f} s: {what}. {said()}")
        if now - spoke > 15:
            print(f"   ... {what} ({now - start:.0f} s) {said()}", flush=True)
            spoke = now
        time.sleep(every)
    return time.monotonic() - start


def condition(found: JsonObject | None, kind: str) -> JsonObject:
    """The condition of that type, or an empty object."""
    conditions = ((found or {}).get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})


def is_ready(found: JsonObject | None) -> bool:
    """Ready for the present generation."""
    if found is None:
        return False
    generation = found["metadata"].get("generation", 0)
    observed = (found.get("status") or {}).get("observedGeneration", -1)
    return observed == generation and condition(found, "Ready").get("status") == "True"


def summary(found: JsonObject | None) -> str:
    """Conditions in one line, for the message of a wait that failed."""
    if found is None:
        return "(it is not there)"
    conditions = (found.get("status") or {}).get("conditions") or []
    return "; ".join(f"{c['type']}={c['status']} {c['reason']}: {c.get('message', '')}" for c in conditions)
