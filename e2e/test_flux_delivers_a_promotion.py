"""Flux delivers promotions from Git: it waits for them, tells of one that fails, and `git revert` takes one back."""

from __future__ import annotations

import pytest
import yaml
from stack import flux, promises
from stack.install import Stack
from stack.kube import condition
from stack.traffic import Steady


def test_a_commit_is_healthy_when_its_version_is_served_and_failed_when_it_is_not(
    stack: Stack, seen: list[str]
) -> None:
    if not stack.own_cluster:
        pytest.fail(
            "Flux runs on this machine and must reach the API server as an administrator: unset KUBECONFIG"
        )
    maple = stack.client("maple")

    def text(version: str, digest: str = "") -> str:
        adapter = yaml.safe_load(stack.adapter_text("tone", stable=version))
        if digest:
            wrong = {**adapter["spec"]["versions"][1], "version": version, "digest": digest}
            adapter["spec"]["versions"].append(wrong)
        return str(yaml.safe_dump(adapter, sort_keys=False))

    with (
        flux.following(stack.kube) as following,
        Steady(lambda: maple.ask("tone", "Where is my parcel?", max_tokens=2)) as traffic,
    ):
        git = following.repository
        first = git.commit("Serve 1.0.0", {"tone.yaml": text("1.0.0")})
        flux.follow(following, timeout="1m")
        following.applied(first)

        promotion = git.commit("Promote 1.1.0", {"tone.yaml": text("1.1.0")})
        following.sync()
        following.applied(promotion)
        adapter = stack.kube.get("adapter", "tone", "maple-ml") or {}
        assert adapter["status"]["channels"][0]["activeVersion"] == "1.1.0", "healthy means served"
        promises.served_after(stack, "maple", "tone", "1.1.0")

        broken = git.commit("Promote 1.2.0", {"tone.yaml": text("1.2.0", "sha256:" + "0" * 64)})
        following.sync()
        failed = following.refused(broken)
        assert "tone" in condition(failed, "Ready")["message"]
        stalled = stack.kube.get("adapter", "tone", "maple-ml")
        assert condition(stalled, "Stalled")["reason"] == "DigestMismatch"
        assert condition(stalled, "Ready")["status"] == "True"

        reverted = git.revert()
        following.sync()
        following.applied(reverted)
        promises.served_after(stack, "maple", "tone", "1.1.0")
        back = git.commit("Go back to 1.0.0", {"tone.yaml": text("1.0.0")})
        following.sync()
        following.applied(back)
        promises.served_after(stack, "maple", "tone", "1.0.0")
    seen.append(f"Flux: five commits under {len(traffic.answers)} requests, {dict(traffic.outcomes)}")
    assert traffic.failures == []
    assert promises.only_versions(traffic, "1.0.0", "1.1.0")
