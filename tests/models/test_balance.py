"""Two drawn by chance, the cheaper taken: load, latency, and hosts nobody knows yet."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models import balance
from seawall.models.balance import LEAST, Load, choose, cost
from tests.support import SEEDS, falsified

HALF_LIFE = 5.0


def load(latency: float | None = None, in_flight: int = 0, at: float = 0.0) -> Load:
    made = Load(HALF_LIFE)
    if latency is not None:
        made.answered(latency, at)
    made.in_flight = in_flight
    return made


# --- Latency ---


def test_latency_rises_at_once_and_falls_with_time():
    """A slower answer counts whole; faster ones afterwards count by the time that has passed."""
    one = load(0.1)
    one.answered(1.0, 1.0)
    assert one.expected(1.0) == 1.0
    one.answered(0.1, 1.0)
    assert one.expected(1.0) == 1.0
    one.answered(0.2, 1.0 + HALF_LIFE)
    assert one.expected(1.0 + HALF_LIFE) == pytest.approx(0.6)


def test_latency_fades_in_silence():
    """Each half-life without an answer halves what is expected, down to the least."""
    one = load(1.0)
    assert one.expected(2 * HALF_LIFE) == 0.25
    assert one.expected(1000.0) == LEAST
    assert one.expected(-1.0) == 1.0


def test_a_fast_failure_does_not_look_fast():
    """Failures can raise a latency, never lower it, and make the host dearer from the second on."""
    one, other = load(0.1), load(0.1)
    one.failed(0.001, 0.0)
    assert one.expected(0.0) == 0.1
    assert cost(one, other, 0.0) == cost(other, one, 0.0)
    one.failed(0.001, 0.0)
    assert cost(one, other, 0.0) == pytest.approx(2 * cost(other, one, 0.0))
    one.failed(3.0, 0.0)
    assert one.expected(0.0) == 3.0
    assert one.wariness(0.0) == 3.0
    one.answered(0.1, 0.0)
    assert one.wariness(0.0) == 1.0


def test_what_was_given_up_took_at_least_that_long():
    """A cancelled request raises the latency if it had lasted longer, and is no failure."""
    one = load(0.1)
    one.given_up(0.05, 0.0)
    assert one.expected(0.0) == 0.1
    one.given_up(2.0, 0.0)
    assert one.expected(0.0) == 2.0
    assert one.wariness(0.0) == 1.0


# --- A fair start ---


def test_an_unknown_host_is_taken_to_be_as_fast_as_the_other():
    """A new host costs what the other costs with as much in flight: a fair start, no stampede."""
    new, known = load(None, in_flight=2), load(0.3, in_flight=2)
    assert cost(new, known, 0.0) == cost(known, new, 0.0)
    new.in_flight = 3
    assert choose([new, known], 0.0, 0.0) == choose([new, known], 0.0, 0.99) == 1


def test_an_unknown_host_that_hung_is_not_taken_for_fast():
    """Who never answered is not cheaper than what it cost those who gave it up."""
    hung, fresh = load(None), load(None)
    hung.given_up(2.0, 0.0)
    assert choose([hung, fresh], 0.0, 0.0) == 1
    assert cost(hung, load(0.1), 0.0) == 2.0


def no_stampede(case: tuple[int, float, int]) -> None:
    """Assert that a new host beside busy ones never has more in flight than the busiest."""
    busy, latency, seed = case
    rng = Random(seed)
    loads = [load(latency, busy), load(latency, busy), load(None)]
    for _ in range(4 * busy + 4):
        chosen = choose(loads, 0.0, rng.random())
        loads[chosen].in_flight += 1
        assert loads[2].in_flight <= max(loads[0].in_flight, loads[1].in_flight) + 1


STARTS = st.tuples(st.integers(0, 20), st.floats(0.01, 10.0), SEEDS)


@given(STARTS)
def test_a_new_host_is_not_stampeded(case):
    """Nothing is known of a new host, and so it gets as much as the others have, not more."""
    no_stampede(case)


def test_a_fair_start_needs_the_others_latency(monkeypatch):
    """If a new host were taken for the fastest, it would get all there is."""
    plain = lambda one, _other, now: (one.in_flight + 1) * one.expected(now)  # noqa: E731
    monkeypatch.setattr(balance, "cost", plain)
    assert falsified(no_stampede, STARTS)


# --- Choosing ---

LOADS = st.builds(
    load,
    st.none() | st.floats(0.0, 10.0),
    st.integers(0, 50),
    st.floats(0.0, 20.0),
)


def never_the_dearer(case: tuple[list[Load], float, float]) -> None:
    """Assert that of the two hosts which chance draws the chosen one is not the dearer."""
    loads, now, chance = case
    chosen = choose(loads, now, chance)
    count = len(loads)
    first, second = divmod(int(chance * (count * (count - 1))), count - 1)
    second += second >= first
    assert first != second
    assert chosen in (first, second)
    other = second if chosen == first else first
    assert cost(loads[chosen], loads[other], now) <= cost(loads[other], loads[chosen], now)


CASES = st.tuples(
    st.lists(LOADS, min_size=2, max_size=6),
    st.floats(0.0, 40.0),
    st.floats(0.0, 1.0, exclude_max=True),
)


@given(CASES)
def test_never_the_dearer_of_the_two(case):
    """Whatever is known of the hosts, the dearer of the two drawn is never chosen."""
    never_the_dearer(case)


def test_never_the_dearer_needs_the_load(monkeypatch):
    """Without the requests in flight in the cost, the dearer one is chosen now and then."""
    monkeypatch.setattr(balance, "cost", lambda one, _other, now: one.expected(now))
    assert falsified(never_the_dearer, CASES)


def never_by_refusing(case: tuple[Load, Load, float, float]) -> None:
    """Assert that a host does not become cheaper than another by refusing."""
    one, other, seconds, now = case
    one.refused(seconds, now)
    assert cost(one, other, now) >= cost(other, one, now)


REFUSALS = st.tuples(LOADS, LOADS, st.floats(0.0, 1.0), st.floats(20.0, 60.0))


@given(REFUSALS)
def test_who_refuses_is_not_cheaper(case):
    """However soon a host refuses, and however idle it is, it costs no less than the other."""
    never_by_refusing(case)


def test_who_refuses_needs_the_mark(monkeypatch):
    """If a refusal were an answer as any other, who refuses would draw all there is."""
    monkeypatch.setattr(Load, "refused", Load.answered)
    assert falsified(never_by_refusing, REFUSALS)


def test_a_good_answer_ends_the_refusing():
    """The next good answer is measured as any other, and what is usual knows only good ones."""
    one, other = load(0.02), load(0.2)
    one.refused(0.001, 0.0)
    assert cost(one, other, 0.0) == cost(other, one, 0.0)
    one.answered(0.02, 0.0)
    one.failed(9.0, 0.0)
    assert one.usual == pytest.approx(0.02)
    one.answered(0.1, 0.0)
    assert one.usual == pytest.approx(0.03)
    assert load(None).usual is None


@given(st.integers(2, 7), SEEDS)
def test_every_pair_is_drawn_equally_often(count, seed):
    """Among equals each host is chosen as often as any other."""
    rng = Random(seed)
    loads = [load(0.1) for _ in range(count)]
    counts = [0] * count
    for _ in range(200 * count):
        counts[choose(loads, 0.0, rng.random())] += 1
    assert min(counts) > 100
    assert max(counts) < 300


def test_one_host_is_always_chosen():
    """A set of one has no choice, and needs no chance."""
    assert choose([load()], 0.0, 0.99) == 0


def asked_again(case: tuple[float, int, int]) -> None:
    """Assert that a host which was slow or failing, and has recovered, is asked again in time."""
    slowness, failures, seed = case
    rng = Random(seed)
    loads = [load(0.02), load(0.02), load(slowness)]
    for _ in range(failures):
        loads[2].failed(0.001, 0.0)
    asked, now = 0, 0.0
    while now < 30 * HALF_LIFE:
        now += 0.2
        chosen = choose(loads, now, rng.random())
        loads[chosen].answered(0.02, now)
        asked += chosen == 2
    assert asked > 25


RECOVERIES = st.tuples(st.floats(0.0, 30.0), st.integers(0, 100), SEEDS)


@given(RECOVERIES)
def test_a_recovered_host_is_asked_again(case):
    """However slow it was, and however often it failed, an idle host gets traffic again."""
    asked_again(case)


def test_a_recovered_host_needs_forgetting(monkeypatch):
    """If nothing faded in silence, a host that was slow once would be left alone for ever."""
    monkeypatch.setattr(Load, "_kept", lambda _self, _now: 1.0)
    assert falsified(asked_again, RECOVERIES)


@given(SEEDS)
def test_load_goes_where_it_is_served_soonest(seed):
    """Of three hosts, one of which is ten times slower, it gets a share but a small one."""
    rng = Random(seed)
    loads = [load(), load(), load()]
    seconds = [0.02, 0.02, 0.2]
    ends: list[tuple[float, int]] = []
    counts = [0, 0, 0]
    for tick in range(600):
        now = tick * 0.005
        for end, index in [pair for pair in ends if pair[0] <= now]:
            loads[index].in_flight -= 1
            loads[index].answered(seconds[index], now)
            ends.remove((end, index))
        chosen = choose(loads, now, rng.random())
        loads[chosen].in_flight += 1
        counts[chosen] += 1
        ends.append((now + seconds[chosen], chosen))
    assert 0 < counts[2] < 0.1 * sum(counts)
    assert min(counts[:2]) > 0.3 * sum(counts)
