"""Retries of guards inside guards: they add up, and never multiply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Cache, Fallback, Guard, Hedge, Retry, ThreadBulkhead
from seawall.clock import VirtualClock
from seawall.context import current_attempt
from seawall.policies.retry import policy as retry_module
from seawall.testing import ScriptedService, answer, fail, run_virtual, virtual_time
from seawall.web.edge.inbound import Inbound
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from tests.support import falsified, let_pass, new_guard, receiving
from tests.web.support import http_scope

ATTEMPTS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


class Broken(Exception):
    """What is retried here."""


def retrying(attempts: int = 3) -> Guard:
    """Return a guard that makes so many attempts."""
    return new_guard(Retry(on=Broken, attempts=attempts, backoff=0.1))


def stopped(guard: Guard) -> dict[str, int]:
    """Return why the guard's retries stopped, and how often."""
    return next(p for p in guard.snapshot()["policies"] if p["policy"] == "retry")["stopped"]


def nest(guards: list[Guard], function: Callable[[], Any]) -> Callable[[], Any]:
    """Return `function` with the guards around it, the first outermost, each by `call`."""
    for guard in reversed(guards):

        def function(guard: Guard = guard, inside: Callable[[], Any] = function) -> Any:
            return guard.call(inside)

    return function


def calls_through(attempts: list[int]) -> int:
    """Return how often nested guards with these attempts call what always fails."""
    with virtual_time():
        service = ScriptedService(fail(Broken))
        guards = [retrying(number) for number in attempts]
        with pytest.raises(Broken):
            nest(guards, service.call)()
        for guard in guards:
            guard.close()
        return service.calls


def adds_up(attempts: list[int]) -> None:
    """Demand that the retries of all levels are added, not multiplied."""
    assert calls_through(attempts) == 1 + sum(number - 1 for number in attempts)


def test_three_nested_guards_of_three_attempts_make_seven_calls_not_27() -> None:
    """The inner guards retry in the first attempt of the outer ones, and not in their retries."""
    assert calls_through([3, 3, 3]) == 7


@given(ATTEMPTS)
def test_nested_retries_add_up(attempts: list[int]) -> None:
    """Of guards with a, b and c attempts at most a + b + c - 2 calls come."""
    adds_up(attempts)


def test_nested_retries_add_up_only_by_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it they multiply."""
    monkeypatch.setattr(retry_module, "retried_above", lambda _held: None)
    assert falsified(adds_up, ATTEMPTS)
    assert calls_through([3, 3, 3]) == 27


def test_an_inner_guard_says_why_it_does_not_retry() -> None:
    """The cause is counted, and the error says which guard retries in its place."""
    with virtual_time():
        outer, inner = retrying(2), retrying(3)
        with pytest.raises(Broken) as caught:
            outer.call(inner.call, ScriptedService(fail(Broken)).call)
    assert stopped(inner) == {"attempts": 1, "retried above": 1}
    note = f"seawall: not retried: guard {outer.name!r} around it is retrying"
    assert note in caught.value.__notes__


def test_explain_names_guards_that_were_seen_to_retry_around_each_other() -> None:
    """Both are told: the inner guard of the outer one, and the outer of the inner."""
    with virtual_time():
        outer, inner = retrying(), retrying()
        assert "retries too" not in outer.explain() + inner.explain()
        outer.attempt(inner.call, ScriptedService(fail(Broken)).call)
    assert f"around it guard {outer.name!r} retries too" in inner.explain()
    assert f"inside it guard {inner.name!r} retries too" in outer.explain()


def _nested_calls(kind: str, outer: Guard, inner: Guard) -> None:
    """Call `inner` inside `outer` once; nothing is retried."""
    one = ScriptedService(answer(1))
    guarded = inner(one.call)

    @outer
    @inner
    async def awaited() -> None:
        await one.acall()

    if kind == "sync":
        outer.call(inner.call, one.call)
    elif kind == "decorated":
        outer(partial(guarded))()
    elif kind == "async":
        run_virtual(awaited())
    else:
        outer.attempt(inner.attempt, one.call)


@pytest.mark.parametrize("kind", ["sync", "decorated", "async", "attempt"])
def test_explain_knows_of_nested_retries_before_anything_is_retried(kind: str) -> None:
    """One call of the inner guard inside the outer one is enough."""
    with virtual_time():
        outer, inner = retrying(), retrying()
        _nested_calls(kind, outer, inner)
    assert f"around it guard {outer.name!r} retries too" in inner.explain()
    assert f"inside it guard {inner.name!r} retries too" in outer.explain()


def test_a_call_that_fails_knows_the_guards_around_it() -> None:
    """Also where the outer guard does not retry that error, and so never begins to retry."""
    with virtual_time():
        outer = new_guard(Retry(on=Broken, backoff=0))
        inner = new_guard(Retry(on=KeyError, attempts=2, backoff=0))
        outer.attempt(inner.call, ScriptedService(fail(KeyError, times=None)).call)
    assert f"around it guard {outer.name!r} retries too" in inner.explain()


def test_a_nested_call_is_seen_later_than_the_first_calls_of_a_guard() -> None:
    """Calls are looked at four times a second, not only at the beginning."""
    with virtual_time() as clock:
        outer, inner = retrying(), retrying()
        for _ in range(5):
            inner.call(int)
        assert "retries too" not in inner.explain()
        clock.advance(1.0)
        outer.call(inner.call, int)
    assert f"around it guard {outer.name!r} retries too" in inner.explain()


def test_guards_side_by_side_are_not_nested() -> None:
    """Nor are those of which only one retries."""
    with virtual_time():
        one, other, timed = retrying(), retrying(), new_guard(Breaker(consecutive=9))
        one.call(int)
        other.call(int)
        timed.call(one.call, int)
        one.call(timed.call, int)
    assert "retries too" not in one.explain() + other.explain() + timed.explain()


def test_the_names_of_outer_guards_are_bounded() -> None:
    """A guard inside a thousand others remembers a few of them."""
    with virtual_time():
        inner = retrying()
        for _ in range(20):
            retrying(2).attempt(inner.call, ScriptedService(fail(Broken)).call)
    (bound,) = inner.bounds
    assert len(bound.retried_by) == retry_module.MOST_OUTER_GUARDS


def test_two_retries_in_one_guard_follow_the_same_rule() -> None:
    """The inner one does not retry while the outer one does."""
    with virtual_time():
        stack = [Retry(on=Broken, attempts=3, backoff=0.1) for _ in range(3)]
        service = ScriptedService(fail(Broken))
        new_guard(*stack).attempt(service.call)
    assert service.calls == 7


async def in_a_task(call: Callable[[], Any]) -> None:
    """Wait for `call` in a task of its own."""
    await asyncio.create_task(call())


async def in_a_group(call: Callable[[], Any]) -> None:
    """Wait for `call` in a task group, beside another one."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(call())
            group.create_task(let_pass(0.001))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def in_gather(call: Callable[[], Any]) -> None:
    """Wait for `call` in `gather`."""
    await asyncio.gather(call(), let_pass(0.001))


@pytest.mark.parametrize("child", [in_a_task, in_a_group, in_gather])
def test_the_rule_reaches_child_tasks(child: Callable[[Callable[[], Any]], Any]) -> None:
    """A task that is started in a retry is a part of it."""
    service = ScriptedService(fail(Broken))

    async def main() -> None:
        outer, inner = retrying(), retrying()

        async def call() -> None:
            await inner.acall(service.acall)

        with pytest.raises(Broken):
            await outer.acall(child, call)

    run_virtual(main())
    assert service.calls == 5


def test_the_rule_reaches_worker_threads() -> None:
    """A guard that is called in a thread pool follows the rule there."""
    seen: list[int] = []

    def fails() -> None:
        seen.append(current_attempt())
        raise Broken

    inner = retrying(3)

    def work() -> None:
        inner.call(fails)

    outer = new_guard(Retry(on=Broken, attempts=3, backoff=0.0), ThreadBulkhead(1))
    with pytest.raises(Broken):
        outer.call(work)
    assert seen == [1, 2, 3, 2, 3]


def test_the_rule_reaches_hedged_copies() -> None:
    """All copies of a retry are parts of it."""
    service = ScriptedService(fail(Broken))

    async def main() -> None:
        inner = retrying()
        outer = new_guard(Retry(on=Broken, attempts=3, backoff=0.1), Hedge(delay=5.0))
        with pytest.raises(Broken):
            await outer.acall(inner.acall, service.acall)

    run_virtual(main())
    assert service.calls == 5


def test_what_a_call_left_running_retries_again_when_the_call_is_over() -> None:
    """A background task started in a retry is a part of it until its end, and no longer."""
    service = ScriptedService(fail(Broken))
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        outer, inner = retrying(2), retrying(3)
        over = asyncio.Event()

        async def background() -> None:
            await over.wait()
            await inner.acall(service.acall)

        async def work() -> None:
            if current_attempt() == 1:
                raise Broken
            tasks.append(asyncio.create_task(background()))

        await outer.acall(work)
        over.set()
        with pytest.raises(Broken):
            await tasks[0]

    run_virtual(main())
    assert service.calls == 3


def test_calls_after_a_retried_call_are_retried() -> None:
    """Nothing of a call stays in the context of its caller."""
    with virtual_time():
        outer, inner = retrying(2), retrying(3)
        outer.attempt(inner.call, ScriptedService(fail(Broken)).call)
        service = ScriptedService(fail(Broken))
        inner.attempt(service.call)
    assert service.calls == 3


def test_a_substitute_may_retry() -> None:
    """A fallback is no attempt of the guard that has failed."""
    with virtual_time():
        backup, spare = retrying(3), ScriptedService(fail(Broken, times=2), answer("spare"))
        guard = new_guard(
            Fallback(lambda: backup.call(spare.call)), Retry(on=Broken, attempts=3, backoff=0.1)
        )
        service = ScriptedService(fail(Broken))
        assert guard.call(service.call) == "spare"
    assert (service.calls, spare.calls) == (3, 3)


def test_a_substitute_inside_a_retry_is_a_part_of_it() -> None:
    """What an outer guard retries is not retried by the fallback of an inner one either."""
    with virtual_time():
        backup, spare = retrying(3), ScriptedService(fail(Broken))
        inner = new_guard(
            Fallback(lambda: backup.call(spare.call)), Retry(on=Broken, attempts=1, backoff=0.1)
        )
        retrying(2).attempt(inner.call, ScriptedService(fail(Broken)).call)
    assert spare.calls == 3 + 1


def test_a_stream_keeps_its_attempt_to_its_end() -> None:
    """What a generator calls after its first item is a part of the same attempt."""
    service = ScriptedService(fail(Broken))
    with virtual_time():
        inner = retrying(3)

        @new_guard(Retry(on=Broken, attempts=2, backoff=0.1))
        def items() -> Iterator[int]:
            if current_attempt() == 1:
                raise Broken
            yield 1
            inner.attempt(service.call)
            yield 2

        assert list(items()) == [1, 2]
        assert service.calls == 1
        inner.attempt(service.call)
    assert service.calls == 1 + 3


def test_a_guard_does_not_retry_for_a_request_that_is_a_retry() -> None:
    """Whatever it guards: the rule between services is the rule within one."""
    with virtual_time():
        for received, calls in ((0, 3), (1, 3), (2, 1), (99, 1)):
            service = ScriptedService(fail(Broken))
            with receiving(received):
                retrying(3).attempt(service.call)
            assert service.calls == calls


def test_what_a_handler_left_running_retries_when_its_request_is_over() -> None:
    """No header of a stranger's keeps a background task from retrying for ever."""
    service = ScriptedService(fail(Broken))

    async def main() -> None:
        guard, over = retrying(3), asyncio.Event()
        inbound = Inbound()
        incoming = Incoming(http_scope(headers=[("Seawall-Attempt", "2")]), Trust())

        async def background() -> None:
            await over.wait()
            await guard.aattempt(service.acall)

        tokens = inbound.read(incoming, VirtualClock())
        task = asyncio.create_task(background())
        inbound.undo(incoming, tokens)
        over.set()
        await task

    run_virtual(main())
    assert service.calls == 3


def test_the_rule_holds_for_blocks_that_are_attempted() -> None:
    """A guard inside a block of `attempts()` does not retry while the loop does."""
    service = ScriptedService(fail(Broken))
    with virtual_time():
        outer, inner = retrying(3), retrying(3)

        def block() -> None:
            for attempt in outer.attempts():
                with attempt:
                    inner.call(service.call)

        with pytest.raises(Broken):
            block()
        assert service.calls == 5
        inner.attempt(service.call)
    assert service.calls == 5 + 3


def test_a_fallback_inside_a_retry_does_not_multiply():
    """A level that asks another guard is part of the attempt that the retry around it makes."""
    calls = 0

    def replica() -> None:
        nonlocal calls
        calls += 1
        raise ConnectionError

    def primary() -> None:
        raise ConnectionError

    again = {"on": ConnectionError, "attempts": 3, "backoff": 0.0}
    other = Guard("replica", Retry(**again))
    guard = Guard("main", Retry(**again), Fallback(lambda: other.call(replica), on=OSError))
    with pytest.raises(ConnectionError):
        guard.call(primary)
    assert calls == 5


def test_who_waits_for_a_call_that_may_not_retry_tries_itself():
    """A follower of a shared call is not held back by the retries around its leader."""

    async def main() -> tuple[object, int]:
        calls = 0

        async def source(key: int) -> int:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0.1)  # noqa: TID251 - virtual
            if calls < 3:
                raise ConnectionError
            return key

        cached = Guard("cached", Cache(10.0), Retry(on=ConnectionError, attempts=2, backoff=0.0))
        outer = Guard("outer", Retry(on=ValueError, attempts=2, backoff=0.0))
        begun: list[int] = []

        async def second_attempt(key: int) -> int:
            begun.append(key)
            if len(begun) == 1:
                raise ValueError
            return await cached.acall(source, key)

        leader = asyncio.create_task(outer.acall(second_attempt, 1))
        await asyncio.sleep(0.05)  # noqa: TID251 - virtual
        follower = await cached.acall(source, 1)
        with pytest.raises(ConnectionError):
            await leader
        return follower, calls

    assert run_virtual(main()) == (1, 3)
