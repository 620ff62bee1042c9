"""From pydantic's JSON schema to the structural schema that the API server stores.

Structural (see "Specifying a structural schema" in the Kubernetes documentation) means: no `$ref`, no unions, a type at
every node. Everything has a maximum besides, so that objects stay small and the cost of CEL rules is bounded.
"""

from __future__ import annotations

import copy
from typing import Any

from .common import PATTERN_MESSAGES, Model

Schema = dict[str, Any]

_DROPPED = ("title", "propertyNames", "x-tenantry-not-stored")
# Formats that the API server itself checks; such a string needs no pattern.
_FORMATS = ("date-time",)


class SchemaError(Exception):
    """A model cannot be expressed as a structural schema; the text names the field."""


def structural(model: type[Model], *, friendly: bool) -> Schema:
    """The structural schema of a model.

    With `friendly`, patterns become CEL rules whose message says what must be. A rule costs more than a pattern, so it
    is for what people write. Raises SchemaError for what has no bound or no structural form.
    """
    root = model.model_json_schema(by_alias=True, mode="validation")
    return _node(root, root.get("$defs", {}), model.__name__, friendly)


def _node(source: Schema, definitions: Schema, path: str, friendly: bool) -> Schema:
    node = _flatten(source, definitions)
    kind = node.get("type")
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if kind == "object":
        _object(node, definitions, path, friendly)
    elif kind == "array":
        if "maxItems" not in node:
            raise SchemaError(f"`{path}` must have a maximum of items")
        node.setdefault("x-kubernetes-list-type", "atomic")
        node["items"] = _node(node["items"], definitions, f"{path}[]", friendly)
    elif kind == "integer":
        node["format"] = "int64"
    elif kind == "string":
        _string(node, path, friendly)
    elif kind != "boolean":
        raise SchemaError(f"`{path}` must be an object, array, integer, string or boolean, and is {kind}")
    return node


def _flatten(source: Schema, definitions: Schema) -> Schema:
    """Follow `$ref`, and keep the one branch of a union with null. What stands beside a `$ref` wins."""
    node = copy.deepcopy({key: value for key, value in source.items() if key != "$defs"})
    while "$ref" in node or "anyOf" in node:
        if "$ref" in node:
            target = definitions[node.pop("$ref").rsplit("/", 1)[1]]
        else:
            branches = [branch for branch in node.pop("anyOf") if branch.get("type") != "null"]
            if len(branches) != 1:
                raise SchemaError(f"a union must have one branch besides null: {branches}")
            target = branches[0]
        node = {**copy.deepcopy(target), **node}
    if node.get("default", ...) is None:
        del node["default"]
    if node.pop("x-tenantry-not-stored", False):
        node["default"] = None
    return {key: value for key, value in node.items() if key not in _DROPPED}


def _object(node: Schema, definitions: Schema, path: str, friendly: bool) -> None:
    if "properties" in node:
        node.pop("additionalProperties", None)
        node["properties"] = {
            name: _node(child, definitions, f"{path}.{name}", friendly)
            for name, child in node["properties"].items()
        }
        for child in node["properties"].values():
            _settle_default(child)
        return
    keys = node.pop("patternProperties", None)
    if not keys or "maxProperties" not in node:
        raise SchemaError(f"`{path}` must be a map with a pattern for keys and a maximum of entries")
    (pattern, values), *_ = keys.items()
    node["additionalProperties"] = _node(values, definitions, f"{path}.*", friendly)
    field = path.rsplit(".", 1)[1]
    node["x-kubernetes-validations"] = [
        {
            "rule": f"self.all(key, size(key) <= 317 && key.matches({_literal(pattern)}))",
            "message": f"each key of `{field}` {PATTERN_MESSAGES[pattern]}",
        }
    ]


def _settle_default(child: Schema) -> None:
    """Object defaults become `{}`, which the children's own defaults fill; empty defaults say nothing and go."""
    if "default" not in child:
        return
    if child["default"] in (None, "", [], {}):
        del child["default"]
    elif child["type"] == "object":
        del child["default"]
        if any("default" in grandchild for grandchild in child.get("properties", {}).values()):
            child["default"] = {}


def _string(node: Schema, path: str, friendly: bool) -> None:
    if "enum" in node:
        return
    if "maxLength" not in node:
        raise SchemaError(f"`{path}` must have a maximum length")
    if node.get("format", "") not in ("", *_FORMATS):
        raise SchemaError(f"`{path}` has format {node['format']}, which the API server does not check")
    pattern = node.get("pattern")
    if friendly and pattern is not None:
        if pattern not in PATTERN_MESSAGES:
            raise SchemaError(f"`{path}` has a pattern that `PATTERN_MESSAGES` must explain")
        del node["pattern"]
        field = path.rsplit(".", 1)[1]
        rule = {
            "rule": f"self.matches({_literal(pattern)})",
            "message": f"`{field}` {PATTERN_MESSAGES[pattern]}",
        }
        node.setdefault("x-kubernetes-validations", []).append(rule)


def _literal(text: str) -> str:
    """A CEL raw string."""
    return f"r'{text}'"
