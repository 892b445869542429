"""A response header that tells which parts of an answer were degraded.

Promises: callers learn where lesser answers came from and at which level, nothing of the errors
that made them necessary. Names are cut, and what a structured field cannot say is replaced. A
response without degraded parts has no such header.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, Final

from seawall.runtime.degradation import Degradations, degradations
from seawall.runtime.events import Degraded
from seawall.wire.structured import integer, string

if TYPE_CHECKING:
    from seawall.web.asgi_types import App, Message, Receive, Scope, Send

DEGRADED_HEADER: Final = "Seawall-Degraded"
_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
MOST_SOURCES: Final = 16
"""Sources that one response names."""
LONGEST_SOURCE: Final = 64
"""Characters of a source's name."""


def write_degraded(seen: Iterable[Degraded]) -> str:
    """Return the value of the header: each source and level once, in order."""
    told = dict.fromkeys(
        f"{string(less.source[:LONGEST_SOURCE])};level={integer(less.level)}" for less in seen
    )
    return ", ".join([*told][:MOST_SOURCES])


def header_name(report_degraded: object) -> str | None:
    """Return the header that the option asks for; True is the usual one, False none."""
    if isinstance(report_degraded, bool):
        return DEGRADED_HEADER if report_degraded else None
    if not isinstance(report_degraded, str) or not _NAME.fullmatch(report_degraded):
        raise TypeError(
            f"report_degraded={report_degraded!r}: write True, or the name of a header, such as"
            " 'X-Degraded'"
        )
    return report_degraded


class DegradationReport:
    """Stands around an app, inside its edge, and adds the header to its responses."""

    def __init__(self, app: App, header: str) -> None:
        """Tell in `header` what was degraded before a response starts."""
        self.app = app
        self._header = header.lower().encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; whatever else is none of its business."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with degradations() as seen:

            def telling(message: Message) -> Awaitable[None]:
                if seen and message["type"] == "http.response.start":
                    message = self._told(message, seen)
                return send(message)

            await self.app(scope, receive, telling)

    def _told(self, message: Message, seen: Degradations) -> dict[str, Any]:
        more = (self._header, write_degraded(seen).encode("ascii"))
        return {**message, "headers": [*message.get("headers", ()), more]}
