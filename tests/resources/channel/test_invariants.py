"""What Channel always keeps to, under random programs and orders; and that safeguards matter."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import DeadlineExceeded, TimedOut, deadline
from seawall.errors import ChannelClosed, ChannelFull
from seawall.models.channel import Buffer
from seawall.resources import Channel
from seawall.resources.channel import WHEN_FULL, _Getter, _Putter
from seawall.resources.channel import _ChannelWaiter as _Waiter
from seawall.testing import run_virtual
from tests.support import SEEDS, examples, falsified, let_pass, quarters

QUARTERS = quarters(8)
Cancel = tuple[float, int] | None


class Producer(NamedTuple):
    """Puts some items, one after another; how it is disturbed is as in the bulkhead's tests.

    It is cancelled at an instant, and so many turns of the loop after that: so the cancellation
    meets every point at which it can wait.
    """

    at: float
    items: int
    pause: float
    timeout: float | None
    within: float | None
    cancel: Cancel


class Consumer(NamedTuple):
    """Takes some items, one after another."""

    at: float
    items: int
    pause: float
    timeout: float | None
    within: float | None
    cancel: Cancel


class Day(NamedTuple):
    """What happens to one channel."""

    capacity: int
    when_full: str
    demand: bool
    producers: list[Producer]
    consumers: list[Consumer]
    requests: list[tuple[float, int]]
    capacities: list[tuple[float, int]]
    close: float | None
    seed: int


_DISTURBED: dict[str, Any] = {
    "at": QUARTERS,
    "items": st.integers(1, 4),
    "pause": st.sampled_from([0.0, 0.0, 0.5]),
    "timeout": st.none() | QUARTERS,
    "within": st.none() | QUARTERS,
    "cancel": st.none() | st.tuples(QUARTERS, st.integers(0, 3)),
}
DAYS = st.builds(
    Day,
    capacity=st.integers(1, 3),
    when_full=st.sampled_from(["block", "block", *WHEN_FULL]),
    demand=st.sampled_from([False, False, True]),
    producers=st.lists(st.builds(Producer, **_DISTURBED), min_size=1, max_size=5),
    consumers=st.lists(st.builds(Consumer, **_DISTURBED), min_size=1, max_size=5),
    requests=st.lists(st.tuples(QUARTERS, st.integers(1, 3)), max_size=3),
    capacities=st.lists(st.tuples(QUARTERS, st.integers(1, 3)), max_size=1),
    close=st.none() | QUARTERS,
    seed=SEEDS,
)

Item = tuple[int, int]


class Watch:
    """Writes down from outside what goes in and out, and looks at the channel between."""

    def __init__(self, day: Day) -> None:
        self.dropped: list[Item] = []
        self.channel: Channel[Item] = Channel(
            day.capacity, when_full=day.when_full, demand=day.demand, on_drop=self.dropped.append
        )
        self.entered: list[Item] = []
        self.refused: list[Item] = []
        self.taken: list[Item] = []
        self.broken: list[str] = []
        self.allowed = day.capacity
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, work: Any, script: Producer | Consumer) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        self.tasks.append(task)
        if script.cancel is not None:
            after, turns = script.cancel
            loop.call_later(after, self.cancel, task, turns)

    def cancel(self, task: asyncio.Task[None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self.cancel, task, turns - 1)
        else:
            task.cancel()

    async def produce(self, number: int, script: Producer) -> None:
        with deadline(999.0 if script.within is None else script.within):
            for n in range(script.items):
                try:
                    if await self.channel.aput((number, n), script.timeout):
                        self.entered.append((number, n))
                except (ChannelFull, DeadlineExceeded, ChannelClosed):
                    self.refused.append((number, n))
                self.look_at_depth()
                await let_pass(script.pause)

    async def consume(self, script: Consumer) -> None:
        with deadline(999.0 if script.within is None else script.within):
            for _ in range(script.items):
                try:
                    self.taken.append(await self.channel.aget(script.timeout))
                except (TimedOut, DeadlineExceeded, ChannelClosed):
                    pass
                await let_pass(script.pause)

    def resize(self, capacity: int) -> None:
        self.channel.update(capacity=capacity)
        self.allowed = max(capacity, self.channel.depth)

    def look_at_depth(self) -> None:
        depth = self.channel.depth
        if depth > self.allowed:
            self.broken.append(f"{depth} inside, {self.allowed} allowed")

    def look(self) -> None:
        """Look when all that could happen at an instant has happened."""
        self.look_at_depth()
        shown = self.channel.snapshot()
        self.allowed = max(shown["capacity"], shown["depth"])
        if shown["waiting_getters"] and (shown["depth"] or shown["closed"]):
            self.broken.append("a lost wake-up: somebody waits beside an item, or at the end")
        room = shown["depth"] < shown["capacity"] and shown["requested"] != 0
        if shown["waiting_putters"] and (room or shown["closed"]):
            self.broken.append("a lost wake-up: somebody waits beside room, or at the end")

    def account(self, left: list[Item]) -> None:
        assert not self.broken
        assert all(task.done() for task in self.tasks)
        assert all(task.cancelled() or task.exception() is None for task in self.tasks)
        buffer = self.channel._buffer
        waiting = [*buffer.putters, *buffer.getters, *buffer.drainers]
        tokens = buffer.withheld, len(buffer.room), len(buffer.ready)
        assert (waiting, tokens) == ([], (buffer.capacity, 0, 0))
        gone = set(self.dropped)
        assert len(gone) == len(self.dropped)
        assert [item for item in self.entered if item not in gone] == self.taken + left
        assert not gone & set(self.taken + left + self.refused)
        assert not set(self.refused) & set(self.entered)
        shown = self.channel.snapshot()
        assert shown["put"] == len(self.entered)
        assert shown["got"] == len(self.taken + left)
        assert shown["dropped"] == len(self.dropped)


def _check_day(day: Day) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        watch = Watch(day)
        channel = watch.channel
        for number, producer in enumerate(day.producers):
            work = watch.produce(number, producer)
            loop.call_later(producer.at, watch.begin, work, producer)
        for consumer in day.consumers:
            loop.call_later(consumer.at, watch.begin, watch.consume(consumer), consumer)
        for at, n in day.requests:
            loop.call_later(at, channel.request if day.demand else len, n if day.demand else "")
        for at, capacity in day.capacities:
            loop.call_later(at, watch.resize, capacity)
        if day.close is not None:
            loop.call_later(day.close, channel.close)
        for n in range(80):
            loop.call_later(n / 4 + 0.125, watch.look)
        await let_pass(80.0)
        channel.close()
        await let_pass(1.0)
        left = await channel.adrain(timeout=0)
        await let_pass(80.0)
        watch.account(left)

    run_virtual(main(), seed=day.seed)


@given(DAYS)
@examples(400)
def test_every_item_is_taken_once_or_dropped_and_counted(day: Day) -> None:
    """In order, never more inside than the capacity, nobody waits in vain, nothing is lost."""
    _check_day(day)


@given(DAYS)
def test_the_same_holds_where_every_step_takes_the_lock(day: Day) -> None:
    """Without a global interpreter lock nobody goes past the lock; nothing else changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seawall.resources.channel.LOCK_FREE", False)
        _check_day(day)


def _nothing(*_: Any) -> None:
    pass


def _add_silently(buffer: Buffer[Any], item: Any, now: float) -> None:
    buffer.items.append(item)
    buffer.ready.append(now)
    buffer.put += 1


def _remove_silently(buffer: Buffer[Any]) -> Any:
    buffer.got += 1
    buffer.withheld += 1
    return buffer.items.popleft()


def _only_add(buffer: Buffer[Any], item: Any, now: float) -> Any:
    buffer.add(item, now)
    return item


def _close_silently(channel: Channel[Any]) -> None:
    channel._buffer.closed = True


def _put_early(putter: _Putter, state: Any) -> bool:
    """Put the item in when room is granted, not when its producer goes on."""
    putter._wake()
    if state == "granted":
        _add_silently(putter._buffer, putter._item, 0.0)
        state = "put"
    putter._state = state
    return True


def _claim_put(putter: _Putter) -> None:
    if putter._state != "put":
        raise ChannelClosed


def _take_early(getter: _Getter, state: Any, since: float = 0.0) -> bool:
    """Hand the item over when it is granted, not when its consumer goes on."""
    if state == "granted":
        getter._item = getter._buffer.items.popleft()
    getter._state, getter._since = state, since
    return getter._wake()


def _claim_taken(getter: _Getter) -> Any:
    if getter._state != "granted":
        getter._line.pop(getter, None)
        raise TimedOut
    getter._buffer.got += 1
    getter._buffer.withheld += 1
    getter._buffer.serve()
    return getter._item


def _give_back_taken(getter: _Getter) -> None:
    getter._buffer.items.appendleft(getter._item)
    getter._buffer.ready.appendleft(getter._since)


ABLATIONS: dict[str, list[tuple[type, str, Any]]] = {
    "a cancelled waiter stays": [(_Waiter, "abandon", _nothing)],
    "an item promised to a cancelled get is lost": [(_Getter, "_give_back", _nothing)],
    "room promised to a cancelled put is lost": [(_Putter, "_give_back", _nothing)],
    "a put wakes nobody": [(Buffer, "add", _add_silently)],
    "a get wakes nobody": [(Buffer, "remove", _remove_silently)],
    "dropping the oldest removes nothing": [(Buffer, "exchange", _only_add)],
    "closing wakes nobody": [(Channel, "close", _close_silently)],
    "a waiting put is carried out early": [
        (_Putter, "end", _put_early),
        (_Putter, "claim", _claim_put),
    ],
    "items are handed over early, and put back in front": [
        (_Getter, "end", _take_early),
        (_Getter, "claim", _claim_taken),
        (_Getter, "_give_back", _give_back_taken),
    ],
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_without_its_safeguards_the_channel_loses_or_overflows(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one safeguard away, and the property is falsified."""
    for owner, name, broken in ABLATIONS[missing]:
        monkeypatch.setattr(owner, name, broken)
    assert falsified(_check_day, DAYS)


# Fairness


class Line(NamedTuple):
    """Producers that come one after another to a full channel, some of whom give up."""

    patience: list[float]
    gaps: list[float]
    seed: int


LINES = st.builds(
    Line,
    patience=st.lists(quarters(40, 1), min_size=1, max_size=8),
    gaps=st.lists(quarters(8, 1), min_size=16, max_size=16),
    seed=SEEDS,
)


def _check_line(case: Line) -> None:
    """Room is given in the order of coming to those who are still there."""
    entered: list[int] = []
    gone: dict[int, float] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel: Channel[int] = Channel(1)
        channel.put(-1)

        async def produce(number: int, patience: float) -> None:
            try:
                await channel.aput(number, patience)
                entered.append(number)
            except ChannelFull:
                gone[number] = loop.time()

        tasks = []
        for number, patience in enumerate(case.patience):
            tasks.append(loop.create_task(produce(number, patience)))
            await let_pass(1 / 8)
        for gap in case.gaps:
            await let_pass(gap)
            try:
                channel.get(timeout=0)
            except TimedOut:
                pass
        await let_pass(1 / 8)
        channel.close()
        await asyncio.wait(tasks)

    run_virtual(main(), seed=case.seed)
    assert entered == sorted(entered)
    assert set(entered) | set(gone) == set(range(len(case.patience)))


@given(LINES)
def test_room_is_given_in_the_order_of_waiting(case: Line) -> None:
    """Who waits longer goes first, whatever others before it do."""
    _check_line(case)


def test_without_its_line_producers_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve the newest first, and the property is falsified."""
    last = lambda line: line.popitem()[0]  # noqa: E731
    monkeypatch.setattr("seawall.models.channel._first", last)
    assert falsified(_check_line, LINES)


# Threads and loops together


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _in_threads(works: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own, begun together; raise what any of them raised."""
    failed: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        start.wait(30)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads)


class Crowd:
    """Producers and consumers of one channel, as threads and as tasks of loops."""

    def __init__(self, capacity: int, when_full: Any) -> None:
        self.dropped: list[Item] = []
        self.channel: Channel[Item] = Channel(
            capacity, when_full=when_full, on_drop=self.dropped.append
        )
        self.taken: list[list[Item]] = []
        self.producing = threading.Semaphore(0)

    def produce(self, number: int) -> None:
        for n in range(ITEMS):
            self.channel.put((number, n))
        self.producing.release()

    def produce_in_loop(self, number: int) -> None:
        async def main() -> None:
            for n in range(ITEMS):
                await self.channel.aput((number, n))

        asyncio.run(main())
        self.producing.release()

    def consume(self) -> None:
        self.taken.append(list(self.channel))

    def consume_in_loop(self) -> None:
        async def main() -> None:
            self.taken.append([item async for item in self.channel])

        asyncio.run(main())

    def close(self, producers: int) -> None:
        for _ in range(producers):
            assert self.producing.acquire(timeout=50)
        self.channel.close()


ITEMS = 200


@pytest.mark.usefixtures("many_switches")
@pytest.mark.parametrize("capacity", [1, 3, 50])
@pytest.mark.parametrize("when_full", ["block", "drop_oldest", "drop_newest"])
def test_threads_and_tasks_of_several_loops_share_a_channel(capacity: int, when_full: Any) -> None:
    """Each item is taken once, or dropped and counted; in order for each producer."""
    crowd = Crowd(capacity, when_full)
    producers = [partial(crowd.produce, 0), partial(crowd.produce, 1)]
    producers += [partial(crowd.produce_in_loop, 2), partial(crowd.produce_in_loop, 3)]
    consumers = [crowd.consume, crowd.consume_in_loop] * 2
    _in_threads([*producers, *consumers, partial(crowd.close, 4)])
    taken = [item for got in crowd.taken for item in got]
    assert sorted(taken + crowd.dropped) == [(p, n) for p in range(4) for n in range(ITEMS)]
    for got in crowd.taken:
        for producer in range(4):
            numbers = [n for p, n in got if p == producer]
            assert numbers == sorted(numbers)
    shown = crowd.channel.snapshot()
    assert (shown["got"], shown["dropped"]) == (len(taken), len(crowd.dropped))
    assert (shown["depth"], crowd.channel._buffer.withheld) == (0, capacity)


class Impatient:
    """A producer and a consumer whose tasks are cancelled again and again, at any moment."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.channel: Channel[int] = Channel(2)
        self.entered: list[int] = []
        self.taken: list[int] = []

    async def put(self) -> None:
        await self.channel.aput(len(self.entered))
        self.entered.append(len(self.entered))

    async def get(self) -> None:
        self.taken.append(await self.channel.aget())

    async def repeat(self, step: Callable[[], Any], rng: Random, over: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while not over():
            task = loop.create_task(step())
            for _ in range(rng.randrange(4)):
                await let_pass(0)
            task.cancel()
            await asyncio.wait([task])

    def produce(self) -> None:
        asyncio.run(self.repeat(self.put, Random(self.seed), lambda: len(self.entered) == ITEMS))
        self.channel.close()

    def consume(self) -> None:
        over = lambda: self.channel._buffer.over  # noqa: E731
        asyncio.run(self.repeat(self.get, Random(self.seed + 1), over))

    def consume_patiently(self) -> None:
        for item in self.channel:
            self.taken.append(item)


@pytest.mark.usefixtures("many_switches")
def test_cancelled_tasks_among_threads_lose_nothing(seed: int) -> None:
    """Tasks that give up at any moment leave the items to the others."""
    crowd = Impatient(seed)
    _in_threads([crowd.produce, crowd.consume, crowd.consume_patiently])
    assert crowd.entered == list(range(ITEMS))
    assert sorted(crowd.taken) == crowd.entered
