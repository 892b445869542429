"""The command line: `seawall worker`, `top`, `members`, `metrics`, `keys`, `audit` and others.

Promises:
- A mistake is reported in one line on the standard error, with exit status 2.
- Ctrl-C ends a command quietly with status 130, and a closed pipe with 141.
- A command is loaded when it is called. One that needs more than the standard library reports what
  to install.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final, NamedTuple

__all__ = ["main"]

MISTAKEN: Final = 2
INTERRUPTED: Final = 130
UNREAD: Final = 141
"""The status that shells report for a process ended by a broken pipe."""

SHELLS: Final = ("bash", "zsh", "fish", "tcsh")
_FOR_SHELLS: Final = f"print a script that completes commands and options: {', '.join(SHELLS)}"

EXTRAS: Final = {
    "rich": "cli",
    "redis": "redis",
    "fastapi": "fastapi",
    "starlette": "web",
    "psycopg": "psycopg",
    "psycopg_pool": "psycopg",
    "shtab": "cli",
}
"""The extra that installs a missing module, if there is one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default the process's arguments; return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(given)
        sys.stdout.flush()
    except SystemExit as ended:  # argparse has printed the error or the help
        return _status(ended)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _read_no_more()
        return UNREAD
    return status


def _run(given: list[str]) -> int:
    command = given[0] if given else ""
    try:
        if command in COMMANDS:
            return COMMANDS[command].run(given[1:])
        parser = _parser()
        shell = parser.parse_args(given).print_completion
        if shell is not None:
            return _print_completion(shell)
    except ModuleNotFoundError as error:
        return _failed(f"seawall {command}: {_missing(error)}")
    parser.print_help(sys.stderr)
    return MISTAKEN


def _worker(given: list[str]) -> int:
    from seawall.cli.worker import add_arguments, main

    parser = ArgumentParser("seawall worker")
    add_arguments(parser)
    return main(parser.parse_args(given))


def _metrics(given: list[str]) -> int:
    from seawall.cli.metrics import add_arguments, main

    parser = ArgumentParser("seawall metrics", description=_about("metrics"))
    add_arguments(parser)
    try:
        return main(parser.parse_args(given))
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        return _failed(f"seawall metrics: {error}")


def _top(given: list[str]) -> int:
    from seawall.cli.top.command import add_arguments, main

    parser = ArgumentParser("seawall top", description=_about("top"))
    add_arguments(parser)
    return int(main(parser.parse_args(given)))


def _members(given: list[str]) -> int:
    from seawall.cli.members import add_arguments, main

    parser = ArgumentParser("seawall members", description=_about("members"))
    add_arguments(parser)
    return main(parser.parse_args(given))


def _keys(given: list[str]) -> int:
    from seawall.cli.keys import ABOUT, add_arguments, main

    parser = ArgumentParser(
        "seawall keys", description=ABOUT, formatter_class=RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        return main(parser.parse_args(given))
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError) as error:
        return _failed(f"seawall keys: {error}")


def _dead_letters(given: list[str]) -> int:
    from seawall.cli.dead_letters import ABOUT, add_arguments, main

    parser = ArgumentParser(
        "seawall dead-letters", description=ABOUT, formatter_class=RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        # Ids may follow options, where a plain parse accepts no more positionals.
        return main(parser.parse_intermixed_args(given))
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError) as error:
        return _failed(f"seawall dead-letters: {error}")


def _audit(given: list[str]) -> int:
    from seawall.cli.audit import add_arguments, main

    parser = ArgumentParser("seawall audit", description=_about("audit"))
    add_arguments(parser)
    try:
        return main(parser.parse_args(given))
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        return _failed(f"seawall audit: {error}")


def _simulate(given: list[str]) -> int:
    from seawall.cli.simulate import ABOUT, add_arguments, main

    parser = ArgumentParser("seawall simulate", description=ABOUT)
    add_arguments(parser)
    try:
        return main(parser.parse_args(given))
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError) as error:
        return _failed(f"seawall simulate: {error}")


def _tune(given: list[str]) -> int:
    from seawall.cli.tune import add_arguments, main

    parser = ArgumentParser("seawall tune", description=_about("tune"))
    add_arguments(parser)
    try:
        return main(parser.parse_args(given))
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError) as error:
        return _failed(f"seawall tune: {error}")


def _demo(given: list[str]) -> int:
    from seawall_demo import main

    return int(main(given))


class Command(NamedTuple):
    """One command: its function, a one-line description, and the module with its arguments."""

    run: Callable[[list[str]], int]
    about: str
    module: str


COMMANDS: Final = {
    "worker": Command(
        _worker, "run workers and dispatchers until a signal stops them", "seawall.cli.worker"
    ),
    "top": Command(
        _top, "what goes on in a service, live in the terminal", "seawall.cli.top.command"
    ),
    "members": Command(
        _members, "which members of a group are alive, suspected or gone", "seawall.cli.members"
    ),
    "metrics": Command(
        _metrics,
        "the table of metrics; a Grafana dashboard and alert rules made from it",
        "seawall.cli.metrics",
    ),
    "keys": Command(
        _keys,
        "how an idempotency key is, what came of it, and how to free it",
        "seawall.cli.keys",
    ),
    "dead-letters": Command(
        _dead_letters,
        "list, replay and drop the dead letters of a pipeline",
        "seawall.cli.dead_letters",
    ),
    "audit": Command(
        _audit, "what is unguarded in source code, and what guards never do", "seawall.cli.audit"
    ),
    "simulate": Command(
        _simulate,
        "a service through its worst hour, with the real policies, on virtual time",
        "seawall.cli.simulate",
    ),
    "tune": Command(
        _tune,
        "better settings from what a service measures, proven by simulation",
        "seawall.cli.tune",
    ),
    "demo": Command(_demo, "the whole system at work, in a browser or as a table", "seawall_demo"),
}


def _about(command: str) -> str:
    about = COMMANDS[command].about
    return f"{about[0].upper()}{about[1:]}."


def _parser() -> ArgumentParser:
    listed = "\n".join(f"  {name:<12} {command.about}" for name, command in COMMANDS.items())
    parser = ArgumentParser(
        "seawall",
        description="The resilience layer for Python services.",
        epilog=f"commands:\n{listed}\n\n`seawall COMMAND --help` tells more.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"seawall {_version()}")
    parser.add_argument("--print-completion", choices=SHELLS, metavar="SHELL", help=_FOR_SHELLS)
    parser.add_argument("command", nargs="?", choices=sorted(COMMANDS), metavar="COMMAND")
    return parser


def _print_completion(shell: str) -> int:
    """Print a script by which `shell` completes commands and their options."""
    import shtab

    parser = ArgumentParser("seawall")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--print-completion", choices=SHELLS, help=_FOR_SHELLS)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        its_parser = commands.add_parser(name, help=command.about)
        import_module(command.module).add_arguments(its_parser)
        its_parser.description = None  # completion scripts have one line for each command
    print(shtab.complete(parser, shell))  # noqa: T201 - the output of the command
    return 0


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("seawall")
    except PackageNotFoundError:  # running from a source tree
        return "(not installed)"


# Exit status and errors


def _status(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    return _failed(str(ended.code))


def _failed(what: str) -> int:
    print(what, file=sys.stderr)  # noqa: T201 - the output of a command line
    return MISTAKEN


def _missing(error: ModuleNotFoundError) -> str:
    module = (error.name or "").split(".")[0]
    if not module or module == "seawall":
        return f"it is not part of this installation ({error})"
    wanted = f"'seawall[{EXTRAS[module]}]'" if module in EXTRAS else module
    return f"it needs {module}: pip install {wanted}"


def _read_no_more() -> None:
    """Redirect the rest of the output to /dev/null: Python would report the broken pipe."""
    try:
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, sys.stdout.fileno())
        os.close(nobody)
    except (OSError, ValueError):
        pass  # the standard output is no file
