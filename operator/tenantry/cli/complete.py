"""Completion: names of tenants for any shell, and all of it for kubectl, which asks `kubectl_complete-tenantry`.

kubectl's protocol is Cobra's: one candidate a line, then a colon and a number that says what the shell should do.
"""

from __future__ import annotations

import sys

NO_FILES = 4
"""Cobra's ShellCompDirectiveNoFileComp."""
DEFAULT = 0


def tenant_names(incomplete: str) -> list[str]:
    """Tenants of the cluster at hand; none where there is none, since a shell must not be told errors."""
    from .cluster import Cluster
    from .errors import CliError

    try:
        names = [str(tenant["metadata"]["name"]) for tenant in Cluster().tenants()]
    except CliError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def candidates(words: list[str]) -> tuple[list[str], int]:
    """What may stand where the last word begins, and the directive."""
    import typer

    from .app import app

    command = typer.main.get_command(app)
    context = command.make_context("tenantry", [], resilient_parsing=True)
    *done, incomplete = words or [""]
    for word in done:
        if word.startswith("-") or not hasattr(context.command, "get_command"):
            continue
        found = context.command.get_command(context, word)
        if found is None:
            return [], NO_FILES
        context = found.make_context(word, [], parent=context, resilient_parsing=True)
    if incomplete.startswith("-"):
        options = [
            name
            for parameter in context.command.params
            if parameter.param_type_name == "option"
            for name in parameter.opts
            if name.startswith(incomplete)
        ]
        return sorted(options), NO_FILES
    if hasattr(context.command, "list_commands"):
        names = context.command.list_commands(context)
        return [name for name in names if name.startswith(incomplete)], NO_FILES
    if any(parameter.name == "tenant" for parameter in context.command.params):
        return tenant_names(incomplete), NO_FILES
    return [], DEFAULT


def main() -> None:
    """Entry point `kubectl_complete-tenantry`."""
    found, directive = candidates(sys.argv[1:])
    sys.stdout.write("".join(f"{name}\n" for name in found) + f":{directive}\n")
