"""The rules of shedding alone: who goes at which load, and who goes first."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Bulkhead, Criticality
from seawall.models.shedding import rules as shedding
from seawall.models.shedding.rules import (
    CLASSES,
    LeastCriticalFirst,
    ShedRule,
    Sources,
    allowed_cost,
    class_bar,
    class_degree,
    excess_share,
    place_of,
)
from seawall.shedding import (
    by_chance,
    by_cost,
    by_criticality,
    by_deadline,
    by_fraction,
    by_latency,
    by_queue,
    by_tier,
)
from tests.support import falsified


class World:
    """What the rules read, settable."""

    def __init__(self, **values: Any) -> None:
        self.load = 0.0
        self.rank = 2
        self.tier: str | None = None
        self.uniform: Callable[[], float] = lambda: 0.5
        self.remaining: float | None = None
        self.service: float | None = None
        self.response: float | None = None
        self.asked: list[float] = []
        vars(self).update(values)

    def sources(self) -> Sources:
        def quantile(value: Callable[[], float | None]) -> Any:
            def of(p: float) -> Callable[[float], float | None]:
                self.asked.append(p)
                return lambda _now: value()

            return of

        return Sources(
            load=lambda: self.load,
            signal=lambda read: read,
            rank=lambda: self.rank,
            tier=lambda: self.tier,
            uniform=self.uniform,
            remaining=lambda: self.remaining,
            service_time=quantile(lambda: self.service),
            response_time=quantile(lambda: self.response),
        )


def sheds(rule: ShedRule, *args: Any, now: float = 0.0, **values: Any) -> bool:
    """Tell whether a fresh rule sheds a call with `args` in a world of these values."""
    return rule.start(World(**values).sources())(now, *args)


LOADS = st.floats(0.0, 1.5)
RANKS = st.integers(0, CLASSES - 1)
STARTS = st.floats(0.0, 0.99)
UNIFORM = st.floats(0.0, 1.0, exclude_max=True)


def test_there_are_as_many_classes_as_criticalities() -> None:
    """The rules count classes, and know nothing else of them."""
    assert [int(rank) for rank in Criticality] == list(range(CLASSES))
    assert shedding.CRITICAL_PLUS == Criticality.CRITICAL_PLUS


# No lower class is admitted while a higher one is shed

BY_CLASS: dict[str, Callable[[float], ShedRule]] = {
    "criticality": by_criticality,
    "chance": by_chance,
    "chance by key": lambda start: by_chance(start, key=lambda cost: f"user-{cost}"),
    "cost": lambda start: by_cost(lambda cost: cost, most=100.0, start=start),
}
INSTANTS = st.tuples(
    st.sampled_from(sorted(BY_CLASS)), STARTS, LOADS, RANKS, RANKS, UNIFORM, UNIFORM
).flatmap(lambda case: st.tuples(st.just(case), st.integers(0, 200), st.integers(0, 200)))


def _check_instant(case: Any) -> None:
    (name, start, load, one, other, first, second), cost, other_cost = case
    lower, higher = sorted((one, other))
    rule = BY_CLASS[name](start)
    call = [cost] if rule.takes_arguments else []
    other_call = [other_cost] if rule.takes_arguments else []
    higher_goes = sheds(rule, *call, load=load, rank=higher, uniform=lambda: first)
    lower_goes = sheds(rule, *other_call, load=load, rank=lower, uniform=lambda: second)
    assert lower == higher or lower_goes or not higher_goes


@given(INSTANTS)
def test_no_lower_class_is_admitted_while_a_higher_one_is_shed(case: Any) -> None:
    """At one load, whatever chance, key and cost of the two calls are."""
    _check_instant(case)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (shedding, "class_bar", lambda start, _rank: start),
        (shedding, "class_bar", lambda start, rank: class_bar(start, CLASSES - 1 - rank)),
        (LeastCriticalFirst, "sheds", lambda _self, share, _rank, place, _now: place < share),
    ],
    ids=["one bar for all", "bars upside down", "one probability for all"],
)
def test_without_bars_that_rise_a_lower_class_is_admitted(
    owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the classes overlap, and the property is falsified."""
    monkeypatch.setattr(owner, name, broken)
    assert falsified(_check_instant, INSTANTS, most=5000)


@given(INSTANTS, LOADS)
def test_more_load_never_admits_more(case: Any, more: float) -> None:
    """Who is shed at some load is shed at every higher one."""
    (name, start, load, rank, _, uniform, _), cost, _ = case
    rule = BY_CLASS[name](start)
    call = [cost] if rule.takes_arguments else []
    low, high = sorted((load, more))
    goes = [
        sheds(rule, *call, load=level, rank=rank, uniform=lambda: uniform) for level in (low, high)
    ]
    assert goes[1] or not goes[0]


@given(INSTANTS)
def test_nobody_goes_below_the_start_and_all_but_the_kept_beyond_the_limit(case: Any) -> None:
    """Up to `start` all are admitted, above 1 CRITICAL_PLUS alone, by every rule with classes."""
    (name, start, _, rank, _, uniform, _), cost, _ = case
    rule = BY_CLASS[name](start)
    call = [cost] if rule.takes_arguments else []
    world = {"rank": rank, "uniform": lambda: uniform}
    assert not sheds(rule, *call, load=start, **world)
    assert sheds(rule, *call, load=1.001, **world) is (rank < Criticality.CRITICAL_PLUS)
    assert not sheds(rule, *call, load=nan, **world)


KEEPING: dict[str, Callable[..., ShedRule]] = {
    "criticality": by_criticality,
    "tier": by_tier,
    "cost": lambda **keep: by_cost(lambda *_: 10**9, most=100.0, **keep),
    "chance": by_chance,
    "chance by key": lambda **keep: by_chance(key=lambda *_: "ann", **keep),
    "fraction": lambda **keep: by_fraction(1.0, start=0.5, **keep),
    "latency": lambda **keep: by_latency(0.1, **keep),
}


@given(st.sampled_from(sorted(KEEPING)), RANKS, st.floats(1.001, 100.0))
def test_critical_plus_is_never_shed_by_load(name: str, rank: int, load: float) -> None:
    """However high the load is, by every rule that looks at it; all others go."""
    world = {"load": load, "rank": rank, "uniform": lambda: 0.0, "response": 1.0, "tier": "free"}
    call = [1] if KEEPING[name]().takes_arguments else []
    assert sheds(KEEPING[name](), *call, **world) is (rank < Criticality.CRITICAL_PLUS)


@given(st.sampled_from(sorted(KEEPING)), RANKS, st.sampled_from([1, 2, 3, None]))
def test_the_class_that_is_kept_can_be_lowered(name: str, rank: int, keep: int | None) -> None:
    """`keep=CRITICAL` keeps both critical classes, None nobody."""
    rule = KEEPING[name](keep=None if keep is None else Criticality(keep))
    world = {"load": 9.0, "rank": rank, "uniform": lambda: 0.0, "response": 1.0, "tier": "free"}
    call = [1] if rule.takes_arguments else []
    assert sheds(rule, *call, **world) is (rank < (CLASSES if keep is None else keep))


def test_the_bar_rises_in_quarters_of_what_is_left() -> None:
    """0.8, 0.85, 0.9, 0.95: the most critical go last."""
    bars = [class_bar(0.8, rank) for rank in range(CLASSES)]
    assert bars == pytest.approx([0.8, 0.85, 0.9, 0.95])
    assert [sheds(by_criticality(), load=0.87, rank=rank) for rank in range(4)] == [
        True,
        True,
        False,
        False,
    ]


# Tier


@pytest.mark.parametrize(
    ("load", "shed"),
    [
        (0.7, set()),
        (0.71, {"free"}),
        (0.91, {"free", "basic", None}),
        (5.0, {"free", "basic", None}),
    ],
)
def test_free_goes_first_and_premium_never(load: float, shed: set[str | None]) -> None:
    """Free above 0.7, all but premium above 0.9; who has no tier is one of the others."""
    tiers = ["free", "basic", None, "premium"]
    assert {tier for tier in tiers if sheds(by_tier(), load=load, tier=tier)} == shed


def test_the_tier_can_come_from_the_arguments() -> None:
    """`tier=` is a function of the call's own arguments; the context is not asked then."""
    rule = by_tier({"trial": 0.1, "paid": inf}, others=0.5, tier=lambda user: user["plan"])
    assert sheds(rule, {"plan": "trial"}, load=0.3, tier="paid")
    assert not sheds(rule, {"plan": "paid"}, load=9.0, tier="trial")
    assert sheds(rule, {"plan": "unheard of"}, load=0.6)


# Cost


@given(LOADS, LOADS, RANKS)
def test_the_cost_allowed_shrinks_with_load(one: float, other: float, rank: int) -> None:
    """From any to `most`, then to `least`, then to none."""
    loads = sorted((one, other))
    low, high = (allowed_cost(class_degree(0.8, rank, load), 1000.0, 1.0) for load in loads)
    assert high <= low
    assert low in (inf, -inf) or 1.0 <= low <= 1000.0


def test_the_expensive_go_first() -> None:
    """Halfway through a class's quarter the middle, by orders of magnitude, is allowed."""
    rule = by_cost(lambda rows: rows, most=10_000, start=0.6)
    loads = [0.6, 0.61, 0.65, 0.69, 0.71]
    assert [sheds(rule, 5_000, load=load, rank=0) for load in loads] == [False, *[True] * 4]
    assert [sheds(rule, 50, load=load, rank=0) for load in loads] == [*[False] * 3, True, True]
    assert [sheds(rule, 0, load=load, rank=0) for load in loads] == [*[False] * 4, True]
    assert not sheds(rule, 10**9, load=0.69, rank=1)


# Chance and shares


def _share_by_chance(mix: list[int], load: float, seed: int = 1, start: float = 0.2) -> list[float]:
    """Return which share of each class goes by chance, once the classes are known."""
    world = World(load=0.0, uniform=Random(seed).random)
    decide = by_chance(start).start(world.sources())
    rng, gone = Random(seed + 1), [[0, 0] for _ in range(CLASSES)]
    for number in range(6000):
        world.rank = rng.choices(range(CLASSES), mix)[0]
        world.load = load if number >= 2000 else 0.0
        goes = decide(float(number))
        if number >= 2000:
            gone[world.rank][0] += goes
            gone[world.rank][1] += 1
    return [goes / max(1, came) for goes, came in gone]


@pytest.mark.parametrize("load", [0.2, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_class_is_shed_over_the_whole_range(rank: int, load: float) -> None:
    """By chance it rises from none at the start, slowly at first, to all at a load of 1."""
    mix = [int(own == rank) for own in range(CLASSES)]
    assert _share_by_chance(mix, load)[rank] == pytest.approx(((load - 0.2) / 0.8) ** 2, abs=0.03)


def test_of_two_classes_each_has_its_half_of_the_range() -> None:
    """However rare one of them is; whoever is kept has no part in it."""
    mix = [90, 0, 5, 5]
    assert _share_by_chance(mix, 0.4) == pytest.approx([0.25, 0, 0, 0], abs=0.05)
    assert _share_by_chance(mix, 0.8) == pytest.approx([1.0, 0, 0.25, 0], abs=0.12)
    assert _share_by_chance(mix, 2.0) == [1.0, 0, 1.0, 0]


@pytest.mark.parametrize(("load", "share"), [(0.0, 0.0), (0.8, 0.0), (0.81, 0.3), (5.0, 0.3)])
def test_a_fraction_goes_only_above_the_load_it_was_given(load: float, share: float) -> None:
    """With `start`, nobody goes up to it, and the share above it, not more."""
    world = World(load=load, uniform=Random(1).random)
    decide = by_fraction(0.3, start=0.8).start(world.sources())
    gone = [decide(float(number)) for number in range(3000)][100:]
    assert sum(gone) / len(gone) == pytest.approx(share, abs=0.03)


MIXES = st.tuples(
    st.integers(0, 2**32),
    st.floats(0.0, 1.0),
    st.lists(st.integers(0, 10), min_size=CLASSES, max_size=CLASSES).filter(any),
)


def _mixed(case: tuple[int, float, list[int]], calls: int = 4000) -> list[list[bool]]:
    """Return by class who was shed of calls that come in a random mix, after some to learn by."""
    seed, share, mix = case
    rng = Random(seed)
    decides = LeastCriticalFirst()
    gone: list[list[bool]] = [[] for _ in range(CLASSES)]
    for number in range(calls):
        rank = rng.choices(range(CLASSES), mix)[0]
        goes = decides.sheds(share, rank, rng.random(), number / 100)
        if number > calls / 4:
            gone[rank].append(goes)
    return gone


@given(MIXES)
def test_a_share_of_all_calls_goes_whatever_the_mix(case: tuple[int, float, list[int]]) -> None:
    """The share is that of all classes together."""
    gone = [goes for own in _mixed(case) for goes in own]
    assert sum(gone) / len(gone) == pytest.approx(case[1], abs=0.07)


class Crowd(NamedTuple):
    """Calls that come at one instant: each of a class, and at a place among its equals."""

    calls: list[tuple[int, float]]
    times: int


CROWDS = st.builds(
    Crowd, st.lists(st.tuples(RANKS, UNIFORM), min_size=1, max_size=4), st.sampled_from([1, 9])
)
MOMENTS = st.tuples(st.floats(0.0, 1.0), st.lists(CROWDS, min_size=1, max_size=12))


def _check_moment(case: tuple[float, list[Crowd]]) -> None:
    share, crowds = case
    decides = LeastCriticalFirst()
    for now, (calls, times) in enumerate(crowds):
        shed, admitted = {-1}, {CLASSES}
        for rank, place in calls * times:
            goes = decides.sheds(share, rank, place, float(now))
            (shed if goes else admitted).add(rank)
        assert max(shed) <= min(admitted)


@given(MOMENTS)
def test_by_share_no_lower_class_is_admitted_while_a_higher_one_is_shed(
    case: tuple[float, list[Crowd]],
) -> None:
    """At any instant, however many calls come at it, and in whichever order."""
    _check_moment(case)


def _measure_at_once(
    decides: LeastCriticalFirst, share: float, rank: int, place: float, _now: float
) -> bool:
    """Measure the classes again with each call, also at one instant."""
    decides._counts[rank] += 1
    decides._measure()
    return share > decides._left[rank] + place * decides._width[rank]


def _measure_when_counted(
    decides: LeastCriticalFirst, share: float, rank: int, place: float, now: float
) -> bool:
    """Measure them once at an instant, but in the middle of it."""
    decides._counts[rank] += 1
    decides._counted += 1
    if decides._counted >= decides._enough and now > decides._seen:
        decides._measure()
        decides._seen = now
    return share > decides._left[rank] + place * decides._width[rank]


@pytest.mark.parametrize(
    "broken",
    [
        lambda _self, share, _rank, place, _now: place < share,
        _measure_at_once,
        _measure_when_counted,
    ],
    ids=["by chance alone", "measured with each call", "measured in the middle of an instant"],
)
def test_without_its_order_a_share_takes_from_all_classes(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shed by chance alone, or by a measure that changes at one instant: it is falsified."""
    monkeypatch.setattr(LeastCriticalFirst, "sheds", broken)
    assert falsified(_check_moment, MOMENTS)


def test_a_fixed_fraction_takes_the_least_critical_first() -> None:
    """Of calls that are half sheddable, a quarter of all is half of those and nobody else."""
    gone = _mixed((7, 0.25, [5, 0, 5, 0]))
    assert sum(gone[0]) / len(gone[0]) == pytest.approx(0.5, abs=0.05)
    assert not any(gone[2])


def test_a_key_is_in_or_out_as_a_whole() -> None:
    """With `key`, chance has no say: the same user gets the same answer."""
    rule = by_fraction(0.3, key=lambda user: user)
    decide = rule.start(World(rank=2).sources())
    for number in range(200):
        decide(float(number), f"learn-{number}")
    users = [f"user-{number}" for number in range(1000)]
    first = [decide(1000.0, user) for user in users]
    assert [decide(1001.0, user) for user in users] == first
    assert sum(first) / 1000 == pytest.approx(0.3, abs=0.05)


def test_without_a_key_of_its_own_a_call_is_shed_by_chance() -> None:
    """A key of None stands for nobody in particular."""
    rule = by_chance(0.0, key=lambda _user: None)
    decide = rule.start(World(load=0.9, rank=2, uniform=Random(1).random).sources())
    assert 400 < sum(decide(0.0, "x") for _ in range(1000)) < 600


def test_places_are_the_same_in_every_process() -> None:
    """No salt, unlike hash(): these are pinned."""
    assert place_of("user-1") == place_of(b"user-1") == pytest.approx(0.2965885659)
    assert place_of(17) == place_of("17") == pytest.approx(0.4893170930)
    assert place_of("\ud800") < 1


@pytest.mark.parametrize("form", ["{}", "user-{}", "{:08d}", "{:x}@example.org"])
def test_places_are_evenly_spread(form: str) -> None:
    """Similar keys stand far apart: each of 128 cohorts gets its part."""
    cohorts = [0] * 128
    for number in range(12_800):
        cohorts[int(place_of(form.format(number)) * 128)] += 1
    assert min(cohorts) > 55
    assert max(cohorts) < 155


def test_a_key_of_another_type_is_refused() -> None:
    """What has no stable form would put a user elsewhere in each process."""
    with pytest.raises(TypeError, match="return a string, bytes or a whole number"):
        place_of(1.5)


# Latency, queue, deadline


@given(st.floats(0.0, 100.0) | st.none())
def test_as_much_goes_as_latency_is_over(latency: float | None) -> None:
    """Nobody within the SLA, and never everybody: the others tell when it is over."""
    share = excess_share(latency, 0.5)
    assert 0 <= share <= 0.9
    assert (share > 0) == (latency is not None and latency > 0.5)


def test_latency_over_the_sla_sheds() -> None:
    """The quantile asked for is the one given; half as much again sheds half."""
    world = World(response=0.75, uniform=Random(3).random)
    decide = by_latency(0.5, quantile=0.9).start(world.sources())
    assert world.asked == [0.9]
    gone = [decide(number / 10) for number in range(1000)]
    assert sum(gone[100:]) / 900 == pytest.approx(0.5, abs=0.06)
    world.response = 0.5
    assert not any(decide(200.0 + number) for number in range(100))


def test_a_long_queue_sheds() -> None:
    """From the length on, of anything that tells how many wait."""
    length = [2]
    rule = by_queue(3, of=lambda: length[0])
    decide = rule.start(World().sources())
    assert not decide(0.0)
    length[0] = 3
    assert decide(0.0)
    assert not sheds(by_queue(1, of=Bulkhead(1)))


@pytest.mark.parametrize(
    ("remaining", "service", "shed"),
    [
        (None, 9.0, False),
        (1.0, None, False),
        (0.05, None, True),
        (1.0, 0.8, False),
        (1.0, 0.95, True),
    ],
)
def test_what_cannot_be_done_in_time_is_not_begun(
    remaining: float | None, service: float | None, *, shed: bool
) -> None:
    """What is left must be enough for a typical call and the reserve."""
    assert sheds(by_deadline(reserve=0.1), remaining=remaining, service=service) is shed


# Settings


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: by_criticality(1), ValueError, "start=1: write less than 1"),
        (lambda: by_criticality(-0.1), ValueError, "start=-0.1: write a share"),
        (lambda: by_criticality("x"), TypeError, "start='x': write a share"),
        (lambda: by_tier(["free"]), TypeError, "write the bar of each tier"),
        (lambda: by_tier({"free": nan}), ValueError, "free=nan: write a load"),
        (lambda: by_tier({"free": "0.7"}), ValueError, "free='0.7': write a load"),
        (lambda: by_tier(others=-1), ValueError, "others=-1: write a load"),
        (lambda: by_tier(tier="free"), TypeError, "tier='free': pass a function"),
        (lambda: by_cost(5, most=10), TypeError, "cost=5: pass a function"),
        (lambda: by_cost(len, most=1), ValueError, "write costs above 0"),
        (lambda: by_cost(len, most=5, least=0), ValueError, "write costs above 0"),
        (lambda: by_chance(2), ValueError, "start=2: write a share"),
        (lambda: by_chance(key="user"), TypeError, "key='user': pass a function"),
        (lambda: by_fraction(1.1), ValueError, "share=1.1: write a share"),
        (lambda: by_latency(0), ValueError, "sla=0: write finite seconds"),
        (lambda: by_latency(1, quantile=0), ValueError, "quantile=0: write a share"),
        (lambda: by_queue(0, of=list), ValueError, "length=0: write 1 or more"),
        (lambda: by_queue(5, of=5), TypeError, "of=5: pass what has a queue"),
        (lambda: by_deadline(reserve=-1), ValueError, "reserve=-1: write finite seconds"),
    ],
)
def test_bad_settings_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    """At once, and the message says what to write."""
    with pytest.raises(error, match=message):
        make()


def test_rules_can_be_read() -> None:
    """The repr is close to the call that makes them."""
    rules = [
        by_criticality(),
        by_tier({"free": 0.5}),
        by_cost(len, most=10),
        by_chance(),
        by_fraction(0.1),
        by_fraction(0.1, start=0.5),
        by_latency(0.5),
        by_queue(9, of=list),
        by_deadline(),
    ]
    assert [repr(rule) for rule in rules] == [
        "by_criticality(start=0.8)",
        "by_tier({'free': 0.5}, others=0.9)",
        "by_cost(..., most=10, least=1, start=0.8)",
        "by_chance(start=0.8)",
        "by_fraction(0.1)",
        "by_fraction(0.1, start=0.5)",
        "by_latency(0.5, quantile=0.95)",
        "by_queue(9)",
        "by_deadline(reserve=0, quantile=0.5)",
    ]
