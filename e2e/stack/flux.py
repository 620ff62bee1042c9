"""A real Flux beside the cluster: its source-controller and kustomize-controller."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import beside, binaries
from cluster.process import free_port

from . import git
from .git import Repository
from .kube import JsonObject, Kube, condition

NAMESPACE = "flux-system"
NAME = "fleet"
CONTROLLERS = {
    "source-controller": "github.com/fluxcd/source-controller",
    "kustomize-controller": "github.com/fluxcd/kustomize-controller",
}


@dataclass(frozen=True)
class Flux:
    """A Flux that follows one repository, and waits for the health of what it applies."""

    kube: Kube
    repository: Repository

    def sync(self) -> None:
        """Ask for the newest commit now instead of at the next interval."""
        self.kube.run(
            "annotate", "gitrepository", NAME, "-n", NAMESPACE, "--overwrite",
            f"reconcile.fluxcd.io/requestedAt={time.time_ns()}",
        )  # fmt: skip

    def applied(self, commit: str, *, seconds: float = 180) -> JsonObject:
        """Wait until Flux says that the commit is applied and healthy; the Kustomization."""
        return self._until(f"Flux reports {commit[:12]} as healthy", commit, "True", seconds)

    def refused(self, commit: str, *, seconds: float = 180) -> JsonObject:
        """Wait until Flux says that what the commit brought is not healthy; the Kustomization."""
        return self._until(f"Flux reports {commit[:12]} as failed", commit, "False", seconds)

    def _until(self, what: str, commit: str, ready: str, seconds: float) -> JsonObject:
        def reached(found: JsonObject | None) -> bool:
            status = (found or {}).get("status") or {}
            done = "lastAppliedRevision" if ready == "True" else "lastAttemptedRevision"
            # After a failure it goes on to say `Reconciling`, for it will try again.
            at_rest = ready == "False" or condition(found, "Reconciling").get("status") != "True"
            told = condition(found, "Ready").get("status") == ready
            return str(status.get(done, "")).endswith(commit) and told and at_rest

        found = self.kube.wait(what, "kustomization", NAME, NAMESPACE, until=reached, seconds=seconds)
        assert found is not None
        return found


@contextmanager
def following(kube: Kube) -> Iterator[Flux]:
    """Flux with an empty repository of its own, until the block ends; what it applied stays."""
    programs = binaries.ensure(CONTROLLERS)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenantry-flux-")))
        repository = stack.enter_context(git.serve(root / "git"))
        for name, module in CONTROLLERS.items():
            bases = binaries.module_folder(name, module) / "config" / "crd" / "bases"
            beside.define(kube.run, bases.glob("*.yaml"))
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        storage = free_port()
        own = {"source-controller": [
            f"--storage-path={root}/artifacts", f"--storage-addr=127.0.0.1:{storage}",
            f"--storage-adv-addr=127.0.0.1:{storage}",
        ]}  # fmt: skip
        (root / "artifacts").mkdir()
        for name, program in programs.items():
            arguments = [
                "--watch-all-namespaces", "--enable-leader-election=false", "--log-level=info",
                f"--metrics-addr=127.0.0.1:{free_port()}", f"--health-addr=127.0.0.1:{free_port()}",
                *own.get(name, []),
            ]  # fmt: skip
            environment = {"RUNTIME_NAMESPACE": NAMESPACE}
            stack.enter_context(
                beside.running(kube.kubeconfig, root, program, *arguments, environment=environment)
            )
        try:
            yield Flux(kube, repository)
        finally:
            # Without the controllers' finalizers nothing would be left to take them off.
            for kind in ("kustomization", "gitrepository"):
                kube.run(
                    "delete", kind, NAME, "-n", NAMESPACE, "--ignore-not-found", "--timeout=60s", check=False
                )


def follow(flux: Flux, *, timeout: str = "2m") -> None:
    """Have Flux follow the branch `main` from now on."""
    source: JsonObject = {
        "apiVersion": "source.toolkit.fluxcd.io/v1",
        "kind": "GitRepository",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"interval": "1h", "url": flux.repository.url, "ref": {"branch": "main"}},
    }
    kustomization: JsonObject = {
        "apiVersion": "kustomize.toolkit.fluxcd.io/v1",
        "kind": "Kustomization",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "interval": "1h",
            "retryInterval": "1h",
            "timeout": timeout,
            "path": "./",
            "prune": True,
            "deletionPolicy": "Orphan",
            "wait": True,
            "sourceRef": {"kind": "GitRepository", "name": NAME},
        },
    }
    flux.kube.apply(source, kustomization)
