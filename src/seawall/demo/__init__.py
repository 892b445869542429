"""The whole system at work on one machine: `seawall demo`, or `python -m seawall.demo`.

An embedded Valkey, three pods of a service, the same service without protection, a vendor that can
be broken, users who pay and users who do not, and one page on which to see and to break it all; or
a pipeline of five sensors, on the same page. Everything listens on this machine alone, and nothing
is left when it ends.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

__all__ = ["main"]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what may be asked for."""
    from seawall.demo._main import declare

    declare(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with these arguments, those of the command line unless given.

    Returns 0 if all went well, 1 if something failed or the outage was not contained, and 2 if the
    arguments are wrong.
    """
    from seawall.demo._main import run

    return run(argv)
