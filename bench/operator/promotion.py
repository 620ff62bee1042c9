"""Promotions and rollbacks under constant traffic: no request fails, none is served by a third version.

On the stack of the e2e tests (brought up where it does not run): one adapter moves between three versions. Every move
up takes two steps, every move down is a rollback within the window, some moves up fail their analysis and come back by
themselves. Meanwhile clients ask without a pause, each request as another conversation.

    python bench/operator/promotion.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "e2e"), str(REPOSITORY / "bench")]

import report  # noqa: E402
from stack import install  # noqa: E402
from stack.install import EXAMPLES, Stack, tenantry  # noqa: E402
from stack.kube import JsonObject, condition, eventually, is_ready  # noqa: E402
from stack.traffic import Answer  # noqa: E402

NAME, NAMESPACE, TENANT, MODEL = "tone", "maple-ml", "maple", "tone"
FOLDERS = {"1.0.0": "pirate", "1.1.0": "formal", "1.2.0": "triage"}
VERSIONS = list(FOLDERS)
STEPS = [{"weight": 25, "pauseSeconds": 1}, {"weight": 50, "pauseSeconds": 1}]
# No answer takes 0 ms, so this fails on the first measurement.
HOPELESS = [{"metric": "DurationMillisecondsP95", "threshold": 0, "minSamples": 3}]
FAIL_EVERY = 10


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Move:
    """One change in Git's place: from one version to another. `fails`: its analysis cannot pass."""

    before: str
    after: str
    fails: bool

    @property
    def up(self) -> bool:
        return VERSIONS.index(self.after) > VERSIONS.index(self.before)


def moves(count: int) -> list[Move]:
    """Up and down through all versions. About every `FAIL_EVERY`th is a move up that fails and is made anew next."""
    at, direction, since, found = 0, 1, 0, []
    for _ in range(count):
        if not 0 <= at + direction < len(VERSIONS):
            direction = -direction
        since += 1
        fails = since >= FAIL_EVERY - 2 and direction > 0
        found.append(Move(VERSIONS[at], VERSIONS[at + direction], fails))
        at, since = (at, 0) if fails else (at + direction, since)
    return found


@dataclass
class Done:
    """What one move took, in seconds."""

    move: Move
    began: float
    total: float
    stages: dict[str, float] = field(default_factory=dict)


@dataclass
class Traffic:
    """Every answer with the time at which it was asked for and came."""

    stack: Stack
    workers: int = 2
    pause: float = 0.1
    answers: list[tuple[float, float, Answer]] = field(default_factory=list)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        stop = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(stop,), daemon=True) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _ask(self, stop: threading.Event) -> None:
        client = self.stack.client(TENANT)
        while not stop.is_set():
            began = time.monotonic()
            answer = client.ask(MODEL, "Where is my parcel?", max_tokens=2, user=uuid.uuid4().hex)
            self.answers.append((began, time.monotonic(), answer))
            stop.wait(self.pause)


@dataclass
class Stages:
    """When the Adapter's status said what, by a watch."""

    seen: list[tuple[float, str]] = field(default_factory=list)

    @contextmanager
    def watched(self, stack: Stack) -> Iterator[None]:
        path = '{.status.rollout.attempt} {.status.rollout.phase} {.status.rollout.step}{"\\n"}'
        command = [
            str(stack.kube.kubectl), f"--kubeconfig={stack.kube.kubeconfig}", "get", "adapter", NAME,
            "-n", NAMESPACE, "--watch", "-o", f"jsonpath={path}",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            reader.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split()
            if len(words) == 3:
                _, phase, step = words
                self.seen.append((time.monotonic(), f"step {int(step) + 1}" if phase == "Shift" else phase))

    def of(self, began: float, ended: float) -> dict[str, float]:
        """Seconds from the first sight of each stage between two moments until that of the next."""
        found = [(when, stage) for when, stage in self.seen if began <= when <= ended]
        firsts: dict[str, float] = {}
        for when, stage in found:
            firsts.setdefault(stage, when)
        order = sorted(firsts.items(), key=lambda item: item[1])
        ends = [when for _, when in order[1:]] + [ended]
        return {stage: end - when for (stage, when), end in zip(order, ends, strict=True)}


def adapter(stack: Stack, stable: str, *, fails: bool, token: str) -> JsonObject:
    found: JsonObject = yaml.safe_load(stack.adapter_text(NAME, stable=stable))
    first = found["spec"]["versions"][0]
    listed = {entry["version"]: entry for entry in found["spec"]["versions"]}
    for version, folder in FOLDERS.items():
        if version not in listed:
            source = EXAMPLES / "adapters" / folder
            entry = yaml.safe_load((EXAMPLES / "adapters" / f"{folder}.yaml").read_text())["spec"][
                "versions"
            ][0]
            listed[version] = {
                **entry,
                "version": version,
                "digest": tenantry("adapters", "digest", str(source)).strip(),
                "source": first["source"].replace(first["version"], version),
            }
    found["spec"]["versions"] = list(listed.values())
    found["spec"]["rollout"] = {
        **found["spec"].get("rollout", {}),
        "steps": STEPS,
        "analysis": HOPELESS if fails else [],
        "retryToken": token,
    }
    return found


def push(stack: Stack) -> None:
    """The version that the examples do not have."""
    address = (
        stack.service_address("registry", "tenantry-registry") + ":5000"
        if stack.own_cluster
        else stack.registry
    )
    for version in VERSIONS[2:]:
        target = f"oci://{address}/maple/{NAME}:{version}"
        tenantry(
            "adapters",
            "push",
            str(EXAMPLES / "adapters" / FOLDERS[version]),
            target,
            "--plain-http",
            "--force",
        )


def make(stack: Stack, move: Move, number: int) -> tuple[float, float]:
    """Apply the move and wait until it has ended; when it began and ended."""
    wanted = adapter(stack, move.after, fails=move.fails, token=f"move-{number}")
    began = time.monotonic()
    stack.kube.apply(wanted)

    def ended(found: JsonObject | None) -> bool:
        if not is_ready(found) or condition(found, "Reconciling").get("status") == "True":
            return False
        status = (found or {})["status"]
        active = status["channels"][0].get("activeVersion")
        if move.fails:
            return condition(found, "RolledBack").get("status") == "True" and active == move.before
        return active == move.after and condition(found, "Stalled").get("status") == "False"

    stack.kube.wait(f"move {number}: {move}", "adapter", NAME, NAMESPACE, until=ended, seconds=300)
    return began, time.monotonic()


def strangers(answers: list[tuple[float, float, Answer]], done: list[Done]) -> int:
    """Answers by a version that was neither stable nor on its way while the request ran."""
    count = 0
    for asked, came, answer in answers:
        if answer.status != 200:
            continue
        allowed: set[str] = set()
        for index, entry in enumerate(done):
            until = done[index + 1].began if index + 1 < len(done) else float("inf")
            if entry.began <= came and asked <= until:
                allowed |= {entry.move.before, entry.move.after}
        if asked < done[0].began:
            allowed.add(done[0].move.before)
        count += not any(f".{NAME}--{version}-" in answer.served for version in allowed)
    return count


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100)[int(share * 100) - 1] if len(values) > 1 else sum(values)


def run(count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    stack = install.up()
    push(stack)
    stack.kube.apply(adapter(stack, VERSIONS[0], fails=False, token="start"))

    def started() -> bool:
        found = stack.kube.get("adapter", NAME, NAMESPACE)
        return is_ready(found) and (found or {})["status"]["channels"][0].get("activeVersion") == VERSIONS[0]

    eventually("the first version is served", started, seconds=180)
    traffic, stages, done = Traffic(stack), Stages(), []
    try:
        with stages.watched(stack), traffic.flowing():
            eventually("traffic flows", lambda: len(traffic.answers) >= 4, seconds=120)
            for number, move in enumerate(moves(count), start=1):
                began, ended = make(stack, move, number)
                done.append(Done(move, began, ended - began, stages.of(began, ended)))
                if number % 10 == 0 or number == count:
                    say(f"{number} of {count} moves, {len(traffic.answers)} answers")
            enough = len(traffic.answers) + 4
            eventually("traffic flows on", lambda: len(traffic.answers) >= enough, seconds=120)
    finally:
        stack.apply_text(stack.adapter_text(NAME))
    failed = [answer for _, _, answer in traffic.answers if answer.status != 200]
    for answer in failed[:5]:
        say(f"failed: {answer}")
    kinds = {
        "promotion": [d.total for d in done if d.move.up and not d.move.fails],
        "rollback": [d.total for d in done if not d.move.up],
        "failed_rollout": [d.total for d in done if d.move.fails],
    }
    figures: dict[str, Any] = {
        "rollouts": len(done),
        "requests": len(traffic.answers),
        "failed_requests": len(failed),
        "served_by_others": strangers(traffic.answers, done),
    }
    for kind, taken in kinds.items():
        figures[f"{kind}s"] = len(taken)
        if taken:
            figures[f"{kind}_p50_seconds"] = round(percentile(taken, 0.5), 2)
            figures[f"{kind}_max_seconds"] = round(max(taken), 2)
    for stage in ("Verify", "Load", "step 1", "step 2"):
        taken = [d.stages[stage] for d in done if stage in d.stages and not d.move.fails and d.move.up]
        if taken:
            figures[f"{stage.lower().replace(' ', '_')}_p50_seconds"] = round(percentile(taken, 0.5), 2)
    told = [
        {**vars(entry.move), "seconds": round(entry.total, 2), "stages": rounded(entry.stages)}
        for entry in done
    ]
    return figures, {"moves": told}


def rounded(taken: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="10 rollouts instead of 100")
    quick = parser.parse_args().quick
    count = 10 if quick else 100
    figures, details = run(count)
    ranges: dict[str, report.Bounds] = {
        "rollouts": (count, count),
        "failed_requests": (None, 0),
        "served_by_others": (None, 0),
    }
    sys.exit(
        report.finish(
            bench="operator/promotion",
            figures=figures,
            peers={},
            ranges=ranges,
            keep=not quick,
            details=details,
        )
    )


if __name__ == "__main__":
    main()
