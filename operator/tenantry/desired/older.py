"""Objects may be older than a rule: what the API server would refuse today, the operator refuses too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, get_args

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
    for name, alias in _parts(type(model)):
        value = getattr(model, name)
        where = f"{path}.{alias}".lstrip(".")
        if isinstance(value, Model):
            yield from _within(value, where)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Model):
                    yield from _within(item, f"{where}[{index}]")


@cache
def _parts(model: type[Model]) -> tuple[tuple[str, str], ...]:
    """Fields, with their names on the wire, below which a rule is to be looked at."""
    fields = model.model_fields.items()
    return tuple((name, info.alias or name) for name, info in fields if _has_rules(info.annotation))


def _has_rules(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return any(rule.holds is not None for rule in annotation.RULES) or bool(_parts(annotation))
    return any(_has_rules(argument) for argument in get_args(annotation))


def _problem(path: str, rule: Rule) -> Problem:
    """A rule's message begins with its field in backquotes."""
    _, field, words = rule.message.split("`", 2)
    return Problem(f"{path}.{field}".lstrip("."), words.strip())
