"""`seawall worker` and `run_sync`: real processes that are told to stop."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from seawall import RedisStore
from seawall.cli import main
from seawall.durable import DeferredCalls, Outbox, migrate
from seawall.redis import PriorityQueue
from seawall.runtime.stop_signals import STOP_SIGNALS
from tests.cli import worker_app
from tests.redis.support import Server, eventually

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["jobs", "outbox", "later", "queue", "pipeline"]
MANY = 40
ENDED_WITHIN = 60.0
"""Seconds, on a busy machine."""
signals = pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)


class Work:
    """What is to be done, and what was: kept where all processes of a test find it."""

    def __init__(self, folder: Path, redis_url: Callable[[], str]) -> None:
        self._folder = folder
        self._redis_url = redis_url
        self.environment = {"NOTES": str(folder / "notes"), "WORK": str(folder)}

    def put(self, kind: str) -> None:
        """Have `MANY` things to do."""
        if kind == "queue":
            self.environment |= {"WORK": self._redis_url(), "PREFIX": token_hex(4)}
        os.environ.update(self.environment)
        numbers = range(MANY)
        if kind == "pipeline":
            (self._folder / "numbers").write_text("".join(f"{number}\n" for number in numbers))
            return
        if kind == "queue":
            prefix = self.environment["PREFIX"]
            with RedisStore(self.environment["WORK"], prefix=prefix, timeout=5.0) as store:
                queue = PriorityQueue(store, "work", keep=2 * worker_app.LEASE)
                for number in numbers:
                    queue.push(number)
            return
        worker_app.database.cache_clear()
        database = worker_app.database()
        migrate(database)
        with database.transaction() as connection:
            for number in numbers:
                if kind in ("jobs", "several"):
                    worker_app.jobs_of(database).submit(connection, "any", number, scope="acme")
                if kind in ("outbox", "several"):
                    Outbox(database).add(connection, "order", str(number), "made", None)
        if kind in ("later", "several"):
            later = DeferredCalls(database, "later", delay=0.0)
            for number in numbers:
                later.store(number)

    def noted(self, what: str) -> Counter[str]:
        """Return what was begun, or done, and how often."""
        notes = self._folder / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return Counter(line.split()[1] for line in lines if line.startswith(what))

    @contextmanager
    def process(self, *arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
        """Run a Python process; it is gone at the end, also where a test fails."""
        path = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(  # noqa: S603 - our own programs
            [sys.executable, *arguments],
            env=os.environ | self.environment | path | more,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Return a world of its own; what it puts into the environment is gone afterwards."""
    for name in ("NOTES", "WORK", "PREFIX", "STUCK"):
        monkeypatch.setenv(name, "")  # put back at the end
    monkeypatch.delenv("STUCK")
    servers: list[Server] = []

    def redis_url() -> str:
        servers.append(Server())
        return servers[-1].url

    yield Work(tmp_path, redis_url)
    worker_app.database.cache_clear()
    for server in servers:
        server.close()


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send it a signal; it has to end well. Return what it wrote."""
    process.send_signal(number)
    _, wrote = process.communicate(timeout=ENDED_WITHIN)
    assert process.returncode == 0, wrote
    assert "Traceback" not in wrote, wrote
    return wrote


def stops_under_load(work: Work, number: signal.Signals, copies: int, *arguments: str) -> None:
    """Stop a process in the midst of its work; another one does what is left, all of it."""
    everything = {str(one): copies for one in range(MANY)}
    with work.process(*arguments, STUCK="yes") as process:
        eventually(lambda: len(work.noted("done")) >= 5, ENDED_WITHIN)
        eventually(
            lambda: all(work.noted("begun")[one] >= copies for one in worker_app.STUCK),
            ENDED_WITHIN,
        )
        end(process, number)
    assert not worker_app.STUCK & set(work.noted("done"))
    with work.process(*arguments) as process:
        eventually(lambda: work.noted("done") >= Counter(everything), ENDED_WITHIN)
        end(process, number)


@signals
@pytest.mark.parametrize("kind", KINDS)
def test_run_sync_loses_nothing_when_a_signal_stops_it(
    kind: str, number: signal.Signals, work: Work
):
    """It exits with 0; what it could not finish is given back, and another process does it."""
    work.put(kind)
    stops_under_load(work, number, 1, "-m", "tests.cli.worker_app", kind, "0.3")


@signals
@pytest.mark.parametrize(("kind", "copies"), [("queue", 1), ("several", 3), ("pipeline", 1)])
def test_the_command_loses_nothing_when_a_signal_stops_it(
    kind: str, copies: int, number: signal.Signals, work: Work
):
    """The same for workers that functions make, several at once; their store is closed."""
    work.put(kind)
    target = f"tests.cli.worker_app:{kind}"
    stops_under_load(work, number, copies, "-m", "seawall", "worker", target, "--drain", "0.3")
    assert work.noted("closed") == ({"store": 2} if kind == "queue" else {})


@signals
def test_a_second_signal_gives_back_at_once(number: signal.Signals, work: Work):
    """The drain time is an hour; the second process gets what the first did not finish."""
    work.put("jobs")
    arguments = ("-m", "seawall", "worker", "tests.cli.worker_app:jobs", "--drain", "3600")
    with work.process(*arguments, STUCK="yes") as process:
        eventually(lambda: len(work.noted("done")) == MANY - len(worker_app.STUCK), ENDED_WITHIN)
        assert process.stderr is not None
        process.send_signal(number)
        while "stops, within 3600 s" not in process.stderr.readline():
            pass
        end(process, number)
    with work.process(*arguments) as process:
        eventually(lambda: len(work.noted("done")) == MANY, ENDED_WITHIN)
        end(process, number)


def test_several_names_run_together_and_answer_probes(work: Work):
    """One process for all of them; a probe is answered on the loopback while they run."""
    work.put("several")
    names = [f"tests.cli.worker_app:{kind}" for kind in ("jobs", "outbox", "later")]
    with work.process("-m", "seawall", "worker", *names, "--health", "0") as process:
        assert process.stderr is not None
        _, _, address = process.stderr.readline().strip().rpartition("http://")
        probe = http.client.HTTPConnection(address.strip("/"), timeout=ENDED_WITHIN)
        probe.request("GET", "/")
        answer = probe.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status":"pass"}')
        assert address.startswith("127.0.0.1:")
        probe.close()
        eventually(lambda: min(Counter(work.noted("done")).values(), default=0) == 3, ENDED_WITHIN)
        assert "stopped" in end(process, signal.SIGTERM)


def test_pipelines_that_come_to_their_end_are_no_failure(work: Work):
    """One goes on when the other is over; with the last one the process ends, with status 0."""
    work.put("pipeline")
    target = "tests.cli.worker_app:pipelines"
    with work.process("-m", "seawall", "worker", target) as process:
        _, wrote = process.communicate(timeout=ENDED_WITHIN)
    assert process.returncode == 0, wrote
    assert work.noted("done") == {str(number): 2 for number in range(MANY)}
    assert wrote.count("at its end: <Pipeline") >= 1
    assert wrote.rstrip().endswith("seawall worker: stopped")


def test_a_pipeline_that_breaks_stops_the_others(work: Work):
    """The status is 1, and what the others have begun is finished."""
    work.put("pipeline")
    target = "tests.cli.worker_app:pipeline_that_breaks"
    with work.process("-m", "seawall", "worker", target) as process:
        _, wrote = process.communicate(timeout=ENDED_WITHIN)
    assert process.returncode == 1, wrote
    assert "ZeroDivisionError" in wrote
    assert work.noted("done") == work.noted("begun")


# --- Development ---

VERSION = """
from seawall.jobs import LocalQueue, Worker
from tests.cli.worker_app import note

queue = LocalQueue("work")
queue.push(None)


async def handler(claim):
    note("version", {version!r})


worker = Worker(queue, handler)
"""


@signals
def test_a_changed_source_file_begins_anew(number: signal.Signals, work: Work, tmp_path: Path):
    """A broken file is waited for; a signal ends both processes, with status 0."""
    (tmp_path / "pkg").mkdir()
    source = tmp_path / "pkg" / "changing.py"
    source.write_text(VERSION.format(version="first"))
    run = f"import os, seawall.cli; os.chdir({str(tmp_path)!r}); exit(seawall.cli.main())"
    with work.process("-c", run, "worker", "pkg.changing:worker", "--reload") as process:
        eventually(lambda: work.noted("version")["first"], ENDED_WITHIN)
        replace(source, "this is no Python")
        assert process.stderr is not None
        while "waits for a change" not in process.stderr.readline():
            pass
        replace(source, VERSION.format(version="second"))
        eventually(lambda: work.noted("version")["second"], ENDED_WITHIN)
        wrote = end(process, number)
    assert "changing.py changed: begins anew" in wrote
    assert wrote.rstrip().endswith("seawall worker: stopped")


def replace(file: Path, text: str) -> None:
    """Write it in one step, with another time of change however coarse the file system's is."""
    before = file.stat().st_mtime_ns
    new = file.with_suffix(".new")
    new.write_text(text)
    os.utime(new, ns=(before + 10**9, before + 10**9))
    new.rename(file)


# --- Mistakes ---

MISTAKES = """
from seawall.jobs import LocalQueue, Worker

worker = Worker(LocalQueue("work"), print)
number = 5


def wants(something): ...


def makes_none(): ...


def makes_empty():
    return []


async def breaks():
    raise RuntimeError("no database")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current directory."""
    name = f"module_{token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(MISTAKES)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_thing_at_all")
    (tmp_path / f"{name}_raises.py").write_text("raise OSError('no such disk')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("nowhere:worker", 2, "there is no module 'nowhere'"),
        ("{module}.sub:worker", 2, "there is no module '{module}.sub'"),
        ("{module}", 2, "write MODULE:NAME, such as app:worker"),
        (":worker", 2, "write MODULE:NAME"),
        ("{module}:woker", 2, "{module} has no 'woker'; it has worker"),
        ("{module}:number", 2, "is 5, which is no worker: name a Worker"),
        ("{module}:wants", 2, "which is no worker"),
        ("{module}:Worker", 2, "which is no worker"),
        ("{module}:makes_none", 2, "made None, which is no worker"),
        ("{module}:makes_empty", 2, "{module}:makes_empty made no worker: name a Worker"),
        ("{module}:breaks", 1, "cannot begin: RuntimeError('no database')"),
        ("{module}_broken:worker", 2, "cannot be imported: No module named 'no_such_thing_at_all'"),
        ("{module}_raises:worker", 2, "cannot be imported: OSError('no such disk')"),
    ],
)
def test_a_mistake_is_reported_before_anything_begins(
    target: str, status: int, words: str, module: str, capsys: pytest.CaptureFixture[str]
):
    """The message names what was asked for, and what to write."""
    assert main(["worker", target.format(module=module)]) == status
    assert words.format(module=module) in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--drain", "soon"), ("--drain", "-1"), ("--drain", "nan"), ("--drain", "inf"),
        ("--health", "http"), ("--health", "99999"), ("--health", "host:"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    """The error repeats the wrong value and says what to write."""
    assert main(["worker", "app:worker", *arguments]) == 2
    assert "write" in capsys.readouterr().err


def test_a_worker_that_ends_by_itself_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A process in which one of two has broken must not look well: the status is 1."""
    stopped: list[float] = []

    class Broken:
        async def run(self) -> None:
            raise LookupError("gone")

        def stop(self, grace: float) -> None:
            stopped.append(grace)

    name = f"module_{token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(MISTAKES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module: Any = __import__(name)
    module.broken = Broken()
    assert main(["worker", f"{name}:worker", f"{name}:broken", "--drain", "3"]) == 1
    assert "broke: LookupError('gone')" in capsys.readouterr().err
    assert stopped == [3.0]
    # One that was alone leaves nothing to stop: the last line says that it is over.
    assert main(["worker", f"{name}:broken", "--drain", "3"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "seawall worker: stopped"
