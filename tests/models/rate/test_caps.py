"""What a vendor says is left: it lowers a budget, and never raises it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.rate import caps as rate_caps
from seawall.models.rate.caps import Caps
from tests.support import falsified


class Word(NamedTuple):
    """A vendor's report: that many are left until then."""

    remaining: int
    lasts: int


class Taking(NamedTuple):
    """A reservation, settled a little later or never."""

    cost: int
    back: bool


STEPS = st.lists(
    st.one_of(
        st.builds(Word, st.integers(0, 6), st.integers(1, 12)),
        st.builds(Taking, st.integers(1, 3), st.booleans()),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=30,
)


class Ledger:
    """Every word that was ever said, and every taking, reckoned from the beginning."""

    def __init__(self) -> None:
        self.now = 0
        self.words: list[tuple[int, int, int]] = []
        self.takings: list[list[int]] = []

    def left(self, now: int) -> int | None:
        """Return what all words together allow now; None if none holds."""
        lefts = [
            remaining - sum(cost for at, cost in self.takings if at > since)
            for since, remaining, until in self.words
            if until > now
        ]
        return min(lefts) if lefts else None


def keeps_every_word(steps: list[Any]) -> None:
    """No word that was said is ever broken, whatever is taken and given back."""
    caps, ledger = Caps(), Ledger()
    given_back: list[tuple[int, list[int]]] = []
    for step in steps:
        ledger.now += 1  # each at an instant of its own
        now = ledger.now
        if isinstance(step, Word):
            caps.lower(float(now), step.remaining, float(now + step.lasts))
            ledger.words.append((now, step.remaining, now + step.lasts))
        elif isinstance(step, Taking):
            if caps.wait(float(now), step.cost) == 0:
                allowed = ledger.left(now)
                assert allowed is None or step.cost <= allowed
                caps.take(step.cost)
                ledger.takings.append([now, step.cost])
                if step.back:
                    given_back.append((now, ledger.takings[-1]))
        else:
            ledger.now += step
            for mark, taking in given_back:
                caps.give_back(taking[1], float(mark))
                taking[1] = 0
            given_back.clear()
        assert len(caps.untils) <= rate_caps.AT_MOST
        assert caps.untils == sorted(set(caps.untils))
        assert caps.lefts == sorted(set(caps.lefts))


@given(STEPS)
def test_no_word_is_ever_broken(steps: list[Any]) -> None:
    """Whatever is said, taken and given back, no more is taken than any word allows."""
    keeps_every_word(steps)


@given(STEPS)
def test_no_word_is_broken_where_there_are_too_many(steps: list[Any]) -> None:
    """The same holds where words have to become one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rate_caps, "AT_MOST", 1)
        keeps_every_word(steps)


def _replace(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any]) -> None:
    monkeypatch.setattr(Caps, name, wrong)


def test_a_word_that_is_known_already_still_counts_from_now_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a known word did not renew its beginning, what others took would be given back."""
    honest = Caps.lower

    def lower(self: Caps, now: float, remaining: int, until: float) -> None:
        before = list(self.sinces)
        honest(self, now, remaining, until)
        if len(before) == len(self.sinces):
            self.sinces = before

    _replace(monkeypatch, "lower", lower)
    assert falsified(keeps_every_word, STEPS)


def test_what_was_taken_before_a_word_is_not_given_back_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it were, a budget would be raised above what the vendor said."""

    def give_back(self: Caps, unused: int, _mark: float) -> None:
        self.lefts = [left + unused for left in self.lefts]

    _replace(monkeypatch, "give_back", give_back)
    assert falsified(keeps_every_word, STEPS)


def test_of_two_words_that_become_one_the_stricter_holds_for_the_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If words were dropped where there are too many, one of them would be broken."""
    monkeypatch.setattr(rate_caps, "AT_MOST", 1)
    monkeypatch.setattr(Caps, "_merge", lambda self: self._remove(0))
    assert falsified(keeps_every_word, STEPS)


def test_a_longer_word_allows_more() -> None:
    """The end of a window and the beginning of the next are two words, and both hold."""
    caps = Caps()
    caps.lower(0.0, 0, 10.0)
    caps.lower(1.0, 50, 100.0)
    assert caps.wait(5.0, 1) == 5.0
    assert caps.wait(10.0, 50) == 0.0
    assert caps.wait(10.0, 51) == 90.0
    assert caps.left(5.0, 9) == 0
    assert caps.left(10.0, 9) == 9
    assert caps.rest(10.0) == 90.0


def test_a_word_never_raises_the_budget() -> None:
    """More than is known to be left says nothing, and so does a word that is over."""
    caps = Caps()
    caps.lower(0.0, 3, 10.0)
    caps.lower(1.0, 500, 9.0)
    caps.lower(1.0, 0, 1.0)
    assert (caps.untils, caps.lefts) == ([10.0], [3])


def test_what_is_unused_is_left_again() -> None:
    """A call that was refused further in, after the word, has not been counted by the vendor."""
    caps = Caps()
    caps.lower(0.0, 3, 10.0)
    caps.take(2)
    caps.give_back(2, 1.0)
    assert caps.left(2.0, 9) == 3


def test_a_copy_is_changed_apart() -> None:
    """What is taken from a copy is not taken from the original."""
    caps = Caps()
    caps.lower(0.0, 3, 10.0)
    caps.copy().take(2)
    assert caps.left(1.0, 9) == 3
