"""The generated files are those of the models, and the schemas keep the bounds that the API promises."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field
from tenantry.api import crd
from tenantry.api.common import Model
from tenantry.api.kinds import KINDS
from tenantry.api.schema import SchemaError, structural

REPOSITORY = Path(__file__).resolve().parents[2]


def test_nothing_is_stale() -> None:
    assert crd.stale(REPOSITORY) == [], "run `python -m tenantry.api.crd`"


def test_stale_files_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--root", str(tmp_path)]) == 0
    assert crd.main(["--root", str(tmp_path), "--check"]) == 0
    path = tmp_path / "crds/tenantry.dev_tenants.yaml"
    path.write_text(path.read_text().replace("maxItems: 32", "maxItems: 33", 1))
    shutil.copy(path, tmp_path / "crds/tenantry.dev_leftovers.yaml")
    (tmp_path / crd.REFERENCE).unlink()
    assert crd.main(["--root", str(tmp_path), "--check"]) == 1
    complaint = capsys.readouterr().err
    for name in ("tenants", "leftovers", "api.md"):
        assert name in complaint
    assert "adapters.yaml" not in complaint


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_everything_has_a_maximum(kind: Any) -> None:
    for path, node in _nodes(crd.root_schema(kind), kind.name):
        if node.get("type") == "string" and path.count(".") > 1:
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
            assert "x-kubernetes-list-type" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        assert node.get("type") != "number", path
        assert not {"$ref", "anyOf", "allOf", "oneOf", "const", "title", "propertyNames", "nullable"} & set(
            node
        ), path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_field_of_a_spec_is_described(kind: Any) -> None:
    for path, node in _nodes(crd.root_schema(kind)["properties"]["spec"], "spec"):
        if not path.endswith(("[]", "*")):
            assert node.get("description"), path


class _Unbounded(Model):
    text: str


class _UnboundedList(Model):
    items: list[Annotated[str, Field(max_length=1)]]


class _Union(Model):
    either: Annotated[str, Field(max_length=1)] | int


class _Number(Model):
    share: float


@pytest.mark.parametrize("model", [_Unbounded, _UnboundedList, _Union, _Number])
def test_what_has_no_structural_form_is_refused(model: type[Model]) -> None:
    with pytest.raises(SchemaError):
        structural(model, friendly=True)


def _nodes(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from _nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from _nodes(node["additionalProperties"], f"{path}.*")
