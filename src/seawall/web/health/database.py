"""Read and write checks for any database, using what connections have in common.

`connect()` returns a connection: as it is, as an awaitable, or in a context manager, async or not.
It is closed, or returned to its pool, at the end, also if the statement fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any, TypeAlias

Connect: TypeAlias = Callable[[], Any]


def reading(connect: Connect, statement: str) -> Any:
    """Read with a blocking connection, or return a coroutine that reads with an async one."""
    given = connect()
    if _is_async(given):
        return _aread(given, statement)
    with ExitStack() as stack:
        connection = _enter(stack, given)
        _execute(connection, statement, fetch=True)
    return None


def writing(connect: Connect, create: str | None, statements: Sequence[str]) -> Any:
    """Write and roll back, or return a coroutine that does.

    If that fails and `create` is given, run and commit `create`, and try once more: a role that may
    write to a table need not have the right to create it.
    """
    given = connect()
    if _is_async(given):
        return _awrite(given, create, statements)
    with ExitStack() as stack:
        connection = _enter(stack, given)
        try:
            _try(connection, statements)
        except Exception:
            if create is None:
                raise
            _execute(connection, create)
            connection.commit()
            _try(connection, statements)
    return None


def _try(connection: Any, statements: Sequence[str]) -> None:
    try:
        for statement in statements:
            _execute(connection, statement)
    finally:
        connection.rollback()


async def _aread(given: Any, statement: str) -> None:
    async with AsyncExitStack() as stack:
        connection = await _aenter(stack, given)
        await _aexecute(connection, statement)


async def _awrite(given: Any, create: str | None, statements: Sequence[str]) -> None:
    async with AsyncExitStack() as stack:
        connection = await _aenter(stack, given)
        try:
            await _atry(connection, statements)
        except Exception:
            if create is None:
                raise
            await _aexecute(connection, create)
            if hasattr(connection, "commit"):
                await connection.commit()
            await _atry(connection, statements)


async def _atry(connection: Any, statements: Sequence[str]) -> None:
    # asyncpg commits each statement separately, unless a transaction is started.
    begin = None if hasattr(connection, "rollback") else connection.transaction()
    if begin is not None:
        await begin.start()
    try:
        for statement in statements:
            await _aexecute(connection, statement)
    finally:
        await (connection if begin is None else begin).rollback()


def _is_async(given: Any) -> bool:
    return hasattr(given, "__aenter__") or hasattr(given, "__await__")


def _is_connection(given: Any) -> bool:
    return hasattr(given, "cursor") or hasattr(given, "exec_driver_sql") or hasattr(given, "fetch")


def _enter(stack: ExitStack, given: Any) -> Any:
    if not _is_connection(given) and hasattr(given, "__enter__"):
        return stack.enter_context(given)
    stack.callback(given.close)  # leaving the `with` of some connections does not close them
    return given


async def _aenter(stack: AsyncExitStack, given: Any) -> Any:
    if hasattr(given, "__aenter__"):
        return await stack.enter_async_context(given)
    connection = await given
    stack.push_async_callback(connection.close)
    return connection


def _execute(connection: Any, statement: str, *, fetch: bool = False) -> None:
    if hasattr(connection, "exec_driver_sql"):
        connection.exec_driver_sql(statement)
        return
    cursor = connection.cursor()
    try:
        cursor.execute(statement)
        if fetch:
            cursor.fetchone()
    finally:
        cursor.close()


async def _aexecute(connection: Any, statement: str) -> None:
    run = getattr(connection, "exec_driver_sql", None) or connection.execute
    await run(statement)
