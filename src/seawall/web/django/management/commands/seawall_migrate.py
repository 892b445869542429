"""`manage.py seawall_migrate`: creates and updates our tables in a database of the project."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db.utils import ConnectionDoesNotExist

from seawall.durable import Database, DjangoAlias, migrate


class Command(BaseCommand):  # type: ignore[misc]  # it has no types
    """Runs the migrations that are missing; any number of processes may do so at once."""

    help = "Create and update the tables of seawall.durable in a database of this project."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the arguments of `Database`."""
        add = parser.add_argument
        add("--database", default="default", help='alias of the database ("default")')
        add("--schema", help="schema of the tables (that of the database)")
        add("--prefix", default="seawall_", help='beginning of their names ("seawall_")')

    def handle(self, *_args: Any, **options: Any) -> None:
        """Migrate, and say what was done."""
        try:
            source = DjangoAlias(options["database"])
            database = Database(source, schema=options["schema"], prefix=options["prefix"])
        except (TypeError, ValueError, ConnectionDoesNotExist) as error:
            raise CommandError(str(error)) from error
        try:
            done = migrate(database)
        finally:
            database.close()
        message = f"applied {', '.join(map(str, done))}" if done else "up to date"
        self.stdout.write(f"{source!r}: {message}")
