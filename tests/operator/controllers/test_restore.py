"""Export and restore: in another cluster the same keys open the same tenants, and the promoted versions serve."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tenantry.api import keys
from tenantry.cluster import ADAPTER, ADAPTER_POOL, STATEFUL_SET, TENANT, Key, Obj
from tenantry_gateway.auth import identify
from tenantry_gateway.state import State

if TYPE_CHECKING:
    from conftest import Lab
    from support.outage import Outage

pytestmark = pytest.mark.apiserver

CRDS = Path(__file__).parents[3] / "crds"


def whose(tenant: Obj, key: str) -> str:
    """Whom the gateway takes the key for, with that Tenant alone."""
    state = State()
    state.replace_tenants([tenant])
    state.replace_slices([])
    return identify([(b"authorization", f"Bearer {key}".encode())], state, time.time()).tenant.name


def exported(kubeconfig: Path) -> tuple[str, str]:
    """What `tenantry export` prints, and what it says besides."""
    done = subprocess.run(
        [sys.executable, "-m", "tenantry.cli", "export"],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


async def test_keys_and_promoted_versions_hold_in_another_cluster(
    lab: Lab, own_plane: Outage, crds: None, until: Any
) -> None:
    await lab.start()
    where, minted = lab.config.release_namespace, keys.mint(lab.name("acme"))
    await lab.settled_pool("lora", tiers=["MidMarket"], lora={"maxRank": 16})
    auth = {"apiKeys": [{"name": "ci", "sha256": minted.sha256}]}
    models = [lab.model("chat", "tone")]
    await lab.tenant("acme", tier="MidMarket", models=models, adapterNamespaces=[where], auth=auth)
    versions = {"1.0.0": "a", "2.0.0": "f"}
    await lab.adapter("tone", "acme", versions, "1.0.0")
    await lab.until(TENANT, "acme", "Ready", "True", "Serving")
    served = await lab.served("acme")
    lab.fleet.refused[f"sha256:{'f' * 64}"] = ("DigestMismatch", "other bytes than the spec says")
    await lab.edit(ADAPTER, "tone", {"channels": [{"name": "stable", "version": "2.0.0"}]})
    await lab.until(ADAPTER, "tone", "Stalled", "True")
    assert await lab.served("acme") == served, "the failed version changed nothing"

    text, notes = await asyncio.to_thread(exported, lab.kubeconfig)
    documents = [d for d in yaml.safe_load_all(text) if d and lab.suffix in str(d["metadata"])]
    assert [d["kind"] for d in documents] == ["Namespace", "AdapterPool", "Tenant", "Adapter"]
    assert "serves 1.0.0" in notes
    text = yaml.safe_dump_all(documents)

    # another API server takes all of it as it is, and its Tenant opens to the same key
    plane = own_plane.plane
    folder = str(CRDS)
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", folder)
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", folder)
    plane.kubectl("apply", "--server-side", "-f", "-", text=text)
    there = yaml.safe_load(plane.kubectl("get", "tenant", lab.name("acme"), "-o", "yaml").stdout)
    assert whose(there, minted.key) == lab.name("acme")
    assert there["metadata"]["uid"] != (await lab.get(TENANT, "acme") or {})["metadata"]["uid"]
    plane.kubectl("delete", "--wait=false", "-f", "-", text=text)

    # and where nothing is left, an operator serves from it what was served before
    for resource, name in ((ADAPTER, "tone"), (TENANT, "acme"), (ADAPTER_POOL, "lora")):
        await lab.remove(resource, lab.key(resource, name))
        key = lab.key(resource, name)
        await until(lambda resource=resource, key=key: _gone(lab, resource, key), True)
    workload = Key(where, f"{lab.name('lora')}-fast")
    await until(lambda: _gone(lab, STATEFUL_SET, workload), True, seconds=120.0)  # collected as garbage
    for document in documents[1:]:
        await lab.make(document)
    await lab.until(TENANT, "acme", "Ready", "True", "Serving")
    assert await lab.served("acme") == served
    assert whose(await lab.get(TENANT, "acme") or {}, minted.key) == lab.name("acme")
    channel = ((await lab.get(ADAPTER, "tone") or {})["status"])["channels"][0]
    assert channel["activeDigest"] == f"sha256:{'a' * 64}", "proven anew by the engines"


async def _gone(lab: Lab, resource: Any, key: Key) -> bool:
    return await lab.client.get(resource, key) is None
