"""What an exchange must know about a library, and refusals as exceptions of that library.

Existing code with `except httpx.HTTPError` keeps working under a guard: the exception for an open
circuit is both a `seawall.CircuitOpen` and an `httpx.TransportError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from seawall.errors import SeawallError

_SAFETY_MARGIN: Final = 0.02


class Library(ABC):
    """What an exchange must know about the library that carries it."""

    _known: ClassVar[dict[str, Library]] = {}
    honours_keys: ClassVar[bool] = True
    """Whether its servers may know the header Idempotency-Key."""

    def __init__(
        self,
        name: str,
        *,
        error: type[Exception],
        timeout_error: type[Exception],
        transient: tuple[type[Exception], ...],
        attributes: Mapping[str, Any],
        timeouts: tuple[type[Exception], ...] = (),
    ) -> None:
        """Describe the library. A refusal is raised as an `error` of the library too.

        A `Retry` should retry at least one of the `transient` exceptions: a transport warns if it
        retries none. `attributes` are those that all exceptions of the library have, with default
        values. `timeouts` are the library's own, if not all of them are a `timeout_error`.
        """
        self.name = name
        self._attributes = attributes
        self.error = error
        self.timeout_error = timeout_error
        self.response = f"{name}.Response"
        """The name of the class of responses."""
        self.timeouts = timeouts or (timeout_error,)
        self.transient = transient
        self._combined: dict[type[SeawallError], type[Exception]] = {}
        Library._known[name] = self

    @abstractmethod
    def replayable(self, request: Any) -> bool:
        """Return whether the body of `request` can be sent more than once."""

    @abstractmethod
    def shareable(self, request: Any) -> bool:
        """Return whether two attempts can send its body concurrently."""

    @abstractmethod
    def headers(self, request: Any) -> Mapping[str, str]:
        """Return the headers of `request` by their names in lower case."""

    @abstractmethod
    def copy(self, request: Any, headers: Mapping[str, str], tried: set[str]) -> Any:
        """Return a copy of `request` with these `headers` set, for one attempt.

        The names are in lower case. Attempts may run concurrently, so each has its own copy. They
        share `tried`: where the library's requests can carry it, it is attached, for a transport
        that chooses among hosts.
        """

    @abstractmethod
    def nothing_sent(self, error: Exception) -> bool:
        """Return whether `error` was raised before any part of the request was sent."""

    def status(self, response: Any) -> int:
        """Return the status of a response."""
        status: int = response.status_code
        return status

    def throttled(self, response: Any) -> bool:
        """Return whether a failed response says that the server did nothing, and to ask later."""
        return False

    def request_of_error(self, request: Any) -> Any:
        """Return what an error has as its `request`; it can be pickled."""
        return request

    def note(self, response: Any, text: str) -> None:
        """Attach a note to a response."""
        response.seawall_note = text

    def combined(self, kind: type[SeawallError]) -> type[Exception]:
        """Return the class of exceptions that are of `kind` and of the library's class."""
        known = self._combined.get(kind)
        if known is None:
            late = issubclass(kind, TimeoutError)
            bases = (kind, self.timeout_error if late else self.error)
            body = {
                **self._attributes,
                "__module__": kind.__module__,
                "__doc__": kind.__doc__,
                "__reduce__": _reduce,
                "_library": self.name,
                "_kind": kind,
            }
            known = self._combined.setdefault(kind, type(kind.__name__, bases, body))
        return known


def safety_margin(seconds: float) -> float:
    """Return how many seconds before the guard's timeout a library should give up.

    The first of its steps, the wait for a place in its pool, ends earlier by twice that time:
    httpcore 1.0 loses a place that is freed in the very moment in which a waiter gives up.
    """
    return min(_SAFETY_MARGIN, seconds / 10)


def as_library_error(error: SeawallError, library: Library, request: Any) -> Exception:
    """Return `error` as an exception of the library too, about `request`, with its attributes."""
    if isinstance(error, (library.error, library.timeout_error)):
        return error
    combined: Any = _rebuild(library.name, type(error), error.args, vars(error))
    combined.request = request
    combined.__traceback__ = error.__traceback__
    combined.__cause__ = error.__cause__
    combined.__suppress_context__ = True
    found: Exception = combined
    return found


def _rebuild(
    library: str, kind: type[SeawallError], args: tuple[Any, ...], state: dict[str, Any]
) -> Any:
    combined = Library._known[library].combined(kind)
    # Of two built-in bases, the one with its own layout must create the object.
    error = (OSError if issubclass(combined, OSError) else Exception).__new__(combined)
    error.args = args
    vars(error).update(state)
    return error


def _reduce(error: Any) -> tuple[Any, ...]:
    return _unpickle, (error._library, error._kind, error.args, vars(error))


def _unpickle(library: str, kind: type[SeawallError], args: Any, state: dict[str, Any]) -> Any:
    """Restore the exception where its library may not have been loaded yet."""
    if library not in Library._known:
        from importlib import import_module

        import_module(f"seawall.clients.{library}")
    return _rebuild(library, kind, args, state)


# Timeouts of urllib3, with which requests and botocore send


def lower_urllib3_timeout(timeout: Any, seconds: float | None) -> Any:
    """Return `timeout` with connecting and reading together limited to `seconds`.

    It is a number, a pair for connecting and reading, None, or a timeout of urllib3.
    """
    from urllib3.util import Timeout

    if seconds is None:
        return timeout
    if isinstance(timeout, Timeout):
        total = timeout.total
        least = min(total, seconds) if isinstance(total, (int, float)) else seconds
        return Timeout(least, timeout._connect, timeout._read)
    connect, read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
    return Timeout(seconds, connect, read)


def relax_urllib3_timeout(raw: Any, timeout: Any) -> None:
    """Apply the user's `timeout` to each remaining piece of the body that is read from `raw`.

    If the response is the connection's last, its socket is not accessible, and nothing changes.
    """
    from urllib3.util import Timeout

    socket = getattr(getattr(raw, "connection", None), "sock", None)
    if isinstance(timeout, Timeout):
        read = timeout._read if timeout.total is None else socket
    else:
        read = timeout[1] if isinstance(timeout, tuple) else timeout
    if socket is not None and (read is None or isinstance(read, (int, float))):
        socket.settimeout(read)
