"""What the cluster reports of every guarantee and tier; and of each Enforced one, what ends it and how soon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stack import guarantees
from stack.install import Stack
from stack.kube import eventually

TIERS = {"birch": "Free", "cedar": "Smb", "maple": "MidMarket", "oak": "Enterprise", "yew": "Regulated"}
ENFORCED = {
    "birch": {"PromptSeparation"},
    "cedar": {"PromptSeparation"},
    "maple": {"PromptSeparation", "AdapterIntegrity", "AdapterAccess"},
    "oak": {
        "PromptSeparation",
        "DedicatedProcess",
        "DedicatedNodes",
        "NetworkIsolation",
        "PodHardening",
        "QuotaEnforced",
    },
    "yew": set(),
}


@pytest.fixture(scope="module", autouse=True)
def often(stack: Stack) -> Iterator[None]:
    with guarantees.looking_often(stack):
        yield


def test_what_is_reported_of_every_tier(stack: Stack, seen: list[str]) -> None:
    def enforced(tenant: str) -> set[str]:
        return {name for name, line in guarantees.lines(stack, tenant).items() if line["state"] == "Enforced"}

    for tenant, wanted in ENFORCED.items():
        eventually(
            f"{tenant} is guaranteed {sorted(wanted)}",
            lambda: enforced(tenant) == wanted,  # noqa: B023
            said=lambda: str(sorted(enforced(tenant))),  # noqa: B023
        )
    table = {tenant: guarantees.lines(stack, tenant) for tenant in TIERS}
    seen.append(f"{'guarantee':20} " + " ".join(f"{tier:12}" for tier in TIERS.values()))
    for name in table["oak"]:
        states = (table[tenant][name]["state"] for tenant in TIERS)
        seen.append(f"{name:20} " + " ".join(f"{state:12}" for state in states))
    for tenant, lines in table.items():
        for name, line in lines.items():
            if line["state"] == "Enforced":
                assert line["observedAt"], (tenant, name)
                assert line["evidence"], (tenant, name)
    text = guarantees.report(stack, "oak", "text")
    assert "GAP: " in text, "what is not observed is shown as a gap"


def test_every_claim_ends_with_what_it_claims(stack: Stack, seen: list[str]) -> None:
    for mutant in guarantees.mutants(stack):
        seconds = guarantees.show(stack, mutant)
        seen.append(f"{mutant.guarantee}: {mutant.name}: told after {seconds:.1f} s")
    seconds = guarantees.stale(stack)
    seen.append(f"every guarantee: stale evidence, no operator: told after {seconds:.1f} s")
