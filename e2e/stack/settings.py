"""The operator's configuration, changed for as long as a test needs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import yaml

from .install import Stack
from .kube import JsonObject, StackError

NAME = "tenantry-operator"


@contextmanager
def changed(stack: Stack, change: Callable[[JsonObject], None]) -> Iterator[None]:
    """The operator runs with the changed file inside the block, and with the one before after it."""
    found = stack.kube.get("configmap", NAME, stack.namespace)
    if found is None:
        raise StackError(f"ConfigMap {stack.namespace}/{NAME} is not there")
    before = found["data"]["operator.yaml"]
    config = yaml.safe_load(before)
    change(config)
    _restart_with(stack, yaml.safe_dump(config))
    try:
        yield
    finally:
        _restart_with(stack, before)


def _restart_with(stack: Stack, text: str) -> None:
    where = ("-n", stack.namespace)
    patch = json.dumps({"data": {"operator.yaml": text}})
    stack.kube.run("patch", "configmap", NAME, *where, "--type=merge", "-p", patch)
    stack.kube.run("rollout", "restart", f"deployment/{NAME}", *where)
    stack.kube.run("rollout", "status", f"deployment/{NAME}", *where, "--timeout=120s", seconds=150)
