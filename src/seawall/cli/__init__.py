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
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

__all__ = ["main"]

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""The status that shells report for a process ended by a broken pipe."""
HEADERS: Final = "SEAWALL_TOP_HEADER"
"""The environment variable with headers for a dashboard, one on each line."""
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
        _discard_output()
        return BROKEN_PIPE
    return status


def _run(given: list[str]) -> int:
    name = given[0] if given else ""
    try:
        if name in COMMANDS:
            return _run_command(name, given[1:])
        parser = _parser()
        shell = parser.parse_args(given).print_completion
        if shell is not None:
            return _print_completion(shell)
    except ModuleNotFoundError as error:
        return _failed(f"seawall {name}: {_missing(error)}")
    parser.print_help(sys.stderr)
    return USAGE_ERROR


def _run_command(name: str, given: list[str]) -> int:
    module = _module(name)
    if name == "demo":  # it has a command line of its own
        return int(module.main(given))
    parser = ArgumentParser(f"seawall {name}", description=_about(name))
    module.add_arguments(parser)
    # Ids may follow options, where a plain parse accepts no more positionals.
    parse = parser.parse_intermixed_args if name == "dead-letters" else parser.parse_args
    args = parse(given)
    if name == "worker":  # it reports its mistakes; what it raises is an error of the user's code
        return int(module.main(args))
    try:
        return int(module.main(args))
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError) as error:
        return _failed(f"seawall {name}: {error}")


COMMANDS: Final = {
    "worker": "run workers and dispatchers until a signal stops them",
    "top": "what goes on in a service, live in the terminal",
    "members": "which members of a group are alive, suspected or gone",
    "metrics": "the table of metrics; a Grafana dashboard and alert rules made from it",
    "keys": "how an idempotency key is, what came of it, and how to free it",
    "dead-letters": "list, replay and drop the dead letters of a pipeline",
    "audit": "what is unguarded in source code, and what guards never do",
    "simulate": "a service through its worst hour, with the real policies, on virtual time",
    "tune": "better settings from what a service measures, proven by simulation",
    "demo": "the whole system at work, in a browser or as a table",
}
"""The commands, with a description of each. Each has a module with `add_arguments` and `main`."""


def _module(command: str) -> Any:
    elsewhere = {"top": "seawall.cli.top.command", "demo": "seawall_demo"}
    return import_module(elsewhere.get(command, f"seawall.cli.{command.replace('-', '_')}"))


def _about(command: str) -> str:
    about = COMMANDS[command]
    return f"{about[0].upper()}{about[1:]}."


def _parser() -> ArgumentParser:
    listed = "\n".join(f"  {name:<12} {about}" for name, about in COMMANDS.items())
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
    import shtab

    parser = ArgumentParser("seawall")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--print-completion", choices=SHELLS, help=_FOR_SHELLS)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, about in COMMANDS.items():
        its_parser = commands.add_parser(name, help=about)
        _module(name).add_arguments(its_parser)
        its_parser.description = None  # completion scripts have one line for each command
    print(shtab.complete(parser, shell))  # noqa: T201 - the output of the command
    return 0


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("seawall")
    except PackageNotFoundError:  # running from a source tree
        return "(not installed)"


def _status(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    return _failed(str(ended.code))


def _failed(what: str) -> int:
    print(what, file=sys.stderr)  # noqa: T201 - the output of a command line
    return USAGE_ERROR


def _missing(error: ModuleNotFoundError) -> str:
    module = (error.name or "").split(".")[0]
    if not module or module == "seawall":
        return f"it is not part of this installation ({error})"
    wanted = f"'seawall[{EXTRAS[module]}]'" if module in EXTRAS else module
    return f"it needs {module}: pip install {wanted}"


def _discard_output() -> None:
    """Redirect the rest of the output to /dev/null: Python would report the broken pipe."""
    try:
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, sys.stdout.fileno())
        os.close(nobody)
    except (OSError, ValueError):
        pass  # the standard output is no file
