"""What must hold of worker processes, with fake ones: thousands die, and none costs a start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import loads
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall import BulkheadFull, subscribe
from seawall.errors import WorkerDied
from seawall.events import WorkerReplaced
from seawall.resources import CpuPool
from seawall.resources.executors import processes
from seawall.resources.executors.messages import answer
from tests import support_processes as there
from tests.support import falsified

WAIT = 150


class _FakeWorker:
    """Does items in the thread that asks, as a process would; and dies as one does."""

    live: set[_FakeWorker] = set()  # noqa: RUF012 - all there are
    most = 0

    def __init__(self, *_: Any) -> None:
        self.connection = self
        self.booted = False
        self.dead = threading.Event()
        self.begun = False
        _FakeWorker.live.add(self)
        _FakeWorker.most = max(_FakeWorker.most, len(_FakeWorker.live))

    def is_ready(self) -> bool:
        self.booted = True
        return not self.dead.is_set()

    def send_bytes(self, message: Any) -> None:
        if self.dead.is_set():
            raise BrokenPipeError
        self.message = bytes(message)

    def receive(self) -> Any:
        function = loads(self.message)[0]  # noqa: S301 - packed a moment ago
        if function is there.die:
            self.dead.set()
        elif function is there.last:
            _FakeWorker.last_began.release()
            assert self.dead.wait(WAIT)
        if self.dead.is_set():
            raise EOFError
        return bytes(answer(self.message))

    last_began = threading.Semaphore(0)

    def kill(self) -> None:
        self.dead.set()

    def reap(self) -> int:
        self.dead.set()
        _FakeWorker.live.discard(self)
        return -9

    def end(self) -> int:
        return self.reap()

    def close(self) -> None:
        self.dead.set()


@contextmanager
def _fakes(worker: type = _FakeWorker) -> Iterator[list[WorkerReplaced]]:
    events: list[WorkerReplaced] = []
    unsubscribe = subscribe(events.append, WorkerReplaced)
    _FakeWorker.live, _FakeWorker.most = set(), 0
    _FakeWorker.last_began = threading.Semaphore(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "_Worker", worker)
            yield events
    finally:
        unsubscribe()


KINDS = {"echo": there.echo, "fail": there.fail, "die": there.die}


def _outcome(pool: CpuPool, kind: str, number: int) -> Any:
    try:
        return pool.run(KINDS[kind], number)
    except (LookupError, WorkerDied) as error:
        return error


def _check_deaths(programs: list[list[str]], worker: type = _FakeWorker) -> None:
    """Let each thread ask one thing after another; each gets what belongs to its own item."""
    results: dict[int, tuple[str, Any]] = {}
    with _fakes(worker) as events:
        pool = CpuPool("cpu", workers=2, max_queue=len(programs))

        def ask(base: int, program: list[str]) -> None:
            for number, kind in enumerate(program):
                results[base + number] = kind, _outcome(pool, kind, base + number)

        threads = [
            threading.Thread(target=ask, args=(100 * i + 100, program), daemon=True)
            for i, program in enumerate(programs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        pool.close(WAIT)
    assert len(results) == sum(map(len, programs))
    for number, (kind, result) in results.items():
        if kind == "echo":
            assert result == number
        elif kind == "fail":
            assert isinstance(result, LookupError)
            assert result.args == (number,)
        else:
            assert isinstance(result, WorkerDied)
            assert f"die({number})" in str(result)
    died = sorted(number for number, (kind, _) in results.items() if kind == "die")
    told = sorted(int(event.item.partition("(")[2][:-1]) for event in events)
    assert told == died
    assert pool.snapshot()["replaced"] == len(died)
    assert _FakeWorker.most <= 2
    assert not _FakeWorker.live


PROGRAMS = st.lists(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5), min_size=1, max_size=4
)


@given(PROGRAMS)
def test_a_death_is_the_end_of_its_own_item_only(programs):
    """Values, errors and deaths each reach their own caller; each death is told once."""
    _check_deaths(programs)


def test_a_dead_process_in_use_would_cost_others_their_items(monkeypatch: pytest.MonkeyPatch):
    """Keep a dead process as if nothing had happened, and the property is falsified."""

    class Undying(_FakeWorker):
        def is_ready(self) -> bool:
            return True

    def keep(workers: processes.WorkerProcesses, worker: Any, item: Any) -> WorkerDied:
        workers._put_back(worker)
        return WorkerDied(str(item))

    monkeypatch.setattr(processes.WorkerProcesses, "_lost", keep)
    assert falsified(lambda programs: _check_deaths(programs, Undying), PROGRAMS)


def _check_given_up(case: tuple[int, list[bool]], drain: float = WAIT) -> None:
    """Give up some of the calls that would last for ever; their processes end, others' do not."""
    workers, cancelled = case
    with _fakes() as events:
        pool = CpuPool("cpu", workers=workers, max_queue=0)

        async def main() -> list[Any]:
            loop = asyncio.get_running_loop()
            tasks = [asyncio.create_task(pool.arun(there.last, n)) for n in range(len(cancelled))]
            for _ in range(min(workers, len(cancelled))):
                await loop.run_in_executor(None, _FakeWorker.last_began.acquire)
            for task, cancel in zip(tasks, cancelled, strict=True):
                if cancel:
                    task.cancel()
            given_up = [task for task, cancel in zip(tasks, cancelled, strict=True) if cancel]
            if given_up:
                await asyncio.wait(given_up)
            running = sum(not cancel for cancel in cancelled[:workers])
            while pool.snapshot()["in_flight"] > running and loop.time() < until:
                await loop.run_in_executor(None, lambda: None)
            stopped = pool.snapshot()["in_flight"] == running
            await pool.aclose(0.0)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert stopped, "a process runs on though nobody waits for it"
            return results

        loop = asyncio.new_event_loop()
        until = loop.time() + drain
        try:
            results = loop.run_until_complete(main())
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
    for number, (result, cancel) in enumerate(zip(results, cancelled, strict=True)):
        if number >= workers:
            assert isinstance(result, BulkheadFull)
        elif cancel:
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert isinstance(result, WorkerDied)
            assert "was closed" in str(result)
    assert len(events) == sum(cancelled[:workers])


GIVEN_UP = st.tuples(st.integers(1, 3), st.lists(st.booleans(), min_size=1, max_size=4))


@given(GIVEN_UP)
@settings(max_examples=25)
def test_a_call_that_is_given_up_stops_its_process(case):
    """Whoever is cancelled: his process is stopped and replaced, and nobody else's."""
    _check_given_up(case)


def test_without_the_kill_a_core_would_stay_taken(monkeypatch: pytest.MonkeyPatch):
    """Give up on an item without stopping its process, and the property is falsified."""

    def only_note(item: Any) -> None:
        item.given_up = True

    monkeypatch.setattr(processes, "_stop", only_note)
    assert falsified(lambda case: _check_given_up(case, drain=0.05), GIVEN_UP)
