"""The commands of `python -m cluster`: each a thin door to a module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import binaries, hollow, images, lifecycle, packages
from .errors import ClusterError
from .paths import cluster_dir

Arguments = argparse.Namespace


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds every command to `parser`; the chosen one is `arguments.run`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Arguments], int | None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    command(
        "up", lambda _: lifecycle.up(), "start the cluster (three nodes), or check the one KUBECONFIG names"
    )
    command("down", lambda _: lifecycle.down(), "take the cluster away without a trace")
    command("status", _status, "tell what runs; exits 1 unless all is ready")
    command(
        "kubeconfig", lambda _: print(lifecycle.kubeconfig()), "print the administrator's kubeconfig's path"
    )
    names = command("binary", _binary, "print where programs lie, building what is missing")
    names.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of: {', '.join(binaries.BINARIES)}; all if none"
    )
    listed = command("packages", _packages, "check the Debian packages that nodes and images need")
    listed.add_argument("--install", action="store_true", help="install what is missing")
    tool = command("kubectl", _kubectl, "run our kubectl against the cluster")
    tool.add_argument("words", nargs=argparse.REMAINDER)
    _declare_nodes(commands)
    _declare_hollow(commands)
    _declare_images(commands)


def _declare_nodes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    node = commands.add_parser("node", help="kill a node as a power cut would, or start it again")
    verbs = node.add_subparsers(required=True, metavar="VERB")
    for verb, run in (("stop", _node_stop), ("start", _node_start)):
        chosen = verbs.add_parser(verb)
        chosen.add_argument("name")
        chosen.set_defaults(run=run)


def _declare_hollow(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("hollow", help="nodes that take GPU pods without running them")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add = verbs.add_parser("add", help="start N more")
    add.add_argument("count", type=int, metavar="N")
    add.add_argument("--prefix", default="tenantry-hollow")
    add.add_argument(
        "--resource", action="append", default=[], metavar="NAME=QUANTITY", help="default nvidia.com/gpu=8"
    )
    add.add_argument("--label", action="append", default=[], metavar="NAME=VALUE")
    add.add_argument(
        "--taint", action="append", default=[], metavar="KEY=VALUE:EFFECT", help=f"default {hollow.GPU_TAINT}"
    )
    add.set_defaults(run=_hollow_add)
    remove = verbs.add_parser("remove", help="end all, or those named")
    remove.add_argument("names", nargs="*")
    remove.set_defaults(run=lambda chosen: _print(hollow.remove(cluster_dir(), chosen.names)))
    verbs.add_parser("list").set_defaults(run=lambda _: _print(hollow.names(cluster_dir())))


def _declare_images(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("image", help="build images and bring them into nodes")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    build = verbs.add_parser("build", help="build from a Dockerfile unless nothing changed")
    build.add_argument("--file", type=Path, required=True, metavar="F")
    build.add_argument("--tag", required=True, metavar="T")
    build.add_argument("--context", type=Path, metavar="DIR", help="default: the Dockerfile's folder")
    build.add_argument("--build-arg", action="append", default=[], metavar="K=V")
    build.add_argument(
        "--mount", action="append", default=[], metavar="SOURCE:TARGET", help="read-only while building"
    )
    build.set_defaults(run=_image_build)
    load = verbs.add_parser("load", help="import built images into nodes that lack them")
    load.add_argument("tags", nargs="+", metavar="T")
    load.add_argument(
        "--node", action="append", default=[], metavar="N", help="role or name; default: every node"
    )
    load.set_defaults(run=_image_load)
    own = verbs.add_parser("own", help="build the cluster's own images: base, probe, ...")
    own.add_argument("tags", nargs="+", metavar="T")
    own.set_defaults(run=lambda chosen: _print([images.ensure(tag).tag for tag in chosen.tags]))


def _status(_: Arguments) -> int:
    status = lifecycle.status()
    _print(status.lines)
    return 0 if status.ok else 1


def _binary(chosen: Arguments) -> None:
    unknown = [name for name in chosen.names if name not in binaries.BINARIES]
    if unknown:
        raise ClusterError(f"`{unknown[0]}` must be one of: {', '.join(binaries.BINARIES)}")
    _print([str(path) for path in binaries.ensure(chosen.names or binaries.BINARIES).values()])


def _packages(chosen: Arguments) -> int:
    if chosen.install:
        packages.ensure()
        return 0
    names = packages.missing()
    _print(names)
    return 1 if names else 0


def _kubectl(chosen: Arguments) -> None:
    program = str(binaries.ensure(["kubectl"])["kubectl"])
    os.execv(program, [program, f"--kubeconfig={lifecycle.kubeconfig()}", *chosen.words])


def _node_stop(chosen: Arguments) -> None:
    lifecycle.worker(chosen.name).stop()


def _node_start(chosen: Arguments) -> None:
    worker = lifecycle.worker(chosen.name)
    lifecycle.authority()
    worker.launch()
    worker.wait_for_runtime()


def _hollow_add(chosen: Arguments) -> None:
    lifecycle.authority()
    _print(
        hollow.add(
            cluster_dir(),
            lifecycle.SERVER,
            chosen.count,
            prefix=chosen.prefix,
            resources=_pairs("resource", chosen.resource) or hollow.GPU,
            labels=_pairs("label", chosen.label),
            taints=chosen.taint or (hollow.GPU_TAINT,),
        )
    )


def _image_build(chosen: Arguments) -> None:
    context = (chosen.context or chosen.file.parent).absolute()
    arguments = _pairs("build-arg", chosen.build_arg)
    built = images.build(
        images.Image(chosen.tag, chosen.file.absolute(), context, arguments, tuple(chosen.mount))
    )
    print(f"{built.tag}@{built.digest}")


def _image_load(chosen: Arguments) -> None:
    given = lifecycle.foreign_kubeconfig()
    if given is not None:
        raise ClusterError(
            f"images cannot be put into the nodes of KUBECONFIG={given}: push them to a registry it pulls from, "
            "or use its own loader (e.g. `kind load image-archive`)"
        )
    lifecycle.authority()
    nodes = [lifecycle.worker(name) for name in chosen.node] or lifecycle.workers()
    images.load(chosen.tags, nodes)


def _pairs(option: str, values: Sequence[str]) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise ClusterError(f"`--{option}` must be NAME=VALUE, not `{value}`")
    return {name: content for name, _, content in (value.partition("=") for value in values)}


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
