"""Channel: what becomes of an item, who waits for how long, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import DeadlineExceeded, Overloaded, TimedOut, deadline, subscribe
from seawall.clock import VirtualClock
from seawall.errors import ChannelClosed, ChannelFull
from seawall.events import CallRejected, SettingsChanged
from seawall.models.channel import Buffer, ChannelTokens
from seawall.resources import Channel
from seawall.resources.channel import _ChannelWaiter as _Waiter
from seawall.shedding import adaptive_lifo, codel
from seawall.testing import run_virtual, virtual_time
from tests.support import let_pass, settled

SOURCE = Path(__file__).resolve().parent.parent / "src"


def _task(awaitable: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(awaitable)


# In and out


def test_items_come_out_in_the_order_in_which_they_came_in() -> None:
    """First in, first out, by either kind of method."""

    async def main() -> None:
        channel: Channel[int] = Channel(4)
        assert [channel.put(1), await channel.aput(2), channel.put(3)] == [True] * 3
        assert [await channel.aget(), channel.get(), channel.get()] == [1, 2, 3]

    run_virtual(main())


def test_a_producer_waits_for_room_and_a_consumer_for_an_item() -> None:
    """Both go on in the very instant at which they can."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel: Channel[str] = Channel(1)
        taken = _task(channel.aget())
        await let_pass(1.0)
        assert channel.snapshot()["waiting_getters"] == 1
        channel.put("first")
        assert await taken == "first"
        channel.put("second")
        third = _task(channel.aput("third"))
        await let_pass(1.0)
        assert channel.snapshot()["waiting_putters"] == 1
        assert channel.get() == "second"
        assert await third is True
        assert (loop.time(), channel.get()) == (2.0, "third")

    run_virtual(main())


def test_waiting_producers_get_room_in_the_order_of_their_coming() -> None:
    """Nobody overtakes, neither among those who wait nor a newcomer."""

    async def main() -> None:
        channel: Channel[int] = Channel(1)
        channel.put(0)
        producers = []
        for n in range(1, 6):
            producers.append(_task(channel.aput(n)))
            await let_pass(1.0)
        got = [channel.get()]
        with pytest.raises(ChannelFull):
            channel.put(99, timeout=0)  # there is room, but it is promised to who waits
        got += [await channel.aget() for _ in range(5)]
        assert got == [0, 1, 2, 3, 4, 5]
        await asyncio.gather(*producers)

    run_virtual(main())


def test_waiting_consumers_get_items_in_the_order_of_their_coming() -> None:
    """Nobody overtakes among consumers either."""

    async def main() -> None:
        channel: Channel[int] = Channel(5)
        consumers = []
        for _ in range(5):
            consumers.append(_task(channel.aget()))
            await let_pass(1.0)
        for n in range(5):
            channel.put(n)
        with pytest.raises(TimedOut):
            channel.get(timeout=0)  # all five are promised
        assert channel.depth == 5
        assert await asyncio.gather(*consumers) == [0, 1, 2, 3, 4]

    run_virtual(main())


# When it is full


def test_reject_refuses_what_there_is_no_room_for() -> None:
    """The error says so, and the refusal is counted."""
    channel: Channel[int] = Channel(1, when_full="reject", name="orders")
    channel.put(1)
    with pytest.raises(ChannelFull, match="'orders': all 1 places are taken") as caught:
        channel.put(2)
    assert caught.value.reason == "channel_full"
    assert channel.snapshot()["rejected"] == 1
    assert channel.get() == 1


def test_drop_newest_keeps_what_is_inside() -> None:
    """The producer learns it, and so does `on_drop`."""
    dropped: list[int] = []
    channel: Channel[int] = Channel(2, when_full="drop_newest", on_drop=dropped.append)
    assert [channel.put(n) for n in range(4)] == [True, True, False, False]
    assert (dropped, channel.drain(timeout=0)) == ([2, 3], [0, 1])


def test_drop_oldest_keeps_what_is_new() -> None:
    """The newest are inside; what went is told."""
    dropped: list[int] = []
    channel: Channel[int] = Channel(2, when_full="drop_oldest", on_drop=dropped.append)
    assert [channel.put(n) for n in range(4)] == [True] * 4
    shown = channel.snapshot()
    assert (shown["put"], shown["got"], shown["dropped"], shown["depth"]) == (4, 0, 2, 2)
    assert (dropped, channel.drain(timeout=0)) == ([0, 1], [2, 3])


def test_drop_oldest_may_drop_what_a_consumer_is_about_to_take() -> None:
    """Who was promised an item gets the next one: what is old is what matters."""

    async def main() -> None:
        dropped: list[int] = []
        channel: Channel[int] = Channel(1, when_full="drop_oldest", on_drop=dropped.append)
        consumer = _task(channel.aget())
        await let_pass(1.0)
        assert [channel.put(1), channel.put(2)] == [True, True]
        assert channel.depth == 1
        assert (await consumer, dropped) == (2, [1])

    run_virtual(main())


def test_an_on_drop_that_fails_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged; the item is dropped all the same."""

    def broken(item: int) -> None:
        raise LookupError(item)

    channel: Channel[int] = Channel(1, when_full="drop_newest", on_drop=broken, name="orders")
    with caplog.at_level(logging.ERROR, "seawall"):
        assert [channel.put(1), channel.put(2)] == [True, False]
    assert "on_drop of channel 'orders' failed" in caplog.text


# Time


def test_waiting_ends_in_time() -> None:
    """`timeout` is exact: `ChannelFull` for who puts, `TimedOut` for who gets."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel: Channel[int] = Channel(1)
        with pytest.raises(TimedOut, match=r"nothing came, waited 1\.5 s") as caught:
            await channel.aget(timeout=1.5)
        assert (loop.time(), caught.value.seconds) == (1.5, 1.5)
        channel.put(1)
        with pytest.raises(ChannelFull, match=r"waited 0\.5 s"):
            await channel.aput(2, timeout=0.5)
        assert loop.time() == 2.0
        shown = channel.snapshot()
        assert (shown["waiting_putters"], shown["waiting_getters"]) == (0, 0)
        assert channel.drain(timeout=0) == [1]

    run_virtual(main())


def test_threads_wait_on_their_clock() -> None:
    """The sync methods block for as long, on virtual time too."""
    with virtual_time() as clock:
        channel: Channel[int] = Channel(1)
        with pytest.raises(TimedOut):
            channel.get(timeout=2.0)
        channel.put(1)
        with pytest.raises(ChannelFull):
            channel.put(2, timeout=3.0)
        assert clock.now() == 5.0


def test_without_time_nobody_waits() -> None:
    """`timeout=0` is for those who must not wait, such as a callback of the loop."""
    clock = VirtualClock()
    channel: Channel[int] = Channel(1, clock=clock)
    with pytest.raises(TimedOut, match="is empty"):
        channel.get(timeout=0)
    channel.put(1, timeout=0)
    with pytest.raises(ChannelFull):
        channel.put(2, timeout=0)
    assert (channel.get(timeout=0), clock.now()) == (1, 0.0)


def test_the_deadline_ends_the_waiting() -> None:
    """With its own error: to try again is of no use."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel: Channel[int] = Channel(1)
        with deadline(1.0), pytest.raises(DeadlineExceeded, match="while waiting"):
            await channel.aget(timeout=9.0)
        channel.put(1)
        with deadline(1.0), pytest.raises(DeadlineExceeded):
            await channel.aput(2)
        assert loop.time() == 2.0
        with deadline(9.0), pytest.raises(ChannelFull):
            await channel.aput(2, timeout=1.0)

    run_virtual(main())


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_bad_timeouts_are_refused_before_anything_happens(timeout: Any) -> None:
    """Nothing is put, taken or closed."""
    channel: Channel[int] = Channel(2)
    channel.put(1)
    for attempt in (lambda: channel.put(2, timeout), channel.get, channel.drain):
        with pytest.raises((TypeError, ValueError), match="timeout="):
            attempt(timeout) if attempt in (channel.get, channel.drain) else attempt()
    assert (channel.depth, channel.closed) == (1, False)


# Demand


def test_with_demand_there_is_room_only_for_what_was_asked_for() -> None:
    """Requests add up, and never let in more than the capacity."""
    channel: Channel[int] = Channel(3, demand=True, when_full="reject")
    with pytest.raises(ChannelFull, match="nothing more is requested"):
        channel.put(0)
    channel.request(1)
    channel.request(1)
    channel.put(1)
    assert channel.snapshot()["requested"] == 1
    channel.put(2)
    with pytest.raises(ChannelFull, match="nothing more is requested"):
        channel.put(3)
    channel.request(5)
    channel.put(3)
    with pytest.raises(ChannelFull, match="all 3 places are taken"):
        channel.put(4)
    assert channel.snapshot()["requested"] == 4
    assert [channel.get() for _ in range(3)] == [1, 2, 3]
    assert [channel.put(n) for n in range(3)] == [True] * 3


def test_a_waiting_producer_goes_on_when_it_is_asked() -> None:
    """Demand travels upstream: the producer waits for the request, not for room."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel: Channel[int] = Channel(8, demand=True)

        async def produce() -> None:
            for n in range(5):
                await channel.aput(n)
                produced.append((n, loop.time()))

        produced: list[tuple[int, float]] = []
        producer = _task(produce())
        await let_pass(1.0)
        channel.request(2)
        await let_pass(1.0)
        assert produced == [(0, 1.0), (1, 1.0)]
        channel.request(3)
        await producer
        assert channel.drain(timeout=0) == [0, 1, 2, 3, 4]

    run_virtual(main())


def test_a_cancelled_put_leaves_the_request_open() -> None:
    """What was asked for is still wanted."""

    async def main() -> None:
        channel: Channel[int] = Channel(1, demand=True)
        putting = _task(channel.aput(1))
        await let_pass(1.0)
        channel.request(1)
        putting.cancel()
        await asyncio.wait([putting])
        assert putting.cancelled()
        assert (channel.depth, channel.snapshot()["requested"]) == (0, 1)
        assert channel.put(2, timeout=0)

    run_virtual(main())


def test_requests_need_a_channel_made_for_them() -> None:
    """Else they would be forgotten."""
    with pytest.raises(TypeError, match="demand=True"):
        Channel(1).request(1)
    with pytest.raises(ValueError, match="n=0"):
        Channel(1, demand=True).request(0)


# The end


def test_after_closing_the_rest_can_be_taken_and_nothing_put() -> None:
    """Iteration ends when all is taken."""
    channel: Channel[int] = Channel(3, name="orders")
    channel.put(1)
    channel.put(2)
    channel.close()
    channel.close()
    with pytest.raises(ChannelClosed, match="'orders' is closed"):
        channel.put(3)
    assert list(channel) == [1, 2]
    with pytest.raises(ChannelClosed):
        channel.get()
    assert channel.snapshot()["closed"] is channel.closed is True


def test_async_iteration_ends_when_all_is_taken() -> None:
    """`async for` waits for items until the channel is closed."""

    async def main() -> list[int]:
        channel: Channel[int] = Channel(2)

        async def produce() -> None:
            for n in range(5):
                await channel.aput(n)
            channel.close()

        producer = _task(produce())
        got = [item async for item in channel]
        await producer
        return got

    assert run_virtual(main()) == [0, 1, 2, 3, 4]


def test_closing_wakes_everybody() -> None:
    """Those who wait to put and those who wait to get learn it at once."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        empty: Channel[int] = Channel(1)
        full: Channel[int] = Channel(1)
        full.put(1)
        tasks = [_task(empty.aget()) for _ in range(3)] + [_task(full.aput(2)) for _ in range(3)]
        await let_pass(1.0)
        empty.close()
        full.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [ChannelClosed] * 6
        assert loop.time() == 1.0
        assert list(full) == [1]

    run_virtual(main())


def test_a_producer_that_was_promised_room_puts_nothing_after_closing() -> None:
    """Closing is final, also for one who was about to go on."""

    async def main() -> None:
        channel: Channel[int] = Channel(1)
        channel.put(1)
        putting = _task(channel.aput(2))
        await let_pass(1.0)
        assert channel.get() == 1
        channel.close()
        with pytest.raises(ChannelClosed):
            await putting
        assert list(channel) == []

    run_virtual(main())


def test_drain_waits_until_all_is_taken() -> None:
    """It returns the instant the last item is out, with nothing left."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel: Channel[int] = Channel(3)

        async def consume() -> None:
            async for _ in channel:
                await let_pass(1.0)

        for n in range(3):
            channel.put(n)
        consumer = _task(consume())
        assert await channel.adrain() == []
        assert loop.time() == 2.0
        await consumer
        assert await channel.adrain() == []

    run_virtual(main())


@pytest.mark.parametrize("by", ["timeout", "deadline"])
def test_drain_gives_back_what_nobody_took_in_time(by: str) -> None:
    """Nothing is lost: what is left is returned, in order."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel: Channel[int] = Channel(3)
        for n in range(3):
            channel.put(n)
        loop.call_later(1.0, channel.get)
        with deadline(2.0 if by == "deadline" else 99.0):
            assert await channel.adrain(timeout=None if by == "deadline" else 2.0) == [1, 2]
        assert loop.time() == 2.0
        assert list(channel) == []

    run_virtual(main())


def test_a_cancelled_drain_has_taken_nothing() -> None:
    """The channel is closed, and its items are still inside."""

    async def main() -> None:
        channel: Channel[int] = Channel(3)
        channel.put(1)
        draining = _task(channel.adrain())
        await let_pass(1.0)
        draining.cancel()
        await asyncio.wait([draining])
        assert draining.cancelled()
        assert list(channel) == [1]

    run_virtual(main())


# Cancelled, closed, forked, collected


def test_a_cancelled_get_has_taken_nothing() -> None:
    """Also if an item was promised in the same instant: it is the next one's, in order."""

    async def main() -> None:
        channel: Channel[int] = Channel(3)
        first, second = _task(channel.aget()), _task(channel.aget())
        await let_pass(1.0)
        for n in range(3):
            channel.put(n)
        first.cancel()
        assert await second == 0
        assert first.cancelled()
        assert channel.drain(timeout=0) == [1, 2]

    run_virtual(main())


def test_a_cancelled_put_has_put_nothing() -> None:
    """Also if room was promised in the same instant: it is the next one's."""

    async def main() -> None:
        channel: Channel[int] = Channel(1)
        channel.put(0)
        first, second = _task(channel.aput(1)), _task(channel.aput(2))
        await let_pass(1.0)
        assert channel.get() == 0
        first.cancel()
        assert await second is True
        assert first.cancelled()
        assert channel.drain(timeout=0) == [2]

    run_virtual(main())


def test_an_interrupted_thread_leaves_the_line() -> None:
    """KeyboardInterrupt while waiting takes nothing with it."""

    class Interrupting(VirtualClock):
        def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
            channel.put(1, timeout=0)  # the item is promised to who is interrupted
            raise KeyboardInterrupt

    channel: Channel[int] = Channel(1, clock=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        channel.get()
    assert channel.get(timeout=0) == 1
    assert channel.snapshot()["waiting_getters"] == 0


def _leave_a_waiter_behind(waiting: Any) -> tuple[asyncio.AbstractEventLoop, Any]:
    """Let a task of a loop wait, and close the loop without ending the task."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    task = loop.create_task(waiting)
    for _ in range(3):
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
    return loop, task


def test_waiters_of_a_closed_loop_swallow_nothing() -> None:
    """What is promised to nobody stays; and stays one, when the dead task is thrown away."""
    channel: Channel[int] = Channel(1)
    getting = channel.aget()
    kept = [_leave_a_waiter_behind(getting)]
    channel.put(1)
    putting = channel.aput(2)
    kept.append(_leave_a_waiter_behind(putting))
    assert channel.get(timeout=0) == 1
    assert channel.put(3, timeout=0)
    getting.close()
    putting.close()
    with pytest.raises(ChannelFull):
        channel.put(4, timeout=0)
    assert (channel.get(timeout=0), channel.depth) == (3, 0)
    with pytest.raises(TimedOut):
        channel.get(timeout=0)
    assert kept


def test_a_waiting_coroutine_may_be_collected_in_the_middle_of_a_change() -> None:
    """The collector runs where it likes; leaving the line waits until the change is done."""

    async def main() -> None:
        channel: Channel[int] = Channel(1)
        getting = channel.aget()
        getting.send(None)
        with channel._mutex:
            channel._buffer.attention = True
            getting.close()
            assert len(channel._buffer.getters) == 1
        settled(channel._mutex)
        assert len(channel._buffer.getters) == 0
        channel.put(1)
        assert channel.get(timeout=0) == 1

    run_virtual(main())


def test_a_child_process_begins_with_an_empty_channel() -> None:
    """What was inside belongs to the parent, and no lock or line of its threads is in the way."""
    script = """
        import os, threading
        from seawall import TimedOut
        from seawall.resources import Channel

        full, empty = Channel(1), Channel(1)
        full.put("the parent's")
        waiting = threading.Thread(target=full.put, args=("later",))
        waiting.start()
        while not full.snapshot()["waiting_putters"]:
            pass
        full._mutex.acquire()
        child = os.fork()
        if child == 0:
            try:
                assert full.depth == 0 and full.put("mine") and full.get() == "mine"
                full.close()
                assert list(full) == []
            except BaseException:
                os._exit(1)
            os._exit(0)
        full._mutex.release()
        assert os.waitpid(child, 0)[1] == 0
        assert [full.get(), full.get()] == ["the parent's", "later"]
        waiting.join()
        print("well")
    """
    lines = "\n".join(line[8:] for line in script.splitlines())
    ran = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", lines],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (ran.returncode, ran.stdout) == (0, "well\n"), ran.stderr


# Races, made to happen


def _wait_beside_an_item() -> float:
    """Return how long a get waits if the item comes between its look and its joining the line."""

    async def main() -> float:
        channel: Channel[int] = Channel(1)
        publish = _Waiter.publish

        def late(waiter: _Waiter, wake: Any) -> None:
            channel.put(1)  # so another thread would, at this very moment
            publish(waiter, wake)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Waiter, "publish", late)
            try:
                await channel.aget(timeout=7.0)
            except TimedOut:
                pass
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_an_item_that_comes_just_before_a_consumer_waits_is_not_overlooked() -> None:
    """Who joins the line looks again, after it has made itself known."""
    assert _wait_beside_an_item() == 0.0


def test_without_the_second_look_the_wake_up_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join without looking again, and the get waits in vain beside an item."""

    def publish(waiter: _Waiter, wake: Any) -> None:
        waiter._wake = wake
        waiter._buffer.attention = True
        waiter._line[waiter] = None

    monkeypatch.setattr(_Waiter, "publish", publish)
    assert _wait_beside_an_item() == 7.0


class _Slow(ChannelTokens[None]):
    """Room that lets others go on just after somebody took it."""

    meanwhile: Any = None

    def popleft(self) -> None:
        super().popleft()
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()


def _close_in_the_middle_of_a_put() -> tuple[str, list[int]]:
    """Return what a consumer sees of a channel closed while a put is under way, and its rest."""
    channel: Channel[int] = Channel(1)
    seen: list[str] = []

    def close() -> None:
        channel.close()
        try:
            channel.get(timeout=0)
        except (ChannelClosed, TimedOut) as error:
            seen.append(error.reason)

    room = channel._buffer.room = _Slow()
    room.append(None)
    room.meanwhile = close
    channel.put(1)
    return seen[0], list(channel)


def test_a_consumer_does_not_leave_while_a_put_is_under_way() -> None:
    """The channel is over when all room is back, not when nothing happens to be inside."""
    assert _close_in_the_middle_of_a_put() == ("timed_out", [1])


def test_without_counting_room_a_late_item_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call it over when it is empty, and the consumer is gone when the item arrives."""
    monkeypatch.setattr(Buffer, "over", property(lambda self: self.closed and not self.items))
    assert _close_in_the_middle_of_a_put() == ("channel_closed", [1])


# What can be seen and changed


def test_the_snapshot_tells_what_is_inside_and_for_how_long() -> None:
    """`oldest_age` is how far consumers are behind."""
    with virtual_time() as clock:
        channel: Channel[int] = Channel(4)
        channel.put(1)
        clock.advance(2.0)
        channel.put(2)
        clock.advance(3.0)
        assert channel.snapshot() == {
            "name": "channel",
            "capacity": 4,
            "depth": 2,
            "oldest_age": 5.0,
            "put": 2,
            "got": 0,
            "dropped": 0,
            "rejected": 0,
            "waiting_putters": 0,
            "waiting_getters": 0,
            "requested": None,
            "closed": False,
        }
        channel.get()
        assert channel.snapshot()["oldest_age"] == 3.0
        channel.get()
        assert channel.snapshot()["oldest_age"] == 0.0


def test_capacity_and_policy_change_at_run_time() -> None:
    """More room lets in who waits; less room drops nothing."""

    async def main() -> None:
        channel: Channel[int] = Channel(1)
        channel.put(0)
        waiting = [_task(channel.aput(n)) for n in (1, 2)]
        await let_pass(1.0)
        channel.update(capacity=3)
        await asyncio.gather(*waiting)
        channel.update(capacity=1, when_full="reject")
        assert channel.depth == 3
        for left in (2, 1):
            channel.get()
            assert channel.depth == left
            with pytest.raises(ChannelFull):
                channel.put(9)
        channel.get()
        assert channel.put(9)
        with pytest.raises(ValueError, match="capacity=0"):
            channel.update(capacity=0, when_full="block")
        assert (channel.capacity, channel.when_full) == (1, "reject")

    run_virtual(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 1.5}, "capacity=1.5"),
        ({"capacity": 1, "when_full": "wait"}, "when_full='wait': write one of 'block'"),
        ({"capacity": 10**7}, "capacity=10000000: write 1000000 or less"),
        ({"capacity": 1, "name": ""}, r"Channel\(name=''\): write a name, such as 'orders'"),
        ({"capacity": 1, "name": 3}, r"Channel\(name=3\): write a name"),
        ({"capacity": 1, "on_drop": let_pass}, "on_drop=.*: pass a plain function"),
        ({"capacity": 1, "demand": 1}, "demand=1"),
        ({"capacity": 1, "on_drop": []}, "on_drop"),
        ({"capacity": 1, "clock": VirtualClock}, "clock="),
    ],
)
def test_settings_are_checked_where_they_are_written(
    arguments: dict[str, Any], message: str
) -> None:
    """The message says what to write instead."""
    with pytest.raises((TypeError, ValueError), match=message):
        Channel(**arguments)


def test_repr_tells_the_settings() -> None:
    """As one would write them."""
    channel: Channel[int] = Channel(3, demand=True, name="orders")
    assert repr(channel) == "Channel(3, when_full='block', demand=True, name='orders')"


def test_the_largest_capacity_is_had_at_once() -> None:
    """Tokens are made by the thousand, not one by one; more of them come when it is raised."""
    channel: Channel[int] = Channel(1_000_000)
    assert len(channel._buffer.room) == 1_000_000
    small: Channel[int] = Channel(1)
    small.update(capacity=1_000_000)
    assert len(small._buffer.room) == 1_000_000


def test_refusals_and_changes_are_told() -> None:
    """Each refusal is an event, is counted, and names the channel; so does a change of settings."""
    heard: list[Any] = []
    stop = subscribe(heard.append, CallRejected, SettingsChanged)

    async def main() -> None:
        channel: Channel[int] = Channel(1, name="orders")
        channel.put(1)
        for timeout, seconds in ((0, 9.0), (1.0, 9.0), (None, 1.0)):
            with (
                deadline(seconds),
                pytest.raises((ChannelFull, DeadlineExceeded)) as refused,
            ):
                await channel.aput(2, timeout)
            assert (refused.value.guard, refused.value.policy) == ("orders", "channel")
        channel.get()
        with deadline(1.0), pytest.raises(DeadlineExceeded) as refused:
            await channel.aget()
        assert (refused.value.guard, refused.value.policy) == ("orders", "channel")
        for timeout in (0, 1.0):
            with pytest.raises(TimedOut) as late:
                await channel.aget(timeout)
            assert late.value.guard == "orders"
        assert channel.snapshot()["rejected"] == 4
        channel.update(when_full="reject")

    try:
        run_virtual(main())
    finally:
        stop()
    *refusals, change = heard
    assert [(event.guard, event.policy, event.reason) for event in refusals] == [
        ("orders", "channel", "channel_full"),
        ("orders", "channel", "channel_full"),
        ("orders", "channel", "deadline_exceeded"),
        ("orders", "channel", "deadline_exceeded"),
    ]
    assert (change.guard, change.policy, change.changes) == (
        "orders",
        "channel",
        {"when_full": "reject"},
    )


def test_who_listens_may_use_the_channel() -> None:
    """Nobody is told anything while the lock is held."""
    channel: Channel[int] = Channel(1, when_full="reject")
    channel.put(1)
    seen: list[tuple[bool, bool]] = []

    def listen(_event: CallRejected) -> None:
        seen.append((channel._mutex._is_owned(), channel._mutex.acquire(blocking=False)))
        channel._mutex.release()

    stop = subscribe(listen, CallRejected)
    with pytest.raises(ChannelFull):
        channel.put(2)
    stop()
    assert seen == [(False, True)]


def test_a_change_of_nothing_is_refused() -> None:
    """It says what can be changed."""
    with pytest.raises(TypeError, match=r"Channel.update\(\): it takes capacity, when_full"):
        Channel(1).update()


# What was promised, and is not fetched


def test_draining_takes_back_what_was_promised_to_a_consumer_that_has_not_come() -> None:
    """It may have been cancelled, and would leave its item behind in a channel that is over."""

    async def main() -> None:
        channel: Channel[str] = Channel(4)
        consumers = [_task(channel.aget()) for _ in range(3)]
        await let_pass(1.0)
        for item in "ab":
            channel.put(item)
        assert channel.drain(timeout=0) == ["a", "b"]
        consumers[0].cancel()
        ended = await asyncio.gather(*consumers, return_exceptions=True)
        assert [type(end) for end in ended] == [
            asyncio.CancelledError,
            ChannelClosed,
            ChannelClosed,
        ]
        assert (channel.depth, channel._buffer.over) == (0, True)
        assert not channel._buffer.promised

    run_virtual(main())


def test_a_promise_that_is_kept_is_forgotten() -> None:
    """Nothing is left of those who came for their item, or went away."""

    async def main() -> None:
        channel: Channel[int] = Channel(4)
        consumers = [_task(channel.aget()) for _ in range(2)]
        await let_pass(1.0)
        channel.put(1)
        channel.put(2)
        assert len(channel._buffer.promised) == 2
        consumers[0].cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        assert (len(channel._buffer.promised), channel.depth) == (0, 1)

    run_virtual(main())


class _Interrupted(ChannelTokens[Any]):
    """Tokens; after one is taken, a finalizer runs."""

    finalizer: Any = None

    def popleft(self) -> Any:
        value = super().popleft()
        finalizer, self.finalizer = self.finalizer, None
        if finalizer is not None:
            finalizer()
        return value


def test_a_finalizer_that_puts_while_somebody_is_served_does_no_harm() -> None:
    """It serves who waited; who was at it looks again, and puts its token back."""

    async def main() -> None:
        channel: Channel[str] = Channel(4)
        ready = channel._buffer.ready = _Interrupted()
        waiting = _task(channel.aget())
        await let_pass(1.0)
        ready.finalizer = lambda: channel.put("from a finalizer")
        channel.put("mine")
        assert await waiting == "mine"
        assert channel.get(timeout=0) == "from a finalizer"

    run_virtual(main())


def test_a_finalizer_that_gets_while_somebody_is_served_does_no_harm() -> None:
    """The same on the side of room."""

    async def main() -> None:
        channel: Channel[int] = Channel(2)
        channel.put(1)
        channel.put(2)
        waiting = _task(channel.aput(3))
        await let_pass(1.0)
        room = channel._buffer.room = _Interrupted()
        room.finalizer = lambda: channel.get(timeout=0)
        channel.get()
        await waiting
        assert (channel.depth, len(channel._buffer.room)) == (1, 1)

    run_virtual(main())


# Items that wait for too long


def _overloaded(**settings: Any) -> tuple[Channel[float], list[float], list[float]]:
    """Put 60 items a second for 20 s, and take 20; return the waits, and when puts were refused."""
    waits: list[float] = []
    refused: list[float] = []

    async def main() -> Channel[float]:
        loop = asyncio.get_running_loop()
        channel: Channel[float] = Channel(5000, **settings)

        async def consume() -> None:
            async for came in channel:
                waits.append(loop.time() - came)
                await let_pass(0.05)

        consumer = _task(consume())
        for _ in range(1200):
            try:
                if not await channel.aput(loop.time()):
                    refused.append(loop.time())
            except Overloaded:
                refused.append(loop.time())
            await let_pass(1 / 60)
        channel.close()
        await consumer
        return channel

    return run_virtual(main()), waits, refused


@pytest.mark.parametrize("when_full", ["block", "reject", "drop_newest", "drop_oldest"])
def test_controlled_delay_keeps_a_channel_at_its_target(when_full: Any) -> None:
    """Newcomers are refused at once, or dropped where the channel drops; what waits is taken."""
    dropped: list[float] = []
    reasons: list[str] = []
    unsubscribe = subscribe(lambda event: reasons.append(event.reason), CallRejected)
    channel, waits, refused = _overloaded(
        when_full=when_full, on_drop=dropped.append, shed=codel(0.25, interval=1.0)
    )
    unsubscribe()
    assert sorted(waits)[len(waits) // 2] <= 2 * 0.25
    assert len(waits) >= 0.9 * 20 * 20
    assert len(waits) + len(refused) == 1200
    shown = channel.snapshot()
    drops = when_full.startswith("drop")
    assert (shown["dropped"], shown["rejected"]) == (
        (len(refused), 0) if drops else (0, len(refused))
    )
    assert len(dropped) == (len(refused) if drops else 0)
    assert reasons == ([] if drops else ["shed_by_queue_time"] * len(refused))


def test_what_waited_for_too_long_in_a_channel_is_dropped() -> None:
    """By adaptive LIFO the timeouts hold; the order of a channel stays as it is."""
    dropped: list[float] = []
    shed = adaptive_lifo(0.25, patience=1.0)
    channel, waits, refused = _overloaded(on_drop=dropped.append, shed=shed)
    assert max(waits[60:]) <= 1.0
    assert not refused
    assert channel.snapshot()["dropped"] == len(dropped) > 600
    assert len(waits) + len(dropped) == 1200
    assert "shed=adaptive_lifo(0.25" in repr(channel)


def test_a_channel_that_keeps_up_refuses_nothing() -> None:
    """A burst that is taken within an interval is taken whole."""
    with virtual_time() as clock:
        channel: Channel[int] = Channel(100, shed=codel(0.05, interval=1.0))
        for _ in range(5):
            assert all(channel.put(number) for number in range(50))
            for number in range(50):
                clock.advance(0.01)
                assert channel.get() == number
            clock.advance(2.0)
        assert channel.snapshot()["dropped"] == channel.snapshot()["rejected"] == 0


def test_what_is_given_back_is_taken_first_and_needs_no_room() -> None:
    """Beyond the capacity nothing else is put in until there is room again."""
    channel: Channel[int] = Channel(2)
    channel.put(1)
    channel.put(2)
    taken = [channel.get(), channel.get()]
    channel.put(3)
    channel.put(4)
    channel.give_back(taken)
    assert channel.depth == 4
    for expected in (1, 2):
        with pytest.raises(ChannelFull):
            channel.put(5, timeout=0)
        assert channel.get() == expected
    with pytest.raises(ChannelFull):
        channel.put(5, timeout=0)
    assert channel.get() == 3
    assert channel.put(5, timeout=0)
    assert (channel.snapshot()["put"], channel.snapshot()["got"]) == (5, 3)


def test_what_is_given_back_wakes_whoever_waits() -> None:
    """Also after the channel was closed: it is not over then."""

    async def main() -> None:
        channel: Channel[int] = Channel(1)
        channel.put(1)
        item = channel.get()
        waiting = asyncio.create_task(channel.aget())
        await let_pass(0.0)
        channel.give_back([item])
        assert await waiting == 1
        channel.close()
        channel.give_back([1])
        assert channel.get() == 1
        with pytest.raises(ChannelClosed):
            channel.get()

    run_virtual(main())


@given(
    capacity=st.integers(1, 3),
    acts=st.lists(st.sampled_from(["put", "get", "give back", "close"]), max_size=40),
)
def test_giving_back_keeps_the_order_and_every_item(capacity: int, acts: list[str]) -> None:
    """Against a list: whatever is done in which order."""
    channel: Channel[int] = Channel(capacity)
    inside: list[int] = []
    taken: list[int] = []
    closed = False
    for number, act in enumerate(acts):
        if act == "put" and not closed and len(inside) < capacity:
            assert channel.put(number, timeout=0)
            inside.append(number)
        elif act == "put":
            with pytest.raises((ChannelFull, ChannelClosed)):
                channel.put(number, timeout=0)
        elif act == "get" and inside:
            taken.append(channel.get(timeout=0))
            assert taken[-1] == inside.pop(0)
        elif act == "give back":
            channel.give_back(taken[-2:])
            inside = taken[-2:] + inside
            del taken[-2:]
        elif act == "close":
            channel.close()
            closed = True
        assert channel.depth == len(inside)
        assert channel.snapshot()["got"] == len(taken)
    assert channel.drain(0) == inside
