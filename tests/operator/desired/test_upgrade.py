"""The upgrade of a lane, played through against pods that come, fail and go at any time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tenantry.desired.upgrade import Plan, PodState, Stage, plan


def pod(name: str, current: bool = False, ready: bool = True, **more: object) -> PodState:
    return PodState(name=name, current=current, ready=ready, proven=current and ready, **more)  # type: ignore[arg-type]


def step(pods: list[PodState], *, canaries: int = 1, max_unavailable: int = 1) -> Plan:
    return plan(pods, len(pods), canaries=canaries, max_unavailable=max_unavailable)


def test_the_last_replica_goes_first_and_alone() -> None:
    assert step([pod("a"), pod("b"), pod("c")], max_unavailable=3) == Plan(leave=("c",))


def test_nothing_follows_before_the_canary_has_proven_itself() -> None:
    young = replace(pod("c", current=True), proven=False)
    assert step([pod("a"), pod("b"), young], max_unavailable=3) == Plan()
    assert step([pod("a"), pod("b"), pod("c", current=True)], max_unavailable=3) == Plan(leave=("b", "a"))


def test_a_pod_that_serves_nobody_goes_first_and_at_once() -> None:
    assert step([pod("a", ready=False), pod("b"), pod("c")]) == Plan(delete=("a",))


def test_another_pod_that_is_down_counts_against_what_may_be() -> None:
    assert step([pod("a"), pod("b", current=True, ready=False), pod("c", current=True)], canaries=0) == Plan()


def test_a_new_pod_that_fails_ends_it() -> None:
    faulty = pod("c", current=True, ready=False, fault="its containers ended 3 times")
    assert step([pod("a"), pod("b"), faulty]).failure == "c: its containers ended 3 times"


def test_way_out_stage_by_stage() -> None:
    leaving = pod("b", stage=Stage.LEAVING)
    assert step([pod("a"), leaving]) == Plan()
    assert step([pod("a"), replace(leaving, over=True)]) == Plan(drain=("b",))
    draining = pod("b", ready=False, stage=Stage.DRAINING)
    assert step([pod("a"), draining]) == Plan()
    assert step([pod("a"), replace(draining, over=True)]) == Plan(delete=("b",))


def test_a_single_replica_without_a_spare_still_rolls() -> None:
    assert step([pod("a")]) == Plan(leave=("a",))


def test_a_whole_lane_is_complete_and_an_empty_one_never() -> None:
    assert step([pod("a", current=True)]).complete
    assert not step([replace(pod("a", current=True), proven=False)]).complete
    assert not plan([], 0, canaries=1, max_unavailable=1).complete
    assert not plan([pod("a", current=True)], 2, canaries=1, max_unavailable=1).complete


@dataclass
class Pod:
    """One pod of the played cluster; `new`: made from the revision that is rolled out."""

    new: bool
    up: bool = False
    age: int = 0
    stage: Stage = Stage.SERVING
    waited: int = 0


class Upgrade(RuleBasedStateMachine):
    """A StatefulSet that makes what is missing from the wanted revision, and nodes that fail."""

    @initialize(
        size=st.integers(1, 6),
        canaries=st.integers(0, 3),
        budget=st.integers(1, 3),
        good=st.booleans(),
    )
    def begin(self, size: int, canaries: int, budget: int, good: bool) -> None:
        self.size, self.canaries, self.budget, self.good = size, canaries, budget, good
        self.rolled_back = False
        self.pods: dict[int, Pod | None] = {n: Pod(False, up=True, age=9) for n in range(size)}

    def fits(self, one: Pod) -> bool:
        """Whether a pod of its revision can come up: the earlier one could."""
        return self.good or not one.new

    def states(self) -> list[PodState]:
        return [
            PodState(
                name=str(n),
                current=one.new is not self.rolled_back,
                ready=one.up and one.stage is not Stage.DRAINING,
                proven=one.up and one.age >= 2,
                stage=one.stage,
                over=one.waited >= 1,
                fault="" if self.rolled_back or not one.new or one.up or one.age < 4 else "never came up",
            )
            for n, one in self.pods.items()
            if one is not None
        ]

    def proceed(self) -> Plan:
        canaries = 0 if self.rolled_back else self.canaries
        before = self.states()
        found = plan(before, self.size, canaries=canaries, max_unavailable=self.budget)
        if found.failure:
            self.rolled_back = True
            for one in self.pods.values():
                if one is not None and one.stage is Stage.LEAVING:
                    one.stage = Stage.SERVING
            return found
        serving = sum(state.serves for state in before)
        for name in found.leave:
            self.pods[int(name)].stage = Stage.LEAVING  # type: ignore[union-attr]
            self.pods[int(name)].waited = 0  # type: ignore[union-attr]
        for name in found.drain:
            self.pods[int(name)].stage = Stage.DRAINING  # type: ignore[union-attr]
            self.pods[int(name)].waited = 0  # type: ignore[union-attr]
        for name in found.delete:
            state = next(state for state in before if state.name == name)
            assert not state.serves, "a pod that serves is never deleted"
            self.pods[int(name)] = None
        after = sum(state.serves for state in self.states())
        assert after >= min(serving, self.size - self.budget), "more are down for it than may be"
        if not self.rolled_back and found.leave:
            proven = sum(s.current and s.proven and s.serves for s in before)
            new = self.size - sum(not s.current and s.stage is Stage.SERVING for s in self.states())
            first = min(self.canaries, self.size)
            assert new <= first or proven >= first, "others follow only proven canaries"
        return found

    @rule()
    def work(self) -> None:
        self.proceed()

    @rule()
    def time(self) -> None:
        for n, one in self.pods.items():
            if one is None:
                self.pods[n] = Pod(not self.rolled_back)
                continue
            one.waited += 1
            one.age += 1
            if not one.up and self.fits(one) and one.age >= 1:
                one.up, one.age = True, 0

    @rule(n=st.integers(0, 5))
    def crash(self, n: int) -> None:
        one = self.pods.get(n)
        if one is not None:
            one.up, one.age = False, 0

    @rule(n=st.integers(0, 5))
    def evict(self, n: int) -> None:
        if n in self.pods:
            self.pods[n] = None

    @precondition(lambda self: hasattr(self, "pods"))
    @invariant()
    def it_always_comes_to_an_end(self) -> None:
        """From every state: when nothing more happens from outside, one revision runs everywhere."""
        kept = {n: replace(one) if one is not None else None for n, one in self.pods.items()}
        back = self.rolled_back
        for _ in range(60 * self.size):
            if self.proceed().complete:
                break
            self.time()
        else:
            raise AssertionError(f"it never ended: {self.states()}")
        if not self.good and not back:
            assert self.rolled_back, "a revision that cannot come up is never left running"
        self.pods, self.rolled_back = kept, back


Upgrade.TestCase.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
TestUpgrade = Upgrade.TestCase


@given(
    flags=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=8),
    canaries=st.integers(0, 4),
    budget=st.integers(1, 4),
)
def test_a_plan_never_touches_what_runs_as_wanted(
    flags: list[tuple[bool, bool, bool]], canaries: int, budget: int
) -> None:
    pods = [
        PodState(str(n), current=current, ready=ready, proven=proven and ready and current)
        for n, (current, ready, proven) in enumerate(flags)
    ]
    found = plan(pods, len(pods), canaries=canaries, max_unavailable=budget)
    wanted = {pod.name for pod in pods if pod.current}
    assert not wanted & {*found.leave, *found.drain, *found.delete}
    assert len(found.leave) <= budget
