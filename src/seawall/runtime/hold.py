"""The gates of a guard around a block of code that cannot be a function.

The block may report its own outcome (`BlockVerdict`): a response with status 503 raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from seawall.errors import ReportedFailure
from seawall.runtime.call import Call
from seawall.runtime.interpreter import release, run_async, run_sync
from seawall.runtime.layers import Host, Layer


class BlockVerdict:
    """A block's report about itself; the last report counts, whatever the block raises."""

    __slots__ = ("_open", "_said")

    def __init__(self) -> None:
        self._open = False
        self._said: BaseException | None = None

    def failed(self, error: Exception | str) -> None:
        """Count the block as failed with `error`, although it does not raise it.

        A string becomes a `ReportedFailure`. A breaker's `is_failure` is called as if the block had
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
        # Break the cycle: its traceback may refer to the frame that holds this.
        said, self._said = self._said, None
        self._open = False
        return error if said is None else said


class _NoVerdict(BaseException):
    """Placeholder error of a block to ignore; not an Exception, so it is never retried."""

    no_verdict = True


class Hold(BlockVerdict):
    """`with guard.hold() as call:` or `async with guard.hold() as call:`; one use each."""

    __slots__ = ("_call",)

    def __init__(
        self,
        host: Host,
        gates: Sequence[Layer],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
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

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        release(self._call, self._end(error))

    async def __aenter__(self) -> Self:
        self._once().function = _nothing_async
        with explained("hold", self._call):
            await run_async(self._call)
        self._open = True
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        release(self._call, self._end(error))


@contextmanager
def explained(method: str, call: Call) -> Iterator[None]:
    """Add advice to a TypeError that is raised before `call` begins."""
    try:
        yield
    except TypeError as error:
        if call.attempts:
            raise
        # Only the user's own functions (key=, cost=...) are called with arguments here.
        advice = f"give {method}(...) the arguments that key=, cost= and the like look at"
        raise TypeError(f"{error}: {advice}") from error


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


async def _nothing_async(*_args: Any, **_kwargs: Any) -> None:
    pass
