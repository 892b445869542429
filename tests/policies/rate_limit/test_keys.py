"""The keys of RateLimit: how much memory they take, and that no flood of them resets anybody."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextvars import ContextVar
from enum import StrEnum
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import RateLimit, RateLimited
from seawall.clock import VirtualClock
from seawall.policies.rate_limit import meters as meter_module
from seawall.policies.rate_limit.meters import SHARED, KeyQueue, Meter, Meters
from seawall.testing import run_virtual, virtual_time
from tests.support import examples, falsified, let_pass, new_guard, quarters


def bytes_a_key(keys: int, kind: Any = str) -> float:
    """Return what so many live keys of 16 characters take, each, the key itself included."""
    with virtual_time():
        limit = RateLimit("10/day", key=lambda key: key, max_keys=keys)
        gate: Any = new_guard(limit).bounds[0]
        for _ in range(2):
            gate.enter(0.0, "warm")
    gc.collect()
    tracemalloc.start()
    try:
        before, _peak = tracemalloc.get_traced_memory()
        for number in range(keys - 1):
            gate.enter(1.0, f"key-{number:012d}" if kind is str else kind(10**9 + number))
        gc.collect()
        after, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(limit._meters.all[0].states) == keys
    return (after - before) / keys


def test_a_hundred_thousand_live_keys_take_at_most_200_bytes_each() -> None:
    """A token bucket is one number; the key itself is included."""
    assert bytes_a_key(100_000) <= 200


def test_a_key_that_is_no_text_takes_at_most_400_bytes() -> None:
    """It is kept apart from the texts, which costs a little more."""
    assert bytes_a_key(20_000, int) <= 400


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_live_keys_take_at_most_200_bytes_each() -> None:
    """The same on a larger scale."""
    assert bytes_a_key(1_000_000) <= 200


# Floods


def flood(limit: RateLimit, clock: VirtualClock, keys: int, prefix: str = "flood") -> int:
    """Make one call for each of so many new keys; return how many were admitted."""
    guard = new_guard(limit, clock=clock)
    went = sum(guard.attempt(lambda _: None, f"{prefix}-{n}").ok for n in range(keys))
    guard.close()
    return went


def tries(limit: RateLimit, clock: VirtualClock, key: str, times: int = 20) -> int:
    """Return how many of so many calls for one key are admitted."""
    guard = new_guard(limit, clock=clock)
    went = sum(guard.attempt(lambda _: None, key).ok for _ in range(times))
    guard.close()
    return went


def attacked() -> tuple[int, int, int]:
    """Let an offender use up what it has, and flood the map with other keys.

    Returns what the offender gets afterwards, how many states are kept, and what somebody new gets.
    """
    clock = VirtualClock(100.0)
    limit = RateLimit("10/day", key=lambda key: key, max_keys=500)
    assert tries(limit, clock, "offender") == 10
    for wave in range(5):
        flood(limit, clock, 3000, f"wave {wave}")
        clock.advance(1.0)
    states = len(limit._meters.all[0].states)
    return tries(limit, clock, "offender"), states, tries(limit, clock, "newcomer")


def test_a_flood_of_keys_does_not_reset_an_offender() -> None:
    """It is remembered, the map stays bounded, and newcomers share what is left to share."""
    offender, states, newcomer = attacked()
    assert offender == 0
    assert states <= 500 + SHARED
    assert newcomer <= 10


def _forgets_the_oldest(self: Meter, _steps: int, _now: float) -> None:
    del self.states[next(iter(self.states))]


def test_a_map_that_forgets_the_oldest_is_reset_by_a_flood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Make room by forgetting whoever came first, and the offender has all it had again."""
    monkeypatch.setattr(Meter, "_sweep", _forgets_the_oldest)
    assert attacked()[0] == 10


def test_a_newcomer_in_a_flood_is_served_from_what_is_shared() -> None:
    """Those who find no room are spread over many buckets, so some of them get in."""
    clock = VirtualClock(100.0)
    limit = RateLimit("10/day", key=lambda key: key, max_keys=500)
    assert flood(limit, clock, 500) == 500
    assert flood(limit, clock, 200, "late") == 200
    assert tries(limit, clock, "one of the late") <= 10


def test_memory_follows_the_keys_that_are_in_use() -> None:
    """A key that has paid is forgotten when others come, long before the map is full."""
    clock = VirtualClock(100.0)
    limit = RateLimit("10/s", key=lambda key: key, max_keys=100_000)
    for wave in range(30):
        flood(limit, clock, 1000, f"wave {wave}")
        clock.advance(10.0)
    assert len(limit._meters.all[0].states) < 5000


class Crowd(NamedTuple):
    """Calls of few keys on a map with room for fewer."""

    calls: list[tuple[float, int]]
    algorithm: str
    kind: type


CROWDS = st.builds(
    Crowd,
    calls=st.lists(st.tuples(quarters(6), st.integers(0, 5)), max_size=60),
    algorithm=st.sampled_from(["token_bucket", "sliding_log"]),
    kind=st.sampled_from([int, str]),
)


def check_crowd(crowd: Crowd) -> None:
    """Check the bound of each key, whether it is kept by itself or shared, in turns."""
    clock = VirtualClock(100.0)
    limit = RateLimit("2/s", algorithm=crowd.algorithm, key=crowd.kind, max_keys=2)
    guard = new_guard(limit, clock=clock)
    went: dict[int, list[float]] = {}
    for gap, key in crowd.calls:
        clock.advance(gap / 4)
        if guard.attempt(lambda _: None, key).ok:
            went.setdefault(key, []).append(clock.now())
    guard.close()
    for times in went.values():
        for first, begin in enumerate(times):
            for number, end in enumerate(times[first:], 1):
                length = Fraction(end) - Fraction(begin)
                if crowd.algorithm == "token_bucket":
                    assert number <= 2 + 2 * length
                else:
                    assert number <= 2 or length >= 1


@given(CROWDS)
@examples(200)
def test_the_bound_holds_for_each_key_of_a_crowd(crowd: Crowd) -> None:
    """Also while keys lose their place and find it again."""
    check_crowd(crowd)


def _without_what_was_shared(self: Meter, place: Any, now: float) -> Any:
    state = self.states.get(place)
    return self.rule.fresh(now) if state is None else state


def _anybody(self: Meter, _steps: int, _now: float) -> None:
    for key in list(self.states)[:1]:
        del self.states[key]


@pytest.mark.parametrize(
    ("attribute", "broken"),
    [("_sweep", _anybody), ("read", _without_what_was_shared)],
    ids=["anybody is forgotten", "what was shared is forgotten"],
)
def test_without_its_safeguards_a_crowd_breaks_the_bound(
    attribute: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forget a debtor, or what was taken from a shared bucket, and a key gets too much."""
    monkeypatch.setattr(Meter, attribute, broken)
    assert falsified(check_crowd, CROWDS)


def test_a_clock_that_steps_back_revives_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was forgotten as idle on a clock far ahead is not fresh again when it steps back."""

    def admitted() -> int:
        limit = RateLimit("2/s", key=lambda key: key, max_keys=1)
        guard = new_guard(limit)
        gate: Any = guard.bounds[0]
        went = 0
        for wave in range(5):
            for now in (100.0, 100.0, 100.0):
                try:
                    gate.enter(now, "offender")
                    went += 1
                except RateLimited:
                    pass
            gate.enter(100_000.0 + wave * 100, f"other {wave}")
            gate.enter(100_050.0 + wave * 100, f"another {wave}")
        return went

    assert admitted() == 2
    fresh = Meter.read

    def read(self: Meter, place: Any, now: float) -> Any:
        self._horizon = float("-inf")
        return fresh(self, place, now)

    monkeypatch.setattr(Meter, "read", read)
    assert admitted() > 2


def test_waiters_of_one_key_keep_its_state() -> None:
    """A key that somebody waits for is not forgotten, however idle it looks."""
    with virtual_time():
        limit = RateLimit("1/s", key=lambda key: key, max_keys=1, max_wait=9.0)
        meter = limit._meters.all[0]
        meter.states["waited for"] = 0.0
        meter.queues["waited for"] = KeyQueue()
        with limit._meters.mutex, limit._meters:
            meter._sweep(16, 10**9)
        assert "waited for" in meter.states
        meter.queues.clear()
        with limit._meters.mutex, limit._meters:
            meter._sweep(16, 10**9)
        assert not meter.states


# Those who share, and wait


class Wave(NamedTuple):
    """When somebody comes, and with which key."""

    at: float
    key: int


WAVES = st.lists(st.builds(Wave, at=quarters(24), key=st.integers(0, 4)), max_size=30) | st.just(
    # No room at first, and later there is: for those who came first, and for those who come then.
    [Wave(0.0, 0), Wave(0.0, 1), *[Wave(0.0, 2)] * 8, *[Wave(3.25, 2)] * 8]
)


def check_waves(waves: list[Wave]) -> None:
    """Let all wait for their turn, under a limit of their own and one for all."""
    went: dict[str, list[float]] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit("1/s", key=lambda key: key, max_keys=2, max_wait=float("inf"))
        guard = new_guard(limit)

        async def come(wave: Wave) -> None:
            await let_pass(wave.at)
            await guard.acall(note, f"key {wave.key}")

        async def note(key: str) -> None:
            went.setdefault(key, []).append(loop.time())

        await asyncio.gather(*[come(wave) for wave in waves])
        assert limit.waiting == 0
        guard.close()

    run_virtual(main())
    assert sum(map(len, went.values())) == len(waves)
    for times in went.values():
        for first, begin in enumerate(times):
            for number, end in enumerate(times[first:], 1):
                assert number <= 1 + Fraction(end) - Fraction(begin) + Fraction(1, 1000)


@given(WAVES)
@examples(100)
def test_the_bound_holds_for_each_key_that_waits_where_others_do(waves: list[Wave]) -> None:
    """A key whose calls wait in a shared place has no second bucket when it finds room."""
    check_waves(waves)


def _wherever_there_is_room(self: Meter, key: Any, now: float) -> Any:
    if self._holds(key) or self._has_room(now):
        return key
    self._shared = self._shared or [meter_module._Stripe() for _ in range(SHARED)]
    return self._shared[hash(key) % SHARED]


def test_a_key_with_two_places_to_wait_gets_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not look who waits where, and the bound of a key is broken."""
    monkeypatch.setattr(Meter, "place", _wherever_there_is_room)
    assert falsified(check_waves, WAVES)


# What keys are made of


class Odd:
    """A key that meets a text in the map, and compares itself slowly, by code of the user."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return sum(range(50)) < 0


@pytest.fixture
def _hasty() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_hasty")
def test_a_key_of_another_kind_does_not_meet_a_text() -> None:
    """Or its comparison would run in the middle of the success path, and takings were lost."""
    with virtual_time():
        limit = RateLimit("2000/day", key=lambda key: key)
        guarded = new_guard(limit)(lambda _: 1)
        guarded(Odd("a"))  # first in the map, where a lookup of the text would meet it
    start = threading.Barrier(8)
    went = []

    def work() -> None:
        start.wait(30)
        own = 0
        for _ in range(500):
            try:
                own += guarded("a")
            except RateLimited:
                pass
        went.append(own)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(went) == 2000
    assert all(type(place) is not Odd for place in limit._meters.all[0].states)


class Nosy:
    """A key whose comparison calls the guard itself."""

    inside = False

    def __init__(self, call: Any) -> None:
        self.call = call

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        if not Nosy.inside:
            Nosy.inside = True
            try:
                self.call(Nosy(self.call))
            finally:
                Nosy.inside = False
        return isinstance(other, Nosy)


def test_a_comparison_that_calls_the_guard_loses_nothing() -> None:
    """Code of the user runs before anything is read, and not between reading and writing."""
    with virtual_time():
        guard = new_guard(RateLimit("10/day", key=lambda key: key))
        went = []

        def call(key: Nosy) -> None:
            if guard.attempt(lambda _: None, key).ok:
                went.append(key)

        for _ in range(60):
            call(Nosy(call))
        assert len(went) == 10


def test_a_section_within_a_section_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The success path stays shut until the outermost is over."""
    limit = RateLimit("10/day")
    (meter,) = limit._meters.all
    seen = []
    for _ in range(2):
        with limit._meters.mutex, limit._meters:
            with limit._meters.mutex, limit._meters:
                pass
            seen.append(meter.slack)
        assert meter.slack > 0
        # Without counting how deep it is, it would be open.
        monkeypatch.setattr(Meters, "__exit__", _opens_always)
    assert seen[0] == meter_module.SHUT
    assert seen[1] > 0


def _opens_always(self: Meters, *_exc: object) -> None:
    self._nesting.leave()
    for meter in self.all:
        meter.reopen()


class Tier(StrEnum):
    """Text by another name."""

    FREE = "free"


def test_text_by_another_name_is_that_text() -> None:
    """An enumeration of texts counts with the texts it is equal to."""
    with virtual_time():
        limit = RateLimit("2/s", key=lambda key: key)
        assert tries(limit, VirtualClock(), Tier.FREE, 1) == 1
        assert tries(limit, VirtualClock(), "free") == 1
        assert list(limit._meters.all[0].states) == ["free"]


def test_a_context_variable_is_asked_without_arguments() -> None:
    """Its `get` takes a default, and the call's first argument is none."""
    user: ContextVar[str] = ContextVar("user")
    with virtual_time():
        guard = new_guard(RateLimit("1/min", key=user.get))
        with pytest.raises(LookupError):
            guard.call(lambda _: 1, "question")
        user.set("ann")
        assert [guard.attempt(lambda _: 1, q).ok for q in "abc"] == [True, False, False]
