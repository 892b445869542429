"""What transports around another have in common: that one is opened and closed with them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class SyncAround:
    """A transport of a `Client` around `transport`."""

    transport: Any

    def __enter__(self) -> Self:
        self.transport.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.transport.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Close what is inside; a guard stays as it is."""
        self.transport.close()


class AsyncAround:
    """A transport of an `AsyncClient` around `transport`."""

    transport: Any

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.transport.__aexit__(kind, error, traceback)

    async def aclose(self) -> None:
        """Close what is inside; a guard stays as it is."""
        await self.transport.aclose()
