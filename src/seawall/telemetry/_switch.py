"""A switch for something that is on until it is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class Switch:
    """Something that is on; `close()`, or the end of a `with` block, switches it off."""

    def __init__(self, what: str, off: Callable[[], None]) -> None:
        """Call `off` once, when closed; `what` is its name."""
        self._what = what
        self._off: list[Callable[[], None]] = [off]

    def __repr__(self) -> str:
        return f"<{self._what}: {'on' if self._off else 'off'}>"

    def close(self) -> None:
        """Switch it off. Idempotent, and callable from any thread."""
        try:
            off = self._off.pop()
        except IndexError:
            return
        off()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
