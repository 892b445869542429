"""One request to one of the hosts: choose, enter its breaker, and take in how it went, once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Final, Self

from seawall.clients._upstream_hosts import Endpoint, Host
from seawall.clients._upstream_set import HostSet
from seawall.errors import CircuitOpen, Rejected
from seawall.runtime.interpreter import enter
from seawall.runtime.layers import CANCELLED, FAILED, OK, UNUSED, Kind, Outcome, Wait, Waiter
from seawall.runtime.runners import wait_async, wait_sync

Classifier = Callable[[Exception | None, Any], bool]
"""`is_failure(error, response)`: whether what a host raised, or answered, is its own failure."""

NOT_THE_HOSTS: Final = frozenset({"PoolTimeout", "LocalProtocolError", "UnsupportedProtocol"})
"""Errors of HTTP clients, by name, that arise before anything was sent."""

NOT_FAILURES: Final = frozenset({501, 505})
"""Statuses from 500 on that say something of the request, not of the host."""


def failed_by_itself(error: Exception | None, response: Any) -> bool:
    """Tell whether a host failed: it raised, or answered with a status of its own trouble."""
    if error is not None:
        return type(error).__name__ not in NOT_THE_HOSTS
    status = getattr(response, "status_code", None)
    return isinstance(status, int) and status >= 500 and status not in NOT_FAILURES  # noqa: PLR2004


class Pick:
    """`with upstreams.pick() as host:` or `async with ...`; one use each.

    `host.url` is whom to ask. An error that leaves the block is the host's failure, unless
    `is_failure` says otherwise; `host.answered(response)` lets it judge an answer, and
    `host.failed()` says so outright. A cancelled block is no verdict.
    """

    __slots__ = (
        "_answer",
        "_began",
        "_failed",
        "_generation",
        "_host",
        "_is_failure",
        "_kind",
        "_set",
        "_ticket",
        "_tried",
        "_used",
    )

    def __init__(self, hosts: HostSet, is_failure: Classifier, tried: set[str] | None) -> None:
        """Choose when the block begins; those in `tried` only if no other is left."""
        self._set = hosts
        self._is_failure = is_failure
        self._tried = tried
        self._kind: Kind = "sync"
        self._used = False
        self._failed = False
        self._answer: Any = None
        self._ticket: Any = None
        self._host: Host | None = None

    def __repr__(self) -> str:
        where = "not begun, or over" if self._host is None else self._host.url
        return f"<Pick of {self._set.name!r}: {where}>"

    @property
    def url(self) -> str:
        """The base URL of the host, inside the block."""
        if self._host is None:
            raise RuntimeError("pick() chooses when its block begins: `with upstreams.pick() as`")
        return self._host.url

    @property
    def _endpoint(self) -> Endpoint:
        """The parts of that URL; only of http and https hosts."""
        endpoint = None if self._host is None else self._host.endpoint
        if endpoint is None:
            raise ValueError(f"{self.url!r} is no http or https URL: send HTTP to such hosts only")
        return endpoint

    def answered(self, response: Any) -> None:
        """Let `is_failure(None, response)` judge what the host answered."""
        self._answer = response
        self._failed = self._judge(None, response)

    def failed(self) -> None:
        """Say that the host failed, though no error leaves the block."""
        self._failed = True

    def __enter__(self) -> Self:
        self._once()
        if not self._set.gated:
            self._take(())
            return self
        steps = self._steps()
        clock = self._set.clock
        try:
            waiter = next(steps)
            while True:
                try:
                    result = wait_sync(waiter, clock)
                except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                    waiter = steps.throw(error)
                else:
                    waiter = steps.send(result)
        except StopIteration:
            return self

    async def __aenter__(self) -> Self:
        self._once()
        if not self._set.gated:
            self._take(())
            return self
        self._kind = "async"
        steps = self._steps()
        clock = self._set.clock
        try:
            waiter = next(steps)
            while True:
                try:
                    result = await wait_async(waiter, clock)
                except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                    waiter = steps.throw(error)
                else:
                    waiter = steps.send(result)
        except StopIteration:
            return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(error)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(error)

    def _once(self) -> None:
        if self._used:
            raise RuntimeError("this pick() was used already: write upstreams.pick() each time")
        self._used = True

    def _take(self, refused: set[Host] | tuple[()]) -> Host | None:
        taken = self._set.take(self._tried, refused)
        if taken is None:
            return None
        self._host, self._began, self._generation = taken
        return self._host

    def _steps(self) -> Generator[Waiter, Any, None]:
        """Go from host to host until a breaker lets the request through."""
        refused: set[Host] = set()
        refusals: list[CircuitOpen] = []
        while (host := self._take(refused)) is not None:
            try:
                yield from self._enter(host)
            except BaseException as error:
                self._host = None
                self._set.put_back(host)
                if self._tried is not None:
                    self._tried.discard(host.url)
                if not isinstance(error, CircuitOpen):
                    raise
                refused.add(host)
                refusals.append(error)
            else:
                return
        try:
            raise self._set.all_open(refusals)
        finally:
            refusals.clear()  # or they and this frame would keep each other alive

    def _enter(self, host: Host) -> Generator[Waiter, Any, None]:
        if host.gate is None:
            return
        layer = host.gate.layers[self._kind]
        waiter: Waiter | None = None
        while True:
            try:
                if waiter is None:
                    self._ticket = enter(layer, self._began, host.gate.arguments, {})
                else:  # pods share it, and the store has to be asked
                    self._ticket = yield waiter
                    self._began = self._set.clock.now()
            except Wait as wait:
                waiter = wait.waiter
            else:
                return

    def _end(self, error: BaseException | None) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        outcome = self._outcome(error)
        ticket, self._ticket = self._ticket, None
        try:
            if host.gate is not None:
                detail = self._answer if outcome is OK else error
                layer = host.gate.layers[self._kind]
                layer.leave(ticket, outcome, detail, self._set.clock.now())
        finally:
            self._answer = None
            self._set.end(host, self._began, self._generation, outcome)

    def _outcome(self, error: BaseException | None) -> Outcome:
        if error is None:
            return FAILED if self._failed else OK
        if isinstance(error, Rejected):
            return UNUSED
        if isinstance(error, Exception):
            return FAILED if self._judge(error, None) else CANCELLED
        return FAILED if self._failed or _out_of_time(error) else CANCELLED

    def _judge(self, error: Exception | None, response: Any) -> bool:
        try:
            return bool(self._is_failure(error, response))
        except Exception:
            import logging

            logging.getLogger("seawall").exception(
                "is_failure of upstreams %r failed; the host counts as failed", self._set.name
            )
            return True


def _out_of_time(error: BaseException) -> bool:
    # asyncio is loaded if the error is a CancelledError; a sync service never pays for it.
    if type(error).__name__ != "CancelledError":
        return False
    from seawall._expiry import is_expiry

    return is_expiry(error)
