"""Draws the figures of the documents from the newest dated results: `python bench/plot.py` (after a benchmark ran).

Each figure names the file that it shows. SVG without a date in it: drawing the same results again changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "docs/explanation/figures"
OURS, PEER, FLOOR = "#0072b2", "#999999", "#d55e00"  # distinct for every kind of colour vision


def newest(bench: str) -> tuple[str, dict[str, Any]] | None:
    """Name and content of the newest result of a benchmark; None when it has none."""
    found = sorted((HERE / "results").glob(f"????-??-??-{bench}.json"))
    return (found[-1].name, json.loads(found[-1].read_text())) if found else None


def throughput(axes: Axes, result: dict[str, Any]) -> None:
    """Tokens per second of everything that ran."""
    suffix = " tok/s"
    rows = [
        (n, v, FLOOR if n.startswith("floor") else OURS)
        for n, v in result["figures"].items()
        if n.endswith(suffix)
    ]
    rows += [(n, v, PEER) for n, v in result["peers"].items()]
    names = [name.removesuffix(suffix) for name, _, _ in rows]
    bars = axes.barh(names, [value for _, value, _ in rows], color=[colour for _, _, colour in rows])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second (higher is better)")
    axes.set_title("SmolLM2-135M, bf16, 16 requests at once, 64 tokens in, 48 out")


def fairness(axes: Axes, result: dict[str, Any]) -> None:
    """What a flood does to a victim, beside calm neighbours at the same occupancy."""
    figures = result["figures"]
    names = ["first token, ms", "tokens per second"]
    fair = [figures["flood: fair first token ms"], figures["flood: fair tokens/s"]]
    flooded = [figures["flood: flooded first token ms"], figures["flood: flooded tokens/s"]]
    for index, (calm, flood) in enumerate(zip(fair, flooded, strict=True)):
        pair = axes.bar([index - 0.2, index + 0.2], [1.0, flood / calm], 0.38, color=[PEER, OURS])
        axes.bar_label(pair, [f"{calm:.0f}", f"{flood:.0f}"])
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("times the value beside calm neighbours")
    axes.set_title("A victim beside 15 calm tenants (grey) and beside a flood (blue)")


def adapters(axes: Axes, result: dict[str, Any]) -> None:
    """Throughput when more adapters are registered, and when more are in use than pages hold."""
    figures, work = result["figures"], result["work"]
    names = [work["active"], work["registered"]]
    rates = [figures["registered: tok/s"][label] for label in ("few", "many")]
    axes.plot(names, rates, "o-", label=f"registered; {work['active']} of them in use", color=OURS)
    curve = figures["zipf: curve"]
    label = f"in use (Zipf); the pages hold about {work['fitting']}"
    axes.plot([p["adapters"] for p in curve], [p["tok/s"] for p in curve], "s-", label=label, color=FLOOR)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("adapters")
    axes.set_ylabel("output tokens per second")
    axes.legend()


DRAWN = {
    "engine-throughput": throughput,
    "engine-fairness": fairness,
    "engine-adapters": adapters,
}


def main() -> None:
    """Draws what there are results for."""
    mpl.rcParams.update(
        {"svg.hashsalt": "tenantry", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    FIGURES.mkdir(parents=True, exist_ok=True)
    for bench, draw in DRAWN.items():
        found = newest(bench)
        if found is None:
            print(f"{bench}: no result yet")
            continue
        name, result = found
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        draw(axes, result)
        figure.text(
            0.995,
            0.005,
            f"bench/results/{name}, {result['machine']['cpu']}",
            ha="right",
            fontsize=6,
            color="#666666",
        )
        figure.savefig(FIGURES / f"{bench}.svg", metadata={"Date": None})
        plt.close(figure)
        print(f"docs/explanation/figures/{bench}.svg from {name}")


if __name__ == "__main__":
    main()
