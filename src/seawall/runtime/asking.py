"""A question to the store, sent together with all others that wait at the same moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from seawall.errors import StoreUnavailable


class Asked(Protocol):
    """The subject of a question."""

    def unwanted(self, item: Any, answer: Any) -> None:
        """Handle an answer that came too late: give back what was granted."""


class Coalesced(Asked, Protocol):
    """How to batch questions into one script call; questions about the same object go together."""

    script: str
    """The name of the script."""
    most: int
    """Maximum number of questions in one call."""

    def pack(self, items: Sequence[Any]) -> tuple[Sequence[str], Sequence[str | int | float]]:
        """Return keys and arguments of the script call for all `items`."""

    def unpack(self, reply: Any, items: Sequence[Any]) -> Sequence[Any]:
        """Return the answers, one for each of `items`; raise on an invalid reply."""


class Asking:
    """One question, as a `Waiter`: `claim` returns the answer or raises `StoreUnavailable`.

    The caller may give up in one thread while another delivers; the first one decides.
    """

    __slots__ = ("_add", "_answer", "_error", "_open", "_wake", "about", "due", "item", "until")

    def __init__(
        self, about: Asked, item: Any, until: float | None, add: Callable[[Asking], None]
    ) -> None:
        """Ask for `item`, waiting until `until`; the answering side has its own timeout."""
        self.about: Any = about  # a `Coalesced` if a link answers
        self.item = item
        self.until = until
        self.due = 0.0
        """When the answering side gives up, on the clock of its event loop."""
        self._add = add
        self._open = [True]
        self._wake: Callable[[], bool] | None = None
        self._answer: Any = None
        self._error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether the answer has come, or the caller no longer waits for it."""
        return not self._open

    def publish(self, wake: Callable[[], bool]) -> None:
        """Ask the store."""
        self._wake = wake
        self.publish_in(self._add)

    def publish_in(self, add: Callable[[Asking], None]) -> None:
        """Ask the store from the current event loop."""
        try:
            add(self)
        except StoreUnavailable as error:
            self.fail(error)

    def deliver(self, answer: Any) -> None:
        """Deliver the answer; if the caller has given up, it is unwanted."""
        self._answer = answer
        if not (self._end() and self._wake is not None and self._wake()):
            self._unwanted()

    def fail(self, error: Exception) -> None:
        """Report that there is no answer."""
        self._error = error
        if self._end() and self._wake is not None:
            self._wake()

    def claim(self) -> Any:
        """Return the answer, or raise `StoreUnavailable`."""
        if self._end():
            raise StoreUnavailable("the store did not answer in time")
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # break the reference cycle between the error and this frame
        return self._answer

    def abandon(self) -> None:
        """Stop waiting, and give back what was granted."""
        if not self._end() and self._error is None:
            self._unwanted()

    def _unwanted(self) -> None:
        try:
            self.about.unwanted(self.item, self._answer)
        except Exception:  # the other waiters must still get their answers
            logging.getLogger("seawall").exception("what was granted is not given back")

    def _end(self) -> bool:
        """Close the question; return False if it was closed already."""
        try:
            return self._open.pop()  # atomic: only one of two threads gets it
        except IndexError:
            return False
