"""Findings over time: what counts, what grows stale, what is stored, and what an auditor reads."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cluster.pki import certify
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tenantry.api import Tier
from tenantry.cli.errors import CliError
from tenantry.cli.report import report as command
from tenantry.desired import isolation
from tenantry.evidence import report, seal
from tenantry.evidence.book import Book, Page, Subject
from tenantry.evidence.findings import ASPECTS, Finding, blind, clock, current, is_stale, together
from tenantry.evidence.report import Report


def certificate() -> tuple[Ed25519PrivateKey, str]:
    """A key of the operator's, and what says so."""
    with tempfile.TemporaryDirectory() as folder:
        key = certify(Path(folder), "tenantry-operator")
        return key, (Path(folder) / "tenantry-operator.crt").read_text()


KEY, CERTIFICATE = certificate()
OAK = Subject("Tenant", "oak")
NOW = 1_800_000_000.0
AGE = 900.0


def whole(at: float = NOW, **changed: Finding) -> Page:
    """Everything of a dedicated tenant was seen to hold; `changed` by guarantee, for its first aspect."""
    page = Page()
    for guarantee, aspects in ASPECTS.items():
        page.findings[guarantee] = {
            aspect: Finding(True, f"{aspect} is fine", at, ("a fact",)) for aspect in aspects
        }
        if guarantee in changed:
            page.findings[guarantee][aspects[0]] = changed[guarantee]
    return page


def test_a_guarantee_holds_only_with_all_its_aspects_and_only_for_a_while() -> None:
    aspects = ASPECTS["NetworkIsolation"]
    seen = {aspect: Finding(True, aspect, NOW) for aspect in aspects}
    first = current("NetworkIsolation", seen, NOW, AGE)
    assert first is not None
    assert (first.holds, first.reason) == (True, "probe")
    for aspect in aspects:
        lacking = current("NetworkIsolation", {k: v for k, v in seen.items() if k != aspect}, NOW, AGE)
        assert lacking is not None
        assert lacking.holds is None
    old = current("NetworkIsolation", seen | {"probe": Finding(True, "probe", NOW - AGE - 1)}, NOW, AGE)
    assert old is not None
    assert old.holds is None
    assert old.reason == f"stale: last seen to hold at {clock(NOW - AGE - 1)}"
    broken = current("NetworkIsolation", {"probe": Finding(False, "reached", NOW - 9 * AGE)}, NOW, AGE)
    assert broken is not None
    assert broken.holds is False, "what was broken stays broken until it is seen whole"
    assert current("NetworkIsolation", {}, NOW, AGE) is None
    assert is_stale(NOW + AGE + 1, NOW, AGE), "evidence from the future is none"


def test_a_look_that_could_not_see_leaves_the_last_one_to_grow_stale() -> None:
    book = Book()
    assert book.record(OAK, "QuotaEnforced", "quota", Finding(True, "fine", NOW))
    assert not book.record(OAK, "QuotaEnforced", "quota", blind("no answer", NOW + 5))
    assert not book.record(OAK, "QuotaEnforced", "quota", blind("no answer", NOW + 6))
    page = book.page(OAK)
    assert page is not None
    kept = page.findings["QuotaEnforced"]["quota"]
    assert (kept.holds, kept.at) == (True, NOW)
    assert kept.facts == (f"could not be looked at at {clock(NOW + 6)}: no answer",)
    assert book.record(OAK, "QuotaEnforced", "quota", Finding(False, "gone", NOW + 7))
    assert page.violations["QuotaEnforced"].reason == "gone"
    assert not book.record(OAK, "QuotaEnforced", "quota", Finding(True, "fine", NOW)), (
        "an older look comes late"
    )
    with pytest.raises(KeyError):
        book.record(OAK, "QuotaEnforced", "probe", Finding(True, "", NOW))


def test_what_serves_a_tenant_together_holds_together() -> None:
    yes, no, open_ = (isolation.Observation(holds, str(holds)) for holds in (True, False, None))
    assert together([yes, yes]) == yes
    assert together([yes, no, open_]) == no
    assert together([yes, open_]) == open_
    partial = together([yes, None])
    assert partial is not None
    assert partial.holds is None
    assert together([]) is together([None]) is None


def test_verdicts_of_the_tenant() -> None:
    seen = whole().observations(NOW, AGE)
    for tier in Tier:
        assert isolation.verified(tier, seen).status == "True"
    assert isolation.verified(Tier.FREE, {}).status == "Unknown"
    broken = seen | {"QuotaEnforced": isolation.Observation(False, "gone")}
    assert isolation.verified(Tier.ENTERPRISE, broken).status == "False"
    assert isolation.verified(Tier.SMB, broken).status == "True", "the tier does not include it"
    idle = seen | {"AdapterIntegrity": isolation.Observation(None, "no adapter is in use", idle=True)}
    assert isolation.verified(Tier.ENTERPRISE, idle).status == "True"
    assert isolation.network(None).status == "Unknown"
    assert isolation.network(isolation.Observation(False, "reached")).status == "False"
    states = {e["guarantee"]: e for e in isolation.guarantees(Tier.ENTERPRISE, True, broken)}
    assert states["QuotaEnforced"]["state"] == "NotProvided"
    assert states["QuotaEnforced"]["reason"] == "broken: gone"
    assert set(states) == set(ASPECTS) | {"EncryptionAtRest"}


def test_a_report_is_read_back_as_it_was_written() -> None:
    page = whole(QuotaEnforced=Finding(False, "gone", NOW))
    page.violations["QuotaEnforced"] = Finding(False, "gone", NOW)
    stored = report.config_map(Report(OAK, "u1", NOW, AGE, page), "tenantry-system")
    assert stored["metadata"]["namespace"] == "tenant-oak"
    assert report.read(stored, OAK, "u1") == Report(OAK, "u1", NOW, AGE, page)
    assert report.read(stored, OAK, "of another life") is None
    assert report.read(stored, Subject("Tenant", "elm"), "u1") is None
    for text in (
        "",
        "{",
        "[]",
        json.dumps({"form": 1}),
        stored["data"][report.FIELD].replace("false", '"no"'),
    ):
        assert report.read({"data": {report.FIELD: text}}, OAK, "u1") is None
    assert report.where(Subject("AdapterPool", "shared"), "rel") == ("rel", "tenantry-report-shared")


def test_a_report_stays_within_a_config_map() -> None:
    page, huge = Page(), Finding(False, "r" * 5000, NOW, ("f" * 5000,) * 5000)
    for name, aspects in ASPECTS.items():
        page.findings[name] = dict.fromkeys(aspects, huge)
        page.violations[name] = huge
    stored = report.config_map(Report(OAK, "u1", NOW, AGE, page), "rel")
    assert len(stored["data"][report.FIELD]) < 1_000_000


class Cluster:
    """One tenant and the ConfigMaps that lie there."""

    def __init__(self, tier: str, page: Page | None, states: dict[str, str] | None = None) -> None:
        seen = (page or Page()).observations(NOW, AGE)
        entries = [{**e, "since": clock(NOW - 50)} for e in isolation.guarantees(Tier(tier), True, seen)]
        for entry in entries:
            entry["state"] = (states or {}).get(entry["guarantee"], entry["state"])
        pool = {"name": "shared", "uid": "p1"}
        self.kind = Subject("Tenant", "oak") if tier == "Enterprise" else Subject("AdapterPool", "shared")
        self.object: dict[str, Any] = {
            "metadata": {"name": "oak", "uid": "u1"},
            "spec": {"tier": tier},
            "status": {
                "tier": tier,
                "isolation": entries,
                "route": {"pools": [pool]},
                "placement": [{"pool": "shared", "namespace": "rel"}],
            },
        }
        uid = "u1" if tier == "Enterprise" else "p1"
        made = report.config_map(Report(self.kind, uid, NOW, AGE, page or Page()), "rel")
        self.stored = None if page is None else seal.sealed(made, KEY)
        self.certificate = CERTIFICATE

    def tenant(self, name: str) -> dict[str, Any]:
        return self.object

    def pool(self, name: str) -> dict[str, Any] | None:
        return {"metadata": {"name": name, "uid": "p1"}}

    def config_map(self, namespace: str, name: str) -> dict[str, Any] | None:
        if name == "tenantry-identity":
            assert namespace == "rel"
            return {"data": {"operator.crt": self.certificate}}
        assert (namespace, name) == report.where(self.kind, "rel")
        return self.stored


def lines(cluster: Cluster, now: float = NOW) -> dict[str, dict[str, Any]]:
    text, _ = command(cluster, "oak", "json", "rel", now)
    return {line["guarantee"]: line for line in json.loads(text)["guarantees"]}


def test_an_auditor_reads_states_evidence_times_and_gaps() -> None:
    cluster = Cluster("Enterprise", whole())
    found = lines(cluster)
    line = found["NetworkIsolation"]
    assert (line["state"], line["observedAt"], line["countsUntil"]) == (
        "Enforced",
        clock(NOW),
        clock(NOW + AGE),
    )
    assert line["evidence"] == ["a fact"] * 3
    assert line["neverClaims"]
    assert found["NoEgress"]["state"] == "NotProvided"
    assert found["NoEgress"]["included"] is False
    text, gaps = command(cluster, "oak", "text", "rel", NOW)
    assert not gaps
    assert "All 9 guarantees of the tier were seen to hold." in text
    assert "Not included in tier Enterprise: AttestedNodes" in text
    assert command(cluster, "oak", "html", "rel", NOW)[0].count("<tr") == 15


def test_a_claim_grows_stale_without_the_operator() -> None:
    cluster = Cluster("Enterprise", whole())
    found = lines(cluster, NOW + AGE + 1)
    assert {line["state"] for line in found.values()} == {"Configured", "NotProvided"}
    assert found["QuotaEnforced"]["reason"].startswith("stale: last seen to hold at")
    text, gaps = command(cluster, "oak", "text", "rel", NOW + AGE + 1)
    assert gaps
    assert "0 of 9 guarantees were seen to hold. Gaps: AdapterAccess" in text
    assert "GAP: stale" in text


def test_the_operator_s_word_without_evidence_is_not_repeated() -> None:
    bare = Cluster("Enterprise", None, {"QuotaEnforced": "Enforced"})
    assert lines(bare)["QuotaEnforced"]["state"] == "Configured"
    assert "no evidence" in lines(bare)["QuotaEnforced"]["reason"]
    contrary = Cluster(
        "Enterprise", whole(QuotaEnforced=Finding(False, "gone", NOW)), {"QuotaEnforced": "Enforced"}
    )
    assert lines(contrary)["QuotaEnforced"]["reason"] == "broken: gone"


def test_a_shared_tenant_s_evidence_is_its_pools() -> None:
    found = lines(Cluster("MidMarket", whole()))
    assert found["PromptSeparation"]["state"] == "Enforced"
    assert found["DedicatedProcess"]["state"] == "NotProvided"


def test_hostile_words_stay_words_in_html() -> None:
    page = whole(QuotaEnforced=Finding(True, "<script>x</script>", NOW, ("<img src=x>",)))
    text, _ = command(Cluster("Enterprise", page), "oak", "html", "rel", NOW)
    assert "<script>" not in text
    assert "<img" not in text


def test_only_what_the_operator_sealed_is_believed() -> None:
    cluster = Cluster("Enterprise", whole())
    stored = cluster.stored
    assert stored is not None
    text = stored["data"][report.FIELD]
    for data in (
        {**stored["data"], report.FIELD: text.replace("a fact", "a lie", 1)},
        {report.FIELD: text},
        {**stored["data"], seal.SEAL: "?"},
        {**stored["data"], seal.SEAL: "AAAA"},
    ):
        cluster.stored = {**stored, "data": data}
        assert lines(cluster)["QuotaEnforced"]["state"] == "Configured"
        assert "not sealed by the operator, so not believed" in command(cluster, "oak", "text", "rel", NOW)[0]
    cluster.stored, (_, cluster.certificate) = stored, certificate()
    assert lines(cluster)["QuotaEnforced"]["state"] == "Configured", "sealed by another key"
    cluster.certificate = "none"
    with pytest.raises(CliError, match="`--release`"):
        command(cluster, "oak", "text", "rel", NOW)
