"""Programs of other projects, run as processes of this machine instead of in pods, so that no image is built of them.

They reach the API server as the administrator does. What they do to objects is the same.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ClusterError
from .process import dying_with_me, tail


@contextmanager
def running(
    kubeconfig: Path,
    folder: Path,
    program: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """The program works inside the block; its log lies in `folder`.

    Raises ClusterError with its last lines where it ended on its own.
    """
    log = folder / f"{program.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            dying_with_me([str(program), *arguments]),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "KUBECONFIG": str(kubeconfig), **(environment or {})},
            cwd=folder,
        )
    try:
        yield
        if process.poll() is not None:
            raise ClusterError(f"{program.name} ended with {process.returncode}:\n{tail(log)}")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def define(kubectl: Callable[..., Any], files: Iterable[Path]) -> list[str]:
    """Apply files of CustomResourceDefinitions and wait until they are served; `-f FILE ...` of all of them."""
    named = [word for path in sorted(files) for word in ("-f", str(path))]
    kubectl("apply", "--server-side", "--force-conflicts", *named)
    kubectl("wait", "--for=condition=Established", "--timeout=30s", *named)
    return named
