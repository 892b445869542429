"""A response header that names the degraded parts of a response.

Promises:

- Callers see the source and level of each degraded result, but nothing of the errors behind it.
- Names are truncated, and characters that a structured field cannot contain are replaced.
- A response without degraded parts has no such header.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, Final

from seawall.events import Degraded
from seawall.runtime.degradation import Degradations, degradations
from seawall.wire.structured import integer, string

if TYPE_CHECKING:
    from seawall.web.asgi_types import App, Message, Receive, Scope, Send

DEGRADED_HEADER: Final = "Seawall-Degraded"
_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
MOST_SOURCES: Final = 16
"""Maximum number of sources that one response names."""
LONGEST_SOURCE: Final = 64
"""Maximum number of characters of a source's name."""


def write_degraded(seen: Iterable[Degraded]) -> str:
    """Return the value of the header: each source and level once, in order."""
    entries = dict.fromkeys(
        f"{string(less.source[:LONGEST_SOURCE])};level={integer(less.level)}" for less in seen
    )
    return ", ".join([*entries][:MOST_SOURCES])


def header_name(report_degraded: object) -> str | None:
    """Return the header for the option: the default name for True, None for False."""
    if isinstance(report_degraded, bool):
        return DEGRADED_HEADER if report_degraded else None
    if not isinstance(report_degraded, str) or not _NAME.fullmatch(report_degraded):
        raise TypeError(
            f"report_degraded={report_degraded!r}: write True, or the name of a header, such as"
            " 'X-Degraded'"
        )
    return report_degraded


class DegradationReport:
    """Middleware inside the edge that adds the header to the responses of an app."""

    def __init__(self, app: App, header: str) -> None:
        """Report in `header` what was degraded before a response starts."""
        self.app = app
        self._header = header.lower().encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; pass other ASGI scopes through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with degradations() as seen:

            def reporting(message: Message) -> Awaitable[None]:
                if seen and message["type"] == "http.response.start":
                    message = self._with_header(message, seen)
                return send(message)

            await self.app(scope, receive, reporting)

    def _with_header(self, message: Message, seen: Degradations) -> dict[str, Any]:
        more = (self._header, write_degraded(seen).encode("ascii"))
        return {**message, "headers": [*message.get("headers", ()), more]}
