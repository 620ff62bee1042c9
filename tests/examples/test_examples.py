"""The examples are what they say: digests and ranks of the committed adapters, objects that the API accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tenantry.api import AdapterPoolSpec, AdapterSpec, TenantSpec
from tenantry.api.digest import adapter_digest

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = {("tone", "1.0.0"): "pirate", ("tone", "1.1.0"): "formal", ("triage", "1.0.0"): "triage"}
SPECS = {"Tenant": TenantSpec, "AdapterPool": AdapterPoolSpec, "Adapter": AdapterSpec}


@pytest.mark.parametrize(("adapter", "version"), FOLDERS)
def test_an_example_adapter_has_the_digest_and_rank_that_its_object_states(
    adapter: str, version: str
) -> None:
    spec = AdapterSpec.model_validate(
        yaml.safe_load((EXAMPLES / "adapters" / f"{adapter}.yaml").read_text())["spec"]
    )
    stated = next(entry for entry in spec.versions if entry.version == version)
    folder = EXAMPLES / "adapters" / FOLDERS[adapter, version]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert stated.digest == adapter_digest(folder)
    assert stated.rank == config["r"]
    assert config["base_model_name_or_path"] == "smollm2-135m"


def test_the_adapters_stay_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in EXAMPLES.glob("adapters/*/*")) < 10_000_000


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[apt]*/*.yaml")), ids=lambda path: path.stem)
def test_every_example_object_is_valid(path: Path) -> None:
    for found in yaml.safe_load_all(path.read_text()):
        SPECS[found["kind"]].model_validate(found["spec"])
