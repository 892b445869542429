"""The gates of a guard around a block of code that cannot be a function."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from seawall.runtime.call import Call
from seawall.runtime.interpreter import release
from seawall.runtime.layers import Host, Layer
from seawall.runtime.runners import run_async, run_sync


class Hold:
    """`with guard.hold():` or `async with guard.hold():`; one use each."""

    __slots__ = ("_call",)

    def __init__(self, host: Host, gates: Sequence[Layer]) -> None:
        """Enter `gates` at the beginning of the block and leave them at its end."""
        self._call = Call(host, gates, _nothing, (), {}, host.clock.now())
        self._call.streaming = True

    def __enter__(self) -> None:
        run_sync(self._call)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        release(self._call, error)

    async def __aenter__(self) -> None:
        self._call.function = _nothing_async
        await run_async(self._call)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        release(self._call, error)


def _nothing() -> None:
    pass


async def _nothing_async() -> None:
    pass
