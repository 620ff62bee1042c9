"""The reference pages of metrics and of the command line: `python tools/reference.py [--check]`.

`docs/reference/metrics.md` is made as a whole. In `docs/reference/cli.md` people write what a command is for; what
stands between `<!-- options: COMMAND -->` and `<!-- end -->` is made from the command itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from exposed import exposed

DOCS = Path(__file__).resolve().parents[1] / "docs/reference"
BLOCK = re.compile(r"<!-- options: ([a-z ]+) -->\n.*?<!-- end -->", re.DOTALL)
METRICS_INTRO = """\
# Metrics

Made by `python tools/reference.py`; do not edit. Prometheus reads them at `/metrics` of operator and gateway (port
9090), fetcher (8090) and engines (8001). Names of controller-runtime, client-go and vLLM mean what they mean there.
Of a histogram there are `_bucket`, `_sum` and `_count`.
"""


def metrics_page() -> str:
    parts = [METRICS_INTRO]
    found = [series for series in exposed() if not series.name.startswith(("python_", "process_"))]
    for process in ("operator", "gateway", "fetcher", "engine"):
        parts.append(f"## {process.capitalize()}\n")
        parts.append("| metric | type | labels | meaning |\n|---|---|---|---|")
        for series in found:
            if series.process == process:
                name = series.names[0] if series.kind == "counter" else series.name
                labels = ", ".join(f"`{label}`" for label in series.labels)
                parts.append(f"| `{name}` | {series.kind} | {labels} | {series.help} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(path, command) of every command that does something."""
    for name, child in sorted(getattr(command, "commands", {}).items()):
        if hasattr(child, "commands"):
            yield from commands(child, (*path, name))
        else:
            yield " ".join((*path, name)), child


def options(command: Any) -> str:
    """A table of arguments and options."""
    rows = ["| argument or option | meaning |", "|---|---|"]
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        option = parameter.param_type_name == "option"
        name = ", ".join(f"`{opt}`" for opt in parameter.opts) if option else f"`{parameter.metavar}`"
        kind = parameter.type_descriptor.annotation
        choices = list(kind) if isinstance(kind, type) and issubclass(kind, Enum) else []
        text = (parameter.help or "").rstrip(".")
        if choices:
            text += ": " + ", ".join(f"`{choice.value}`" for choice in choices)
        default = parameter.default
        if option and parameter.required:
            text += "; must be given"
        elif option and default not in (None, False) and not callable(default):
            text += f" (default `{getattr(default, 'value', default)}`)"
        rows.append(f"| {name} | {text} |")
    return "\n".join(rows)


def cli_page(text: str) -> str:
    """The page with every block made anew. Raises KeyError for a block of no command."""
    import typer
    from tenantry.cli.app import app

    known = dict(commands(typer.main.get_command(app)))
    missing = set(known) - set(BLOCK.findall(text))
    if missing:
        raise KeyError(f"docs/reference/cli.md must have a block for: {', '.join(sorted(missing))}")

    def block(found: re.Match[str]) -> str:
        return f"<!-- options: {found[1]} -->\n{options(known[found[1]])}\n<!-- end -->"

    return BLOCK.sub(block, text)


def main() -> int:
    check = "--check" in sys.argv[1:]
    pages = {
        DOCS / "metrics.md": metrics_page(),
        DOCS / "cli.md": cli_page((DOCS / "cli.md").read_text()),
    }
    stale = [path.name for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        sys.stderr.write(f"stale, run `make generate`: {', '.join(stale)}\n")
        return 1
    for path, text in pages.items():
        if not check:
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
