"""Soak and chaos: random traffic over hundreds of adapters that come and go, clients that leave, killed processes.

Every answer, greedy or drawn with a seed, is compared with the one that was recorded alone, token by token and with the
logarithm of each probability (bitwise: the claim of the CPU path). At quiet points pages must add up with none in use,
no adapter may be referred to, every declared one must be served, and both processes are read (soak_memory.py). At the
end nothing is declared, and nothing may be left. Kills come in the first part; the last part runs undisturbed, and
memory is judged there.

    python bench/engine/soak.py [--minutes 20] [--adapters 500] [--model FOLDER --dtype float32] [--seed 0] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import soak_memory
from soak_replica import MAX_TOKENS, SoakReplica, make_small_adapters, make_work
from workload import model_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report

KILLS_UNTIL = 0.55
"""Share of the time in which processes are killed."""

Recorded = tuple[list[str], list[float]]


class Soak:
    """One run against one folder of adapters."""

    def __init__(self, replica: SoakReplica, adapters: dict[str, Path], seed: int, vocab: int) -> None:
        self.replica = replica
        self.adapters = adapters
        self.draw = random.Random(seed)
        self.work = make_work(self.draw, ["base", *adapters], vocab)
        self.oracle: dict[tuple[str, int], Recorded] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.samples: list[soak_memory.Sample] = []  # of the life of the last replica
        self.fence = 0
        self.declared: set[str] = set()
        self.usable: dict[str, int] = {}  # registered names, and when they became so (a count of changes)
        self.changes = 0
        self.up = False
        self.traffic = asyncio.Event()
        self.busy = 0

    # adapters come and go

    async def declare(self, names: set[str]) -> None:
        """Makes `names` the declared set, and brings the bytes that are wanted."""
        for name in self.usable.keys() - names:
            del self.usable[name]
        self.fence += 1
        self.declared = names
        state = await self.replica.declare(self.fence, sorted(names))
        for adapter in state["adapters"]:
            if adapter["name"] in names and adapter["state"] == "Missing":
                await self.replica.push(adapter["name"])
        state = await self.replica.report()
        for adapter in state["adapters"]:
            if adapter["state"] in ("Registered", "Resident"):
                self._became_usable(adapter["name"])
            elif adapter["state"] == "Failed":
                self.fault(f"adapter {adapter['name']} failed: {adapter['reason']} {adapter['message']}")
        self._add_up(state["capacity"]["pages"])

    def _became_usable(self, name: str) -> None:
        if name in self.declared and name not in self.usable:
            self.changes += 1
            self.usable[name] = self.changes

    def _add_up(self, pages: dict[str, int]) -> None:
        parts = sum(count for state, count in pages.items() if state != "total")
        if parts != pages["total"]:
            self.fault(f"pages do not add up: {pages}")

    async def churn(self) -> None:
        """A fifth of the adapters is away at any time; which ones changes, by a few or by many at once.

        How many are declared does not change: what the replica holds for them must not, either.
        """
        while True:
            await self.traffic.wait()
            self.busy += 1
            try:
                await self.declare(self._others(0.02 if self.draw.random() < 0.9 else 0.5))
            except httpx.HTTPError as error:
                if self.up:
                    self.fault(f"the admin port failed: {error!r}")
            finally:
                self.busy -= 1
            self.counts["declarations"] += 1
            await asyncio.sleep(self.draw.uniform(0.1, 1.0))

    def _others(self, share: float) -> set[str]:
        """Four fifths of all names: the declared ones, but about `share` of all for others."""
        size = max(1, len(self.adapters) * 4 // 5)
        kept = self.draw.sample(sorted(self.declared), min(size, len(self.declared)))
        away = sorted(self.adapters.keys() - set(kept))
        count = min(max(1, int(share * len(self.adapters))), len(away), len(kept))
        return {*kept[count:], *self.draw.sample(away, count)}

    # traffic

    def fault(self, text: str) -> None:
        """Something that must not be."""
        self.faults.append(text)
        print(f"FAULT {text[:4000]}", file=sys.stderr, flush=True)

    async def record(self) -> None:
        """Every answer alone."""
        began = time.monotonic()
        for number, key in enumerate(self.work):
            answer = await self.replica.complete(key[0], self.work[key], MAX_TOKENS)
            self.oracle[key] = _read(answer.json()["choices"][0])
            if number % 100 == 99:
                print(
                    f"recorded {number + 1} of {len(self.work)} answers, {time.monotonic() - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

    async def worker(self) -> None:
        """One client after another."""
        keys = sorted(self.work)
        while True:
            await self.traffic.wait()
            key = self.draw.choice(keys)
            name = key[0]
            if name != "base" and name not in self.usable and self.draw.random() < 0.95:
                continue  # mostly names that are served
            since, life = self.usable.get(name), self.replica.life
            self.busy += 1
            try:
                await self._one(key)
            except httpx.HTTPStatusError as error:
                self._refused(key, error, since, life)
            except httpx.HTTPError as error:
                if self.up and life == self.replica.life:
                    self.fault(f"{name}: {error!r}")
                self.counts["cut by a kill"] += 1
                await asyncio.sleep(0.05)
            finally:
                self.busy -= 1

    async def _one(self, key: tuple[str, int]) -> None:
        count = self.draw.randint(1, MAX_TOKENS)
        asked, kind = self.work[key], self.draw.random()
        if kind < 0.35:
            answer = await self.replica.complete(key[0], asked, count)
            self._compare(key, _read(answer.json()["choices"][0]), count, "whole")
        elif kind < 0.45:
            # goes away without a word, wherever its request is then
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.draw.uniform(0, 0.5)):
                    await self.replica.complete(key[0], asked, count)
            self.counts["gone"] += 1
        elif kind < 0.6:
            answer = await self.replica.complete(key[0], asked, count, n=2)
            # the second choice of a drawn answer has a seed of its own
            for choice in answer.json()["choices"][: 2 if asked.seed is None else 1]:
                self._compare(key, _read(choice), count, "n = 2")
        else:
            leave = self.draw.randint(0, count) if kind > 0.8 else None
            got = await self.replica.stream(key[0], asked, count, leave)
            self._compare(key, got, count, "left" if leave is not None else "stream")

    def _compare(self, key: tuple[str, int], got: Recorded, count: int, kind: str) -> None:
        tokens, logprobs = self.oracle[key]
        full = kind != "left"
        size = count if full else len(got[0])
        if got != (tokens[:size], logprobs[:size]):
            self.fault(f"wrong answer ({kind}) of {key}: {got} instead of {(tokens[:size], logprobs[:size])}")
        self.counts[kind] += 1
        self.counts["tokens"] += size

    def _refused(
        self, key: tuple[str, int], error: httpx.HTTPStatusError, since: int | None, life: int
    ) -> None:
        status, code = error.response.status_code, error.args[0]
        same = life == self.replica.life and self.up
        away = key[0] != "base" and (since is None or self.usable.get(key[0]) != since)
        if (code in ("model_not_found", "adapter_withdrawn") and (away or not same)) or (
            code in ("engine_error", "engine_gone", "aborted", "draining") and not same
        ):
            self.counts[code] += 1
        else:
            self.fault(f"{key[0]} was refused: {status} {code}")

    # the run

    async def run(self, seconds: float, kills: int, clients: int) -> None:
        """Records, then soaks for `seconds`."""
        await self.replica.start()
        self.up = True
        for part in _slices(sorted(self.adapters), 100):
            await self.declare(self.declared | set(part))
        await self.record()
        distinct = len({tuple(tokens) for tokens, _ in self.oracle.values()})
        if distinct < 0.5 * len(self.oracle):
            self.fault(f"only {distinct} answers differ: they tell adapters apart too rarely")
        await self.quiet()
        tasks = [asyncio.create_task(self.worker()) for _ in range(clients)]
        tasks.append(asyncio.create_task(self.churn()))
        self.samples.clear()
        soaked = 0.0  # seconds of traffic: those of starts and of quiet points do not count
        kill_at = [KILLS_UNTIL * seconds * (index + 1) / (kills + 1) for index in range(kills)]
        pause = max(2.0, seconds / 60)
        while soaked < seconds:
            until = min(soaked + pause, *kill_at[:1], seconds)
            self.traffic.set()
            await asyncio.sleep(until - soaked)
            soaked = until
            for task in tasks:
                if task.done():
                    task.result()
            if self.replica.ended:
                self.up = False
                self.fault(f"the replica ended by itself:\n{self.replica.last_words()}")
                break
            if soaked in kill_at:
                kill_at.remove(soaked)
                await self.kill()
            else:
                await self.quiet()
            self._say(soaked)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.up:
            await self.empty()

    def _say(self, soaked: float) -> None:
        taken = [
            f"{who} {self.samples[-1][f'{who} MiB']:.1f} MiB" for who in soak_memory.PROCESSES if self.samples
        ]
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        print(f"{soaked:6.0f} s: {', '.join(taken)}; {counts}", file=sys.stderr, flush=True)

    @property
    def answers(self) -> int:
        """Answers that were compared so far, and requests that were given up."""
        return sum(self.counts[kind] for kind in ("whole", "n = 2", "stream", "left", "gone"))

    async def kill(self) -> None:
        """Ends a process in mid-traffic; the other must follow, and a new replica serve the same answers."""
        victim = self.draw.choice(("http", "engine"))
        self.up = False
        self.usable.clear()
        self.traffic.clear()
        left = await self.replica.kill(victim)
        if left:
            self.fault(f"after a kill of {victim} a process was left: {left}")
        self.counts[f"killed {victim}"] += 1
        self.samples.clear()
        async with asyncio.timeout(120):
            await self._all_done()
        await self.replica.start()
        self.fence = 0
        self.up = True
        await self.declare(self.declared)

    async def _all_done(self) -> None:
        while self.busy:  # noqa: ASYNC110 - a count of many tasks
            await asyncio.sleep(0.02)

    async def quiet(self) -> None:
        """Nothing runs: nothing may be held, and what the processes take is read."""
        self.traffic.clear()
        async with asyncio.timeout(120):
            await self._all_done()
        if await self._nothing_held():
            self.samples.append({**await self.replica.sample(), "answers": self.answers})

    async def empty(self) -> None:
        """Nothing is declared any more: no page holds an adapter, no adapter is known, no bytes of one are kept."""
        await self.declare(set())
        await self._nothing_held()
        report = await self.replica.report()
        pages, stored = report["capacity"]["pages"], self.replica.stored()
        if report["adapters"] or stored or pages["free"] + pages["cached"] != pages["total"]:
            known = [adapter["name"] for adapter in report["adapters"]]
            self.fault(f"left after all adapters went: {known}, {stored} files, {pages}")

    async def _nothing_held(self) -> bool:
        """Whether, within a minute, nothing is held and every declared adapter is served; a fault if not."""
        until = time.monotonic() + 60
        while True:
            report, load = await self.replica.report(), await self.replica.load()
            pages, adapters = report["capacity"]["pages"], report["adapters"]
            self._add_up(pages)
            held = {
                "pages of kv": pages["kv"],
                "pages of adapters": pages["adapter"],
                "requests of adapters": sum(adapter["requests"] for adapter in adapters),
                "running": load["running"],
                "waiting": load["waiting"],
                "tokens": load["outstandingTokens"],
                "adapters not served": sum(a["state"] not in ("Registered", "Resident") for a in adapters),
                "adapters missing or left": len(self.declared ^ {adapter["name"] for adapter in adapters}),
            }
            if not any(held.values()):
                return True
            if time.monotonic() > until:
                self.fault(f"held without any request: { {what: n for what, n in held.items() if n} }")
                return False
            await asyncio.sleep(0.05)


def _read(choice: dict[str, Any]) -> Recorded:
    scored = choice["logprobs"]
    return scored["tokens"], scored["token_logprobs"]


def _slices(items: list[str], size: int) -> list[list[str]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def judge(run: Soak) -> tuple[dict[str, float], dict[str, report.Bounds]]:
    """Figures of the run and what they may be."""
    figures: dict[str, float] = {
        "faults": len(run.faults),
        "answers": run.answers,
        "requests given up": run.counts["gone"] + run.counts["left"],
        "declarations": run.counts["declarations"],
        "kills": run.counts["killed http"] + run.counts["killed engine"],
    }
    ranges: dict[str, report.Bounds] = {"faults": (0, 0), "answers": (10, None), "declarations": (1, None)}
    for found, bounds in (soak_memory.held(run.samples), soak_memory.judge(run.samples)):
        figures |= found
        ranges |= bounds
    return figures, ranges


def soak(
    model: Path,
    folder: Path,
    *,
    dtype: str,
    adapters: int,
    seconds: float,
    kills: int,
    clients: int,
    seed: int,
) -> tuple[dict[str, float], dict[str, report.Bounds], list[str]]:
    """The whole run; also what went wrong, in words."""
    made, vocab = make_small_adapters(model, folder / "adapters", adapters, seed)
    replica = SoakReplica(model, folder, dtype, made)
    run = Soak(replica, made, seed, vocab)

    async def go() -> None:
        try:
            await run.run(seconds, kills, clients)
        finally:
            await replica.end()

    asyncio.run(go())
    figures, ranges = judge(run)
    return figures, ranges, run.faults


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=20)
    p.add_argument("--adapters", type=int, default=500)
    p.add_argument("--model", type=Path, help="another model's folder (default: SmolLM2-135M)")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--kills", type=int, help="default: one every two minutes of the first part")
    p.add_argument("--clients", type=int, default=12)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--quick", action="store_true", help="one minute, 40 adapters, one kill, no file, memory not judged"
    )
    options = p.parse_args()
    minutes, adapters = (1.0, 40) if options.quick else (options.minutes, options.adapters)
    kills = options.kills if options.kills is not None else max(1, int(minutes * KILLS_UNTIL / 2))
    with tempfile.TemporaryDirectory(prefix="tenantry-soak-") as name:
        figures, ranges, _ = soak(
            options.model or model_folder(), Path(name), dtype=options.dtype, adapters=adapters,
            seconds=minutes * 60, kills=kills, clients=options.clients, seed=options.seed,
        )  # fmt: skip
    if options.quick:
        ranges = {"faults": ranges["faults"], "answers": ranges["answers"]}
    for name, value in figures.items():
        print(f"{name:45s}{value:12g}", file=sys.stderr)
    sys.exit(
        report.finish(bench="engine/soak", figures=figures, peers={}, ranges=ranges, keep=not options.quick)
    )


if __name__ == "__main__":
    main()
