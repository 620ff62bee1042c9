"""CRDs are upgraded over stored objects: those that a newer rule would refuse are explained, served or let go."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tenantry.api import names
from tenantry.cluster import ADAPTER, TENANT, Key, Obj
from tenantry.runtime.schema import SchemaMismatch, check_schema

if TYPE_CHECKING:
    from conftest import Lab
    from support.outage import Outage

pytestmark = pytest.mark.apiserver

CRDS = Path(__file__).parents[3] / "crds"


@pytest.fixture(scope="module")
def apiserver(own_plane: Outage) -> Any:
    """An API server whose CRDs these tests may change."""
    plane = own_plane.plane
    return SimpleNamespace(kubeconfig=plane.kubeconfig, kubectl=plane.kubectl, client=plane.client)


@pytest.fixture(scope="module")
def crds(apiserver: Any) -> None:
    """CRDs of an older release: without any rule, and without some fields."""
    older = [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]
    for crd in older:
        [version] = crd["spec"]["versions"]
        _loosen(version["schema"]["openAPIV3Schema"])
    [tenant] = [crd for crd in older if crd["spec"]["names"]["kind"] == "Tenant"]
    properties = tenant["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del properties["spec"]["properties"]["weight"]
    del properties["status"]["properties"]["isolation"]
    _install(apiserver, older)


def _loosen(node: Any) -> None:
    if isinstance(node, dict):
        node.pop("x-kubernetes-validations", None)
        for child in node.values():
            _loosen(child)
    elif isinstance(node, list):
        for child in node:
            _loosen(child)


def _install(apiserver: Any, crds: list[Obj]) -> None:
    text = yaml.safe_dump_all(copy.deepcopy(crds))
    apiserver.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=text)
    apiserver.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", "-", text=text)


# what is wrong with a stored Tenant -> (name, change of its spec, words of the operator)
OLD: dict[str, tuple[str, Obj, str]] = {
    "a long name": ("n" * 44, {}, "`metadata.name` must be a DNS label of at most 40"),
    "a dot in its name": ("a.b", {}, "`metadata.name` must be a DNS label of at most 40"),
    "an alias that looks like a version": (
        "alias",
        {"models": [{"name": "a--b", "baseModel": "m"}]},
        "`models[0].name` must not contain `--`",
    ),
    "a fallback to nowhere": (
        "fallback",
        {"models": [{"name": "a", "baseModel": "m", "fallback": "gone"}]},
        "`models[0].fallback` must name another model",
    ),
    "an adapter in a tier without": (
        "free",
        {"models": [{"name": "a", "baseModel": "m", "adapterRef": {"namespace": "x", "name": "y"}}]},
        "`models[0].adapterRef` must be absent",
    ),
    "a network of its own without nodes": (
        "egress",
        {"isolation": {"egress": ["203.0.113.0/24"]}},
        "`isolation` must be absent",
    ),
    "no template": ("bare", {"tier": "Enterprise"}, "`dedicated` must be set"),
}


async def lacking(lab: Lab) -> str:
    """The fields that the start-up check misses; the served document follows the CRDs after a moment."""
    try:
        await check_schema(lab.client, patience=0)
    except SchemaMismatch as error:
        return str(error).removeprefix("the served CRDs lack ").partition(":")[0]
    return ""


async def test_an_upgrade_over_old_objects_serves_the_good_and_explains_the_others(
    lab: Lab, apiserver: Any, until: Any
) -> None:
    await until(lambda: lacking(lab), "`Tenant.spec.weight`, `Tenant.status.isolation`")
    for name, spec, _ in OLD.values():
        await lab.tenant(name, **spec)
    await lab.tenant("good")
    await lab.adapter("old--name", "good", {"1.0.0": "a"}, "1.0.0")
    leaving = await lab.tenant("l" * 44)
    hold = {"metadata": {"finalizers": [names.FINALIZER]}}
    await lab.client.merge_patch(TENANT, Key("", leaving["metadata"]["name"]), hold)
    await lab.remove(TENANT, Key("", leaving["metadata"]["name"]))

    apiserver.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    apiserver.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRDS))
    await check_schema(lab.client)
    await lab.start()
    await lab.pool("shared")
    await lab.until(TENANT, "good", "Ready", "True", "Serving")
    for what, (name, _, words) in OLD.items():
        stalled = await lab.until(TENANT, name, "Stalled", "True", "InvalidSpec")
        assert words in stalled["message"], what
    stalled = await lab.until(ADAPTER, "old--name", "Stalled", "True", "InvalidSpec")
    assert "`metadata.name` must be a DNS label of at most 63" in stalled["message"]

    async def gone() -> bool:
        return await lab.client.get(TENANT, Key("", leaving["metadata"]["name"])) is None

    await until(gone, True)  # a finalizer comes off whatever a rule says of the name
    for name, *_ in OLD.values():
        text = json.dumps({"metadata": {"labels": {"touched": "yes"}}})
        apiserver.kubectl("patch", "tenant", lab.name(name), "--type=merge", "-p", text)
        apiserver.kubectl("delete", "tenant", lab.name(name))
    await lab.edit(TENANT, "good", {"weight": 1})
    await lab.until(TENANT, "good", "Ready", "True")
