from __future__ import annotations

import asyncio
import gc
import math
import operator
import os
import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import pytest

from seawall import (
    Criticality,
    DeadlineExceeded,
    Rejected,
    TimedOut,
    criticality,
    deadline,
    subscribe,
)
from seawall.clock import VirtualClock
from seawall.context import Attempt, attempt_var, idempotency_key, tenant, tier
from seawall.errors import WorkerDied
from seawall.events import WorkerReplaced
from seawall.resources import CpuPool
from seawall.resources.executors import processes
from seawall.testing import run_virtual, virtual_time
from tests import support_processes as there
from tests.support_processes import in_thread, until

ROOT = Path(__file__).resolve().parents[1]
WAIT = 150


@pytest.fixture(scope="module", autouse=True)
def light_start():
    """Let worker processes import what they need, and not the test runner as their main module."""
    with pytest.MonkeyPatch.context() as patch:
        main = sys.modules["__main__"]
        patch.setattr(main, "__spec__", None)
        patch.delattr(main, "__file__", raising=False)
        yield


@pytest.fixture(scope="module")
def pool():
    """Return a pool of two processes."""
    with CpuPool("cpu", workers=2, context=[there.REQUEST]) as pool:
        yield pool


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """Return the path of a named pipe."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


@pytest.fixture
def replaced():
    """Return the list of all `WorkerReplaced` events of the test."""
    events: list[WorkerReplaced] = []
    unsubscribe = subscribe(events.append, WorkerReplaced)
    yield events
    unsubscribe()


def _quiet(pool):
    """Wait until no work, wanted or not, is left."""
    until(lambda: pool.pool.idle)


def _begun(stream):
    """Return the id of the process that `hang` is in."""
    return int(stream.readline())


# --- What travels ---


def test_values_come_back_from_another_process(pool):
    """Positional and keyword arguments go there, the value comes back; for threads and tasks."""
    assert pool.run(math.factorial, 5) == 120
    assert pool.run(int, "ff", base=16) == 255
    assert pool.run(os.getpid) != os.getpid()
    assert run_virtual(pool.arun(operator.add, "a", "b")) == "ab"
    large = b"x" * 3_000_000
    assert pool.run(operator.add, large, b"y") == large + b"y"


def test_errors_come_back_with_the_traceback_they_had_there(pool):
    """The error itself, its notes, and a note that shows where it was raised."""
    with pytest.raises(LookupError, match="nowhere") as raised:
        pool.run(there.fail, "nowhere")
    first, second = raised.value.__notes__
    assert first == "looked everywhere"
    assert second.startswith("seawall: in a worker process of 'cpu':\nTraceback")
    assert "in fail\n    raise error\nLookupError: nowhere\nlooked everywhere" in second
    assert "items.py" not in second


def test_an_error_that_cannot_travel_is_told_by_its_text(pool):
    """An error that cannot be read again becomes a RuntimeError that says what it said."""
    with pytest.raises(RuntimeError) as raised:
        pool.run(there.fail_pickily)
    assert str(raised.value) == "Picky: 1 and 2"
    assert "raise Picky(1, 2)" in raised.value.__notes__[0]


def test_an_exit_in_the_process_reaches_the_caller(pool):
    """SystemExit is the caller's, and the worker lives on."""
    before = pool.run(os.getpid)
    with pytest.raises(SystemExit) as raised:
        pool.run(sys.exit, 3)
    assert raised.value.code == 3
    assert pool.run(os.getpid) == before


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (lambda: 1, (), "cannot be sent to a worker process"),
        (print, (threading.Lock(),), "cannot be sent to a worker process"),
        (print, (there.Unreadable(),), r"could not read print\(.*\(ValueError: not today\)"),
        (there.lock, (), r"the result of tests.support_processes.lock\(\) cannot be sent back"),
        (there.unreadable, (), r"unreadable\(\) cannot be read here \(ValueError: not today\)"),
    ],
    ids=["function", "argument", "unreadable argument", "result", "unreadable result"],
)
def test_what_cannot_be_pickled_fails_alone(pool, function, args, message):
    """A function, argument or result that cannot travel is an error of that call only."""
    before = pool.run(os.getpid)
    with pytest.raises(TypeError, match=message):
        pool.run(function, *args)
    assert pool.run(os.getpid) == before


def test_the_callers_context_goes_along(pool):
    """Seawall's own values and the listed variables do; the next item sees none of them."""
    there.HIDDEN.set("mine")
    token = there.REQUEST.set("r-1")
    number = attempt_var.set(Attempt(2, "outer", None))
    with (
        virtual_time() as clock,
        deadline(3600.0),
        criticality(Criticality.SHEDDABLE),
        tenant("acme"),
        tier("free"),
        idempotency_key("order-1"),
    ):
        clock.advance(600.0)
        seen = run_virtual(pool.arun(there.context), clock=clock)
    attempt_var.reset(number)
    there.REQUEST.reset(token)
    assert 2900.0 < seen.pop("deadline") <= 3000.0  # the process's own clock went on
    assert seen == {
        "criticality": "SHEDDABLE",
        "attempt": 2,
        "idempotency_key": "order-1",
        "tenant": "acme",
        "tier": "free",
        "request": "r-1",
        "hidden": "unset",
    }
    assert pool.run(there.context) == {
        "deadline": None,
        "criticality": "CRITICAL",
        "attempt": 1,
        "idempotency_key": None,
        "tenant": None,
        "tier": None,
        "request": "unset",
        "hidden": "unset",
    }


def test_items_are_described_shortly_and_safely():
    """Long values are cut, broken ones survived, control characters escaped."""

    class Broken:
        def __repr__(self) -> str:
            raise ValueError

    def described(function, *args, **kwargs):
        return str(processes.ProcessCall(function, args, kwargs))

    assert described(math.sqrt, 5) == "math.sqrt(5)"
    bound = partial(partial(int, "ff"), base=10)
    assert described(bound, base=16) == "int('ff', base=16)"
    assert described(int, "x" * 100, base=16).startswith("int('xxx")
    assert len(described(print, *range(1000))) == 200
    assert "Broken instance" in described(print, Broken())
    hostile = type("Hostile", (), {"__repr__": lambda _: "a\nb\x1b[2J"})
    assert described(print, hostile()) == r"print(a\nb\x1b[2J)"


# --- A process that dies ---


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_dead_process_takes_only_its_own_item(pool, fifo, replaced, how):
    """WorkerDied names the item; what runs beside it is not touched; another takes its place."""
    beside, result = in_thread(pool.run, there.wait_for, fifo, "beside")
    until(lambda: pool.pool.in_use == 1)
    before = pool.snapshot()
    if how == "exit":
        with pytest.raises(WorkerDied) as died:
            pool.run(os._exit, 3)
        told, code = "posix._exit(3)", 3
        assert str(died.value) == (
            "executor 'cpu': the worker process died (exit code 3) while it ran posix._exit(3)"
        )
    else:
        with pytest.raises(WorkerDied, match="killed by SIGKILL") as died:
            pool.run(signal.raise_signal, signal.SIGKILL)
        told, code = str(died.value).partition(" while it ran ")[2], -9
    assert [(e.guard, e.item, e.exit_code) for e in replaced] == [("cpu", told, code)]
    after = pool.snapshot()
    assert after["replaced"] == before["replaced"] + 1
    assert after["failed"] == before["failed"] + 1
    assert pool.run(math.factorial, 4) == 24
    Path(fifo).write_text("go on")
    beside.join(WAIT)
    assert result == ["beside"]


def test_a_dead_process_is_replaced_at_once():
    """The next caller does not wait for a process to start."""
    with CpuPool("cpu", workers=1) as pool:
        with pytest.raises(WorkerDied):
            pool.run(os._exit, 3)
        assert len(pool._processes._idle) == 1


def test_a_dead_process_is_noticed_though_its_child_holds_the_pipe(
    fifo, monkeypatch: pytest.MonkeyPatch
):
    """What it has started itself may live on; nobody waits for that."""
    monkeypatch.setattr(processes, "BEAT", 0.01)
    with CpuPool("cpu", workers=1) as pool:
        with pytest.raises(WorkerDied, match="exit code 5"):
            pool.run(there.leave_a_child, fifo)
        Path(fifo).write_text("")  # it waits for that, and goes


def test_an_interrupt_is_for_the_parent(pool):
    """Ctrl-C reaches all processes of a terminal: the workers ignore it."""
    before = pool.run(os.getpid)
    pool.run(signal.raise_signal, signal.SIGINT)
    assert pool.run(os.getpid) == before


def test_a_process_that_died_at_rest_is_replaced_unnoticed(pool, replaced):
    """Its next item goes to another process, and succeeds."""
    _quiet(pool)
    for worker in list(pool._processes._idle):
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.join(WAIT)
    assert pool.run(math.factorial, 3) == 6
    assert {(event.item, event.exit_code) for event in replaced} == {("", -9)}


@pytest.mark.parametrize("ends", ["deadline", "cancellation"])
def test_a_process_is_killed_when_nobody_waits_for_it(pool, fifo, replaced, ends):
    """TimedOut or cancelled for the caller; the core is really free, and a new process is there."""
    _quiet(pool)

    async def main():
        async def call():
            with deadline(5.0):
                await pool.arun(there.hang, fifo)

        task = asyncio.create_task(call())
        loop = asyncio.get_running_loop()
        stream = await loop.run_in_executor(None, open, fifo)
        await loop.run_in_executor(None, _begun, stream)
        if ends == "cancellation":
            task.cancel()
        else:
            loop.clock.advance(5.0)
        await asyncio.wait([task])
        return task, stream

    task, stream = run_virtual(main())
    with stream:
        assert stream.read() == ""  # the process has let go of its end: it is dead
    if ends == "cancellation":
        assert task.cancelled()
    else:
        assert isinstance(task.exception(), TimedOut)
    _quiet(pool)
    assert [(event.exit_code, "hang" in event.item) for event in replaced] == [(-9, True)]
    assert pool.snapshot()["abandoned"] == 0
    assert pool.run(math.factorial, 3) == 6


def test_the_collector_may_give_up_a_call_at_any_moment(pool, fifo):
    """Even in the thread that looks at its process just then, or changes the processes's state."""
    _quiet(pool)
    workers = pool._processes
    item = processes.ProcessCall(there.hang, (fifo,), {})
    busy, result = in_thread(workers.carry_out, item)
    with Path(fifo).open() as stream:
        _begun(stream)
        with item.worker._lock, workers._mutex:
            assert workers.give_up(item)
            assert not item.given_up  # put off until that change is done
        assert stream.read() == ""
    busy.join(WAIT)
    assert isinstance(result[0], WorkerDied)


def test_an_item_that_no_process_was_given_has_not_begun(pool, monkeypatch: pytest.MonkeyPatch):
    """A deadline that passes while a process is made ready is DeadlineExceeded; none is killed."""
    _quiet(pool)
    before = pool.run(os.getpid)
    ready, go_on = threading.Event(), threading.Event()
    really = processes._Worker.is_ready

    def slowly(worker):
        ready.set()
        assert go_on.wait(WAIT)
        return really(worker)

    monkeypatch.setattr(processes._Worker, "is_ready", slowly)

    async def main():
        async def call():
            with deadline(5.0):
                await pool.arun(there.fail, "it began")

        task = asyncio.create_task(call())
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, ready.wait)
        loop.clock.advance(5.0)
        await asyncio.wait([task])
        return task.exception()

    assert isinstance(run_virtual(main()), DeadlineExceeded)
    go_on.set()
    _quiet(pool)
    assert pool.run(os.getpid) == before


def test_expired_work_is_never_sent(pool):
    """With no time left, no process is asked."""
    with virtual_time() as clock, deadline(5.0):
        clock.advance(5.0)
        with pytest.raises(DeadlineExceeded):
            pool.run(there.fail, "it began")


# --- Processes that do not come up ---


def test_processes_that_die_as_they_start_are_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch,
):
    """After three in a row calls are refused with advice, for a pause that doubles each time."""
    clock = VirtualClock()
    pool = CpuPool("poisoned", workers=1, clock=clock)
    started = []
    really = processes._Worker.__init__

    def noted(worker, *args):
        started.append(1)
        really(worker, *args)

    monkeypatch.setattr(processes._Worker, "__init__", noted)
    with monkeypatch.context() as poison:
        poison.setattr(processes, "serve", there.die_at_start)
        with pytest.raises(Rejected, match=r"\(exit code 7, .*if __name__ == ") as refused:
            pool.run(print)
        assert (len(started), refused.value.retry_after) == (3, 0.5)
        with pytest.raises(Rejected, match="die as they start") as refused:
            pool.run(print)
        assert (len(started), refused.value.retry_after) == (3, 0.5)
        clock.advance(0.5)
        with pytest.raises(Rejected) as refused:
            pool.run(print)
        assert (len(started), refused.value.retry_after) == (4, 1.0)
    clock.advance(1.0)
    assert pool.run(math.factorial, 3) == 6
    assert pool._processes._failed_starts == 0
    assert (pool.snapshot()["rejected"], pool.snapshot()["failed"]) == (3, 0)
    pool.close()


def test_a_system_without_processes_to_give_refuses_the_call(monkeypatch: pytest.MonkeyPatch):
    """What the system says is told, as a refusal: the item never began."""

    def none_left(*_):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(processes._Worker, "__init__", none_left)
    with CpuPool("cpu", workers=1) as pool, pytest.raises(Rejected, match="no more processes"):
        pool.run(print)


def test_workers_have_no_workers(pool):
    """An executor inside a worker process says what to do instead."""
    with pytest.raises(RuntimeError, match="call the function itself"):
        pool.run(there.nested)


def test_processes_of_a_fork_server_do_the_same():
    """`start="forkserver"` gives the same answers."""
    with CpuPool("server", workers=1, start="forkserver") as pool:
        assert pool.run(math.factorial, 5) == 120
        with pytest.raises(WorkerDied, match="exit code 4"):
            pool.run(os._exit, 4)
        assert pool.run(math.factorial, 3) == 6


# --- Nothing is left ---


def test_closing_ends_the_processes(fifo):
    """Idle ones go by themselves; one that is busy is killed when its time is over."""
    pool = CpuPool("closed", workers=2)
    busy, result = in_thread(pool.run, there.hang, fifo)
    with Path(fifo).open() as stream:
        pid = _begun(stream)
        idle = pool.run(os.getpid)
        assert idle != pid
        assert not pool.close(0.0)
        assert stream.read() == ""
    busy.join(WAIT)
    assert isinstance(result[0], WorkerDied)
    assert str(result[0]).startswith("executor 'closed' was closed while it ran")
    assert not pool._processes._all
    for process in (pid, idle):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    with pytest.raises(Rejected, match="is closed"):
        pool.run(print)


def test_async_closing_ends_the_processes():
    """`async with` leaves no process behind."""

    async def main():
        async with CpuPool("closed", workers=1) as pool:
            return await pool.arun(os.getpid)

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("ends", ["by itself", "cancelled"])
def test_async_closing_needs_no_thread_of_the_loop(ends, monkeypatch: pytest.MonkeyPatch):
    """A default executor that is shut down does not hold it up; if cancelled, it kills."""
    go_on = threading.Event()
    really = processes.WorkerProcesses.stop

    async def main():
        loop = asyncio.get_running_loop()
        closing = asyncio.Event()

        def slowly(workers, *, kill=False):
            if not kill:
                loop.call_soon_threadsafe(closing.set)
                assert go_on.wait(WAIT)
            really(workers, kill=kill)

        pool = CpuPool("closed", workers=1)
        pid = await pool.arun(os.getpid)
        await loop.shutdown_default_executor()
        if ends == "by itself":
            assert await pool.aclose()
            return pid
        monkeypatch.setattr(processes.WorkerProcesses, "stop", slowly)
        task = asyncio.create_task(pool.aclose())
        await closing.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert pool.pool.state == "closed"
        return pid

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    go_on.set()
    until(lambda: not [t for t in threading.enumerate() if t.name == "seawall-closing"])


def test_async_closing_without_a_thread_to_give_closes_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    """Then the loop's own thread sees to it."""
    from seawall.resources.executors import executors

    def none_left(*_, **__):
        raise RuntimeError("can't start new thread")

    async def main():
        pool = CpuPool("closed", workers=1)
        pid = await pool.arun(os.getpid)
        monkeypatch.setattr(executors, "Thread", none_left)
        assert await pool.aclose()
        return pid

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_executor_that_is_gone_leaves_no_process():
    """Without `close` too: the processes end with the object."""
    pool = CpuPool("dropped", workers=1)
    pid = pool.run(os.getpid)
    _quiet(pool)
    del pool
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _script(text: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - our own text
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *args],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


HANGING = """
    import sys, threading
    from seawall.errors import WorkerDied
    from seawall.resources import CpuPool
    from tests.support_processes import hang
    pool = CpuPool("cpu", workers=2)
    pool.run(abs, 1)
    def ask():
        try:
            pool.run(hang, sys.argv[1])
        except WorkerDied:
            pass  # it may come to that before the thread is stopped
    threading.Thread(target=ask, daemon=True).start()
    open(sys.argv[2]).close()
"""


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_busy_processes_end_with_their_parent(tmp_path: Path, how):
    """Whether the interpreter exits or is killed, no worker is left, and none is waited for."""
    begun, leave = tmp_path / "begun", tmp_path / "leave"
    os.mkfifo(begun)
    os.mkfifo(leave)
    parent = _script(HANGING, str(begun), str(leave))
    with begun.open() as stream:
        _begun(stream)
        if how == "exits":
            leave.write_text("")
        else:
            parent.kill()
        assert stream.read() == ""
    out, err = parent.communicate(timeout=WAIT)
    assert (parent.returncode, out, err) == (0 if how == "exits" else -9, "", "")


FORKED = """
    import os, sys, warnings
    warnings.simplefilter("ignore")  # newer versions warn of any fork beside threads
    from seawall.resources import CpuPool
    pool = CpuPool("cpu", workers=1)
    mine = pool.run(os.getpid)
    child = os.fork()
    if not child:
        assert pool.run(os.getpid) != mine
        assert pool.run(os.getppid) == os.getpid()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.run(os.getpid) == mine
    print("ok", pool.snapshot()["replaced"])
"""


def test_a_forked_child_has_workers_of_its_own():
    """It neither uses nor ends its parent's, though it exits as interpreters do."""
    out, err = _script(FORKED).communicate(timeout=WAIT)
    assert (out, err) == ("ok 0\n", "")


def test_a_child_that_did_not_let_go_would_end_its_parents_workers():
    """Only close the pipes after a fork, and the child's exit costs the parent its worker."""
    ablation = """
    from seawall.resources.executors import processes
    processes._Worker.forget = lambda worker: worker.connection.close()
    """
    out, err = _script(ablation + FORKED).communicate(timeout=WAIT)
    assert out == ""
    assert err.rstrip().endswith("AssertionError")


# --- Many callers at once ---


def test_threads_and_loops_share_the_processes(pool):
    """Everybody gets the answer to his own question."""

    def thread(base):
        return [pool.run(operator.add, base, n) for n in range(20)] == [base + n for n in range(20)]

    def loop(base):
        async def main():
            return [await pool.arun(operator.add, base, n) for n in range(20)]

        return asyncio.run(main()) == [base + n for n in range(20)]

    calls = [in_thread(work, base) for base, work in enumerate((thread, loop, thread, loop))]
    for running, _ in calls:
        running.join(WAIT)
    assert [result for _, result in calls] == [[True]] * 4
