from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from seawall.models.waiting import ORDERS, WaitQueue

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 11)),
        st.tuples(st.just("pop"), st.integers(0, 2)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
    ),
    max_size=60,
)


class Naive:
    """The same rules over one plain list of (number, rank), slow and obvious.

    The kind of an item is its number modulo three.
    """

    def __init__(self, order: str, limit: int) -> None:
        self.order = order
        self.limit = limit
        self.waiting: list[tuple[int, int]] = []

    def push(self, item: int, rank: int) -> int | None:
        rank = rank if self.order == "criticality" else 0
        gone = None
        if len(self.waiting) >= self.limit:
            if self.order == "fifo":
                return item
            if self.order == "lifo":
                gone = self.waiting[0]
            else:
                lowest = min(r for _, r in self.waiting)
                if lowest >= rank:
                    return item
                gone = [entry for entry in self.waiting if entry[1] == lowest][-1]
            self.waiting.remove(gone)
        self.waiting.append((item, rank))
        return None if gone is None else gone[0]

    def pop(self, barred: int) -> int | None:
        fitting = [entry for entry in self.waiting if entry[0] % 3 != barred]
        if not fitting:
            return None
        highest = max(rank for _, rank in fitting)
        entries = [entry for entry in fitting if entry[1] == highest]
        entry = entries[-1 if self.order == "lifo" else 0]
        self.waiting.remove(entry)
        return entry[0]


@given(order=st.sampled_from(ORDERS), limit=st.integers(1, 5), operations=OPERATIONS)
def test_it_agrees_with_the_obvious_list(order, limit, operations):
    """Who is served, who has to go and who is left are the same as with a plain list."""
    queue: WaitQueue[int] = WaitQueue(order, limit)
    naive = Naive(order, limit)
    for number, (operation, argument) in enumerate(operations):
        if operation == "push":
            refused = queue.refuses(argument % 4)
            assert queue.push(number, argument % 4, number % 3) == naive.push(number, argument % 4)
            assert refused == all(item != number for item, _ in naive.waiting)
        elif operation == "pop":
            served = queue.pop(fits=lambda item, barred=argument: item % 3 != barred)
            assert served == naive.pop(argument)
        elif operation == "remove":
            known = [entry for entry in naive.waiting if entry[0] == argument]
            naive.waiting = [entry for entry in naive.waiting if entry[0] != argument]
            assert queue.remove(argument) is bool(known)
        assert len(queue) == len(naive.waiting) <= limit


@given(ranks=st.lists(st.integers(0, 3), min_size=1, max_size=30), limit=st.integers(1, 5))
def test_no_lower_rank_waits_while_a_higher_one_was_turned_away(ranks, limit):
    """In order of criticality, whoever is turned away ranks no higher than anyone who waits."""
    queue: WaitQueue[tuple[int, int]] = WaitQueue("criticality", limit)
    turned_away = []
    for number, rank in enumerate(ranks):
        gone = queue.push((number, rank), rank)
        if gone is not None:
            turned_away.append(gone[1])
    waiting = [queue.pop()[1] for _ in range(len(queue))]
    assert max(turned_away, default=0) <= min(waiting)


def test_an_empty_room_has_nobody_to_serve():
    """Taking from an empty room gives nobody."""
    assert WaitQueue("fifo", 1).pop() is None


def test_only_who_fits_is_served():
    """Who does not fit is passed over and keeps the place; with nobody left nobody is served."""
    queue: WaitQueue[int] = WaitQueue("fifo", 5)
    for number in range(4):
        queue.push(number, kind=number % 2)
    assert queue.pop(fits=lambda number: number % 2 == 1) == 1
    assert queue.pop(fits=lambda number: number % 2 == 1, newest=True) == 3
    assert queue.pop(fits=lambda number: number % 2 == 1) is None
    assert [queue.pop(newest=True), queue.pop(newest=True), len(queue)] == [2, 0, 0]


def test_the_lowest_rank_is_the_one_to_go():
    """The longest waiting of the lowest rank is taken out."""
    queue: WaitQueue[str] = WaitQueue("criticality", 5)
    for item, rank in [("a", 2), ("b", 1), ("c", 1)]:
        queue.push(item, rank)
    assert [queue.pop_lowest() for _ in range(4)] == ["b", "c", "a", None]


def test_the_longest_waiting_of_each_rank_is_known():
    """The oldest of each rank is what tells how long the queue makes people wait."""
    queue: WaitQueue[str] = WaitQueue("criticality", 5)
    for item, rank in [("a", 1), ("b", 3), ("c", 1)]:
        queue.push(item, rank)
    assert sorted(queue.oldest()) == ["a", "b"]


def test_passing_over_a_kind_costs_the_same_however_many_wait():
    """Who fits is asked for once for each kind of each rank, not for each who waits."""
    queue: WaitQueue[int] = WaitQueue("criticality", 5000)
    for number in range(4000):
        queue.push(number, number % 4, "batch")
    queue.push(4000, 0, "live")
    asked = []
    assert queue.pop(fits=lambda number: asked.append(number) or number == 4000) == 4000
    assert len(asked) == 5


def test_the_length_may_be_read_while_the_queue_changes() -> None:
    """A thread that reads it without the lock gets a number, not an error."""
    queue: WaitQueue[str] = WaitQueue("fifo", 10)

    class ChangingLane(OrderedDict[str, int]):
        def __len__(self) -> int:
            queue._lanes[1, "another thread"] = OrderedDict()
            return super().__len__()

    queue._lanes[0, None] = ChangingLane(a=1)
    assert len(queue) == 1
