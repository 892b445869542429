"""One request to one of the hosts: choose it, enter its breaker, and record the outcome once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, Final, Self

from seawall.clients.upstreams.host_set import HostSet, RequestInProgress
from seawall.clients.upstreams.hosts import Endpoint, UpstreamHost
from seawall.context import deadline_scope, live_scope
from seawall.errors import CircuitOpen, Rejected
from seawall.runtime.driver import adrive, drive, wait_async, wait_sync
from seawall.runtime.interpreter import enter
from seawall.runtime.layers import CANCELLED, FAILED, OK, UNUSED, Kind, Outcome, Wait, Waiter
from seawall.wire.idempotency import REPLAYED_HEADER, is_replayed

Classifier = Callable[[Exception | None, Any], bool]
"""`is_failure(error, response)` returns whether the host caused an exception or bad response."""

NEVER_SENT: Final = frozenset({"PoolTimeout", "LocalProtocolError", "UnsupportedProtocol"})
"""Exceptions of HTTP clients, by name, that are raised before anything was sent."""

REFUSED: Final = 400
"""Lowest status of responses that may be faster than a good one."""

NOT_FAILURES: Final = frozenset({501, 505})
"""Statuses from 500 on that are about the request, not about the host."""


def is_host_failure(error: Exception | None, response: Any) -> bool:
    """Return whether a host failed: by an exception, or by a status that means its own failure."""
    if error is not None:
        return type(error).__name__ not in NEVER_SENT
    status = _status(response)
    headers = getattr(response, "headers", None)
    if isinstance(headers, Mapping) and is_replayed(headers.get(REPLAYED_HEADER)):
        return False  # a replayed response, of a host that is healthy now
    return status == 408 or (status >= 500 and status not in NOT_FAILURES)  # noqa: PLR2004


def _status(response: Any) -> int:
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else 0


class Pick:
    """Context manager: `with upstreams.pick() as host:` or `async with ...`; one use each.

    `host.url` is the URL to use. An exception that leaves the block is the host's failure, unless
    `is_failure` says otherwise; `host.answered(response)` classifies a response with `is_failure`,
    and `host.failed()` reports a failure directly: an exception after either changes nothing. A
    cancelled block is neither success nor failure.
    """

    def __init__(self, hosts: HostSet, is_failure: Classifier, tried: set[str] | None) -> None:
        """Choose when the block begins; hosts in `tried` only if no other is left."""
        self._set = hosts
        self._is_failure = is_failure
        self._tried = tried
        self._kind: Kind = "sync"
        self._used = False
        self._host_errors: type[Exception] | tuple[type[Exception], ...] = Exception
        """The exceptions that a host can have caused."""
        self._verdict: Outcome | None = None
        self._refused = False
        self._head_recorded = False
        """Whether the head of a response has arrived, and its body is in progress."""
        self._response: Any = None
        self._ticket: Any = None
        self._sent: RequestInProgress | None = None

    def __repr__(self) -> str:
        where = "not begun, or over" if self._sent is None else self._sent.host.url
        return f"<Pick of {self._set.name!r}: {where}>"

    @property
    def url(self) -> str:
        """The base URL of the host, inside the block."""
        if self._sent is None:
            raise RuntimeError("pick() chooses when its block begins: `with upstreams.pick() as`")
        return self._sent.host.url

    @property
    def _endpoint(self) -> Endpoint:
        """The parts of that URL; only for http and https hosts."""
        endpoint = None if self._sent is None else self._sent.host.endpoint
        if endpoint is None:
            raise ValueError(f"{self.url!r} is no http or https URL: send HTTP to such hosts only")
        return endpoint

    def answered(self, response: Any) -> None:
        """Classify the response of the host with `is_failure(None, response)`."""
        self._response = response
        self._verdict = FAILED if self._has_failed(None, response) else OK
        self._refused = self._verdict is OK and _status(response) >= REFUSED

    def failed(self) -> None:
        """Report that the host failed, though no exception leaves the block."""
        self._verdict = FAILED

    def __enter__(self) -> Self:
        self._once()
        drive(self._steps(), partial(wait_sync, clock=self._set.clock))
        return self

    async def __aenter__(self) -> Self:
        self._once()
        self._kind = "async"
        await adrive(self._steps(), partial(wait_async, clock=self._set.clock))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(error)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(error)

    def _once(self) -> None:
        if self._used:
            raise RuntimeError("this pick() was used already: write upstreams.pick() each time")
        self._used = True

    def _take(self, refused: set[UpstreamHost]) -> UpstreamHost | None:
        self._sent = self._set.take(self._tried, refused)
        return None if self._sent is None else self._sent.host

    def _steps(self) -> Generator[Waiter, Any, None]:
        """Try host after host until a breaker admits the request."""
        refused: set[UpstreamHost] = set()
        refusals: list[CircuitOpen] = []
        while (host := self._take(refused)) is not None:
            try:
                yield from self._enter(host)
            except BaseException as error:
                self._sent = None
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
            refusals.clear()  # Break the cycle between the exceptions and this frame.

    def _enter(self, host: UpstreamHost) -> Generator[Waiter, Any, None]:
        if host.gate is None or self._sent is None:
            return
        layer = host.gate.layers[self._kind]
        waiter: Waiter | None = None
        while True:
            try:
                if waiter is None:
                    self._ticket = enter(layer, self._sent.began, host.gate.arguments, {})
                else:  # shared by pods: the store must be asked
                    self._ticket = yield waiter
                    self._sent = self._sent._replace(began=self._set.clock.now())
            except Wait as wait:
                waiter = wait.waiter
            else:
                return

    def _begin_body(self) -> None:
        """Record the head of a response; `_end` records the end of its body."""
        sent = self._sent
        assert sent is not None  # noqa: S101 - it has just been answered
        outcome = self._verdict or OK
        self._head_recorded = True
        # After a good head the body decides; after a bad one the outcome is final.
        self._verdict = None if outcome is OK else CANCELLED
        try:
            self._leave(sent.host, outcome, None)
        finally:
            self._set.end(sent, outcome, refused=self._refused, body=False)

    def _end(self, error: BaseException | None) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        outcome = self._outcome(sent, error)
        if self._head_recorded:
            self._set.end(sent, outcome, head=False)
            return
        try:
            self._leave(sent.host, outcome, error)
        finally:
            self._set.end(sent, outcome, refused=self._refused)

    def _leave(self, host: UpstreamHost, outcome: Outcome, error: BaseException | None) -> None:
        """Leave the breaker, which judges only the head of a response: a long body is not slow."""
        ticket, self._ticket = self._ticket, None
        answer, self._response = self._response, None
        if host.gate is not None:
            detail = answer if outcome is OK else error
            host.gate.layers[self._kind].leave(ticket, outcome, detail, self._set.clock.now())

    def _outcome(self, sent: RequestInProgress, error: BaseException | None) -> Outcome:
        if self._verdict is not None or error is None:
            return self._verdict or OK
        if isinstance(error, Rejected):
            return UNUSED
        if isinstance(error, Exception):
            if not isinstance(error, self._host_errors):
                return CANCELLED
            if not self._has_failed(error, None):
                return UNUSED if type(error).__name__ in NEVER_SENT else CANCELLED
            return CANCELLED if self._had_too_little_time(sent) else FAILED
        # A body may be longer than the caller has time for; a stalled body is a read error.
        is_late = not self._head_recorded and _out_of_time(error)
        return FAILED if is_late and not self._had_too_little_time(sent) else CANCELLED

    def _had_too_little_time(self, sent: RequestInProgress) -> bool:
        """Return whether the caller's deadline left less time than the host usually takes."""
        held = deadline_scope()
        while held is not None and held[3] is not True:  # of a Timeout: the host had that time
            held = live_scope(held[2])
        if held is None or held[1].now() < held[0]:
            return False
        usual = sent.host.load.usual
        return self._head_recorded or usual is None or self._set.clock.now() - sent.began < usual

    def _has_failed(self, error: Exception | None, response: Any) -> bool:
        try:
            return bool(self._is_failure(error, response))
        except Exception:
            import logging

            logging.getLogger("seawall").exception(
                "is_failure of upstreams %r failed; the host counts as failed", self._set.name
            )
            return True


def _out_of_time(error: BaseException) -> bool:
    # If the error is a CancelledError, asyncio is loaded; a sync service never imports it.
    if type(error).__name__ != "CancelledError":
        return False
    from seawall._expiry import is_expiry

    return is_expiry(error)
