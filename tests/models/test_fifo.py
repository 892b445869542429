"""The rule of a receiver: in order, each once, in bounded room."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from seawall.models import fifo
from seawall.models.fifo import Position, Receiver, gap_since, judge, run_length, skip_to
from tests.support import examples, falsified

WINDOW = 4

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("arrive"), st.integers(0, 30)),
        st.tuples(st.just("arrive and crash"), st.integers(0, 30)),
        st.tuples(st.just("lose"), st.integers(0, 30)),
        st.tuples(st.just("resend"), st.just(0)),
    ),
    max_size=60,
)


def check_in_order_once(steps, receiver_class=Receiver):
    """Carry messages over a bad network, with crashes; see what took effect."""
    receiver = receiver_class(WINDOW)
    sent, effects, network = 8, [], list(range(1, 9))
    for what, which in steps:
        if what == "send":
            sent += 1
            network.append(sent)
        elif what == "resend":
            expected = receiver.position.expected if receiver.position else 1
            network += range(expected, min(sent, expected + WINDOW) + 1)
        elif network:
            number = network[which % len(network)]  # it stays there: it may come again
            if what == "lose":
                network = [other for other in network if other != number]
                continue
            tried = deepcopy(receiver)
            _, ready = tried.arrive(0, 1, number)
            if what == "arrive":  # else it crashes, and nothing of it was
                receiver = tried
                effects += ready
        assert effects == list(range(1, len(effects) + 1))
        assert len(receiver.held) < WINDOW
    # Once the network behaves, all of it arrives.
    for number in range(len(effects) + 1, sent + 1):
        effects += receiver.arrive(0, 1, number)[1]
    assert effects == list(range(1, sent + 1))


@examples(300)
@given(STEPS)
def test_in_order_and_once_whatever_the_network_does(steps):
    """Lost, repeated, reordered, and with a receiver that crashes: in order, once, and all."""
    check_in_order_once(steps)


@pytest.mark.parametrize("missing", ["order", "duplicates", "window"])
def test_without_a_safeguard_it_would_be_noticed(missing, monkeypatch):
    """Each part of the rule is needed: without it the same property fails."""

    def careless(position, held, window, epoch, sequence):
        if missing == "window":
            window = 10**6
        if missing == "duplicates" and sequence < position.expected:
            return Position(epoch, sequence), "delivered"
        if missing == "order" and sequence > position.expected:
            return Position(epoch, sequence), "delivered"
        return judge(position, held, window, epoch, sequence)

    monkeypatch.setattr(fifo, "judge", careless)
    assert falsified(check_in_order_once, STEPS)


class Machine(RuleBasedStateMachine):
    """A sender that loses its state now and then, and a receiver that skips what is too old."""

    def __init__(self):
        super().__init__()
        self.receiver = Receiver(WINDOW, timeout=10)
        self.now = 0
        self.epoch = 1
        self.took_effect = []

    def take(self, epoch, sequence):
        before = deepcopy(self.receiver)
        verdict, ready = self.receiver.arrive(self.now, epoch, sequence)
        ready += self.drained()
        if verdict == "stale":
            assert before.position is not None
            assert epoch < before.position.epoch
        self.took_effect += [(self.receiver.position.epoch, number) for number in ready]

    @rule(sequence=st.integers(1, 12))
    def arrive(self, sequence):
        self.take(self.epoch, sequence)

    @rule(sequence=st.integers(1, 12), older=st.integers(1, 3))
    def arrive_of_before(self, sequence, older):
        self.take(max(0, self.epoch - older), sequence)

    @rule()
    def lose_state(self):
        self.epoch += 1

    @rule(seconds=st.integers(0, 12))
    def time_passes(self, seconds):
        self.now += seconds
        if self.receiver.position is not None:
            epoch = self.receiver.position.epoch
            self.took_effect += [(epoch, number) for number in self.drained()]

    def drained(self):
        """Return all that is ready: behind a gap that is too old there may be another."""
        ready = []
        while more := self.receiver.drain(self.now):
            ready += more
        return ready

    @invariant()
    def ordered_and_once(self):
        assert self.took_effect == sorted(set(self.took_effect))

    @invariant()
    def bounded(self):
        assert len(self.receiver.held) < WINDOW

    @invariant()
    def no_gap_grows_too_old(self):
        receiver = self.receiver
        if receiver.position is not None:
            since = gap_since(receiver.position, receiver.held)
            assert since is None or self.now - since < 10


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_newer_epoch_begins_at_one():
    """What was expected of the epoch before is of no meaning in the next."""
    assert judge(Position(1, 9), {12}, WINDOW, 2, 1) == (Position(2, 1), "delivered")
    assert judge(Position(1, 9), {12}, WINDOW, 2, 3) == (Position(2, 1), "buffered")
    assert judge(Position(2, 1), {}, WINDOW, 1, 9) == (Position(2, 1), "stale")


def test_what_is_ready_is_bounded():
    """A run ends where a number is missing, or where as many are ready as may."""
    assert run_length(3, [3, 4, 6], 10) == 2
    assert run_length(3, [3, 4, 5], 2) == 2
    assert run_length(3, [4], 10) == 0


def test_a_gap_is_as_old_as_the_first_behind_it():
    """It is skipped when that has waited for the timeout, not before."""
    place, held = Position(1, 3), {5: 100, 6: 90}
    assert gap_since(place, held) == 90
    assert gap_since(place, {}) is None
    assert gap_since(place, {3: 1}) is None
    assert skip_to(place, held, 99, 10) == place
    assert skip_to(place, held, 100, 10) == Position(1, 5)


def test_nothing_is_ready_before_anything_came():
    """A receiver that has heard of nobody has nothing to give out."""
    assert Receiver(WINDOW).drain(0) == []
