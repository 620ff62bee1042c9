"""The commands as a user types them: output, errors of one line, exit codes."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from tenantry import cli
from tenantry.api import keys
from tenantry.api.adapter import AdapterVersion
from tenantry.api.tenant import ApiKey

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ADAPTER = EXAMPLES / "adapters" / "pirate"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`tenantry ...` in this process."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["tenantry", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call


def refused(done: Done, text: str) -> None:
    assert done.code == 2
    assert text in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_a_minted_key_fits_the_tenant(run: Run) -> None:
    done = run("keys", "mint", "acme", "--name", "ci", "--expires-in", "90d")
    key, line = done.out.splitlines()
    [entry] = yaml.safe_load(line)
    stored = ApiKey.model_validate(entry)
    assert keys.tenant_of(key) == "acme"
    assert keys.matches(key, stored.sha256)
    assert stored.name == "ci"
    assert stored.expires_at is not None
    left = datetime.fromisoformat(stored.expires_at) - datetime.now(UTC)
    assert timedelta(days=89, hours=23) < left < timedelta(days=90, seconds=1)
    assert key not in done.err
    assert run("keys", "mint", "acme").out.splitlines()[0] != key


@pytest.mark.parametrize("name", ["null", "1e5", "007", "yes", "n", "a-b"])
def test_names_of_keys_stay_texts(run: Run, name: str) -> None:
    [entry] = yaml.safe_load(run("keys", "mint", "acme", "--name", name).out.splitlines()[1])
    assert entry["name"] == name


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["Acme"], "`TENANT` must be a DNS label"),
        (["a_b"], "`TENANT` must be a DNS label"),
        (["acme", "--name", "-x"], "`--name` must be a DNS label"),
        (["acme", "--expires-in", "soon"], "`--expires-in` must be a number with d, h or m"),
        (["acme", "--expires-in", "0d"], "`--expires-in` must be"),
    ],
)
def test_keys_that_cannot_be_minted(run: Run, arguments: list[str], text: str) -> None:
    refused(run("keys", "mint", *arguments), text)


def test_wrong_usage_is_told(run: Run) -> None:
    for arguments in (["keys", "mint"], ["nothing"], ["keys", "mint", "a", "--what"]):
        done = run(*arguments)
        assert done.code == 2
        assert "Error: " in done.err


def test_the_blob_is_what_the_digest_covers() -> None:
    command = [sys.executable, "-m", "tenantry.cli", "adapters"]
    blob = subprocess.run([*command, "blob", ADAPTER], check=True, capture_output=True).stdout
    digest = subprocess.run([*command, "digest", ADAPTER], check=True, capture_output=True, text=True).stdout
    assert f"sha256:{hashlib.sha256(blob).hexdigest()}" == digest.strip()


def test_digest_of_an_example(run: Run) -> None:
    from tenantry.api.digest import adapter_digest

    done = run("adapters", "digest", ADAPTER)
    assert done.out == f"{adapter_digest(ADAPTER)}\n"
    assert done.code == 0


def test_folders_that_hold_no_adapter(run: Run, tmp_path: Path) -> None:
    refused(run("adapters", "digest", tmp_path), "must be a PEFT folder with adapter_config.json")
    (tmp_path / "adapter_config.json").write_bytes((ADAPTER / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x80\x04 a pickle, not tensors")
    refused(run("adapters", "digest", tmp_path), "must be a safetensors file")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("registry/acme", "TARGET must look like oci://"),
        ("oci://registry/acme/tone", "must name a tag"),
        ("oci://registry/acme/tone:1.0.0@sha256:" + "0" * 64, "must name a tag and no digest"),
        ("oci://registry/acme/tone:latest", "`--version` must be a SemVer"),
        ("oci://127.0.0.1:1/acme/tone:1.0.0", "cannot be reached"),
    ],
)
def test_targets_that_cannot_be_pushed_to(run: Run, target: str, text: str) -> None:
    refused(run("adapters", "push", ADAPTER, target, "--plain-http"), text)


FILE = """\
# The tone of Acme.
apiVersion: tenantry.dev/v1alpha1
kind: Adapter
metadata: {name: other, namespace: acme-ml}
spec: {}
---
apiVersion: tenantry.dev/v1alpha1
kind: Adapter
metadata:
    name: tone      # four spaces on purpose
    namespace: acme-ml
spec:
  tenantRef: acme
  versions:
  - {version: 1.0.0, digest: "sha256:ZERO", source: "oci://r/a:1", rank: 4}
  - {version: 1.1.0-rc.1, digest: "sha256:ONE", source: "oci://r/a:2", rank: 4}
  channels:
  - name: stable
    version: 1.0.0  # promote here
""".replace("ZERO", "0" * 64).replace("ONE", "1" * 64)


def test_promotion_is_one_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tone.yaml"
    file.write_text(FILE)
    file.chmod(0o640)
    done = run("promote", "acme-ml/tone", "1.1.0-rc.1", "-f", file)
    assert done.code == 0
    assert "stable 1.0.0 -> 1.1.0-rc.1" in done.out
    before, after = FILE.splitlines(), file.read_text().splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [("    version: 1.0.0  # promote here", "    version: 1.1.0-rc.1  # promote here")]
    assert file.stat().st_mode & 0o777 == 0o640
    assert "already" in run("promote", "acme-ml/tone", "1.1.0-rc.1", "-f", file).out
    run("promote", "acme-ml/tone", "1.0.0", "-f", file)
    assert file.read_text() == FILE
    assert [path.name for path in tmp_path.iterdir()] == ["tone.yaml"]


@pytest.mark.parametrize(
    ("adapter", "version", "text"),
    [
        ("tone", "1.0.0", "ADAPTER must be NAMESPACE/NAME"),
        ("acme-ml/tune", "1.0.0", "must hold the Adapter acme-ml/tune"),
        ("other-ml/tone", "1.0.0", "must hold the Adapter other-ml/tone"),
        ("acme-ml/other", "1.0.0", "is not valid"),
        ("acme-ml/tone", "2.0.0", "must be one of `spec.versions`: 1.0.0, 1.1.0-rc.1"),
    ],
)
def test_promotions_that_cannot_be(run: Run, tmp_path: Path, adapter: str, version: str, text: str) -> None:
    file = tmp_path / "tone.yaml"
    file.write_text(FILE)
    refused(run("promote", adapter, version, "-f", file), text)
    assert file.read_text() == FILE


def test_a_file_that_is_not_there(run: Run, tmp_path: Path) -> None:
    refused(run("promote", "a/b", "1.0.0", "-f", tmp_path / "none.yaml"), "No such file")
    refused(run("plan", "-f", tmp_path / "none.yaml"), "No such file")


CONFIG: dict[str, Any] = {
    "engineImage": "engine:1",
    "gatewayUrl": "http://gateway",
    "fetcherUrl": "http://fetcher",
    "tiers": {
        tier: {
            key: dict.fromkeys(
                [
                    "requestsPerMinute", "tokensPerMinute", "maxInFlight",
                    "maxQueued", "maxInputTokens", "maxOutputTokens",
                ],
                size,
            )
            for key, size in (("defaults", 10), ("ceilings", 1_000_000))
        }
        | {"maxWeight": 100, "poolTemplates": ["dedicated-small"]}
        for tier in ("Free", "Smb", "MidMarket", "Enterprise", "Regulated")
    },
    "poolTemplates": {},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration that offers every template which the examples name."""
    tenants = [yaml.safe_load_all(path.read_text()) for path in (EXAMPLES / "tenants").glob("*.yaml")]
    pool = next(
        document
        for document in yaml.safe_load_all((EXAMPLES / "pools" / "lora.yaml").read_text())
        if document["kind"] == "AdapterPool"
    )
    names = {
        document["spec"]["dedicated"]["poolTemplateRef"]
        for documents in tenants
        for document in documents
        if document and document["kind"] == "Tenant" and "dedicated" in document["spec"]
    }
    document = json.loads(json.dumps(CONFIG))
    document["poolTemplates"] = dict.fromkeys(names, pool["spec"])
    for tier in document["tiers"].values():
        tier["poolTemplates"] = sorted(names)
    path = tmp_path / "operator.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def examples(*paths: str) -> str:
    return "\n---\n".join((EXAMPLES / path).read_text() for path in paths)


def test_plan_of_a_pool_and_its_tenants(run: Run, tmp_path: Path, config: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(examples("pools/shared.yaml", "tenants/smb.yaml"))
    done = run("plan", "-f", file, "--config", config)
    assert done.code == 0, done.err
    kinds = [document["kind"] for document in yaml.safe_load_all(done.out)]
    assert kinds[:3] == ["Service", "StatefulSet", "PodDisruptionBudget"]
    assert re.search(
        r"^# Tenant cedar: would run on shared-fast-0 \(the only pool that fits; lane fast: the only replica\)$",
        done.out,
        re.MULTILINE,
    )


def test_plan_of_a_dedicated_tenant(run: Run, config: Path) -> None:
    done = run("plan", "-f", EXAMPLES / "tenants" / "enterprise.yaml", "--config", config)
    assert done.code == 0, done.err
    objects = [document for document in yaml.safe_load_all(done.out) if document]
    kinds = [document["kind"] for document in objects]
    for kind in ("Namespace", "NetworkPolicy", "ResourceQuota", "LimitRange", "AdapterPool", "StatefulSet"):
        assert kind in kinds
    assert kinds[0] == "Namespace"
    assert "claims" in done.out.splitlines()[0]
    inside = {document["metadata"].get("namespace") for document in objects} - {None}
    assert inside == {objects[0]["metadata"]["name"]}


def test_plan_refuses_what_the_operator_would(run: Run, tmp_path: Path, config: Path) -> None:
    tenant = yaml.safe_load((EXAMPLES / "tenants" / "smb.yaml").read_text())
    file = tmp_path / "t.yaml"

    def write(**changes: Any) -> Path:
        file.write_text(yaml.safe_dump(tenant | {"spec": tenant["spec"] | changes}))
        return file

    refused(run("plan", "-f", write()), "`--config` must be given")
    refused(run("plan", "-f", write(weight=0), "--config", config), "`weight`")
    refused(run("plan", "-f", write(surprise=1), "--config", config), "`surprise`")
    refused(
        run("plan", "-f", write(isolation={"region": "eu"}), "--config", config), "`isolation` must be absent"
    )
    file.write_text("kind: Deployment\napiVersion: apps/v1\nmetadata: {name: x}\n")
    refused(run("plan", "-f", file, "--config", config), "must be Tenant, AdapterPool or Adapter")
    file.write_text("a: [")
    refused(run("plan", "-f", file, "--config", config), "must be YAML")
    config.write_text("{}")
    refused(run("plan", "-f", write(), "--config", config), "`engineImage`")


def test_plan_of_regulated_says_that_nothing_is_served(run: Run, config: Path) -> None:
    done = run("plan", "-f", EXAMPLES / "tenants" / "regulated.yaml", "--config", config)
    assert done.code == 0, done.err
    assert "Stalled/AttestationNotAvailable" in done.out
    assert "---" not in done.out


def test_cost_prints_the_same_numbers_three_times(run: Run) -> None:
    files = ["--tenants", EXAMPLES / "cost" / "tenants.yaml", "--fleet", EXAMPLES / "cost" / "fleet.yaml"]
    document = json.loads(run("cost", *files, "-o", "json").out)
    rows = list(csv.DictReader(io.StringIO(run("cost", *files, "-o", "csv").out)))
    total = Decimal(document["total"])
    assert sum(Decimal(tenant["total"]) for tenant in document["tenants"]) == total
    assert sum(Decimal(row["total"]) for row in rows) == total
    assert total == Decimal(next(b["total"] for b in document["bills"] if b["topology"] == "tiers"))
    table = run("cost", *files).out
    assert f"{total:,}" in table
    assert "none" in table
    spare = run("cost", *files, "-o", "csv", "--idle", "unallocated").out
    assert spare.splitlines()[-1].startswith("(unallocated)") or "(unallocated)" in spare
    assert run("cost", "--tenants", EXAMPLES / "cost" / "tenants.csv", *files[2:]).code == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenants: []", "must hold a list `tenants`"),
        ("tenants: [{name: a}]", "entry 1: `tier`"),
        ("tenants: [{name: a, tier: Gold, requestsPerSecond: 1, inputTokens: 1, outputTokens: 1}]", "`tier`"),
        (
            "tenants: [{name: a, tier: Smb, requestsPerSecond: .nan, inputTokens: 1, outputTokens: 1}]",
            "`requestsPerSecond`",
        ),
        (
            "tenants:\n"
            + "- {name: a, tier: Smb, requestsPerSecond: 1, inputTokens: 1, outputTokens: 1}\n" * 2,
            "must name `a` once",
        ),
    ],
)
def test_traffic_that_is_none(run: Run, tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    refused(run("cost", "--tenants", file, "--fleet", EXAMPLES / "cost" / "fleet.yaml"), problem)


def test_the_cli_never_imports_the_operator_runtime() -> None:
    code = (
        "import sys, tenantry.cli, tenantry.cli.app, tenantry.cli.plan, tenantry.cli.status, tenantry.cli.adapters,"
        "tenantry.cli.cost; sys.exit('kopf' in sys.modules or 'fastapi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pushed_entry_is_a_valid_version() -> None:
    from tenantry.cli.adapters import inspect_folder, version_entry

    adapter = inspect_folder(ADAPTER)
    for version in ("1.0.0", "1.0.0-rc.1"):
        [entry] = yaml.safe_load(
            version_entry(adapter, "oci://registry:5000/a/b:1@sha256:" + "0" * 64, version)
        )
        assert AdapterVersion.model_validate(entry).rank == adapter.facts.rank


def test_the_references_are_what_programs_say_of_themselves() -> None:
    root = EXAMPLES.parent
    found = subprocess.run(
        [sys.executable, root / "tools" / "reference.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def test_the_reference_shows_what_cost_prints(run: Run) -> None:
    page = (EXAMPLES.parent / "docs" / "reference" / "cli.md").read_text()
    shown = page.split(
        "tenantry cost --tenants examples/cost/tenants.yaml --fleet examples/cost/fleet.yaml\n"
    )[1]
    cost = EXAMPLES / "cost"
    assert shown.startswith(
        run("cost", "--tenants", cost / "tenants.yaml", "--fleet", cost / "fleet.yaml").out
    )
