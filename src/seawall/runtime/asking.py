"""A question to the store, asked together with all others that wait at the same moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from seawall.errors import StoreUnavailable


class Asked(Protocol):
    """What a question is about."""

    def unwanted(self, item: Any, answer: Any) -> None:
        """Take note of an answer that came too late: give back what was granted."""


class Coalesced(Asked, Protocol):
    """How questions become one script call. Asked for the same object, they go together."""

    script: str
    """The name of the script."""
    most: int
    """So many questions in one call at most."""

    def pack(self, items: Sequence[Any]) -> tuple[Sequence[str], Sequence[str | int | float]]:
        """Return keys and arguments of the script call that asks for all `items`."""

    def unpack(self, reply: Any, items: Sequence[Any]) -> Sequence[Any]:
        """Return the answers, one for each of `items`; raise on a reply that makes no sense."""


class Asking:
    """One question, as a `Waiter`: `claim` returns the answer or raises `StoreUnavailable`.

    Who gives up and who delivers may be in different threads; the one that comes first decides.
    """

    __slots__ = ("_add", "_answer", "_error", "_open", "_wake", "about", "due", "item", "until")

    def __init__(
        self, about: Asked, item: Any, until: float | None, add: Callable[[Asking], None]
    ) -> None:
        """Ask for `item`, and wait no longer than `until`; whoever answers gives up by itself."""
        self.about: Any = about  # a `Coalesced` where a link is to answer
        self.item = item
        self.until = until
        self.due = 0.0
        """When whoever answers gives up, on the clock of its event loop."""
        self._add = add
        self._open = [True]
        self._wake: Callable[[], bool] | None = None
        self._answer: Any = None
        self._error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether nobody waits for the answer any more, or it has come."""
        return not self._open

    def publish(self, wake: Callable[[], bool]) -> None:
        """Ask the store."""
        self._wake = wake
        self.publish_in(self._add)

    def publish_in(self, add: Callable[[Asking], None]) -> None:
        """Ask the store from the loop that this is called in."""
        try:
            add(self)
        except StoreUnavailable as error:
            self.fail(error)

    def deliver(self, answer: Any) -> None:
        """Hand over the answer; if nobody waits for it any more, it is unwanted."""
        self._answer = answer
        if not (self._end() and self._wake is not None and self._wake()):
            self._unwanted()

    def fail(self, error: Exception) -> None:
        """Say that there is no answer."""
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
                del error  # or its own frame would keep it alive
        return self._answer

    def abandon(self) -> None:
        """Wait no longer; what has been granted is given back."""
        if not self._end() and self._error is None:
            self._unwanted()

    def _unwanted(self) -> None:
        try:
            self.about.unwanted(self.item, self._answer)
        except Exception:  # others wait for their answers
            logging.getLogger("seawall").exception("what was granted is not given back")

    def _end(self) -> bool:
        """Close the question; False if it was closed already."""
        try:
            return self._open.pop()  # atomic: of two threads, one gets it
        except IndexError:
            return False
