"""Images are rebuilt when, and only when, something that goes into them changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import images
from cluster.dockerfile import bases, context_files, copied
from cluster.images import Image, key_of

DOCKERFILE = """\
ARG BASE=tenantry.local/base:bookworm
ARG SOURCE=src
# COPY commented /nowhere
FROM ${BASE} AS build
COPY --chown=1:1 pyproject.toml \\
     ${SOURCE} /app/
RUN echo "it's COPY not_this /x"
FROM $BASE
COPY --from=build /app /app
ADD https://example.org/file /file
COPY ["space name", "/there"]
"""


@pytest.fixture
def image(tmp_path: Path) -> Image:
    context = tmp_path / "context"
    (context / "src" / "__pycache__").mkdir(parents=True)
    (context / "pyproject.toml").write_text("[project]")
    (context / "src" / "main.py").write_text("print()")
    (context / "src" / "__pycache__" / "main.pyc").write_text("compiled")
    (context / "notes.md").write_text("not copied")
    (context / "space name").write_text("x")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(DOCKERFILE)
    return Image("tenantry.local/t:1", dockerfile, context, {"SOURCE": "src"})


def test_sources_of_the_context_are_found_and_nothing_else() -> None:
    assert copied(DOCKERFILE, {"SOURCE": "src"}) == ["pyproject.toml", "src", "space name"]


def test_bases_are_named_with_their_arguments_filled_in() -> None:
    assert bases(DOCKERFILE, {}) == ["tenantry.local/base:bookworm"] * 2
    assert bases(DOCKERFILE, {"BASE": "python:3.11"}) == ["python:3.11"] * 2


def test_only_copied_files_count(image: Image) -> None:
    found = context_files(DOCKERFILE, image.context, image.arguments)
    assert [str(path.relative_to(image.context)) for path in found] == [
        "pyproject.toml",
        "space name",
        "src/main.py",
    ]


def test_an_argument_with_a_default_names_the_sources_too() -> None:
    assert copied("ARG WHERE=src\nFROM scratch\nCOPY $WHERE /app\n", {}) == ["src"]
    assert copied("ARG WHERE=src\nFROM scratch\nCOPY ${WHERE}/x ${NONE:-y} /app\n", {"WHERE": "z"}) == [
        "z/x",
        "y",
    ]


@pytest.mark.parametrize(
    "change",
    ["copied file", "mode", "argument", "dockerfile", "base", "mounted file", "new file", "gone file"],
)
def test_whatever_goes_in_changes_the_key(image: Image, tmp_path: Path, change: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "a.whl").write_text("1")
    before = Image(image.tag, image.dockerfile, image.context, image.arguments, (f"{wheels}:/wheels",))
    first = key_of(before, {"tenantry.local/base:bookworm": "1"})
    after, ours = before, {"tenantry.local/base:bookworm": "1"}
    match change:
        case "copied file":
            (image.context / "src" / "main.py").write_text("print(1)")
        case "mode":
            (image.context / "src" / "main.py").chmod(0o755)
        case "argument":
            after = Image(
                image.tag, image.dockerfile, image.context, {"SOURCE": "src", "X": "1"}, before.mounts
            )
        case "dockerfile":
            image.dockerfile.write_text(DOCKERFILE + "USER 1\n")
        case "base":
            ours = {"tenantry.local/base:bookworm": "2"}
        case "mounted file":
            (wheels / "a.whl").write_text("22")
        case "new file":
            (image.context / "src" / "more.py").write_text("")
        case "gone file":
            (image.context / "src" / "main.py").unlink()
    assert key_of(after, ours) != first


@pytest.mark.parametrize("change", ["other file", "compiled file", "time"])
def test_what_does_not_go_in_leaves_the_key(image: Image, change: str) -> None:
    first = key_of(image)
    match change:
        case "other file":
            (image.context / "notes.md").write_text("changed")
        case "compiled file":
            (image.context / "src" / "__pycache__" / "main.pyc").write_text("again")
        case "time":
            (image.context / "src" / "main.py").touch()
    assert key_of(image) == first


def test_the_machines_pip_settings_reach_a_build_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "absent"))
    mounts = images._registry_mounts(tmp_path)
    assert f"{tmp_path}/pip.conf:/etc/pip.conf" in mounts
    text = (tmp_path / "pip.conf").read_text()
    assert "index-url = https://mirror.example/simple" in text
    assert "find-links" not in text, "a folder that is not there must not be named inside the build"
