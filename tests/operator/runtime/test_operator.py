"""The whole operator as a process on a real API server: converge, repair, survive, hand over."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.collector import Collector
from support.processes import Processes, wait_for

if TYPE_CHECKING:
    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver


@pytest.fixture
def lab(apiserver: ApiServer, crds: None, namespace: str, tmp_path: Path) -> Iterator[Processes]:
    with Processes(apiserver.kubeconfig, namespace, tmp_path, apiserver.kubectl) as lab:
        yield lab


def test_tenants_converge_drift_is_repaired_and_poison_stays_alone(lab: Processes, name: str) -> None:
    lab.tenant(name, "before the start")
    lab.tenant(f"{name}-bad", "poison")
    lab.start()
    wait_for(lambda: lab.made(name) == "before the start")
    lab.tenant(f"{name}-two", "after the start")
    wait_for(lambda: lab.made(f"{name}-two") == "after the start")

    lab.tenant(name, "changed")
    wait_for(lambda: lab.made(name) == "changed" and "changed" in lab.message(name))
    patch = '{"data": {"system": "by hand"}}'
    lab.kubectl("-n", lab.namespace, "patch", "configmap", f"made-{name}", "--type=merge", "-p", patch)
    wait_for(lambda: lab.made(name) == "changed")
    lab.kubectl("-n", lab.namespace, "delete", "configmap", f"made-{name}")
    wait_for(lambda: lab.made(name) == "changed")

    assert lab.http(0, "/readyz")[0] == 200
    assert lab.http(0, "/healthz")[0] == 200
    assert lab.metric(0, "controller_runtime_reconcile_errors_total") >= 1
    assert lab.made(f"{name}-bad") is None
    assert any("poisoned" in entry.get("exception", "") for entry in lab.log(0))

    metadata = lab.get("tenant", name)["metadata"]
    assert "finalizers" not in metadata
    assert not [key for key in metadata.get("annotations", {}) if "kopf" in key]

    lab.tenant(f"{name}-bad", "healed")
    wait_for(lambda: lab.made(f"{name}-bad") == "healed" and lab.message(f"{name}-bad"))

    # and when nothing changes, nothing is sent
    before = lab.sent(0)
    assert before["POST"] >= 3
    time.sleep(3)
    assert lab.sent(0) == before


def test_traces_show_a_reconcile_and_the_calls_that_it_made(lab: Processes, name: str) -> None:
    collector = Collector()
    lab.tenant(name, "a secret of the prompt")
    lab.start(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_BSP_SCHEDULE_DELAY="50")
    wait_for(lambda: lab.made(name))

    def traced() -> list[Any]:
        return [
            span
            for span in list(collector.spans)
            if span.name == "reconcile tenant" and attributes(span)["object"] == name
        ]

    [reconcile, *_] = wait_for(traced)
    assert attributes(reconcile)["outcome"] == "success"
    calls = [span for span in collector.spans if span.parent_span_id == reconcile.span_id]
    made = {
        (call.name, attributes(call)["url.path"], attributes(call)["http.response.status_code"])
        for call in calls
    }
    assert ("POST", f"/api/v1/namespaces/{lab.namespace}/configmaps", 201) in made
    assert b"a secret of the prompt" not in collector.raw


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


def test_leadership_goes_from_one_to_the_next_each_with_a_higher_epoch(lab: Processes, name: str) -> None:
    def epoch(system: str, seconds: float = 40) -> int:
        """The epoch under which that text was served."""
        lab.tenant(name, system)
        wait_for(lambda: system in lab.message(name), seconds)
        return int(lab.message(name).rsplit(" ", 1)[1])

    first = lab.start()
    epochs = [epoch("one")]
    second = lab.start()
    wait_for(lambda: lab.http(1, "/readyz")[0] == 200)
    assert lab.metric(1, "leader_election_master_status") == 0
    holder = lab.holder()

    # one that is told to stop gives the Lease back: the standby need not wait for it to run out
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) == 0
    epochs.append(epoch("two", 10))
    assert lab.holder() not in ("", holder)
    assert lab.metric(1, "leader_election_master_status") == 1

    # one that stops is replaced when its Lease has run out, and ends without another word when it wakes
    third = lab.start()
    wait_for(lambda: lab.http(2, "/readyz")[0] == 200)
    second.send_signal(signal.SIGSTOP)
    epochs.append(epoch("three"))
    second.send_signal(signal.SIGCONT)
    assert second.wait(20) == 1
    assert lab.message(name) == f"three by epoch {epochs[-1]}"

    # one whose Lease was taken ends
    patch = '{"spec": {"holderIdentity": "thief"}}'
    lab.kubectl("-n", lab.namespace, "patch", "lease", "tenantry-operator", "--type=merge", "-p", patch)
    assert wait_for(lambda: third.poll() is not None, 20)
    assert third.returncode == 1
    assert any("leadership lost" in entry["message"] for entry in lab.log(2))
    assert epochs == sorted(set(epochs))


def test_without_the_right_the_process_ends_and_says_which(lab: Processes, apiserver: ApiServer) -> None:
    lab.kubeconfig = apiserver.client(f"nobody-{uuid.uuid4().hex[:6]}", "nobody")
    process = lab.start()
    assert wait_for(process.poll, 40) == 1
    assert "configmaps is forbidden" in (lab.folder / "operator-0.log").read_text()
