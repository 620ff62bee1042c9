"""Building for real: once per content, with nothing of this machine inside."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import images, packages
from cluster.errors import ClusterError
from cluster.shell import succeeds

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TAG = "tenantry.local/test-build:1"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    packages.ensure()
    (tmp_path / "Dockerfile").write_text("FROM scratch\nARG SECRET=none\nCOPY note /note\nUSER 65532\n")
    (tmp_path / "note").write_text("first")
    yield tmp_path
    built = images.recall(TAG)
    if built is not None:
        built.archive.unlink()
        images._record(TAG).unlink()
    succeeds(*images._buildah("rmi"), TAG)


def blobs(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {
            member.name.rpartition("/")[2]: handle.read()
            for member in tar.getmembers()
            if (handle := tar.extractfile(member)) is not None
        }


def test_one_build_per_content(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    image = images.Image(TAG, folder / "Dockerfile", folder)
    first = images.build(image)
    assert images.build(image) == first
    assert capfd.readouterr().err.count("building image") == 1
    (folder / "note").write_text("second")
    second = images.build(image)
    assert second.digest != first.digest
    assert not first.archive.exists(), "an image that was replaced takes no room"


def test_the_archive_holds_what_its_digest_says(folder: Path) -> None:
    built = images.build(images.Image(TAG, folder / "Dockerfile", folder))
    content = blobs(built.archive)
    index = json.loads(content["index.json"])
    assert index["manifests"][0]["digest"] == built.digest
    manifest = json.loads(content[built.digest.removeprefix("sha256:")])
    config = json.loads(content[manifest["config"]["digest"].removeprefix("sha256:")])
    assert config["config"]["User"] == "65532"
    assert not config["config"].get("Env") or not any("PIP_" in item for item in config["config"]["Env"])


def test_a_failing_build_says_why_and_keeps_the_last_image(folder: Path) -> None:
    built = images.build(images.Image(TAG, folder / "Dockerfile", folder))
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY absent /absent\n")
    with pytest.raises(ClusterError, match=r"test-build:1` failed[\s\S]*absent"):
        images.build(images.Image(TAG, folder / "Dockerfile", folder))
    assert images.recall(TAG) == built


def test_an_image_that_was_never_built_is_named(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM tenantry.local/absent:1\n")
    with pytest.raises(ClusterError, match="absent:1` is neither"):
        images.build(images.Image(TAG, dockerfile, tmp_path))
    with pytest.raises(ClusterError, match="was not built"):
        images.load(["tenantry.local/absent:1"], [])
