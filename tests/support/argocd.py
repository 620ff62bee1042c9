"""Argo CD's way of judging health: a Lua 5.1 script over one object, with nothing else in reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lupa.lua51 import LuaRuntime

SCRIPT = Path(__file__).parents[2] / "helm" / "tenantry" / "files" / "argocd-health.lua"
STATES = {"Healthy", "Progressing", "Degraded", "Suspended"}


def health(obj: dict[str, Any], script: str | None = None) -> tuple[str, str]:
    """(status, message) as Argo CD would show them."""
    lua = LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    for name in (
        "io",
        "os",
        "package",
        "require",
        "dofile",
        "loadfile",
        "load",
        "loadstring",
        "python",
        "debug",
    ):
        lua.globals()[name] = None
    lua.globals().obj = lua.table_from(obj, recursive=True)
    found = lua.execute(script or SCRIPT.read_text())
    assert found.status in STATES
    return str(found.status), str(found.message)
