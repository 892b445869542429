"""What a member passes on: each update as often as the rule says, in the order it says."""

from math import ceil, log10

from hypothesis import given
from hypothesis import strategies as st

from seawall.models.detection.gossip import GossipQueue, GossipUpdate, MemberState

names = st.text("abcdefgh", min_size=1, max_size=30)


def alive(name: str, incarnation: int = 0) -> GossipUpdate:
    """Return the statement that a member is alive."""
    return GossipUpdate(MemberState.ALIVE, name, incarnation, "address")


@given(st.integers(1, 6), st.integers(1, 2000))
def test_an_update_is_passed_on_as_often_as_the_logarithm_of_the_group_says(multiplier, members):
    """Then it is forgotten."""
    queue = GossipQueue(multiplier)
    queue.add(alive("a"))
    times = 0
    while queue.take(1400, members):
        times += 1
    assert times == multiplier * ceil(log10(members + 1))
    assert len(queue) == 0


@given(
    st.lists(
        st.one_of(
            names.map(lambda name: ("add", name)),
            names.map(lambda name: ("discard", name)),
            st.integers(0, 400).map(lambda room: ("take", room)),
        ),
        max_size=60,
    )
)
def test_a_packet_has_the_least_often_sent_first_and_of_these_the_largest(steps):
    """Against a plain model that sorts everything each time; one update for each member."""
    queue, model, serial = GossipQueue(2), {}, 0
    for step, value in steps:
        if step == "add":
            serial += 1
            queue.add(alive(value, serial))
            model[value] = [0, -alive(value, serial).size, serial, alive(value, serial)]
        elif step == "discard":
            queue.discard(value)
            model.pop(value, None)
        else:
            wanted, room = [], value
            for entry in sorted(model.values(), key=lambda one: one[:3]):
                if -entry[1] <= room:
                    room += entry[1]
                    wanted.append(entry)
            assert queue.take(value, 50) == [entry[3] for entry in wanted]
            for entry in wanted:
                serial += 1
                entry[0], entry[2] = entry[0] + 1, serial
                if entry[0] == 2 * ceil(log10(51)):
                    del model[entry[3].name]
        assert len(queue) == len(model)


def test_what_goes_first_takes_room_and_is_not_sent_twice():
    """A suspect hears of it with the ping, whatever else waits."""
    queue = GossipQueue(4)
    queue.add(alive("a", 1))
    queue.add(alive("b", 1))
    first = GossipUpdate(MemberState.SUSPECTED, "a", 1, by="c")
    assert queue.take(1400, 10, [first]) == [first, alive("b", 1)]
    assert queue.take(first.size, 10, [first]) == [first]
