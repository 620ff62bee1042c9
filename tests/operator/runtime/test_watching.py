"""Watches that the API server turns away, forbids or ends: they go on when they may, or the process says so or ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.between import Between, error_event, nobody
from support.processes import Processes, wait_for

if TYPE_CHECKING:
    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver


@pytest.fixture
def between(apiserver: ApiServer, tmp_path: Path) -> Iterator[Between]:
    with Between(apiserver.kubeconfig, tmp_path) as between:
        yield between


@pytest.fixture
def lab(
    apiserver: ApiServer, between: Between, crds: None, namespace: str, tmp_path: Path
) -> Iterator[Processes]:
    with Processes(between.kubeconfig, namespace, tmp_path, apiserver.kubectl) as lab:
        yield lab


def seen(lab: Processes, name: str) -> None:
    """A watch tells of the Tenant: it is open."""
    lab.tenant(name, "before")
    wait_for(lambda: lab.made(name) == "before")


def test_watches_that_are_turned_away_go_on_when_they_may(
    lab: Processes, between: Between, name: str
) -> None:
    process = lab.start()
    seen(lab, name)

    codes = itertools.cycle((429, 503))
    between.refuse = lambda request: next(codes) if "watch" in request.query else None
    between.cut()
    wait_for(lambda: min(between.refused[429], between.refused[503]) >= 3)
    lab.tenant(name, "meanwhile")
    assert lab.made(name) == "before", "no watch could tell"
    assert lab.http(0, "/healthz")[0] == 200, "a restart would not help"

    between.refuse = nobody
    wait_for(lambda: lab.made(name) == "meanwhile")
    assert process.poll() is None


def test_a_right_that_is_lost_is_borne_for_a_while_and_then_told_by_the_health_check(
    lab: Processes, between: Between, name: str
) -> None:
    """A hiccup of the authorizer ends nobody. Whoever stays blind is started anew, and then ends with the reason."""
    process = lab.start(resync_seconds=1.0)
    seen(lab, name)
    assert lab.http(0, "/healthz")[0] == 200

    between.refuse = lambda request: 403 if request.path.endswith("/configmaps") else None
    between.cut()
    wait_for(lambda: lab.http(0, "/healthz") == (503, "watch of configmaps tells nothing\n"))
    assert process.poll() is None
    assert wait_for(lab.start().poll) == 1
    assert "403" in (lab.folder / "operator-1.log").read_text()

    between.refuse = nobody
    wait_for(lambda: lab.http(0, "/healthz")[0] == 200)
    assert process.poll() is None


def test_a_watch_that_ends_for_good_ends_the_process(lab: Processes, between: Between, name: str) -> None:
    process = lab.start()
    seen(lab, name)
    between.cut(error_event(500))
    assert process.wait(40) == 1
