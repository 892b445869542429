"""A block of code that is a guarded call: one block with `hold`, one for each try with `attempts`.

    with guard.hold() as call:                  for attempt in guard.attempts():
        ...                                         with attempt:
                                                        ...

A `hold` enters only the gates. `attempts` has the whole stack around each try: the interpreter runs
a call whose function is the block, `with` carries out its requests until the function is to run,
and the end of the block is what the function returned or raised. A block may report its own outcome
(`BlockVerdict`): a response with status 503 raises nothing.

Promises:
- An error of an attempt is swallowed if another one follows; otherwise the `with` raises it.
- Whatever ends the block or the loop (an error, cancellation, `break`, `return`), every layer is
  left exactly once, in the task or thread that entered it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from seawall.errors import ReportedFailure
from seawall.runtime.call import STREAMED, Call
from seawall.runtime.driver import Steps, adrive, drive, wait_async, wait_sync
from seawall.runtime.interpreter import (
    Request,
    RunFunction,
    interpret,
    release,
    result_of,
    run_async,
    run_sync,
)
from seawall.runtime.layers import Host, Kind, Layer

State = Literal["before", "given", "inside", "over"]
"""State of a loop: before an attempt, with one given out, inside its block, or at the end."""


class BlockVerdict:
    """A block's report about itself; the last report counts, whatever the block raises."""

    def __init__(self) -> None:
        self._open = False
        self._said: BaseException | None = None

    def failed(self, error: Exception | str) -> None:
        """Count the block as failed with `error`, although it does not raise it.

        A string becomes a `ReportedFailure`. A breaker treats it as if it had been raised.
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

    def __init__(
        self, host: Host, gates: Sequence[Layer], args: tuple[Any, ...], kwargs: dict[str, Any]
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


@dataclass(slots=True, eq=False, repr=False)
class Attempts:
    """The value of `guard.attempts()`: each `for` or `async for` over it is one guarded call."""

    _host: Host
    _layers: Callable[[Kind], Sequence[Layer]]
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]

    def __iter__(self) -> Iterator[BlockAttempt]:
        block = self._block("sync")
        try:
            while block.give():
                yield BlockAttempt(block)
        finally:
            block.close()

    def __aiter__(self) -> AsyncIterator[AsyncBlockAttempt]:
        return _AsyncAttemptLoop(self._block("async"))

    def _block(self, kind: Kind) -> _Block:
        host = self._host
        layers = self._layers(kind)
        return _Block(Call(host, layers, _nothing, self._args, self._kwargs, host.clock.now()))


class _Block:
    """One call whose function is a block of code, and its progress."""

    def __init__(self, call: Call) -> None:
        call.block = True
        self.call = call
        self.steps = interpret(call)
        self.request: Request | None = None  # not carried out yet; None before the start
        self.state: State = "before"

    def give(self) -> bool:
        """Give out the next attempt; return False if there is none."""
        if self.state in ("given", "inside"):
            raise RuntimeError(
                f"guard {self.call.host.name!r}: attempts() was asked for the next attempt before"
                " this one was made: write `with attempt:` (`async with` in `async for`) once for"
                " each, around all that is to be attempted"
            )
        if self.state == "over":
            return False
        self.state = "given"
        return True

    def start(self) -> Request | None:
        """Begin an attempt; return the first request to carry out."""
        if self.state != "given":
            raise RuntimeError("this attempt was made already: take the next one from the loop")
        self.state = "over"  # unless the block is reached
        request, self.request = self.request, None
        if request is None:
            return self._step(self.steps.send, None)
        self.call.resume()
        return request

    def approach(self, request: Request | None) -> Steps[Request | None]:
        """Yield this and all further requests up to the block; return None if it is not reached."""
        while request is not None and not isinstance(request, RunFunction):
            try:
                result = yield request
            except BaseException as error:  # noqa: BLE001 - the interpreter decides
                request = self._step(self.steps.throw, error)
            else:
                request = self._step(self.steps.send, result)
        return request

    def _step(self, how: Callable[[Any], Request], argument: Any) -> Request | None:
        """Send or throw into the interpreter; return its next request, if any."""
        try:
            return how(argument)
        except StopIteration:
            return None

    def end(self, raised: BaseException | None, counted: BaseException | None) -> bool:
        """End the block that raised `raised` and counts as `counted`.

        Return True if another attempt follows. Otherwise raise the call's own error, unless it is
        the error that the block itself raised or reported.
        """
        self.state = "over"
        if raised is not None and not isinstance(raised, Exception):
            counted = raised  # whatever was reported, a cancellation must not be swallowed
        self.request = (
            self._step(self.steps.send, STREAMED)
            if counted is None
            else self._step(self.steps.throw, counted)
        )
        if self.request is not None:
            self.state = "before"
            self.call.suspend()
            return True
        error = self.call.error
        try:
            if error is not raised and error is not counted:
                result_of(self.call)
        finally:
            self.call.error = None
            del error, raised, counted
        return False

    def close(self) -> None:
        """Leave all layers, if the loop was left between two attempts."""
        if self.state in ("before", "given"):
            self.state = "over"
            self.steps.close()
            self.call.error = None


class _AnyAttempt(BlockVerdict):
    """One attempt at a block; the block may report its own outcome, as a `hold` block may."""

    def __init__(self, block: _Block) -> None:
        super().__init__()
        self._block = block
        self.number = block.call.attempts + 1  # the attempt's number: 1 for the first

    def _reached(self, request: Request | None) -> Self:
        """Begin the block; or raise what ended the call before that."""
        block = self._block
        if request is None:
            with explained("attempts", block.call):
                result_of(block.call)
        block.state = "inside"
        self._open = True
        return self


class BlockAttempt(_AnyAttempt):
    """An item of a `for` over `guard.attempts()`: `with attempt:`."""

    def __enter__(self) -> Self:
        """Pause, wait at the gates and enter the layers around the block."""
        block = self._block
        request = block.start()
        if not isinstance(request, RunFunction):
            wait = partial(wait_sync, clock=block.call.host.clock)
            request = drive(block.approach(request), wait)
        return self._reached(request)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Leave the layers around the block; swallow its error if another attempt follows."""
        return self._block.end(error, self._end(error))


class AsyncBlockAttempt(_AnyAttempt):
    """An item of an `async for` over `guard.attempts()`: `async with attempt:`."""

    async def __aenter__(self) -> Self:
        block = self._block
        request = block.start()
        if not isinstance(request, RunFunction):
            wait = partial(wait_async, clock=block.call.host.clock)
            request = await adrive(block.approach(request), wait)
        return self._reached(request)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return self._block.end(error, self._end(error))


class _AsyncAttemptLoop:
    """One `async for` loop. Only the loop refers to it: leaving the loop leaves all layers."""

    def __init__(self, block: _Block) -> None:
        self._block = block

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncBlockAttempt:
        if self._block.give():
            return AsyncBlockAttempt(self._block)
        raise StopAsyncIteration

    def __del__(self) -> None:
        self._block.close()


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for the function: the block runs where it is written."""


async def _nothing_async(*_args: Any, **_kwargs: Any) -> None:
    pass
