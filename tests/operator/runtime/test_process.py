"""Around the reconcilers: start-up errors, health, logs, what kopf is told, and fencing."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

import pytest
from cluster.pki import certify
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tenantry.api.names import OPERATOR_ISSUER
from tenantry.cluster import NODE, POD, TENANT
from tenantry.runtime.controller import Controller, Watch, own_key
from tenantry.runtime.health import HealthServer
from tenantry.runtime.hub import Hub
from tenantry.runtime.logs import JsonFormatter
from tenantry.runtime.main import Options, StartError, first_to_end, load_config, load_signer, parse
from tenantry.runtime.patience import EndlessBackoffs
from tenantry.runtime.store import Store
from tenantry.runtime.watching import registry_for, settings_for


def options(tmp_path: Path, **changes: Any) -> Options:
    values: dict[str, Any] = {
        "config": tmp_path / "config.yaml",
        "identity_key": None,
        "identity_dir": None,
        "namespace": None,
        "kubeconfig": None,
        "metrics_port": 0,
        "resync_seconds": None,
    }
    return Options(**(values | changes))


def test_a_bad_configuration_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="`--config` must name a valid configuration"):
        load_config(options(tmp_path))
    (tmp_path / "config.yaml").write_text("engineImage: x\nworkers: 0\n")
    with pytest.raises(StartError, match=r"(?s)gatewayUrl.*workers"):
        load_config(options(tmp_path))


def test_the_namespace_flag_overrides_the_configuration(tmp_path: Path) -> None:
    text = "engineImage: x\ngatewayUrl: http://g\nfetcherUrl: http://f\ntiers: {}\n"
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(options(tmp_path)).release_namespace == "tenantry-system"
    assert load_config(options(tmp_path, namespace="elsewhere")).release_namespace == "elsewhere"


def write_identity(folder: Path, issuer: str) -> Path:
    """A key, and its certificate for that issuer in the same folder."""
    key = certify(folder, issuer)
    path = folder / f"{issuer}.key"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def test_a_key_that_engines_would_refuse_is_found_at_the_start(tmp_path: Path) -> None:
    key = write_identity(tmp_path, OPERATOR_ISSUER)
    other = write_identity(tmp_path, "tenantry-gateway")
    assert load_signer(options(tmp_path)) is None
    assert load_signer(options(tmp_path, identity_key=key, identity_dir=tmp_path)) is not None
    with pytest.raises(StartError, match="`--identity-dir` must hold the certificate of `--identity-key`"):
        load_signer(options(tmp_path, identity_key=other, identity_dir=tmp_path))
    with pytest.raises(StartError, match="`--identity-key` cannot be used"):
        load_signer(options(tmp_path, identity_key=tmp_path / "absent"))


def test_every_flag_is_understood() -> None:
    given = parse(["--config", "c", "--metrics-port", "1", "--resync-seconds", "2", "--namespace", "n"])
    assert (given.config, given.metrics_port, given.resync_seconds, given.namespace) == (
        Path("c"),
        1,
        2.0,
        "n",
    )


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_says_what_is_wrong() -> None:
    problems: list[str] = []
    server = HealthServer(0, lambda: problems, lambda: ["not complete"], host="127.0.0.1")
    server.start()
    try:
        assert ask(server.port, "/healthz") == (200, "ok\n")
        assert ask(server.port, "/readyz") == (503, "not complete\n")
        problems.append("the event loop is stuck")
        assert ask(server.port, "/healthz") == (503, "the event loop is stuck\n")
        status, text = ask(server.port, "/metrics")
        assert status == 200
        for name in (
            "controller_runtime_reconcile_total",
            "workqueue_depth",
            "rest_client_requests_total",
            "leader_election_master_status",
        ):
            assert f"# TYPE {name} " in text
        assert ask(server.port, "/else")[0] == 404
    finally:
        server.stop()


def test_a_log_line_is_one_json_object_with_its_extras() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("room", logging.ERROR, __file__, 1, "about %s", ("x",), sys.exc_info())
    record.object = "ns/name"
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "about x"
    assert entry["object"] == "ns/name"
    assert entry["level"] == "error"
    assert "ValueError: broken" in entry["exception"]


async def hub_of(*resources: Any) -> Hub:
    watches = [Watch(resource, own_key) for resource in resources]
    return Hub(Store(), [Controller("c", cast(Any, None), watches)])


async def test_kopf_is_told_to_watch_and_nothing_else() -> None:
    hub = await hub_of(TENANT, NODE, POD)
    settings = settings_for(hub.resources())
    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    selectors = {selector.any_name: labels for selector, labels in settings.watching.label_selectors.items()}
    assert selectors == {"pods": "app.kubernetes.io/managed-by=tenantry"}
    registry = registry_for(hub, lambda: None)
    assert len(registry._watching.get_all_handlers()) == 3
    for part in (registry._changing, registry._spawning, registry._indexing):
        assert not part.get_all_handlers()


def test_requests_of_watches_are_repeated_for_ever_with_growing_pauses() -> None:
    delays = EndlessBackoffs()
    for _ in range(2):  # each request begins anew
        first = list(itertools.islice(iter(delays), 2000))
        assert 0.25 <= first[0] <= 0.75
        assert all(15 <= delay <= 45 for delay in first[10:])
        assert len(set(first[10:])) > 100
    assert not hasattr(delays, "__len__")  # else kopf would count attempts and give up


async def test_when_one_part_fails_the_others_end_and_the_failure_is_told() -> None:
    async def fail() -> None:
        raise RuntimeError("stream lost")

    endless = asyncio.create_task(asyncio.sleep(3600))
    with pytest.raises(RuntimeError, match="stream lost"):
        await first_to_end([cast("asyncio.Task[None]", endless), asyncio.create_task(fail())])
    assert endless.cancelled()


async def test_parts_that_were_told_to_end_do_not_end_the_rest() -> None:
    """kopf's own end cancels our parts first, and must still be waited for."""
    part = asyncio.create_task(asyncio.sleep(3600))
    done = asyncio.Event()

    async def kopf() -> None:
        part.cancel()
        await asyncio.sleep(0.05)
        done.set()

    await first_to_end([cast("asyncio.Task[None]", part), asyncio.create_task(kopf())])
    assert done.is_set()
