"""A limit on requests at once for one route, and how routes are found by their templates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from seawall.clock import Clock
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.runtime.layers import Wait
from seawall.runtime.policy import Policy
from seawall.runtime.runners import wait_async
from seawall.web.request import Incoming
from seawall.web.sending import Passage, Send
from seawall.web.trust import Trust

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Any, Any, Any], Awaitable[None]]


class RouteGate:
    """An app behind a limit of its own on requests at once: that of one route.

    It refuses by raising: the edge, or `problem_handler`, answers.
    """

    def __init__(
        self,
        app: App,
        concurrency: AdaptiveLimit | Bulkhead,
        *,
        name: str,
        clock: Clock | None = None,
    ) -> None:
        """Stand around `app`; `name` is that of a guard, such as "edge GET /reports/{id}"."""
        self.app = app
        checked_part("concurrency", concurrency, (AdaptiveLimit, Bulkhead))
        self.guard = Guard(name, concurrency, clock=clock)
        self._gate: Any = self.guard.bounds[0]
        self._clock = self.guard.clock

    def __repr__(self) -> str:
        return f"<RouteGate {self.guard.name!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within the limit; anything else passes."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gate = self._gate
        passage = Passage(send, self._clock.now, self.guard.stats)
        passage.began = now = self._clock.now()
        arguments = (Incoming(scope, Trust()),) if gate.takes_arguments else ()
        try:
            ticket = gate.enter(now, *arguments)
        except Wait as wait:
            ticket = await wait_async(wait.waiter, self._clock)
        passage.hold(gate, ticket)
        failure: BaseException | None = None
        try:
            await self.app(scope, receive, passage.send)
        except BaseException as error:
            failure = error
            raise
        finally:
            passage.end(failure)
            del failure


def routes_of(routes: Any, prefix: str = "") -> dict[str, list[Any]]:
    """Return the routes of a Starlette app by their templates, those of mounted ones too."""
    found: dict[str, list[Any]] = {}
    for route in routes:
        path = prefix + getattr(route, "path", "")
        inner = getattr(route, "routes", None)
        if inner:
            for deeper, known in routes_of(inner, path).items():
                found.setdefault(deeper, []).extend(known)
        elif hasattr(route, "app"):
            found.setdefault(path, []).append(route)
    return found


def checked_part(part: str, policy: Any, kinds: tuple[type[Policy], ...]) -> Policy:
    """Return `policy` if it is of one of these kinds, or raise and say what to write."""
    if not isinstance(policy, kinds):
        wanted = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise TypeError(f"{part}={policy!r}: write {wanted}")
    return policy
