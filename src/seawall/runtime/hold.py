"""The gates of a guard around a block of code that cannot be a function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from seawall.runtime.call import Call
from seawall.runtime.interpreter import release
from seawall.runtime.layers import Host, Layer
from seawall.runtime.runners import run_async, run_sync


class Hold:
    """`with guard.hold():` or `async with guard.hold():`; one use each."""

    __slots__ = ("_call",)

    def __init__(
        self,
        host: Host,
        gates: Sequence[Layer],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Enter `gates` at the beginning of the block and leave them at its end."""
        self._call = Call(host, gates, _nothing, args, kwargs, host.clock.now())
        self._call.streaming = True
        self._call.timed = False

    def _once(self) -> Call:
        if self._call.attempts or self._call.held:
            raise RuntimeError("this hold() was used already: write guard.hold() for each block")
        return self._call

    def __enter__(self) -> None:
        with _explained():
            run_sync(self._once())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        release(self._call, error)

    async def __aenter__(self) -> None:
        self._once().function = _nothing_async
        with _explained():
            await run_async(self._call)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        release(self._call, error)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        # Nothing but a user's own functions (key=, cost=...) is called with arguments here.
        advice = "give hold(...) the arguments that key=, cost= and the like look at"
        raise TypeError(f"{error}: {advice}") from error


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


async def _nothing_async(*_args: Any, **_kwargs: Any) -> None:
    pass
