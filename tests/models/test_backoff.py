from __future__ import annotations

import copy
import pickle
from itertools import count, islice
from math import inf, isfinite, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.backoff import (
    LONGEST,
    Backoff,
    as_backoff,
    constant,
    decorrelated_jitter,
    exponential,
    full_jitter,
    linear,
    plus_minus,
)
from tests.support import without_addresses

SECONDS = st.floats(0, LONGEST)
JITTERS = st.sampled_from(["full", "equal", "none"]) | st.floats(0.001, 1).map(plus_minus)
CAPPED = st.tuples(SECONDS, SECONDS).map(sorted)


@st.composite
def backoffs(draw):
    """Describe any backoff that this module makes of numbers."""
    base, cap = draw(CAPPED)
    jitter = draw(JITTERS)
    factor = draw(st.floats(1, 1e300))
    return draw(
        st.sampled_from(
            [
                exponential(base, cap=cap, factor=factor, jitter=jitter),
                linear(base, step=cap, cap=cap, jitter=jitter),
                constant(base, jitter=jitter),
                decorrelated_jitter(base, cap=cap),
                as_backoff([base, cap]),
                as_backoff(lambda attempt: min(cap, base * attempt)),
            ]
        )
    )


def lowest():
    """Give the least uniform number."""
    return 0.0


def middle():
    """Give the mean uniform number."""
    return 0.5


def highest():
    """Give what uniform numbers stay below."""
    return 1.0


def first(backoff, number, rng=middle):
    """Return the first delays of one call."""
    return list(islice(backoff.delays(rng), number))


def test_exponential_doubles_up_to_the_cap():
    """Without jitter the delays are base * 2**n, then the cap."""
    delays = first(exponential(0.1, cap=1.0, jitter="none"), 6)
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_exponential_takes_a_factor():
    """The factor replaces the doubling."""
    assert first(exponential(1, cap=100, factor=3, jitter="none"), 4) == [1, 3, 9, 27]


def test_linear_adds_the_step():
    """The step is the base unless given."""
    assert first(linear(1, cap=3, jitter="none"), 4) == [1, 2, 3, 3]
    assert first(linear(1, step=0.5, cap=3, jitter="none"), 4) == [1, 1.5, 2, 2.5]


def test_constant_is_constant():
    """A constant has no jitter unless asked."""
    assert first(constant(0.25), 3, Random(1).random) == [0.25] * 3
    assert first(constant(0.25, jitter="full"), 2) == [0.125] * 2


@pytest.mark.parametrize(
    ("jitter", "bounds"),
    [
        ("full", [0, 5, 10]),
        ("equal", [5, 7.5, 10]),
        ("none", [10, 10, 10]),
        (plus_minus(0.1), [9, 10, 11]),
    ],
)
def test_jitter_spreads_as_documented(jitter, bounds):
    """Each jitter maps the uniform numbers onto its own interval."""
    backoff = exponential(10, jitter=jitter)
    spread = [first(backoff, 1, rng)[0] for rng in (lowest, middle, highest)]
    assert spread == pytest.approx(bounds)


def test_decorrelated_jitter_grows_from_its_own_last_delay():
    """The next delay lies between the base and three times the last, up to the cap."""
    backoff = decorrelated_jitter(1, cap=20)
    assert first(backoff, 5, highest) == [3, 9, 20, 20, 20]
    assert first(backoff, 3, lowest) == [1, 1, 1]
    assert first(backoff, 2, middle) == [2, 3.5]


def test_full_jitter_is_the_default():
    """The short name, the bare number and the plain exponential mean the same."""
    assert full_jitter(0.1) == as_backoff(0.1) == exponential(0.1, cap=30.0, jitter="full")
    assert first(full_jitter(0.1, cap=2.0), 6, highest)[-1] == 2.0


@given(backoffs(), st.integers(0, 2**32))
def test_every_delay_is_finite_and_not_negative(backoff, seed):
    """No settings make a delay that cannot be slept."""
    for delay in first(backoff, 50, Random(seed).random):
        assert isfinite(delay)
        assert 0 <= delay <= 2 * LONGEST


@given(CAPPED, st.sampled_from(["full", "equal", "none"]), st.integers(0, 2**32))
def test_the_cap_holds(capped, jitter, seed):
    """Only plus_minus may go beyond the cap, and by its share alone."""
    base, cap = capped
    rng = Random(seed).random
    for backoff in (
        exponential(base, cap=cap, jitter=jitter),
        linear(base, cap=cap, jitter=jitter),
        decorrelated_jitter(base, cap=cap),
    ):
        assert all(delay <= cap for delay in first(backoff, 40, rng))
    beyond = exponential(base, cap=cap, jitter=plus_minus(0.5))
    assert all(delay <= 1.5 * cap for delay in first(beyond, 40, rng))


@pytest.mark.parametrize(
    "backoff",
    [
        exponential(0.1, jitter="none"),
        exponential(0.1, cap=LONGEST, factor=1e308, jitter="none"),
        linear(0.1, jitter="none"),
        decorrelated_jitter(0.1),
        constant(30),
        as_backoff([1, 30]),
        as_backoff(lambda attempt: min(attempt, 30)),
    ],
    ids=without_addresses,
)
def test_the_millionth_delay_is_the_cap(backoff):
    """A call that retries for ever neither overflows nor slows down."""
    millionth = next(islice(backoff.delays(highest), 10**6, None))
    assert millionth in (30, LONGEST)


@given(backoffs(), st.integers(0, 2**32))
def test_calls_do_not_share_a_schedule(backoff, seed):
    """Two interleaved calls see what each would see alone."""
    one, other = Random(seed), Random(seed + 1)
    alone = first(backoff, 10, Random(seed).random)
    interleaved = zip(backoff.delays(one.random), backoff.delays(other.random), strict=True)
    assert [delay for delay, _ in islice(interleaved, 10)] == alone


def test_a_list_repeats_its_last_delay():
    """A finite list goes on with its last delay."""
    assert first(as_backoff([0.1, 0.5]), 4) == [0.1, 0.5, 0.5, 0.5]


def test_a_list_is_copied():
    """A list that changes later changes nothing."""
    delays = [1.0, 2.0]
    backoff = as_backoff(delays)
    delays.clear()
    assert first(backoff, 2) == [1.0, 2.0]


def test_a_one_shot_iterator_serves_every_call():
    """A generator is read once, at construction, so that no call uses up another's delays."""
    backoff = as_backoff(delay / 10 for delay in (1, 2, 3))
    assert first(backoff, 3) == first(backoff, 3) == [0.1, 0.2, 0.3]


def test_an_endless_iterator_is_refused():
    """What cannot be read at construction is refused, with the way out."""
    with pytest.raises(ValueError, match="over 1000 delays: write a function"):
        as_backoff(count(1))


def test_a_function_is_given_the_attempt_that_failed():
    """The first failed attempt is number 1."""
    assert first(as_backoff(lambda attempt: attempt * 10), 3) == [10, 20, 30]


@pytest.mark.parametrize("bad", [-1.0, nan, inf, "2", None, True, 10**400])
def test_a_function_that_returns_nonsense_is_named(bad):
    """What a function returns is checked each time, and the message says for which attempt."""
    delays = as_backoff(lambda attempt: 1.0 if attempt == 1 else bad).delays(middle)
    assert next(delays) == 1.0
    with pytest.raises((TypeError, ValueError), match=r"^backoff\(2\)="):
        next(delays)


@pytest.mark.parametrize("bad", [-1.0, nan, inf, "2", None, True, LONGEST * 2])
def test_a_list_of_nonsense_is_refused_at_once(bad):
    """What a list holds is checked at construction."""
    with pytest.raises((TypeError, ValueError), match=r"^backoff\[1\]="):
        as_backoff([1.0, bad])


@pytest.mark.parametrize("bad", [-0.1, nan, inf, LONGEST + 1, []])
def test_wrong_values_are_refused(bad):
    """Negative, NaN, endless, absurd or no seconds raise where they are given."""
    with pytest.raises(ValueError, match=r"^backoff.*: write"):
        as_backoff(bad)


@pytest.mark.parametrize("bad", ["0.1", b"12", None, True, object()])
def test_wrong_types_are_refused(bad):
    """What is no backoff raises, and the message lists what is one."""
    with pytest.raises(TypeError, match=r"^backoff=.*write seconds, such as 0\.1"):
        as_backoff(bad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: full_jitter(60), r"cap=30\.0 is below base=60\.0: write cap=60\.0 or more"),
        (lambda: full_jitter(-1), "^base=-1"),
        (lambda: full_jitter(1, cap=nan), "^cap=nan"),
        (lambda: exponential(1, factor=0.5), r"^factor=0\.5"),
        (lambda: exponential(1, jitter="some"), "'full', 'equal', 'none' or plus_minus"),
        (lambda: exponential(1, jitter="decorrelated"), "decorrelated_jitter"),
        (lambda: linear(1, step=-1), "^step=-1"),
        (lambda: constant(-1), "^seconds=-1"),
        (lambda: plus_minus(1.5), r"^share=1\.5"),
    ],
)
def test_wrong_settings_say_what_to_write(make, message):
    """Settings are checked at construction."""
    with pytest.raises(ValueError, match=message):
        make()


def test_zero_means_at_once():
    """A backoff of 0 does not wait."""
    assert first(as_backoff(0), 3, highest) == [0, 0, 0]


def test_a_backoff_is_itself():
    """What is a Backoff already is taken as it is."""
    backoff = full_jitter(1)
    assert as_backoff(backoff) is backoff


@pytest.mark.parametrize(
    "text",
    [
        "exponential(0.1, cap=2.0, factor=2.0, jitter='full')",
        "exponential(0.1, cap=2.0, factor=3.0, jitter=plus_minus(0.2))",
        "linear(0.1, step=0.5, cap=2.0, jitter='equal')",
        "constant(1.0, jitter='none')",
        "decorrelated_jitter(0.1, cap=30.0)",
        "as_backoff((0.1, 0.5))",
    ],
)
def test_a_backoff_reads_as_the_call_that_makes_it(text):
    """The repr can be pasted back, and the copy is equal; pickling keeps it so too."""
    backoff = eval(text)  # noqa: S307 - the texts are those above
    assert repr(backoff) == text
    assert pickle.loads(pickle.dumps(backoff)) == backoff == copy.copy(backoff)  # noqa: S301
    assert hash(copy.copy(backoff)) == hash(backoff)


def test_equality_is_by_settings():
    """Different kinds and settings differ, equal ones do not."""
    different = [
        full_jitter(1),
        full_jitter(2),
        full_jitter(1, cap=2),
        exponential(1, jitter="none"),
        linear(1),
        constant(1),
        decorrelated_jitter(1),
        as_backoff([1]),
        as_backoff([1, 2]),
        as_backoff(float),
    ]
    assert len(set(different)) == len(different)
    assert as_backoff(float) == as_backoff(float)
    assert full_jitter(1) != 1
    assert isinstance(full_jitter(1), Backoff)
