"""Objects may be older than a rule: what the API server would refuse today, the operator refuses too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tenantry.api.common import Model, Rule
from tenantry.api.kinds import KINDS

from .problems import Problem

_RULES: Final = {kind.name: kind.rules for kind in KINDS}


def broken(kind: str, name: str, spec: Model) -> list[Problem]:
    """Rules that the object breaks, of those that nothing else would look at."""
    named = [_problem("", rule) for rule in _RULES[kind] if rule.holds is not None and not rule.holds(name)]
    return [*named, *_within(spec, "")]


def _within(model: Model, path: str) -> Iterator[Problem]:
    for rule in model.RULES:
        if rule.holds is not None and not rule.holds(model):
            yield _problem(path, rule)
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        where = f"{path}.{info.alias or name}".lstrip(".")
        if isinstance(value, Model):
            yield from _within(value, where)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Model):
                    yield from _within(item, f"{where}[{index}]")


def _problem(path: str, rule: Rule) -> Problem:
    """A rule's message begins with its field in backquotes."""
    _, field, words = rule.message.split("`", 2)
    return Problem(f"{path}.{field}".lstrip("."), words.strip())
