"""`manage.py seawall_worker`: `seawall worker` with the project's settings.

It runs workers of jobs, dispatchers of outboxes, and the other workers that `seawall worker` runs.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from django.core.management.base import BaseCommand

from seawall.cli import worker


class Command(BaseCommand):  # type: ignore[misc]  # it has no types
    """Runs workers and dispatchers until a signal stops them."""

    help = "Run workers and outbox dispatchers of this project until a signal stops them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the arguments of `seawall worker`."""
        worker.add_arguments(parser, reload=False)

    def handle(self, *_args: Any, **options: Any) -> None:
        """Run, and end with the status of `seawall worker`."""
        status = worker.main(Namespace(**options))
        if status:
            raise SystemExit(status)
