"""The reference of conditions speaks of reasons that the operator knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def words() -> set[str]:
    """Every text that stands in the operator's code as it is."""
    found: set[str] = set()
    for path in (ROOT / "operator/tenantry").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_documented_reason_is_said_by_the_operator() -> None:
    page = (ROOT / "docs/reference/conditions.md").read_text()
    reasons = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert len(reasons) > 40
    assert set(reasons) - words() == set()
