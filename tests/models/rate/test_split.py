"""Splitting: the parts together stay within the limit, while pods come and go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.rate import split as rate_split
from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.rates import Rate
from seawall.models.rate.rule import RateRule
from seawall.models.rate.split import BEAT, LIFE, VALID, SplitMembers, divided, excess_of, follow
from seawall.models.rate.windows import FixedWindow, SlidingCounter, SlidingLog
from tests.models.rate.test_batches import Taken, most_over
from tests.support import examples, falsified

SECOND = 1_000_000

RULES: list[RateRule[Any]] = [
    TokenBucket(Rate(12, SECOND), 12),
    TokenBucket(Rate(10, SECOND), 7),
    FixedWindow(Rate(12, SECOND)),
    SlidingCounter(Rate(12, 2 * SECOND)),
    SlidingLog(Rate(10, SECOND)),
    SlidingLog(Rate(12, 5 * SECOND)),
]


class Pod:
    """One process with its part of the limit."""

    def __init__(self, whole: RateRule[Any], name: int) -> None:
        self.name = name
        self.members = SplitMembers()
        self.whole = whole
        self.rule: RateRule[Any] | None = None
        self.state: Any = None
        self.pods = 0
        self.valid_until = 0.0

    def beat(
        self, now: float, back: float, live: int, quiet: float | None, *, forgotten: bool
    ) -> None:
        """Hear how many live, and divide the limit among them; the server's clock is behind."""
        forgotten = forgotten or (now >= self.valid_until and now - back < self.members.latest)
        self.members.record(now - back, live, quiet, forgotten=forgotten)
        self.valid_until = now + VALID
        if not self.members.settled:
            self.pods, self.rule = 0, None
        if not self.members.settled or self.pods == self.members.count:
            return
        self.pods = self.members.count
        new = divided(self.whole, self.pods)
        if self.rule is not None or not self._nobody_before(new):
            follow(new, self.rule, now)
        if self.state is not None:
            self.state = new.adopt(self.state, self.rule or self.whole, now)
        self.rule = new

    def _nobody_before(self, part: RateRule[Any]) -> bool:
        """Tell whether nobody else can have spent anything that still counts."""
        quiet = self.members.quiet
        return self.pods == 1 and (quiet is None or quiet >= 2 * part.rate.period)

    def call(self, now: float, cost: int) -> bool:
        """Decide by the part."""
        if self.rule is None or now >= self.valid_until:
            return False
        state = self.rule.fresh(now) if self.state is None else self.state
        if self.rule.wait(state, now, cost) != 0:
            return False
        self.state = self.rule.take(state, now, cost)[0]
        return True


Step = tuple[int, str, int]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["call", "call", "pass", "pass", "join", "kill", "leave", "stop", "back"]),
        st.integers(1, 14),
    ),
    max_size=60,
)
Case = tuple[int, list[Step]]
CASES = st.tuples(st.integers(0, len(RULES) - 1), STEPS)


def total_stays_within(  # noqa: C901 - one line for each thing to happen
    case: Case, *, forgetful: bool = False
) -> None:
    """Demand that what all pods admit is within the bound of the whole limit, rounding aside.

    A `forgetful` store forgets a pod that leaves, as the real one must not.
    """
    which, steps = case
    whole = RULES[which]
    spent: Taken = []
    seen: dict[int, float] = {}
    runs: dict[int, float] = {}
    pods: dict[int, Pod] = {}
    stopped: dict[int, float] = {}
    now, back = 50.0 * SECOND, 0.0
    most = names = 1

    def beat(pod: Pod) -> None:
        at, who = now - back, pod.name  # by the server's clock
        for times in (seen, runs):
            times.update({one: at for one, then in times.items() if then > at})
        others = {other: then for other, then in seen.items() if other != who}
        went_on = any(
            then > at - LIFE and runs[other] <= at - LIFE + BEAT for other, then in others.items()
        )
        before = seen.get(who)
        forgotten = before is not None and before <= at - VALID and went_on
        if before is None or before <= at - LIFE:
            runs[who] = at
        seen[who] = at
        live = sum(then > at - LIFE for then in seen.values())
        quiet = max(0.0, at - max(others.values()) - LIFE) if others else None
        pod.beat(now, back, live, quiet, forgotten=forgotten)

    for who, what, much in steps:
        if what == "join" and who not in pods:
            # Another process, with another name: the store remembers the one before it.
            pods[who] = Pod(whole, names)
            names += 1
            stopped.pop(who, None)
            beat(pods[who])
            most = max(most, len(pods))
        elif what in {"kill", "leave"}:
            gone = pods.pop(who, None)
            if gone is not None and what == "leave":
                seen[gone.name] = now - back - LIFE
                if forgetful:
                    del seen[gone.name]
        elif what == "back":
            back += much * BEAT
        elif what == "stop":
            stopped[who] = now + much * BEAT
        elif what == "call" and who in pods and stopped.get(who, 0.0) <= now:
            spent += [(now, 1) for _ in range(much) if pods[who].call(now, 1)]
        elif what == "pass":
            for _ in range(much):
                now += BEAT // 5
                for one in list(pods):
                    if now // (BEAT // 5) % 5 == one and stopped.get(one, 0.0) <= now:
                        beat(pods[one])  # each in its turn, once in a beat
    over = most_over(whole, spent)
    rounding = most if isinstance(whole, TokenBucket) else 0
    assert over <= excess_of(whole, most) + rounding, over


@examples(500)
@given(CASES)
def test_the_parts_stay_within_the_limit(case: Case) -> None:
    """Whoever joins, dies or leaves, and whatever the server's clock does: the limit holds."""
    total_stays_within(case)


def hostile(rule: int) -> st.SearchStrategy[Case]:
    """Return histories in which a pod that has spent all makes room for another, often."""
    step = st.tuples(
        st.integers(0, 2), st.sampled_from(["call", "pass", "leave", "join"]), st.just(14)
    )
    return st.tuples(st.just(rule), st.lists(step, min_size=20, max_size=60))


SUCCESSOR: list[Step] = [
    *[(0, "join", 14), (0, "call", 14), (0, "leave", 14)],
    *[(0, "join", 14), (0, "call", 14)],
]
"""A pod spends the whole limit and leaves; another one takes its place at once."""

GAIN: list[Step] = [
    *[(0, "join", 14), (0, "call", 14), (1, "join", 14)],
    *[(0, "pass", 14), (1, "call", 14)],
]
"""A pod spends the whole limit; a second one gets its part of it while that still counts."""

NEWCOMER: list[Step] = [
    *[(0, "join", 14), (1, "join", 14)],
    *[(0, "call", 14), (1, "call", 14)],
]
"""A second pod calls before the first has heard of it."""


@examples(200)
@given(st.integers(0, len(RULES) - 1).flatmap(hostile))
def test_pods_that_replace_each_other_stay_within_the_limit(case: Case) -> None:
    """Pods that spend all they have and leave do not multiply the limit."""
    total_stays_within(case)


@pytest.mark.parametrize("rule", range(len(RULES)))
@pytest.mark.parametrize("steps", [SUCCESSOR, GAIN, NEWCOMER])
def test_known_attacks_stay_within_the_limit(rule: int, steps: list[Step]) -> None:
    """Each history that breaks the bound without one of the safeguards keeps it with all."""
    total_stays_within((rule, steps))


@pytest.mark.parametrize("rule", [0, 5])
def test_a_pod_that_left_must_be_remembered(rule: int) -> None:
    """Ablation: if the store forgets who left, the next pod spends the whole limit again."""
    with pytest.raises(AssertionError):
        total_stays_within((rule, SUCCESSOR), forgetful=True)


def test_what_is_gained_must_count_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: who gets a part of a pod that has just spent it spends it again."""
    monkeypatch.setitem(globals(), "follow", lambda new, _old, _now: new)
    monkeypatch.setattr(rate_split._Part, "adopt", lambda _self, state, _old, _now: state)
    with pytest.raises(AssertionError):
        total_stays_within((5, GAIN))


def test_who_was_silent_for_long_must_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a pod that was stopped goes on with a part that others have grown into."""
    begin = [*((who, "join", 1) for who in range(3)), *[(0, "pass", 14)] * 3]
    begin += [(2, "stop", 14), *[(0, "pass", 14)] * 4]
    calls = st.tuples(st.integers(0, 2), st.just("call"), st.just(14))
    passing = st.tuples(st.just(0), st.just("pass"), st.integers(1, 14))
    more = st.lists(st.one_of(calls, passing), min_size=5, max_size=12)
    cases = st.tuples(st.just(4), more.map(lambda steps: begin + steps))
    assert not falsified(total_stays_within, cases, most=500)
    monkeypatch.setitem(globals(), "VALID", 10**12)
    assert falsified(total_stays_within, cases)


def test_a_newcomer_must_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a pod that others do not know of yet spends beside their full parts."""
    monkeypatch.setattr(rate_split, "SETTLED", 0)
    monkeypatch.setitem(globals(), "follow", lambda new, _old, _now: new)
    with pytest.raises(AssertionError):
        total_stays_within((0, NEWCOMER))


@pytest.mark.parametrize(
    ("rule", "pods", "text"),
    [
        (TokenBucket(Rate(10, SECOND), 10), 3, "10 in 3000000, 3"),
        (TokenBucket(Rate(10, SECOND), 2), 3, "10 in 3000000, 1"),
        (LeakyBucket(Rate(10, SECOND)), 3, "10 in 3000000, None"),
        (FixedWindow(Rate(10, SECOND)), 3, "3 in 1000000, 3"),
        (SlidingCounter(Rate(10, SECOND)), 10, "1 in 1000000, 1"),
        (SlidingLog(Rate(10, SECOND)), 12, "1 in 2000000, 1"),
        (SlidingLog(Rate(10, SECOND)), 1, "10 in 1000000, 10"),
    ],
)
def test_the_part_of_one_pod(rule: RateRule[Any], pods: int, text: str) -> None:
    """Rounded down, at least one; a bucket's rate is divided exactly."""
    part = divided(rule, pods)
    assert f"{part.rate.limit} in {part.rate.period}, {part.capacity}" == text


def test_more_pods_than_the_limit_has() -> None:
    """Then each has one in as many periods as it takes; the excess says what may come at once."""
    assert excess_of(SlidingLog(Rate(10, SECOND)), 12) == 2
    assert excess_of(SlidingLog(Rate(10, SECOND)), 10) == 0


@pytest.mark.parametrize("whole", RULES)
def test_a_key_that_was_never_heard_of_has_the_gain_taken_too(whole: RateRule[Any]) -> None:
    """What a pod gains counts as taken for every key, also for those that come later."""
    alone = divided(whole, 1)
    of_two = follow(divided(whole, 2), None, 0.0)
    assert of_two.left(of_two.fresh(0.0), 0.0) == 0
    grown = follow(divided(whole, 1), of_two, 10.0 * SECOND)
    assert grown.capacity is not None
    assert of_two.capacity is not None
    assert grown.left(grown.fresh(10.0 * SECOND), 10.0 * SECOND) <= of_two.capacity + 1
    assert grown.left(grown.fresh(30.0 * SECOND), 30.0 * SECOND) == alone.capacity


@pytest.mark.parametrize("kind", [FixedWindow, SlidingCounter])
def test_a_part_has_the_windows_of_the_whole(kind: Any) -> None:
    """They begin where those of the limit do."""
    rule = kind(Rate(12, SECOND))
    rule.origin = -300_000.0
    part = divided(rule, 3)
    state, _mark = part.take(part.fresh(0.0), 0.0, 4)
    assert rule.fresh(0.0)[0] == part.fresh(0.0)[0] == -300_000.0
    assert part.fresh(700_000.0)[0] == 700_000.0
    assert part.left(state, 700_000.0) == (4 if kind is FixedWindow else 0)
