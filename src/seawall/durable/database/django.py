"""A database of a Django project, by its alias.

Promises:

- The connections are Django's own, one for each thread, so that everything is part of the
  `atomic()` block around it, and is rolled back with it.
- An operation in a transaction of its own (`Database.run`) is never part of such a block: inside of
  one it raises. So it does with autocommit off, where Django would not commit it.
- In a thread of ours, which serves no request, a connection is kept open only for as long as
  CONN_MAX_AGE says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class DjangoAlias:
    """A database in Django's `DATABASES`; the source of a `Database`."""

    def __init__(self, alias: str = "default") -> None:
        """Use the database of this alias, which has to be PostgreSQL or SQLite."""
        if not isinstance(alias, str) or not alias:
            raise TypeError(f"alias={alias!r}: write an alias of DATABASES, such as 'default'")
        self.alias = alias

    def __repr__(self) -> str:
        return f"DjangoAlias({self.alias!r})"

    @property
    def connection(self) -> Any:
        """Django's connection of this thread, to be passed to `Outbox.add` and the like."""
        from django.db import connections

        return connections[self.alias]


@contextmanager
def begin(source: DjangoAlias) -> Iterator[Any]:
    """Begin a transaction of its own, and lend the connection."""
    from django.db import transaction

    connection = source.connection
    if connection.errors_occurred:  # as Django does between two requests
        connection.close_if_unusable_or_obsolete()
    _require_autocommit(source)
    with transaction.atomic(using=source.alias, durable=True):
        yield connection


@contextmanager
def autocommitting(source: DjangoAlias) -> Iterator[Any]:
    """Lend the connection outside of any transaction."""
    connection = source.connection
    if connection.in_atomic_block:
        raise RuntimeError(f"{source!r}: inside of atomic(), nothing can be committed by itself")
    _require_autocommit(source)
    try:
        yield connection
    finally:
        connection.close_if_unusable_or_obsolete()


def _require_autocommit(source: DjangoAlias) -> None:
    connection = source.connection
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise RuntimeError(
            f"{source!r}: autocommit is off, so that atomic() commits nothing: leave AUTOCOMMIT on,"
            " or name an alias of the same database with it"
        )


def in_own_thread(source: DjangoAlias, function: Callable[[], T]) -> T:
    """Call `function` in a thread that serves no request: Django does not clean up after it."""
    try:
        return function()
    finally:
        source.connection.close_if_unusable_or_obsolete()
