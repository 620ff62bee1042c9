"""Draws the figures of the documents from the newest dated results: `python bench/plot.py` (after a benchmark ran).

Each figure names the file that it shows. SVG without a date in it: drawing the same results again changes nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "docs/explanation/figures"
OURS, PEER, FLOOR = "#0072b2", "#999999", "#d55e00"  # distinct for every kind of colour vision


def newest(results: Path, bench: str) -> tuple[str, dict[str, Any]] | None:
    """Name and content of the newest result of a benchmark in a folder; None when it has none."""
    found = sorted(results.glob(f"????-??-??-{bench}.json"))
    return (found[-1].name, json.loads(found[-1].read_text())) if found else None


def throughput(figure: Figure, result: dict[str, Any]) -> None:
    """Tokens per second of everything that ran; what adapters leave of the base model's rate, beside its bounds."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    suffix = " tok/s"
    rows = [
        (n, v, FLOOR if n.startswith("floor") else OURS)
        for n, v in result["figures"].items()
        if n.endswith(suffix)
    ]
    rows += [(n, v, PEER) for n, v in result["peers"].items()]
    bars(left, [(name.removesuffix(suffix), value, colour) for name, value, colour in rows], "%.0f")
    left.set_xlabel("output tokens per second")
    ratios = {n: v for n, v in result["figures"].items() if n in result["ranges"] and v <= 1.5}
    bars(right, [(name, value, OURS) for name, value in ratios.items()], "%.2f")
    for row, name in enumerate(ratios):
        least = result["ranges"][name][0]
        if least is not None:
            right.plot([least, least], [row - 0.4, row + 0.4], color=FLOOR, linewidth=2)
    right.set_xlabel("ratio (the mark: at least)")
    figure.suptitle(
        "SmolLM2-135M, bf16, 16 requests at once, 64 tokens in, 48 out; higher is better", fontsize=10
    )


def fairness(figure: Figure, result: dict[str, Any]) -> None:
    """What a flood does to a victim, beside calm neighbours; what a long prompt does to short streams."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figures = result["figures"]
    names = ["first token, ms", "tokens per second"]
    fair = [figures["flood: fair first token ms"], figures["flood: fair tokens/s"]]
    flooded = [figures["flood: flooded first token ms"], figures["flood: flooded tokens/s"]]
    for index, (calm, flood) in enumerate(zip(fair, flooded, strict=True)):
        pair = left.bar([index - 0.2, index + 0.2], [1.0, flood / calm], 0.38, color=[PEER, OURS])
        left.bar_label(pair, [f"{calm:.0f}", f"{flood:.0f}"])
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("times the value beside calm neighbours")
    left.set_title("A victim beside calm tenants (grey), beside a flood (blue)", fontsize=10)
    for index, part in enumerate(("p50", "p99")):
        gaps = [figures[f"long prompt: {part} gap {where} ms"] for where in ("alone", "beside")]
        pair = right.bar([index - 0.2, index + 0.2], gaps, 0.38, color=[PEER, OURS])
        right.bar_label(pair, fmt="%.0f")
    right.set_xticks([0, 1], ["p50", "p99"])
    right.set_ylabel("ms between tokens of short streams")
    right.set_title("Without (grey), beside a long prompt (blue)", fontsize=10)


def adapters(figure: Figure, result: dict[str, Any]) -> None:
    """More adapters registered, more in use than pages hold, and one loaded cold."""
    zipf, registered, cold = figure.subplots(1, 3, width_ratios=(5, 3, 5))
    figures, work = result["figures"], result["work"]
    curve = figures["zipf: curve"]
    names = [p["adapters"] for p in curve]
    zipf.plot(names, [p["tok/s, all in pages"] for p in curve], "o-", color=PEER, label="all in pages")
    rates = [p["tok/s"] for p in curve]
    spreads = [
        [p["tok/s"] - p["least and most tok/s"][0] for p in curve],
        [p["least and most tok/s"][1] - p["tok/s"] for p in curve],
    ]
    label = f"pages hold about {work['fitting']}"
    zipf.errorbar(names, rates, spreads, fmt="s-", color=OURS, capsize=3, label=label)
    zipf.axvline(work["fitting"], color=PEER, linestyle=":")
    zipf.set_xscale("log", base=2)
    zipf.set_xticks(names, [str(n) for n in names])
    zipf.set_ylim(bottom=0)
    zipf.set_xlabel("adapters in use (Zipf)")
    zipf.set_ylabel("output tokens per second")
    zipf.legend(frameon=False, loc="lower left")
    zipf.set_title("In use", fontsize=10)

    rate, ends = figures["registered: tok/s"], figures["registered: least and most tok/s"]
    for place, (label, colour) in enumerate((("few", PEER), ("many", OURS))):
        low, high = ends[label]
        error = [[rate[label] - low], [high - rate[label]]]
        bar = registered.bar([place], [rate[label]], yerr=error, color=colour, capsize=3)
        registered.bar_label(bar, fmt="%.0f", label_type="center", color="white")
    registered.set_xticks([0, 1], [str(work["active"]), str(work["registered"])])
    registered.set_xlabel(f"adapters registered, {work['active']} in use")
    registered.set_title("Registered", fontsize=10)

    loads = figures["cold load"]
    sizes = [load["bytes"] / 1e6 for load in loads]
    both = [load["copy ms"] + load["digest ms"] for load in loads]
    cold.plot(sizes, [load["ms"] for load in loads], "s-", color=OURS, label="load")
    cold.plot(sizes, both, "o--", color=FLOOR, label="its copy and its SHA-256")
    cold.plot(sizes, [load["copy ms"] for load in loads], "o-", color=PEER, label="its copy")
    for load, size in zip(loads, sizes, strict=True):
        cold.annotate(f"r{load['rank']}", (size, load["ms"]), textcoords="offset points", xytext=(-4, 6))
    cold.set_ylim(bottom=0)
    cold.set_xlim(left=0)
    cold.set_xlabel("MB in pages")
    cold.set_ylabel("ms")
    cold.legend(frameon=False, loc="upper left")
    cold.set_title("Loaded from the page cache", fontsize=10)


def kernels(figure: Figure, result: dict[str, Any]) -> None:
    """What adapters add to a decode step, and how far the kernels are from their references."""
    left, right = figure.subplots(1, 2)
    figures, ranges = result["figures"], result["ranges"]
    steps = {n[5:-3]: v for n, v in figures.items() if n.startswith("step_") and n.endswith("_ms")}
    base = steps["base"]
    places = left.bar(list(steps), list(steps.values()), color=[PEER if n == "base" else OURS for n in steps])
    left.bar_label(places, [f"{v:.0f}\n{base / v:.2f}" for v in steps.values()])
    left.margins(y=0.15)
    left.set_xlabel("distinct adapters in the step")
    left.set_ylabel("ms (and the base's share of it)")
    left.set_title("One decode step of 16 rows", fontsize=10)
    word = "_speedup_over_"
    faster = [(n.replace(word, " over ").replace("_", " "), v, OURS) for n, v in figures.items() if word in n]
    bars(right, faster, "%.0f")
    right.set_xlabel("times as fast")
    least = {ranges[n][0] for n in figures if word in n and n in ranges}
    for bound in least - {None}:
        right.axvline(bound, color=FLOOR)
    right.set_title("Beside torch and the references", fontsize=10)


def bars(axes: Axes, rows: list[tuple[str, float, str]], form: str) -> None:
    """Horizontal bars from the top down: name, value, colour."""
    drawn = axes.barh([r[0] for r in rows], [r[1] for r in rows], color=[r[2] for r in rows])
    axes.bar_label(drawn, fmt=form, padding=6)
    axes.margins(x=0.12)
    axes.invert_yaxis()


DRAWN = {
    "engine-throughput": throughput,
    "engine-fairness": fairness,
    "engine-adapters": adapters,
    "kernels-bench": kernels,
}


def main() -> None:
    """Draws what there are results for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--results", type=Path, default=HERE / "results", help="the folder of the results")
    options.add_argument("--figures", type=Path, default=FIGURES, help="where the figures go")
    asked = options.parse_args()
    mpl.rcParams.update(
        {"svg.hashsalt": "tenantry", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    asked.figures.mkdir(parents=True, exist_ok=True)
    for bench, draw in DRAWN.items():
        found = newest(asked.results, bench)
        if found is None:
            print(f"{bench}: no result yet")
            continue
        name, result = found
        figure = plt.figure(figsize=(10, 4.5), layout="constrained")
        draw(figure, result)
        source = f"bench/results/{name}, {result['machine']['cpu']}, {result['machine']['cores']} cores"
        figure.text(0.995, 0.005, source, ha="right", fontsize=6, color="#666666")
        figure.savefig(asked.figures / f"{bench}.svg", metadata={"Date": None})
        plt.close(figure)
        print(f"{bench}.svg from {name}")


if __name__ == "__main__":
    main()
