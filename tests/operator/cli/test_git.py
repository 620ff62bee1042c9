"""Commands that change a file in Git: the change is as small as it can be, and only the one that was meant."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tenantry.api import keys
from tenantry.api.tenant import ApiKey
from tenantry.cli.errors import CliError
from tenantry.cli.rollback import _order, rollback
from tenantry.cli.rotate import rotate_file

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
OLD = "a" * 64


def tone(stable: str, *versions: str) -> str:
    listed = "".join(
        f'  - {{version: {v}, digest: "sha256:{n:064x}", source: "oci://r/a:{v}", rank: 4}}\n'
        for n, v in enumerate(versions)
    )
    return f"""\
apiVersion: tenantry.dev/v1alpha1
kind: Adapter
metadata: {{name: tone, namespace: acme-ml}}
spec:
  tenantRef: acme
  versions:
{listed}  channels:
  - name: stable
    version: {stable}  # here
"""


def test_a_rollback_is_a_diff_that_git_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("tone.yaml")
    text = tone("1.10.0", "1.2.0", "1.9.0", "1.10.0-rc.1", "1.10.0", "2.0.0")
    file.write_text(text)
    diff = rollback(file, "acme-ml/tone", None, write=False)
    assert file.read_text() == text, "nothing is written"
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("---", "+++")]
    assert changed == ["-    version: 1.10.0  # here", "+    version: 1.10.0-rc.1  # here"]
    subprocess.run(["git", "apply"], input=diff, text=True, check=True, cwd=tmp_path)
    assert yaml.safe_load(file.read_text())["spec"]["channels"][0]["version"] == "1.10.0-rc.1"


def test_a_rollback_by_name_into_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tone.yaml"
    file.write_text(tone("1.1.0", "1.0.0", "1.1.0"))
    assert "stable 1.1.0 -> 1.0.0" in rollback(file, "acme-ml/tone", "1.0.0", write=True)
    assert file.read_text() == tone("1.0.0", "1.0.0", "1.1.0")
    with pytest.raises(CliError, match=r"no version below 1\.0\.0"):
        rollback(file, "acme-ml/tone", None, write=True)
    with pytest.raises(CliError, match="must be another than the stable one"):
        rollback(file, "acme-ml/tone", "1.0.0", write=False)
    with pytest.raises(CliError, match="NAMESPACE/NAME"):
        rollback(file, "tone", None, write=False)
    with pytest.raises(CliError, match="must hold the Adapter"):
        rollback(file, "acme-ml/tune", None, write=False)


def test_versions_are_ordered_as_semver_says() -> None:
    """The example of section 11 of SemVer 2.0.0."""
    ordered = [
        "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-beta.2", "1.0.0-beta.11",
        "1.0.0-rc.1", "1.0.0", "1.0.1", "1.10.0",
    ]  # fmt: skip
    assert sorted(sorted(ordered), key=_order) == ordered


TENANT = """\
# Acme
apiVersion: tenantry.dev/v1alpha1
kind: Tenant
metadata:
  name: acme
spec:
  tier: Smb
  auth:
    apiKeys:
{keys}
  models: [{{name: chat, baseModel: m}}]   # the end
"""

CI, WEB = f'name: ci, sha256: "{OLD}"', f'name: web, sha256: "{"b" * 64}"'
STYLES = {
    "flow entries": f"      - {{{CI}}}  # since May",
    "block entries": f"      - name: ci\n        sha256: {OLD}  # since May",
    "with an end": f'      - name: ci\n        expiresAt: 2027-01-01T00:00:00Z # soon\n        sha256: "{OLD}"',
    "two": f'    - {{{WEB}}}\n    - {{{CI}, expiresAt: "2027-01-01T00:00:00Z"}}',
    "not the last": f'      - name: ci\n        sha256: "{OLD}"\n      # of the web\n      - {{{WEB}}}',
    "one line": f"      [{{{CI}}}, {{{WEB}}}]",
}


@pytest.mark.parametrize("style", STYLES)
def test_a_key_is_rotated_in_the_file_and_nothing_else_changes(tmp_path: Path, style: str) -> None:
    file = tmp_path / "acme.yaml"
    before = TENANT.format(keys=STYLES[style])
    file.write_text(before)
    done = rotate_file(file, "acme", "ci", overlap="7d", expires_in="90d", now=NOW)
    text = file.read_text()
    entries = {entry["name"]: entry for entry in yaml.safe_load(text)["spec"]["auth"]["apiKeys"]}
    assert entries["ci"]["expiresAt"] == "2026-12-07T12:00:00Z"
    assert entries["ci"]["sha256"] == OLD
    assert done.name == "ci-20261130"
    fresh = ApiKey.model_validate(entries[done.name])
    assert keys.matches(done.key, fresh.sha256)
    assert done.key not in text
    assert fresh.expires_at is not None
    rest = [entry for name, entry in entries.items() if name not in ("ci", done.name)]
    assert rest == [e for e in yaml.safe_load(before)["spec"]["auth"]["apiKeys"] if e["name"] != "ci"]
    for comment in ("# Acme", "# the end", *(["# since May"] if "since May" in before else [])):
        assert comment in text
    again = rotate_file(file, "acme", done.name, overlap="1h", expires_in=None, now=NOW)
    assert again.name == "ci-20261130-2"


def test_what_cannot_be_rotated_is_said_and_the_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "acme.yaml"
    text = TENANT.format(keys=STYLES["two"])
    file.write_text(text)

    def refused(tenant: str, name: str, words: str, overlap: str = "7d") -> None:
        with pytest.raises(CliError, match=words):
            rotate_file(file, tenant, name, overlap=overlap, expires_in=None)
        assert file.read_text() in (text, "kind: Tenant\nmetadata: {name: acme}\n")

    refused("acme", "cd", r"`--name` must be a key of the Tenant in the file \(`web`, `ci`\)")
    refused("birch", "ci", "must hold the Tenant birch")
    refused("acme", "ci", "`--overlap` must be a number with d, h or m", overlap="soon")
    file.write_text("kind: Tenant\nmetadata: {name: acme}\n")
    refused("acme", "ci", "must have `spec.auth.apiKeys`")


@settings(deadline=None)
@given(
    indent=st.sampled_from(["    ", "      ", "        "]),
    flow=st.lists(st.booleans(), min_size=1, max_size=4),
    ends=st.lists(st.booleans(), min_size=4, max_size=4),
    index=st.integers(0, 3),
)
def test_any_mix_of_styles(
    tmp_path_factory: pytest.TempPathFactory, indent: str, flow: list[bool], ends: list[bool], index: int
) -> None:
    lines = []
    for number, one_line in enumerate(flow):
        fields = [f"name: k{number}", f'sha256: "{number:064x}"']
        fields += ['expiresAt: "2030-01-01T00:00:00Z"'] if ends[number] else []
        joined = "{" + ", ".join(fields) + "}" if one_line else f"\n{indent}  ".join(fields)
        lines.append(f"{indent}- {joined}")
    file = tmp_path_factory.mktemp("keys") / "acme.yaml"
    file.write_text(TENANT.format(keys="\n".join(lines)))
    before = yaml.safe_load(file.read_text())["spec"]["auth"]["apiKeys"]
    name = f"k{index % len(flow)}"
    rotate_file(file, "acme", name, overlap="7d", expires_in=None, now=NOW)
    after = yaml.safe_load(file.read_text())["spec"]["auth"]["apiKeys"]
    assert [entry["name"] for entry in after] == [*(e["name"] for e in before), f"{name}-20261130"]
    assert [e for e in after[:-1] if e["name"] != name] == [e for e in before if e["name"] != name]
