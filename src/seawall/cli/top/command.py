"""`seawall top`: the dashboard in a terminal.

Promises:
- It only reads.
- With `--once`, the exit status is 0 if all is well, 1 if something is wrong, and 2 if nothing
  could be read. Live, it runs until it is ended, and shows what it waits for.
- However it ends, the terminal is restored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall.cli.top.client import DashboardClient, add_header_argument, client_of
from seawall.cli.top.history import TopHistory
from seawall.cli.top.messages import ParsedMessage, narrowed, validated, verdict
from seawall.dashboard.views import DashboardMessage

if TYPE_CHECKING:
    from rich.console import Console

WELL, WRONG, UNREADABLE = 0, 1, 2
"""Exit status."""
WIDTH: Final = 100
"""Number of columns if there is no terminal and COLUMNS is not set."""
MOST_LISTED: Final = 20
"""Maximum number of existing names listed when an unknown one was given."""
KEYS: Final = "s stacks, q quit"
EPILOG: Final = f"""\
exit status with --once: {WELL} all is well, {WRONG} something is wrong,\
 {UNREADABLE} not to be seen.
keys: {KEYS}. Certificates of https are verified; SSL_CERT_FILE names those of your own.
"""


class Options(NamedTuple):
    """The parsed options."""

    source: DashboardClient
    stacks: bool
    pods: tuple[str, ...]
    guards: tuple[str, ...]
    color: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `seawall top` to `parser`."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("url", help="where the dashboard is mounted, such as http://127.0.0.1:8000/seawall")
    add("--once", action="store_true", help="show it once and exit with a status that tells how")
    add("--json", action="store_true", help="print each message as a line of JSON")
    add("--stacks", action="store_true", help="draw the policies of each guard below it")
    add(
        "--guard",
        action="append",
        metavar="NAME",
        help="show only this guard; may have * and ?, and be repeated",
    )
    add("--pod", action="append", metavar="NAME", help="show only this pod; as --guard")
    add_header_argument(parser)
    add("--no-color", action="store_true", help="without colours; so does NO_COLOR")


def main(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status; a mistake raises ValueError or OSError."""
    if args.json and (args.guard or args.pod or args.stacks):
        raise ValueError("--json tells the message as it is: leave out --guard, --pod and --stacks")
    options = Options(
        source=client_of(args),
        stacks=args.stacks,
        pods=tuple(args.pod or ()),
        guards=tuple(args.guard or ()),
        color=not args.no_color and not os.environ.get("NO_COLOR"),
    )
    if args.json:
        return _once_json(options) if args.once else _live_json(options)
    return _once(options) if args.once else _live(options)


def _once_json(options: Options) -> int:
    raw = options.source.once()
    status = _status(_seen(validated(raw), options))
    _print_json(raw)
    return status


def _once(options: Options) -> int:
    console = _console(options)
    from seawall.cli.top.drawing import frame
    from seawall.cli.top.layout import glyphs_for

    reading = validated(options.source.once())
    message = _seen(reading, options)
    console.print(
        frame(
            message,
            TopHistory().take(message),
            console.width,
            None,
            stacks=options.stacks,
            status="; ".join(reading.notes),
            glyphs=glyphs_for(console.encoding),
        )
    )
    return _status(message)


def _seen(reading: ParsedMessage, options: Options) -> DashboardMessage:
    """Return the requested part of a message; raise if it is empty."""
    message = narrowed(reading.message, options.pods, options.guards)
    if not message["views"]:
        pods = {view["pod"]["name"] for view in reading.message["views"]}
        raise ValueError("; ".join([f"no such pod: {_known(pods)}", *reading.notes]))
    if options.guards and not any(view["guards"] for view in message["views"]):
        found = {g["name"] for view in reading.message["views"] for g in view["guards"]}
        raise ValueError(f"no such guard: {_known(found)}")
    return message


def _known(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
    return f"there are {', '.join(listed[:MOST_LISTED])}{more}" if listed else "there is none"


def _status(message: DashboardMessage) -> int:
    return WRONG if verdict(message) == "bad" else WELL


def _console(options: Options) -> Console:
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else WIDTH
    return Console(
        width=width,
        color_system="auto" if options.color else None,
        # Plain text if there is no terminal, whatever the environment says.
        force_terminal=terminal,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _print_json(raw: dict[str, Any]) -> None:
    """Print a message on one line, in ASCII: terminal control sequences stay escaped."""
    sys.stdout.write(json.dumps(raw, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def _live_json(options: Options) -> int:
    for raw in options.source.messages(_print_trouble):
        _print_json(raw)
    return WELL


def _print_trouble(why: str) -> None:
    sys.stderr.write(f"seawall top: {why}\n")


def _live(options: Options) -> int:
    console = _console(options)
    from seawall.cli.top.live import run

    try:
        return run(options, console)
    except KeyboardInterrupt:  # the usual way to quit
        return WELL
