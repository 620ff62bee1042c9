"""Whatever the API server refuses of a Tenant today, or of a name, the operator refuses too: objects may be older."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tenantry.api import AdapterPoolSpec, AdapterSpec, OperatorConfig, TenantSpec
from tenantry.desired import older
from tenantry.desired.tenant import tenant_problems

TESTS = Path(__file__).parents[2]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from crds.test_rules import REFUSED, TAKEN  # noqa: E402

Object = dict[str, Any]
SPECS = {"Tenant": TenantSpec, "AdapterPool": AdapterPoolSpec, "Adapter": AdapterSpec}
# Lists with keys and atomic types: the API server's own storage cannot hold what breaks them.
STRUCTURAL = ("duplicate entries", "Unsupported value", "field not declared", "Required value")


def complaint(document: Object, config: OperatorConfig) -> str:
    """What the operator says of a stored object; empty when it would serve it."""
    kind, name = document["kind"], document["metadata"]["name"]
    try:
        spec = SPECS[kind].model_validate(document["spec"])
    except ValidationError as error:
        return str(error)
    problems = older.broken(kind, name, spec)
    if isinstance(spec, TenantSpec):
        problems += tenant_problems(name, spec, config, [])
    return "; ".join(str(problem) for problem in problems)


@pytest.fixture
def offering(config: OperatorConfig) -> OperatorConfig:
    """The configuration that the rules' samples count on."""
    wire = config.wire()
    templates: Any = wire["poolTemplates"]
    tiers: Any = wire["tiers"]
    standard = {**templates["gold"], "baseModel": {**templates["gold"]["baseModel"], "name": "smollm2"}}
    offered = {tier: {**policy, "poolTemplates": ["standard"]} for tier, policy in tiers.items()}
    offered["Smb"] = offered["Free"]
    return OperatorConfig.model_validate({**wire, "poolTemplates": {"standard": standard}, "tiers": offered})


def _concerns(words: str, document: Object) -> bool:
    return document["kind"] == "Tenant" or "`metadata.name`" in words


@pytest.mark.parametrize(
    ("words", "document"),
    [(w, d) for w, d in REFUSED if _concerns(w, d) and not any(part in w for part in STRUCTURAL)],
)
def test_what_the_api_server_refuses_is_refused(
    words: str, document: Object, offering: OperatorConfig
) -> None:
    assert complaint(document, offering), words


@pytest.mark.parametrize("document", [document for _, document in TAKEN if document["kind"] == "Tenant"])
def test_what_it_takes_is_taken(document: Object, offering: OperatorConfig) -> None:
    said = complaint(document, offering)
    assert "metadata.name" not in said
    assert "must not contain `--`" not in said


def test_a_broken_rule_names_its_field_with_its_place() -> None:
    models = [{"name": "ok", "baseModel": "m"}, {"name": "a--b", "baseModel": "m"}]
    spec = TenantSpec.model_validate({"tier": "Free", "models": models})
    [name, alias] = older.broken("Tenant", "a.b", spec)
    assert str(name).startswith("`metadata.name` must be a DNS label of at most 40 characters")
    assert str(alias).startswith("`models[1].name` must not contain `--`")
