"""Traps around caches: what is kept, for whom, and under which key."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import seawall
from seawall import Cache, Fallback, Guard, Retry, Timeout, static
from seawall.backoff import constant
from seawall.clock import VirtualClock
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, virtual_time

INSIDE = {
    "fallback": lambda: [Fallback(static("poor"))],
    "second level": lambda: [Fallback(lambda: int("none"), static("poor"))],
    "around retry": lambda: [Fallback(static("poor")), Retry(on=OSError, backoff=constant(0.1))],
    "in a thread": lambda: [Timeout(5.0, sync="thread"), Fallback(static("poor"))],
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("traced", [False, True])
def test_a_fallbacks_value_is_not_cached(inside: str, traced: bool):  # noqa: FBT001
    """Trap: the answer of a fallback is cached, and served as the real one when all is well."""
    with virtual_time():
        guard = Guard(f"poor {inside} {traced}", Cache(60.0), *INSIDE[inside]())
        steps = fail(ConnectionError, times=3 if inside == "around retry" else 1)
        service = ScriptedService(steps, answer("real"))
        if traced:
            first = guard.attempt(service.call)
            assert (first.value, first.degraded) == ("poor", True)
        else:
            assert guard.call(service.call) == "poor"
        assert guard.call(service.call) == "real"
        assert guard.call(service.call) == "real"


def test_a_stale_answer_is_not_made_fresh():
    """Trap: a stale answer served because of an error is kept as if it had just been fetched."""
    clock = VirtualClock()
    with virtual_time(clock):
        guard = Guard("stale", Cache(10.0, stale_if_error=10.0))
        steps = [answer("old"), fail(ConnectionError, times=2), answer("new")]
        service = ScriptedService(*steps)
        assert guard.call(service.call) == "old"
        clock.advance(10.0)
        assert guard.call(service.call) == "old"
        clock.advance(10.0)
        with pytest.raises(ConnectionError):
            guard.call(service.call)
        assert guard.call(service.call) == "new"


def test_a_nested_guards_fallback_is_its_own_affair():
    """Trap: a fallback used by another guard inside makes this guard's answer look degraded."""
    with virtual_time():
        inner = Guard("inner", Fallback(static("part")))
        outer = Guard("outer", Cache(60.0))
        calls = []

        def whole() -> str:
            calls.append(1)
            return "whole with " + inner.call(ScriptedService(fail(KeyError)).call)

        assert not outer.attempt(whole).degraded
        outer.call(whole)
        assert len(calls) == 1


def test_arguments_by_name_and_by_position_are_told_apart():
    """Trap: a tuple given by position makes the same key as arguments given by name."""
    with virtual_time():

        @Guard("keys", Cache(60.0))
        def echo(*args: object, **kwargs: object) -> object:
            return args, kwargs

        assert echo(1, a=2) == ((1,), {"a": 2})
        assert echo((1,), (("a", 2),)) == (((1,), (("a", 2),)), {})


def test_a_cancelled_leader_fails_no_follower():
    """Trap: the call that others wait for is cancelled, and all of them with it."""

    async def main() -> None:
        guard = Guard("leader", Cache(60.0))
        service = ScriptedService(hang(), answer("fetched"))
        leader = asyncio.create_task(guard.acall(service.acall))
        followers = [asyncio.create_task(guard.acall(service.acall)) for _ in range(5)]
        asyncio.get_running_loop().call_later(1.0, leader.cancel)
        assert await asyncio.gather(*followers) == ["fetched"] * 5
        assert leader.cancelled()
        assert service.calls == 2
        assert not guard.policies[0]._answers._flights

    run_virtual(main())


def test_a_cancelled_follower_fails_no_leader():
    """Trap: somebody who waits is cancelled, and the call that all wait for with it."""

    async def main() -> None:
        guard = Guard("follower", Cache(60.0))
        release = asyncio.Event()

        async def fetch() -> str:
            await release.wait()
            return "fetched"

        tasks = [asyncio.create_task(guard.acall(fetch)) for _ in range(3)]
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, tasks[1].cancel)
        loop.call_later(2.0, release.set)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [results[0], results[2]] == ["fetched"] * 2
        assert tasks[1].cancelled()

    run_virtual(main())


def test_no_hash_of_a_string_leaves_the_process():
    """Trap: hash(str), which differs from process to process, decides what others must agree on."""
    source = Path(seawall.__file__).parent
    for file in source.rglob("*.py"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            uses = line.replace("__hash__(", "").count("hash(")
            # Whether it can be a key at all, what a class says of itself, and a place in memory
            # that nobody from outside can aim at.
            allowed = line.strip() in ("hash(key)", "return hash(self._identity())") or (
                file.name == "meters.py" and "self._shared[hash(" in line
            )
            assert not uses or allowed, f"{file.name}:{number}: {line}"


def test_behaviour_does_not_depend_on_the_hash_seed():
    """Trap: the order of a set or of hashes decides what a guard does."""
    script = (
        "from random import Random\n"
        "from seawall import *\n"
        "from seawall.testing import *\n"
        "with virtual_time() as clock:\n"
        "    g = Guard('g', Retry(on=(KeyError, OSError), attempts=5), Breaker(key=str),"
        " rng=Random(7))\n"
        "    for name in 'abc':\n"
        "        r = g.attempt(ScriptedService(fail(KeyError, times=3), answer(1)).call, name)\n"
        "        print(r, clock.now())\n"
        "    print(g.snapshot(), g.explain())\n"
    )
    path = os.pathsep.join(filter(None, [str(Path(seawall.__file__).parent.parent)]))
    outputs = {
        subprocess.run(  # noqa: S603 - this very interpreter and the script above
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
