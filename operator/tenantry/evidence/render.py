"""An audit as text, as JSON and as one HTML page without scripts or anything from elsewhere."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from html import escape

from .audit import Audit, Line

WIDTH = 110


def as_json(audit: Audit) -> str:
    """Everything, for machines; `gaps` names the guarantees of the tier that are not `Enforced`."""
    document = {
        "tenant": audit.tenant,
        "uid": audit.uid,
        "tier": audit.tier,
        "at": audit.at,
        "sources": list(audit.sources),
        "gaps": [line.guarantee for line in audit.gaps],
        "guarantees": [
            {
                "guarantee": line.guarantee,
                "included": line.included,
                "state": line.state,
                "reason": line.reason,
                "since": line.since or None,
                "observedAt": line.observed_at or None,
                "countsUntil": line.counts_until or None,
                "evidence": list(line.facts),
                "lastBroken": line.last_broken or None,
                "neverClaims": line.never or None,
            }
            for line in audit.lines
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def as_text(audit: Audit) -> str:
    """For people: what is guaranteed with its evidence, the gaps, and what the tier does not include."""
    return "\n".join(_text(audit)) + "\n"


def _text(audit: Audit) -> Iterator[str]:
    yield f"Isolation of tenant {audit.tenant} ({audit.uid}), tier {audit.tier}, at {audit.at}"
    for source in audit.sources:
        yield f"  evidence from {source}"
    yield ""
    yield _summary(audit)
    for line in (line for line in audit.lines if line.included):
        yield ""
        yield f"{line.guarantee}: {line.state}" + (f" since {line.since}" if line.since else "")
        yield from _indented(f"{'GAP: ' if line.gap else ''}{line.reason}")
        if line.observed_at:
            yield from _indented(f"observed {line.observed_at}, counts until {line.counts_until}")
        for fact in line.facts:
            yield from _indented(f"- {fact}")
        if line.last_broken:
            yield from _indented(f"last seen broken {line.last_broken}")
        if line.never:
            yield from _indented(f"does not say: {line.never}")
    others = [line for line in audit.lines if not line.included]
    if others:
        yield ""
        yield f"Not included in tier {audit.tier}: {', '.join(line.guarantee for line in others)}"


def _summary(audit: Audit) -> str:
    included = [line for line in audit.lines if line.included]
    if not audit.gaps:
        return f"All {len(included)} guarantees of the tier were seen to hold."
    names = ", ".join(line.guarantee for line in audit.gaps)
    return (
        f"{len(included) - len(audit.gaps)} of {len(included)} guarantees were seen to hold. Gaps: {names}."
    )


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em}
table{border-collapse:collapse;width:100%}td,th{border:1px solid #bbb;padding:.4em .6em}
td,th{text-align:left;vertical-align:top}
.Enforced{background:#e3f4e3}.gap{background:#fbe3e0}.out{color:#777}ul{margin:.3em 0;padding-left:1.2em}"""


def as_html(audit: Audit) -> str:
    """The same on one page."""
    title = escape(f"Isolation of tenant {audit.tenant}")
    rows = "\n".join(_row(line) for line in audit.lines)
    sources = "".join(f"<li>{escape(source)}</li>" for source in audit.sources)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        f"<p>Tier {escape(audit.tier)}, uid {escape(audit.uid)}, at {audit.at}. {escape(_summary(audit))}</p>\n"
        f"<p>Evidence from</p><ul>{sources}</ul>\n"
        "<table><tr><th>Guarantee</th><th>State</th><th>Why</th><th>Observed, counts until</th><th>Evidence</th>"
        f"</tr>\n{rows}\n</table></body></html>\n"
    )


def _row(line: Line) -> str:
    kind = "out" if not line.included else "gap" if line.gap else "Enforced"
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in line.facts)
    broken = f"<br>last seen broken {escape(line.last_broken)}" if line.last_broken else ""
    never = f"<br><small>does not say: {escape(line.never)}</small>" if line.never else ""
    seen = f"{line.observed_at}<br>{line.counts_until}" if line.observed_at else ""
    why = escape(line.reason) + broken + never
    return (
        f'<tr class="{kind}"><td>{line.guarantee}</td><td>{line.state}</td><td>{why}</td>'
        f"<td>{seen}</td><td>{'<ul>' + facts + '</ul>' if facts else ''}</td></tr>"
    )
