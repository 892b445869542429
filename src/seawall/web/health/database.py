"""Read and write checks for any database, using what connections have in common.

`connect()` returns a connection: as it is, as an awaitable, or in a context manager, async or not.
It is closed, or returned to its pool, at the end, also if the statement fails.

What a check does is written once, as a generator: it yields the result of each call of a
connection, which an async connection has to be awaited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final, TypeAlias

from seawall.runtime.driver import Steps, adrive, drive

Connect: TypeAlias = Callable[[], Any]
Execute: TypeAlias = Callable[[str], Any]

_OF_CONNECTIONS: Final = ("cursor", "exec_driver_sql", "fetch")


def reading(connect: Connect, statement: str) -> Any:
    """Read with a blocking connection, or return a coroutine that reads with an async one."""

    def steps(_connection: Any, execute: Execute) -> Steps[None]:
        yield execute(statement)

    return _run(connect(), steps)


def writing(connect: Connect, create: str | None, statements: Sequence[str]) -> Any:
    """Write and roll back, or return a coroutine that does.

    If that fails and `create` is given, run and commit `create`, and try once more: a role that may
    write to a table need not have the right to create it.
    """

    def steps(connection: Any, execute: Execute) -> Steps[None]:
        try:
            yield from _write_and_undo(connection, execute, statements)
        except Exception:
            if create is None:
                raise
            yield execute(create)
            if hasattr(connection, "commit"):
                yield connection.commit()
            yield from _write_and_undo(connection, execute, statements)

    return _run(connect(), steps)


def _write_and_undo(connection: Any, execute: Execute, statements: Sequence[str]) -> Steps[None]:
    # asyncpg commits each statement separately, unless a transaction is started.
    begun = None if hasattr(connection, "rollback") else connection.transaction()
    if begun is not None:
        yield begun.start()
    try:
        for statement in statements:
            yield execute(statement)
    finally:
        yield (connection if begun is None else begun).rollback()


def _run(given: Any, steps: Callable[[Any, Execute], Steps[None]]) -> Any:
    """Run `steps` with the connection that `connect()` has `given`, or return what to await."""
    if hasattr(given, "__aenter__") or hasattr(given, "__await__"):
        return _arun(given, steps)
    with ExitStack() as stack:
        is_connection = any(hasattr(given, name) for name in _OF_CONNECTIONS)
        if not is_connection and hasattr(given, "__enter__"):
            given = stack.enter_context(given)
        else:
            stack.callback(given.close)  # leaving the `with` of some connections closes nothing
        return drive(steps(given, lambda statement: _execute(given, statement)), lambda done: done)


async def _arun(given: Any, steps: Callable[[Any, Execute], Steps[None]]) -> None:
    async def result(awaitable: Any) -> Any:
        return await awaitable

    async with AsyncExitStack() as stack:
        if hasattr(given, "__aenter__"):
            connection = await stack.enter_async_context(given)
        else:
            connection = await given
            stack.push_async_callback(connection.close)
        execute = getattr(connection, "exec_driver_sql", None) or connection.execute
        await adrive(steps(connection, execute), result)


def _execute(connection: Any, statement: str) -> None:
    if hasattr(connection, "exec_driver_sql"):
        connection.exec_driver_sql(statement)
        return
    cursor = connection.cursor()
    try:
        cursor.execute(statement)
        if cursor.description is not None:
            cursor.fetchone()
    finally:
        cursor.close()
