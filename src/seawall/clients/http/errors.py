"""What an HTTP library calls things; and refusals of Seawall's as errors of that library too.

Code that says `except httpx.HTTPError` was there before the guard, and goes on to work: what is
raised for an open circuit is a `seawall.CircuitOpen` and an `httpx.TransportError` at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from seawall.errors import SeawallError

_A_MOMENT: Final = 0.02


class Library(ABC):
    """What an exchange must know of the library that carries it."""

    _known: ClassVar[dict[str, Library]] = {}

    def __init__(
        self,
        name: str,
        *,
        error: type[Exception],
        timeout_error: type[Exception],
        transient: tuple[type[Exception], ...],
        attributes: Mapping[str, Any],
    ) -> None:
        """Describe the library. `error` is what a refusal is raised as, too.

        A `Retry` should retry one of the `transient` errors: a transport warns if it retries none.
        `attributes` are what all of its errors have, with the values of one that knows nothing.
        """
        self.name = name
        self._attributes = attributes
        self.error = error
        self.timeout_error = timeout_error
        self.transient = transient
        self._mixed: dict[type[SeawallError], type[Exception]] = {}
        Library._known[name] = self

    @abstractmethod
    def replayable(self, request: Any) -> bool:
        """Tell whether the body of `request` can be sent more than once."""

    @abstractmethod
    def shareable(self, request: Any) -> bool:
        """Tell whether its body can even be sent by two attempts at the same time."""

    @abstractmethod
    def headers(self, request: Any) -> Mapping[str, str]:
        """Return the headers of `request` by their names in lower case."""

    @abstractmethod
    def copy(self, request: Any, headers: Mapping[str, str], tried: set[str]) -> Any:
        """Return `request` with other `headers` set, for one attempt; the original stays as it is.

        Their names are in lower case.
        Attempts may run at the same time, so each has its own. They have `tried` in common: where
        the library's requests can carry it, it goes along, for who chooses among hosts.
        """

    @abstractmethod
    def nothing_sent(self, error: Exception) -> bool:
        """Tell whether `error` was raised before any part of the request was sent."""

    @abstractmethod
    def note(self, response: Any, text: str) -> None:
        """Leave a note at a response, where one who looks for it finds it."""

    def mixed(self, kind: type[SeawallError]) -> type[Exception]:
        """Return the class of errors that are of that `kind` and of the library's at once."""
        known = self._mixed.get(kind)
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
            known = self._mixed.setdefault(kind, type(kind.__name__, bases, body))
        return known


def a_moment(seconds: float) -> float:
    """Return how much earlier than after `seconds` a library gives up, so that it is not cut off.

    Twice that for the first of its steps, the wait for a place in its pool: a place that is freed
    in the very instant in which somebody stops waiting for it is lost in httpcore 1.0.
    """
    return min(_A_MOMENT, seconds / 10)


def as_library_error(error: SeawallError, library: Library, request: Any) -> Exception:
    """Return `error` as one that is the library's too, about `request`; all it says is kept."""
    if isinstance(error, (library.error, library.timeout_error)):
        return error
    mixed: Any = _rebuild(library.name, type(error), error.args, vars(error))
    mixed.request = request
    mixed.__traceback__ = error.__traceback__
    mixed.__cause__ = error.__cause__
    mixed.__suppress_context__ = True
    found: Exception = mixed
    return found


def _rebuild(
    library: str, kind: type[SeawallError], args: tuple[Any, ...], state: dict[str, Any]
) -> Any:
    mixed = Library._known[library].mixed(kind)
    # Of two built-in bases, the one that is more than an Exception has to make it.
    error = (OSError if issubclass(mixed, OSError) else Exception).__new__(mixed)
    error.args = args
    vars(error).update(state)
    return error


def _reduce(error: Any) -> tuple[Any, ...]:
    return _unpickle, (error._library, error._kind, error.args, vars(error))


def _unpickle(library: str, kind: type[SeawallError], args: Any, state: dict[str, Any]) -> Any:
    """Make the error again where its library may not have been loaded yet."""
    if library not in Library._known:
        from importlib import import_module

        import_module(f"seawall.clients.{library}")
    return _rebuild(library, kind, args, state)
