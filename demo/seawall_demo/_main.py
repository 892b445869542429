"""The command line of the demo."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

from seawall_demo._settings import HOST, PATIENCE, PODS, PORT, RATE, pause

if TYPE_CHECKING:
    from seawall_demo._supervisor import Demo, PipelineDemo, Supervisor

NEEDED: Final = ("fastapi", "uvicorn", "httpx")
N = TypeVar("N", int, float)

SHORTEST: Final = 5.0
"""Minimum number of seconds of a run without a page: a shorter one shows nothing."""


def run(argv: Sequence[str] | None) -> int:
    """Read the arguments and run the demo; see `seawall_demo.main`."""
    try:
        asked = _parser().parse_args(argv)
    except SystemExit as done:  # argparse has printed the error or the help
        return done.code if isinstance(done.code, int) else 2
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        _say(f"the demo needs {', '.join(missing)}: pip install 'seawall[demo]'")
        return 1
    try:
        return asyncio.run(_until_ended(asked))
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seawall demo",
        description="Run three pods of a service, a vendor that can be broken and some users, or a"
        " pipeline of sensors, all on this machine, and watch in a browser what happens when parts"
        " of it break.",
    )
    declare(parser)
    return parser


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the demo to `parser`."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=("service", "pipeline"),
        default="service",
        help="a service with and without protection (unless given), or a pipeline of sensors",
    )
    parser.add_argument(
        "--headless",
        action="store_true",
        help="no page: break one thing after the other, print a table; exit 0 if it was contained",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        metavar="N",
        help="end after N seconds (headless: 30 unless given; else when you press Ctrl-C)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=PORT,
        metavar="P",
        help=f"where the page is, or at the next port that is free ({PORT})",
    )
    opens = parser.add_mutually_exclusive_group()
    opens.add_argument("--open", action="store_true", help="open the page in your browser")
    opens.add_argument("--no-browser", action="store_true", help="open nothing: so unless --open")
    parser.add_argument("--memory", action="store_true", help="one pod, without Valkey")
    parser.add_argument("--verbose", action="store_true", help="tell of each process, and its log")


def _seconds(text: str) -> float:
    return _number(text, float, SHORTEST, 86_400, "a number of seconds")


def _port(text: str) -> int:
    return _number(text, int, 1, 65_535, "a port")


def _number(text: str, kind: type[N], least: float, most: float, what: str) -> N:
    try:
        number = kind(text)
    except ValueError:
        number = kind(0)
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"write {what} from {least:g} to {most:g}, not {text!r}")
    return number


async def _until_ended(asked: argparse.Namespace) -> int:
    """Run the demo until it is over, a signal ends it, or something fails."""
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    ended_by: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        if not ended_by and running is not None:
            ended_by.append(number)
            running.cancel()

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    for number in numbers:
        loop.add_signal_handler(number, end, number)
    try:
        return await _run(asked)
    except asyncio.CancelledError:
        if not ended_by:
            raise
        _say("\nended")
        # Ending an endless demo is no failure; a headless run has not finished its task.
        return 0 if ended_by == [signal.SIGINT] and not asked.headless else 128 + ended_by[0]
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _run(asked: argparse.Namespace) -> int:
    from seawall_demo._children import NotStarted
    from seawall_demo._supervisor import Demo, PipelineDemo

    detail = _say if asked.verbose else _hush
    demo: Demo | PipelineDemo
    if asked.what == "pipeline":
        demo = PipelineDemo(say=_say, detail=detail)
    else:
        demo = Demo(rate=RATE, say=_say, detail=detail, memory=asked.memory)
    try:
        async with demo:
            if isinstance(demo, Demo):
                _introduce(demo)
            showing = _headless(demo, asked) if asked.headless else _page(demo, asked)
            task = asyncio.create_task(showing)
            try:
                both: list[asyncio.Future[Any]] = [task, demo.failed]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task})
                if asked.verbose:
                    _say(demo.logs())
            if demo.failed.done():
                demo.failed.result()
            return task.result()
    except NotStarted as error:
        _say(str(error))
    except ExceptionGroup as errors:
        failed, others = errors.split(NotStarted)
        if others is not None or failed is None:
            raise
        for one in failed.exceptions:
            _say(str(one))
    return 1


async def _headless(demo: Demo | PipelineDemo, asked: argparse.Namespace) -> int:
    from seawall_demo import _headless
    from seawall_demo._supervisor import Demo

    seconds = asked.seconds or 30.0
    if isinstance(demo, Demo):
        return await _headless.run(demo, seconds, _say)
    return await _headless.run_pipeline(demo, seconds, _say)


async def _page(demo: Supervisor, asked: argparse.Namespace) -> int:
    from seawall_demo._dashboard import shown

    async with shown(demo, asked.port) as address:
        _say(f"\n  {address}\n\nLook there, and break something. Ctrl-C ends it.")
        if asked.open:
            import webbrowser

            await asyncio.to_thread(webbrowser.open, address)
        if asked.seconds is None:
            await asyncio.Event().wait()
        else:
            await pause(asked.seconds)
    return 0


def _introduce(demo: Demo) -> None:
    if demo.shared:
        _say(f"{PODS} protected pods that share a Valkey ({demo.why}), and one without protection,")
    else:
        _say(
            f"No Valkey: {demo.why}. So there is ONE protected pod, on memory, with nothing to"
            " share and no Redis to cut; and one without protection,"
        )
    _say(f"each with {RATE:g} requests/s, from users who wait {PATIENCE:g} s. All on {HOST}.")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _hush(_text: Any) -> None:
    pass
