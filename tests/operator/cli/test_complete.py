"""Completion as kubectl asks for it: `kubectl_complete-tenantry WORDS... INCOMPLETE`."""

from __future__ import annotations

import sys

import pytest
from tenantry.cli import complete


def test_commands_options_and_sub_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        complete,
        "tenant_names",
        lambda incomplete: [n for n in ("acme", "birch") if n.startswith(incomplete)],
    )
    assert complete.candidates(["sta"]) == (["status"], 4)
    assert {"keys", "top", "why", "rollback"} <= set(complete.candidates([""])[0])
    assert complete.candidates(["keys", "r"]) == (["rotate"], 4)
    assert complete.candidates(["keys", "rotate", "--o"]) == (["--overlap"], 4)
    assert complete.candidates(["status", "b"]) == (["birch"], 4)
    assert complete.candidates(["status", "--output", "wide", "a"]) == (["acme"], 4)
    assert complete.candidates(["nonsense", ""]) == ([], 4)
    assert complete.candidates(["adapters", "digest", ""]) == ([], 0), "files may complete"


def test_the_protocol(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-tenantry", "keys", ""])
    complete.main()
    assert capsys.readouterr().out == "mint\nrotate\n:4\n"


def test_without_a_cluster_nothing_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert complete.tenant_names("") == []
