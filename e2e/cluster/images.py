"""Container images without a registry: built by buildah, kept as archives, imported into nodes.

An image is named by its tag and known by a key, the hash of everything that goes into it: the Dockerfile, the files
its COPY and ADD lines take, its arguments, its mounts and the keys of those of our images it starts from. A key that
was built once is never built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from . import binaries
from .binaries import say
from .dockerfile import bases, context_files, copied, files_below
from .errors import ClusterError
from .node import Worker
from .paths import HERE, IMAGE_HOST, cache_dir
from .shell import run, succeeds

DOCKERFILES = HERE / "images"
DEBIAN_SUITE = "bookworm"
BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
BASE = f"{IMAGE_HOST}/base:bookworm"


@dataclass(frozen=True)
class Image:
    """What to build: a Dockerfile, its context folder, and arguments."""

    tag: str
    dockerfile: Path
    context: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[str] = ()
    """`SOURCE:TARGET` folders of this machine, seen read-only while building."""


@dataclass(frozen=True)
class Built:
    """A finished image: its name and the archive (OCI layout in a tar file) that holds it."""

    tag: str
    key: str
    archive: Path
    digest: str


def build(image: Image) -> Built:
    """Builds `image` unless its key was built before. Raises ClusterError with buildah's last lines."""
    ours = {
        name: ensure(name)
        for name in bases(image.dockerfile.read_text(), image.arguments)
        if name.startswith(f"{IMAGE_HOST}/")
    }
    key = key_of(image, {name: built.key for name, built in ours.items()})
    with _alone(image.tag):
        known = recall(image.tag)
        return known if known is not None and known.key == key else _build(image, key)


@contextmanager
def _alone(tag: str) -> Iterator[None]:
    """One builder of a tag at a time: a second one waits and then finds the image there."""
    path = cache_dir() / "images" / f"{_plain(tag)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(image: Image, key: str) -> Built:
    say(f"building image {image.tag}")
    started = time.monotonic()
    replaced = _stored(image.tag)
    with tempfile.TemporaryDirectory(prefix="tenantry-build-") as scratch:
        command = [*_buildah("build"), "--isolation=chroot", "--layers", "--format=oci", "-t", image.tag]
        for mount in (*_registry_mounts(Path(scratch)), *image.mounts):
            command += ["-v", f"{mount}:ro"]
        for name, value in image.arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        _show(image.tag, [*command, "-f", str(image.dockerfile), str(image.context)])
    built = _keep(image.tag, key)
    if replaced and replaced != _stored(image.tag):
        succeeds(*_buildah("rmi"), replaced)  # stays where another image still stands on it
    size = built.archive.stat().st_size >> 20
    say(f"built image {image.tag} in {time.monotonic() - started:.0f} s ({size} MB)")
    return built


def recall(tag: str) -> Built | None:
    """The last build of `tag`, if its archive is still there."""
    try:
        record = json.loads(_record(tag).read_text())
    except (OSError, ValueError):
        return None
    archive = Path(record["archive"])
    return Built(tag, record["key"], archive, record["digest"]) if archive.exists() else None


def load(tags: Iterable[str], workers: Sequence[Worker]) -> None:
    """Imports images into nodes, skipping nodes that hold the very digest. Raises ClusterError for an unbuilt tag."""
    images = [_recalled(tag) for tag in tags]
    with ThreadPoolExecutor(max(1, len(workers))) as pool:
        list(pool.map(lambda worker: _import_all(images, worker), workers))


def present(worker: Worker) -> dict[str, str]:
    """Names and digests of the images that a node holds."""
    lines = worker.ctr("images", "list").splitlines()[1:]
    return {fields[0]: fields[2] for line in lines if len(fields := line.split()) > 2}


def _import_all(images: Sequence[Built], worker: Worker) -> None:
    for image in images:
        _import(image, worker)


def _import(image: Built, worker: Worker) -> None:
    if present(worker).get(image.tag) == image.digest:
        return
    started = time.monotonic()
    worker.ctr("images", "import", "--local", "--snapshotter", worker.snapshotter, image.archive)
    found = present(worker).get(image.tag)
    if found != image.digest:
        raise ClusterError(f"`{worker.node.name}` holds {image.tag} as {found}, which must be {image.digest}")
    say(f"imported {image.tag} into {worker.node.name} in {time.monotonic() - started:.0f} s")


def _recalled(tag: str) -> Built:
    built = recall(tag)
    if built is None:
        raise ClusterError(
            f"image `{tag}` was not built; run `python -m cluster image build --tag {tag} --file ...`"
        )
    return built


def key_of(image: Image, ours: Mapping[str, str] | None = None) -> str:
    """Hash of everything that goes into `image`."""
    digest = hashlib.sha256()

    def take(*words: str) -> None:
        digest.update("\0".join(words).encode() + b"\n")

    text = image.dockerfile.read_text()
    take("dockerfile", text)
    for name, value in sorted(image.arguments.items()):
        take("argument", name, value)
    for name, key in sorted((ours or {}).items()):
        take("base", name, key)
    for path in context_files(text, image.context, image.arguments):
        content = (
            hashlib.sha256(path.read_bytes()).hexdigest() if not path.is_symlink() else os.readlink(path)
        )
        take("file", str(path.relative_to(image.context)), oct(path.lstat().st_mode), content)
    for mount in image.mounts:
        source, _, target = mount.partition(":")
        for path in files_below(Path(source)):
            status = path.lstat()
            name = str(path.relative_to(source))  # where the folder lies on this machine changes nothing
            take("mount", target, name, str(status.st_size), str(status.st_mtime_ns))
    return digest.hexdigest()[:20]


# -- buildah --


def _buildah(command: str) -> list[str]:
    store = cache_dir() / "buildah"
    return [
        *("buildah", "--root", str(store / "root"), "--runroot", str(store / "run")),
        *("--storage-driver", _driver(store), command),
    ]


def _driver(store: Path) -> str:
    """Overlays where the disk takes them, else whole copies."""
    from .node import can_overlay

    choice = store / "driver"
    if not choice.exists():
        store.mkdir(parents=True, exist_ok=True)
        choice.write_text("overlay" if can_overlay(store) else "vfs")
    return choice.read_text()


def _show(tag: str, command: Sequence[str]) -> None:
    """Runs a build, showing what it says when it takes long or fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    tail: list[str] = []
    shown = time.monotonic()
    for line in process.stdout:
        tail = [*tail[-40:], line]
        if line.startswith("STEP") and time.monotonic() - shown > 2:
            say(f"{tag}: {line.strip()[:140]}")
            shown = time.monotonic()
    if process.wait():
        raise ClusterError(f"building image `{tag}` failed:\n{''.join(tail)}")


def _stored(tag: str) -> str:
    """Id of the image that buildah holds under `tag`, empty if none."""
    return run(*_buildah("images"), "--quiet", "--no-trunc", "--filter", f"reference={tag}").strip()


def _keep(tag: str, key: str) -> Built:
    folder = cache_dir() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    archive, digest_file = folder / f"{_plain(tag)}-{key}.tar", folder / f"{_plain(tag)}.digest"
    half = folder / f"{archive.name}.part"
    half.unlink(missing_ok=True)
    # Nothing travels over a network, so the quickest compression is the best.
    run(
        *(*_buildah("push"), "--compression-format=zstd", "--compression-level=1"),
        *("--digestfile", digest_file, tag, f"oci-archive:{half}:{tag}"),
    )
    digest = digest_file.read_text().strip()
    digest_file.unlink()
    for old in folder.glob(f"{_plain(tag)}-*.tar"):
        old.unlink()
    half.rename(archive)
    _record(tag).write_text(json.dumps({"tag": tag, "key": key, "archive": str(archive), "digest": digest}))
    return Built(tag, key, archive, digest)


def _record(tag: str) -> Path:
    return cache_dir() / "images" / f"{_plain(tag)}.json"


def _plain(tag: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.]+", "_", tag)


def _registry_mounts(scratch: Path) -> list[str]:
    """The machine's certificates and pip settings, lent to a build and never part of the image."""
    mounts = ["/etc/ssl/certs:/etc/ssl/certs"]
    settings = {
        name.removeprefix("PIP_").lower().replace("_", "-"): value
        for name, value in os.environ.items()
        if name.startswith("PIP_") and value
    }
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if bundle.exists():
        settings.setdefault("cert", str(bundle))
    links = settings.get("find-links", "")
    if links and Path(links).is_dir():
        mounts.append(f"{links}:{links}")
    elif links.startswith("/"):
        del settings["find-links"]
    config = scratch / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    return [*mounts, f"{config}:/etc/pip.conf"]


# -- our own images --


def ensure(tag: str) -> Built:
    """Builds one of the cluster's own images (base, pause, coredns, registry, probe)."""
    name = tag.removeprefix(f"{IMAGE_HOST}/").partition(":")[0]
    if name == "base":
        return _base()
    dockerfile = DOCKERFILES / name / "Dockerfile"
    if not dockerfile.exists():
        built = recall(tag)
        if built is None:
            raise ClusterError(f"image `{tag}` is neither the cluster's own nor built yet")
        return built
    programs = [
        word.removeprefix("bin/") for word in copied(dockerfile.read_text(), {}) if word.startswith("bin/")
    ]
    with tempfile.TemporaryDirectory(prefix="tenantry-image-") as scratch:
        context = Path(scratch, "context")
        shutil.copytree(DOCKERFILES / name, context)
        (context / "bin").mkdir()
        for program, path in binaries.ensure(programs).items():
            os.link(path, context / "bin" / program) if _same_disk(path, context) else shutil.copy2(
                path, context / "bin"
            )
        return build(Image(tag, dockerfile, context))


def _same_disk(first: Path, second: Path) -> bool:
    return first.stat().st_dev == second.stat().st_dev


def _base() -> Built:
    """A small Debian with Python, from Debian's own archive by mmdebstrap."""
    mirror = [given] if (given := os.environ.get("TENANTRY_DEBIAN_MIRROR")) else []  # else mmdebstrap's own
    key = hashlib.sha256("\0".join((DEBIAN_SUITE, *mirror, *BASE_PACKAGES, "1")).encode()).hexdigest()[:20]
    known = recall(BASE)
    if known is not None and known.key == key:
        return known
    say(f"building image {BASE}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tenantry-base-") as scratch:
        run(
            *("mmdebstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}"),
            *("--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*"),
            *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright"),
            *(DEBIAN_SUITE, f"{scratch}/root.tar", *mirror),
        )
        Path(scratch, "Dockerfile").write_text(
            'FROM scratch\nADD root.tar /\nENV LANG=C.UTF-8\nCMD ["bash"]\n'
        )
        _show(BASE, [*_buildah("build"), "--isolation=chroot", "--format=oci", "-t", BASE, scratch])
    built = _keep(BASE, key)
    say(f"built image {BASE} in {time.monotonic() - started:.0f} s")
    return built
