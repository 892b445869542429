from __future__ import annotations

import asyncio
import threading
import traceback
from contextlib import nullcontext

import pytest

from seawall import (
    Breaker,
    Cache,
    DeadlineExceeded,
    Fallback,
    Guard,
    Retry,
    current_deadline,
    deadline,
    static,
)
from seawall.errors import CacheMiss
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow, virtual_time

WAIT = 150


@pytest.fixture
def clock():
    """Return the virtual clock of the guards made in the test."""
    with virtual_time() as clock:
        yield clock


def test_a_fresh_answer_comes_from_memory(clock):
    """Within the ttl one call answers all; at its end another is made."""
    service = ScriptedService(answer(1), answer(2))
    guarded = Guard("vendor", Cache(10.0))(service.call)
    assert [guarded("a"), guarded("a")] == [1, 1]
    clock.advance(9.999)
    assert guarded("a") == 1
    clock.advance(0.001)
    assert guarded("a") == 2
    assert service.calls == 2


def test_answers_are_told_apart_by_arguments():
    """Positional, keyword, and their order: each call has its own answer."""
    guarded = Guard("vendor", Cache(10.0))(lambda *args, **kwargs: (args, kwargs))
    calls = [
        ((1,), {}),
        ((1, 2), {}),
        ((1,), {"a": 2}),
        ((), {"a": 1, "b": 2}),
        (((1,), (("a", 2),)), {}),
    ]
    for args, kwargs in calls * 2:
        assert guarded(*args, **kwargs) == (args, kwargs)
    assert guarded(b=2, a=1) == ((), {"a": 1, "b": 2})


def test_none_is_an_answer_too():
    """A function that returns None is not called again while that is fresh."""
    service = ScriptedService(answer(None))
    guarded = Guard("vendor", Cache(10.0))(service.call)
    assert [guarded(), guarded()] == [None, None]
    assert service.calls == 1


def test_errors_are_not_kept():
    """A failure is raised each time, and the next success is kept."""
    service = ScriptedService(fail(ConnectionError, times=2), answer(1))
    guarded = Guard("vendor", Cache(10.0))(service.call)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            guarded()
    assert [guarded(), guarded()] == [1, 1]
    assert service.calls == 3


def test_a_stale_answer_replaces_an_error(clock):
    """After the ttl a failure is answered from memory, for stale_if_error seconds more."""
    service = ScriptedService(answer("old"), fail(ConnectionError))
    guard = Guard("vendor", Cache(10.0, stale_if_error=60.0))
    call = service.call
    assert guard.attempt(call).level == 0
    clock.advance(69.0)
    result = guard.attempt(call)
    assert (result.value, result.level, result.reason) == ("old", 1, "ConnectionError")
    assert result.degraded
    assert guard.snapshot()["degraded"] == 1
    clock.advance(1.0)
    with pytest.raises(ConnectionError):
        guard.call(call)
    assert service.calls == 3


def test_a_stale_answer_is_refreshed_by_a_success(clock):
    """After the ttl a success replaces the old answer."""
    guarded = Guard("vendor", Cache(10.0, stale_if_error=60.0))(
        ScriptedService(answer(1), answer(2)).call
    )
    guarded()
    clock.advance(10.0)
    assert [guarded(), guarded()] == [2, 2]


def test_exits_are_not_answered_from_memory(clock):
    """KeyboardInterrupt is raised, though a stale answer is there."""
    steps = iter([None, KeyboardInterrupt()])

    def call():
        error = next(steps)
        if error:
            raise error
        return "old"

    guarded = Guard("vendor", Cache(10.0, stale_if_error=60.0))(call)
    guarded()
    clock.advance(10.0)
    with pytest.raises(KeyboardInterrupt):
        guarded()


# --- Single flight ---


def test_tasks_share_one_call():
    """Many tasks for one key make one call; another key makes its own."""

    async def main():
        service = ScriptedService(slow(1.0, "hello"))
        guard = Guard("vendor", Cache(10.0))
        guarded = guard(service.acall)
        keys = ["a"] * 5 + ["b"] * 5
        answers = await asyncio.gather(*(guarded(key) for key in keys))
        return answers, service.calls, guard.snapshot()["policies"][0]

    answers, calls, snapshot = run_virtual(main())
    assert answers == ["hello"] * 10
    assert calls == 2
    assert snapshot == {"policy": "cache", "entries": 2, "hits": 0, "misses": 2, "shared": 8}


class _Blocked:
    """A call that blocks its thread until it is told how to end."""

    def __init__(self):
        self.calls = 0
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.error = None

    def __call__(self):
        self.calls += 1
        self.started.set()
        assert self.go_on.wait(WAIT)
        if self.error:
            raise self.error
        return "hello"


def _followers(cache):
    return sum(len(flight.wakers or ()) for flight in cache._answers._flights.values())


def test_threads_share_one_call():
    """Many threads for one key make one call and get its answer."""
    cache, service, answers = Cache(10.0), _Blocked(), []
    guarded = Guard("vendor", cache)(service)
    threads = [threading.Thread(target=lambda: answers.append(guarded())) for _ in range(5)]
    for thread in threads:
        thread.start()
    while _followers(cache) < 4:
        assert all(thread.is_alive() for thread in threads)
    service.go_on.set()
    for thread in threads:
        thread.join(WAIT)
    assert (answers, service.calls) == (["hello"] * 5, 1)


def test_a_thread_and_a_task_share_one_call():
    """A task waits for a thread's call, on its loop, and gets its answer."""
    cache, service, answers = Cache(10.0, key=lambda: "key"), _Blocked(), []
    guard = Guard("vendor", cache)
    never = ScriptedService(answer("never"))
    leader = threading.Thread(target=lambda: answers.append(guard.call(service)))
    leader.start()
    service.started.wait(WAIT)

    async def main():
        task = asyncio.ensure_future(guard.acall(never.acall))
        while not _followers(cache):
            await ScriptedService(answer()).acall()
        service.go_on.set()
        return await task

    assert asyncio.run(main()) == "hello"
    leader.join(WAIT)
    assert (answers, never.calls) == (["hello"], 0)


def test_a_thread_waits_for_a_task():
    """A thread waits for a task's call, and gets its answer."""
    cache, answers = Cache(10.0, key=lambda: "key"), []
    guard = Guard("vendor", cache)
    never = ScriptedService(answer("never"))

    async def main():
        started, go_on = asyncio.Event(), asyncio.Event()

        async def lead():
            started.set()
            await go_on.wait()
            return "hello"

        task = asyncio.ensure_future(guard.acall(lead))
        await started.wait()
        follower = threading.Thread(target=lambda: answers.append(guard.call(never.call)))
        follower.start()
        while not _followers(cache):
            await ScriptedService(answer()).acall()
        go_on.set()
        await task
        await asyncio.to_thread(follower.join, WAIT)

    asyncio.run(main())
    assert (answers, never.calls) == (["hello"], 0)


def test_when_the_leader_is_cancelled_a_follower_takes_over():
    """Nobody is cancelled with the leader: one follower makes the call, the others wait on."""

    async def main():
        service = ScriptedService(hang(), slow(1.0, "hello"))
        guarded = Guard("vendor", Cache(10.0))(service.acall)
        tasks = [asyncio.ensure_future(guarded()) for _ in range(4)]
        await asyncio.wait(tasks, timeout=1.0)
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        return type(answers[0]), answers[1:], service.calls

    assert run_virtual(main()) == (asyncio.CancelledError, ["hello"] * 3, 2)


def test_a_cancelled_follower_disturbs_nobody():
    """A follower that gives up leaves the leader and the others as they are."""

    async def main():
        cache = Cache(10.0)
        guarded = Guard("vendor", cache)(ScriptedService(slow(5.0, "hello")).acall)
        tasks = [asyncio.ensure_future(guarded()) for _ in range(3)]
        await asyncio.wait(tasks, timeout=1.0)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        waiting = _followers(cache)
        return waiting, await tasks[0], await tasks[2]

    assert run_virtual(main()) == (1, "hello", "hello")


def test_when_the_leader_fails_all_fail_alike():
    """Followers raise the leader's error, and its traceback does not grow with them."""

    async def main():
        error = ConnectionError()

        async def call():
            await ScriptedService(slow(1.0)).acall()
            raise error

        guarded = Guard("vendor", Cache(10.0))(call)
        lengths, same = [], []

        async def follow():
            try:
                await guarded()
            except ConnectionError as caught:
                same.append(caught is error)
                lengths.append(len(traceback.extract_tb(caught.__traceback__)))

        await asyncio.gather(*(follow() for _ in range(20)))
        return lengths, same

    lengths, same = run_virtual(main())
    assert same == [True] * 20
    assert max(lengths[1:]) == min(lengths[1:])


def test_followers_get_the_stale_answer_too():
    """When the leader is answered by a stale value, so are its followers, as degraded."""

    async def main():
        service = ScriptedService(answer("old"), slow(1.0), fail(ConnectionError))
        guard = Guard("vendor", Cache(10.0, stale_if_error=600.0))
        fails = False

        async def call():
            await ScriptedService(slow(1.0)).acall()
            if fails:
                raise ConnectionError
            return await service.acall()

        await guard.acall(call)
        await ScriptedService(slow(20.0)).acall()
        fails = True
        return await asyncio.gather(*(guard.aattempt(call) for _ in range(3)))

    results = run_virtual(main())
    assert [(r.value, r.level, r.reason) for r in results] == [("old", 1, "ConnectionError")] * 3


async def _led_by_one_in_a_hurry(ends, deadlines, *inside, takes=0.25):
    """Let a call with one second lead, and others follow; return their ends, and the calls made.

    `ends(number, left)` answers call `number`, or raises; `left` is what is left of its deadline.
    """
    guard = Guard("vendor", Cache(10.0), *inside)
    made = 0

    async def work():
        nonlocal made
        made += 1
        number = made
        await ScriptedService(slow(takes)).acall()
        held = current_deadline()
        return ends(number, None if held is None else held.remaining())

    async def call(seconds):
        with nullcontext() if seconds is None else deadline(seconds):
            return await guard.aattempt(work)

    calls = [asyncio.ensure_future(call(seconds)) for seconds in (1.0, *deadlines)]
    results = await asyncio.gather(*calls)
    return [result.value if result.ok else result.reason for result in results], made


def _dead(_number, _left):
    raise ConnectionError


def test_when_the_leader_has_no_time_to_retry_a_follower_takes_over():
    """A follower with more time makes its own call, with its own retries, for all others."""

    def ends(number, _left):
        if number < 3:
            raise ConnectionError
        return "hello"

    retry = Retry(on=ConnectionError, backoff=[2.0] * 2)
    led = run_virtual(_led_by_one_in_a_hurry(ends, [None, None, 20.0], retry))
    assert led == (["ConnectionError", "hello", "hello", "hello"], 3)


def test_when_the_leader_is_refused_for_its_deadline_a_follower_takes_over():
    """The leader could not wait for something that its follower can wait for."""

    def ends(_number, left):
        if left is not None:
            raise DeadlineExceeded("a token comes too late", guard="inner", policy="rate_limit")
        return "hello"

    led = run_virtual(_led_by_one_in_a_hurry(ends, [None, None]))
    assert led == (["deadline_exceeded", "hello", "hello"], 2)


def test_when_the_leader_runs_out_of_what_a_client_left_it_a_follower_takes_over():
    """A client that keeps back a reserve gives up a little before the deadline of its caller."""

    def ends(_number, left):
        if left is not None:
            raise TimeoutError
        return "hello"

    led = run_virtual(_led_by_one_in_a_hurry(ends, [None, None], takes=0.95))
    assert led == (["TimeoutError", "hello", "hello"], 2)


def test_a_timeout_that_is_not_the_leaders_deadline_is_for_all():
    """The dependency is slow: it would be slow for the followers too."""

    def ends(_number, _left):
        raise TimeoutError

    led = run_virtual(_led_by_one_in_a_hurry(ends, [None, None]))
    assert led == (["TimeoutError"] * 3, 1)


def test_followers_take_over_once_and_not_one_after_the_other():
    """Where each has a little more time than the last, a dead service is not called by each."""
    retry = Retry(on=ConnectionError, backoff=[60.0] * 2)
    deadlines = [1.02 + number / 50 for number in range(50)]
    led = run_virtual(_led_by_one_in_a_hurry(_dead, deadlines, retry))
    assert led == (["ConnectionError"] * 51, 2)


def test_followers_without_more_time_take_the_leaders_error():
    """A second call would have to end as the first."""
    retry = Retry(on=ConnectionError, backoff=[60.0] * 2)
    led = run_virtual(_led_by_one_in_a_hurry(_dead, [1.0, 0.75], retry))
    assert led == (["ConnectionError"] * 3, 1)


def test_a_follower_waits_no_longer_than_its_deadline():
    """When its time is over while another fetches, it raises; the leader goes on."""

    async def main():
        guard = Guard("vendor", Cache(10.0))
        guarded = guard(ScriptedService(slow(5.0, "hello")).acall)
        leader = asyncio.ensure_future(guarded())
        await asyncio.wait([leader], timeout=1.0)
        with deadline(2.0), pytest.raises(DeadlineExceeded, match="another call") as late:
            await guarded()
        return late.value.policy, await leader

    assert run_virtual(main()) == ("cache", "hello")


def test_what_is_cleared_under_way_is_not_kept():
    """clear() forgets all; a call under way answers its followers but is not kept."""

    async def main():
        cache = Cache(10.0)
        service = ScriptedService(slow(1.0, "old"), answer("new"))
        guarded = Guard("vendor", cache)(service.acall)
        tasks = [asyncio.ensure_future(guarded()) for _ in range(2)]
        await asyncio.wait(tasks, timeout=0.5)
        cache.clear()
        answers = await asyncio.gather(*tasks)
        return answers, len(cache), await guarded()

    assert run_virtual(main()) == (["old", "old"], 0, "new")


# --- With a fallback ---


@pytest.mark.parametrize("order", ["cache first", "fallback first"])
@pytest.mark.parametrize("how", ["call", "attempt", "acall", "aattempt"])
def test_a_fallbacks_answer_is_never_kept(clock, order, how):
    """In any order of Cache and Fallback, and however called, only the real answer is kept."""
    cache, fallback = Cache(10.0), Fallback(static("later"))
    stack = (cache, fallback) if order == "cache first" else (fallback, cache)
    guard = Guard("vendor", *stack)
    service = ScriptedService(fail(ConnectionError), answer("real"))

    async def main():
        function = service.acall
        return [await getattr(guard, how)(function) for _ in range(2)]

    if how.startswith("a") and how != "attempt":
        answers = run_virtual(main(), clock=clock)
    else:
        function = service.call
        answers = [getattr(guard, how)(function) for _ in range(2)]
    values = [getattr(answer, "value", answer) for answer in answers]
    assert values == ["later", "real"]
    assert len(cache) == 1
    if "attempt" in how:
        assert [answer.level for answer in answers] == [1, 0]


def test_the_followers_of_a_degraded_answer_are_degraded():
    """Inside a flight that a fallback answered, everybody's result says so."""

    async def main():
        cache = Cache(10.0)
        guard = Guard("vendor", cache, Fallback(static("later")))

        async def call():
            await ScriptedService(slow(1.0)).acall()
            raise ConnectionError

        results = await asyncio.gather(*(guard.aattempt(call) for _ in range(3)))
        return [(r.value, r.level, r.reason) for r in results], len(cache)

    assert run_virtual(main()) == ([("later", 1, "ConnectionError")] * 3, 0)


def test_stale_is_a_level_of_a_fallback(clock):
    """cache.stale answers from memory when the call fails, and passes on when it has nothing."""
    cache = Cache(10.0, stale_if_error=60.0)
    guard = Guard("vendor", Fallback(cache.stale, static("later")), Breaker(), cache)
    service = ScriptedService(answer("old"), fail(ConnectionError))
    call = service.call
    guard.call(call, "ann")
    guard.policies[1].isolate()
    assert guard.attempt(call, "ann").value == "old"
    assert guard.attempt(call, "ann").level == 1
    assert guard.attempt(call, "bob").level == 2
    clock.advance(70.0)
    assert guard.attempt(call, "ann").value == "later"


def test_nothing_stale_raises_a_miss(clock):
    """stale() raises CacheMiss, which is a LookupError, where it has nothing."""
    cache = Cache(10.0)
    guarded = Guard("vendor", cache)(lambda user: user.upper())
    with pytest.raises(CacheMiss):
        cache.stale("ann")
    guarded("ann")
    assert cache.stale("ann") == "ANN"
    clock.advance(10.0)
    with pytest.raises(LookupError):
        cache.stale("ann")


# --- Bounds and keys ---


def test_the_least_recently_used_goes_first():
    """The map never holds more than max_entries; a hit makes an answer recent."""
    service = ScriptedService(answer("x"))
    cache = Cache(10.0, max_entries=2)
    guarded = Guard("vendor", cache)(service.call)
    for key in ("a", "b", "a", "c"):
        guarded(key)
    assert (service.calls, len(cache)) == (3, 2)
    guarded("a")
    assert service.calls == 3
    guarded("b")
    assert service.calls == 4


def test_a_smaller_bound_holds_from_the_next_answer_on():
    """After update(max_entries=...) the map shrinks to the new bound."""
    cache = Cache(10.0)
    guarded = Guard("vendor", cache)(lambda key: key)
    for key in range(5):
        guarded(key)
    cache.update(max_entries=2)
    guarded(9)
    assert len(cache) == 2


def test_a_longer_ttl_is_for_answers_to_come(clock):
    """update(ttl=...) changes how long the next answers are fresh."""
    cache = Cache(10.0)
    service = ScriptedService(answer(1))
    guarded = Guard("vendor", cache)(service.call)
    cache.update(ttl=100.0)
    guarded()
    clock.advance(99.0)
    guarded()
    assert service.calls == 1


def test_arguments_that_cannot_be_hashed_need_a_key():
    """A list among the arguments raises and says to give key=..."""
    guarded = Guard("vendor", Cache(10.0))(len)
    with pytest.raises(TypeError, match=r"give Cache\(\.\.\., key=\.\.\.\)"):
        guarded([1, 2])
    keyed = Guard("keyed", Cache(10.0, key=tuple))(len)
    assert keyed([1, 2]) == 2


def test_a_key_that_cannot_be_hashed_is_told():
    """A key function that returns a list raises and says that it is the key."""
    guarded = Guard("vendor", Cache(10.0, key=list))(len)
    with pytest.raises(TypeError, match="key"):
        guarded("ab")


def test_a_second_function_is_refused():
    """Without a key the answers of two functions could be mixed up: that raises."""
    guard = Guard("vendor", Cache(10.0))
    guard(len)
    with pytest.raises(TypeError, match="make another Cache for another function, or give key="):
        guard(max)
    with pytest.raises(TypeError, match="make another Cache"):
        guard.call(min, 1)
    guard.call(len, "abc")
    keyed = Guard("keyed", Cache(10.0, key=lambda *args: args))
    keyed(len)
    keyed(max)


def test_a_shared_cache_counts_for_each_guard():
    """One cache in two guards shares answers; hits are each guard's own."""
    cache = Cache(10.0)
    first, second = Guard("first", cache), Guard("second", cache)
    first.call(len, "abc")
    second.call(len, "abc")
    one, two = first.snapshot()["policies"][0], second.snapshot()["policies"][0]
    assert (one["hits"], one["misses"], two["hits"], two["misses"]) == (0, 1, 1, 0)


def test_retries_happen_inside_one_flight():
    """With Retry inside the cache, the answer of the last attempt is kept."""
    guard = Guard("vendor", Cache(10.0), Retry(on=ConnectionError, backoff=0.0))
    service = ScriptedService(fail(ConnectionError, times=2), answer("hello"))
    guarded = guard(service.call)
    assert [guarded(), guarded()] == ["hello", "hello"]
    assert service.calls == 3
