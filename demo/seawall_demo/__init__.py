"""The whole system on one machine: `seawall demo`, or `python -m seawall_demo`.

It runs an embedded Valkey, three pods of a service, the same service without protection, a vendor
that can be broken, paying and free users, and one page to watch and break all of it; or a pipeline
of five sensors, on the same page. Everything listens on this machine only, and nothing is left
behind when it ends.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

__all__ = ["main"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the demo to `parser`."""
    from seawall_demo._main import declare

    declare(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with these arguments, by default those of the command line.

    Returns 0 on success, 1 if something failed or the outage was not contained, and 2 if the
    arguments are wrong.
    """
    from seawall_demo._main import run

    return run(argv)
