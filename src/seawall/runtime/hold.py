"""The gates of a guard around a block of code that cannot be a function.

The block may say itself how it went (`Verdict`): a response with status 503 raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from seawall.errors import ReportedFailure
from seawall.runtime.call import Call
from seawall.runtime.interpreter import release
from seawall.runtime.layers import Host, Layer
from seawall.runtime.runners import run_async, run_sync


class Verdict:
    """What a block of code says of itself; the last word counts, whatever the block raises."""

    __slots__ = ("_open", "_said")

    def __init__(self) -> None:
        """Begin outside of the block, with nothing said."""
        self._open = False
        self._said: BaseException | None = None

    def failed(self, error: Exception | str) -> None:
        """Count the block as failed with `error`, though it does not raise it.

        A text stands for a `ReportedFailure`. A breaker's `is_failure` is asked as if the block had
        raised it.
        """
        if not isinstance(error, Exception | str):
            raise TypeError(f"failed({error!r}): pass an exception, or a text such as 'status 503'")
        self._say(ReportedFailure(error) if isinstance(error, str) else error)

    def ignore(self) -> None:
        """Count the block neither as a success nor as a failure."""
        self._say(_NoVerdict())

    def _say(self, error: BaseException) -> None:
        if not self._open:
            raise RuntimeError("say how a block went inside of it, before it ends")
        self._said = error

    def _end(self, error: BaseException | None) -> BaseException | None:
        """End the block; return the error that it counts with, if any."""
        said, self._said = self._said, None  # its traceback may lead to the frame that has this
        self._open = False
        return error if said is None else said


class _NoVerdict(BaseException):
    """Stands for the error of a block that is to be ignored; no Exception, so never retried."""

    no_verdict = True


class Hold(Verdict):
    """`with guard.hold() as call:` or `async with guard.hold() as call:`; one use each."""

    __slots__ = ("_call",)

    def __init__(
        self,
        host: Host,
        gates: Sequence[Layer],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Enter `gates` at the beginning of the block and leave them at its end."""
        super().__init__()
        self._call = Call(host, gates, _nothing, args, kwargs, host.clock.now())
        self._call.streaming = True
        self._call.timed = False

    def _once(self) -> Call:
        if self._call.attempts or self._call.held:
            raise RuntimeError("this hold() was used already: write guard.hold() for each block")
        return self._call

    def __enter__(self) -> Self:
        with explained("hold", self._once()):
            run_sync(self._call)
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        release(self._call, self._end(error))

    async def __aenter__(self) -> Self:
        self._once().function = _nothing_async
        with explained("hold", self._call):
            await run_async(self._call)
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        release(self._call, self._end(error))


@contextmanager
def explained(method: str, call: Call) -> Iterator[None]:
    """Say in a TypeError that is raised before `call` begins what it may be for."""
    try:
        yield
    except TypeError as error:
        if call.attempts:
            raise
        # Nothing but a user's own functions (key=, cost=...) is called with arguments here.
        advice = f"give {method}(...) the arguments that key=, cost= and the like look at"
        raise TypeError(f"{error}: {advice}") from error


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


async def _nothing_async(*_args: Any, **_kwargs: Any) -> None:
    pass
