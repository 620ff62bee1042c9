"""Promotion, rollback and promotion again under traffic: no request fails, none is served by a third version."""

from __future__ import annotations

import itertools

import pytest
import yaml
from stack import promises
from stack.install import Stack
from stack.kube import is_ready
from stack.traffic import Answer, Steady


@pytest.mark.parametrize(("cycle", "version"), [(1, "1.1.0"), (1, "1.0.0"), (2, "1.1.0"), (2, "1.0.0")])
def test_a_one_line_change_switches_the_version_under_traffic(stack: Stack, cycle: int, version: str) -> None:
    maple = stack.client("maple")
    with Steady(lambda: maple.ask("tone", "Where is my parcel?", max_tokens=4)) as traffic:
        promises.promote(stack, "tone", version)
        served = promises.served_after(stack, "maple", "tone", version)
    assert f"--{version}-" in served
    assert traffic.failures == []
    assert promises.only_versions(traffic, "1.0.0", "1.1.0")
    answer = maple.ask("tone", "Where is my parcel?")
    assert answer.text.lstrip().startswith("Dear customer" if version == "1.1.0" else "Ahoy")


def test_steps_on_measured_traffic_never_take_a_conversation_back(stack: Stack, seen: list[str]) -> None:
    maple, users = stack.client("maple"), itertools.cycle(f"user-{index}" for index in range(12))
    by_user: dict[str, list[str]] = {}

    def ask() -> Answer:
        user = next(users)
        answer = maple.ask("tone", "Where is my parcel?", max_tokens=2, user=user)
        by_user.setdefault(user, []).append(answer.served)
        return answer

    adapter = yaml.safe_load(stack.adapter_text("tone", stable="1.1.0"))
    adapter["spec"]["rollout"] |= {
        "steps": [{"weight": 40, "pauseSeconds": 1}, {"weight": 80, "pauseSeconds": 1}],
        "analysis": [{"metric": "ErrorsPerThousand", "threshold": 0, "minSamples": 5}],
    }
    with Steady(ask, workers=1) as traffic:
        promises.answered(traffic, 6)
        stack.kube.apply(adapter)
        stack.kube.wait(
            "1.1.0 is promoted step by step", "adapter", "tone", "maple-ml",
            until=lambda found: is_ready(found) and (found or {})["status"]["rollout"]["phase"] == "Promoted"
            and (found or {})["status"]["channels"][0]["activeVersion"] == "1.1.0",
            seconds=180,
        )  # fmt: skip
        promises.served_after(stack, "maple", "tone", "1.1.0")
        promises.answered(traffic, 6)
    told = (stack.kube.get("adapter", "tone", "maple-ml") or {})["status"]["rollout"]
    stack.apply_text(stack.adapter_text("tone"))
    seen.append(f"rollout by steps: {dict(traffic.outcomes)}, last measurement {told['analysis']}")
    assert traffic.failures == []
    assert promises.only_versions(traffic, "1.0.0", "1.1.0")
    assert told["analysis"][0]["samples"] >= 5
    for served in by_user.values():
        assert served == sorted(served), "a conversation that had the new version was given the old one again"
