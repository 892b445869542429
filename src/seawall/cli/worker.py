"""`seawall worker`: runs workers and dispatchers until a signal stops them.

Promises:
- A name that does not lead to a worker is reported before anything starts, with status 2.
- After the first signal, running work may finish within the drain time, and the rest is given back.
  After a second one, everything is given back immediately. The status is 0.
- A worker that ends without a signal stops the others, with status 1.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from contextlib import AsyncExitStack, suppress
from importlib import import_module
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any, Final, NamedTuple

from seawall.runtime.stop_signals import run_until_signal, stop_signals_handled

WELL, BROKEN, USAGE_ERROR = 0, 1, 2
"""Exit status."""
LOOPBACK: Final = "127.0.0.1"
HIGHEST_PORT: Final = 65_535
REQUEST_WITHIN: Final = 5.0
"""Timeout in seconds for a probe to send its request."""
LOOK_EVERY: Final = 0.5
"""Seconds between two checks of the source files, with --reload."""
KILLED_AFTER: Final = 10.0
"""Seconds after the drain time at which --reload kills a process that has not stopped."""
ABOUT: Final = """\
Run workers, dispatchers, workers of stored calls and pipelines, in one process, until a signal
stops them.

  seawall worker app:worker
  seawall worker app:worker app:dispatcher app:pipeline --drain 20 --health 8081

NAME is a worker of the module, or a function without arguments that returns one, or several in a
list. The function may be async, or an async context manager: it runs in the event loop of the
workers, where connection pools are made. The current directory is on the path of modules.
"""

EPILOG: Final = f"""\
signals: SIGTERM and Ctrl-C stop it; what is not finished after the drain time is given back.
A second one gives back at once.
A pipeline whose sources are over ends by itself; the others go on.
exit status: {WELL} stopped by a signal, or all pipelines are over, {BROKEN} a worker ended by
itself, {USAGE_ERROR} a mistake.
"""


class UsageError(Exception):
    """The given name cannot be run; the message says what to write."""


class Address(NamedTuple):
    """The address at which probes are answered."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """Parse PORT or HOST:PORT."""
        host, _, port = text.rpartition(":")
        if not port.isdecimal() or int(port) > HIGHEST_PORT:
            raise ArgumentTypeError(f"{text!r}: write a port, or HOST:PORT, such as 0.0.0.0:8081")
        return cls(host.strip("[]") or LOOPBACK, int(port))


def add_arguments(parser: ArgumentParser, *, reload: bool = True) -> None:
    """Add the arguments of the command to `parser`; without --reload if another program runs it."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.description, parser.epilog = ABOUT, EPILOG
    add = parser.add_argument
    add("targets", nargs="+", metavar="MODULE:NAME", help="what to run, such as app:worker")
    add(
        "--drain",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long what is at work may go on after the first signal (10)",
    )
    add(
        "--health",
        type=Address.read,
        metavar="[HOST:]PORT",
        help=f"answer liveness probes by HTTP; on {LOOPBACK} unless a host is given",
    )
    parser.set_defaults(reload=False)
    if reload:
        about = "for development: restart when a source file changes"
        add("--reload", action="store_true", help=about)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r}: write seconds, such as 20")
    return seconds


def main(args: Namespace) -> int:
    """Run the given targets; return the exit status."""
    if args.reload:
        return Reloader(args).run()
    try:
        group = WorkerGroup([load(target) for target in args.targets], args)
    except UsageError as mistake:
        _say(str(mistake))
        return USAGE_ERROR
    run_until_signal(group.run, group.stop, args.drain)
    return group.status


def _say(words: str) -> None:
    print(f"seawall worker: {words}", file=sys.stderr, flush=True)  # noqa: T201 - the output of a command line


# --- Targets ---


class Target(NamedTuple):
    """A worker, or a function that makes some, with the name given on the command line."""

    name: str
    thing: Any

    async def workers(self, stack: AsyncExitStack) -> list[Any]:
        """Return the workers; context managers that made them are closed with `stack`."""
        made = self.thing
        if not is_worker(made):
            made = made()
            if hasattr(made, "__aenter__"):
                made = await stack.enter_async_context(made)
            elif inspect.isawaitable(made):
                made = await made
        workers = list(made) if isinstance(made, list | tuple) else [made]
        if not workers:
            raise UsageError(f"{self.name} made no worker: {EXPECTED}, or several in a list")
        for worker in workers:
            if not is_worker(worker):
                raise UsageError(f"{self.name} made {worker!r}, which is no worker: {EXPECTED}")
        return workers


EXPECTED: Final = (
    "name a Worker, JobWorker, DeferredCallWorker, Dispatcher or Pipeline, or a function without"
    " arguments that returns one"
)


def is_worker(thing: object) -> bool:
    """Return whether it has the interface of Seawall's workers: async `run`, and `stop`."""
    runs = inspect.iscoroutinefunction(getattr(thing, "run", None))
    return runs and callable(getattr(thing, "stop", None)) and not isinstance(thing, type)


def load(name: str) -> Target:
    """Import the object that `name` stands for; raise `UsageError` if there is none."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise UsageError(f"{name!r}: write MODULE:NAME, such as app:worker")
    thing: Any = _module(module_name)
    module = thing
    for part in path.split("."):
        if not hasattr(thing, part):
            known = [word for word, value in vars(module).items() if is_worker(value)]
            there = f"it has {', '.join(known)}" if known else "it has no workers at all"
            raise UsageError(f"{name}: {module_name} has no {path!r}; {there}")
        thing = getattr(thing, part)
    if not is_worker(thing) and not _is_factory(thing):
        raise UsageError(f"{name} is {thing!r}, which is no worker: {EXPECTED}")
    return Target(name, thing)


def _is_factory(thing: Any) -> bool:
    if not callable(thing) or isinstance(thing, type):
        return False
    with suppress(TypeError, ValueError):
        inspect.signature(thing).bind()
        return True
    return False


def _module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise UsageError(
                f"there is no module {missing!r}, in {here} or among the installed ones"
            ) from None
        traceback.print_exc()
        raise UsageError(f"module {name!r} cannot be imported: {error}") from None
    except Exception as error:  # noqa: BLE001 - an error of the user's module, which is shown
        traceback.print_exc()
        raise UsageError(f"module {name!r} cannot be imported: {error!r}") from None


# --- Running ---


class WorkerGroup:
    """The workers of one process: they run together, and stop together."""

    def __init__(self, targets: list[Target], args: Namespace) -> None:
        self.status = WELL
        self._targets = targets
        self._health: Address | None = args.health
        self._drain: float = args.drain
        self._workers: list[Any] = []
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._making: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Create the workers and run them until they are stopped or one of them ends."""
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self._making = asyncio.create_task(self._make(stack))
            if self._stopped:  # before there was a task to cancel
                self._making.cancel()
            try:
                await self._making
            except asyncio.CancelledError:
                return
            except UsageError as mistake:
                self.status = USAGE_ERROR
                _say(str(mistake))
                return
            except Exception as error:  # noqa: BLE001 - an error of the user's function, which is shown
                self.status = BROKEN
                traceback.print_exc()
                _say(f"cannot begin: {error!r}")
                return
            await self._run_all()

    async def _make(self, stack: AsyncExitStack) -> None:
        for target in self._targets:
            self._workers += await target.workers(stack)
        if self._health is not None:
            try:
                server = await asyncio.start_server(_answer_probe, *self._health)
            except OSError as error:
                raise UsageError(f"--health {self._health.port}: {error}") from None
            stack.callback(server.close)
            host, port = server.sockets[0].getsockname()[:2]
            _say(f"probes are answered at http://{host}:{port}/")

    async def _run_all(self) -> None:
        tasks = {asyncio.create_task(worker.run()): worker for worker in self._workers}
        _say(f"runs {', '.join(target.name for target in self._targets)}")
        going = set(tasks)
        while going:
            done, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped:
                continue
            if not all(_is_finished(task) for task in done):
                self.status = BROKEN
                if going:
                    self.stop(self._drain)
            else:
                _say(f"at its end: {', '.join(repr(tasks[task]) for task in done)}")
        for task, worker in tasks.items():
            error = task.exception()
            if error is not None:
                self.status = BROKEN
                traceback.print_exception(error)
                _say(f"{worker!r} broke: {error!r}")
        _say("stopped")

    def stop(self, grace: float) -> None:
        """Stop all workers within `grace` seconds; also from a signal handler."""
        self._stopped = True
        for worker in self._workers:
            worker.stop(grace)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_stop, grace)

    def _on_stop(self, grace: float) -> None:
        making = self._making
        if making is not None and not making.done():
            making.cancel()
        else:
            _say(f"stops, within {grace:g} s")


def _is_finished(task: asyncio.Task[Any]) -> bool:
    """Return whether a pipeline has reached the end of its sources: only its `run` returns True."""
    return not task.cancelled() and task.exception() is None and task.result() is True


_PASS: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 17\r\n"
    b'Connection: close\r\n\r\n{"status":"pass"}'
)


async def _answer_probe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer any request: a probe checks that the event loop of the workers responds at all."""
    with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        async with asyncio.timeout(REQUEST_WITHIN):
            while (await reader.readline()).strip():
                pass
            writer.write(_PASS)
            await writer.drain()
    writer.close()


# --- Development ---


class Reloader:
    """Runs the workers in a separate process, and restarts it when a source file changes."""

    def __init__(self, args: Namespace) -> None:
        self._command = [sys.executable, "-m", "seawall", "worker", *args.targets]
        self._command += ["--drain", repr(args.drain)]
        if args.health is not None:
            host, port = args.health
            self._command += ["--health", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        self._patience: float = args.drain + KILLED_AFTER
        self._stopped = Event()
        self._passed_on = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run until a signal comes; return the status of the last process."""
        status = WELL
        with stop_signals_handled(self._on_signal):
            files = source_files(Path.cwd())
            while not self._stopped.is_set():
                self._child = self._start()
                _say(f"watches {len(files)} source files below {Path.cwd()}")
                files = self._wait_for_change(files)
                status = self._end()
        return status

    def _start(self) -> subprocess.Popen[bytes]:
        # In its own process group: otherwise Ctrl-C in a terminal would reach it twice.
        apart: Any = {"process_group": 0} if os.name == "posix" else {}
        return subprocess.Popen(self._command, **apart)  # noqa: S603 - this very program

    def _wait_for_change(self, files: dict[str, int]) -> dict[str, int]:
        """Wait for a change or a signal; return the files as they are then."""
        child, alive = self._child, True
        while not self._stopped.wait(LOOK_EVERY):
            now = source_files(Path.cwd())
            if now != files:
                changed = sorted(name for name, _ in now.items() ^ files.items())
                _say(f"{changed[0]} changed: begins anew")
                return now
            if alive and child is not None and child.poll() is not None:
                alive = False
                _say(f"ended with status {child.returncode}; waits for a change")
        return files

    def _end(self) -> int:
        """Stop the process, and kill it if it does not end; return its status."""
        child = self._child
        if child is None:
            return WELL
        if not self._passed_on:
            child.terminate()
        try:
            return child.wait(self._patience)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()
        finally:
            self._child = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stopped.set()
        if self._child is not None:
            self._passed_on = True
            self._child.send_signal(number)


def source_files(folder: Path) -> dict[str, int]:
    """Return the Python files below `folder` with their modification times.

    Hidden folders and virtual environments are omitted.
    """
    found: dict[str, int] = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__pycache__", "node_modules"))
            and not Path(root, name, "pyvenv.cfg").exists()
        ]
        for name in names:
            if name.endswith(".py"):
                with suppress(OSError):  # it was deleted
                    file = Path(root, name)
                    found[str(file.relative_to(folder))] = file.stat().st_mtime_ns
    return found
