"""Who may look, and who may act.

Promises: each request is asked about anew; what cannot be decided (a callback that fails, hangs or
returns something else) is refused; nothing of the reason but fixed words is told to who is refused.

With `local`, only this machine may look. That takes more than the address of the peer, for a
browser here can be sent by any page in the world, and a proxy here speaks for all of it:

- the connection comes from a loopback address to a loopback address;
- the Host is a loopback's name, so no name that somebody else pointed here (DNS rebinding);
- no header tells of a proxy, and no HTTP/1.0, which only those still speak;
- this process listens on no address that another machine reaches.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, Final

from seawall import _checks as check
from seawall._redaction import redacted
from seawall.clock import Clock
from seawall.dashboard._answers import Refusal, forbidden
from seawall.dashboard._bounds import shown
from seawall.dashboard._listening import is_loopback, listens_beyond_loopback
from seawall.dashboard._visit import Visit

Ask = Callable[[Visit], Any]
"""`allow` or `operate`: plain or async."""

PATIENCE: Final = 10.0
"""Seconds that a callback has for its answer."""

LOOKED_AGAIN: Final = 10.0
"""Seconds after which the addresses that this process listens on are looked up again."""

NEVER_YET: Final = float("-inf")

QUIET: Final = 60.0
"""Seconds between two records of the same trouble: whoever asks must not fill the log."""

LONGEST_NAME: Final = 80
LONGEST_HOST: Final = 300
LONGEST_RECORD: Final = 1000

_PROXIED: Final = frozenset(
    {
        "cdn-loop",
        "client-ip",
        "forwarded",
        "forwarded-for",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-host",
        "x-real-ip",
        "x-remote-addr",
        "x-remote-ip",
    }
)
_PROXIED_AS: Final = (
    "cf-",
    "fastly-",
    "fly-",
    "x-amzn-",
    "x-appengine-",
    "x-azure-",
    "x-envoy-",
    "x-forwarded",
    "x-original-",
    "x-proxy",
    "x-varnish",
)
"""Headers that proxies add: these, and all that begin so."""

log: Final = logging.getLogger("seawall.dashboard")


class Door:
    """Decides about each request; made of what the dashboard was given."""

    def __init__(
        self, allow: Ask | None, operate: Ask | None, *, local: bool, clock: Clock
    ) -> None:
        """Raise ValueError if everybody could look, RuntimeError if `local` is not."""
        self.allow = None if allow is None else check.function("allow", allow)
        self.operate = None if operate is None else check.function("operate", operate)
        self.local = check.flag("local", local)
        self._clock = clock
        self._exposed: str | None = None
        self._look_at = NEVER_YET
        self._quiet: dict[str, float] = {}
        if allow is None and not local:
            raise ValueError(
                "Dashboard(): it would show itself to everybody. Write allow=function, which is"
                " given each request and returns True for those who may look; or local=True for a"
                " service that only this machine reaches"
            )
        self.check_exposure()

    def check_exposure(self) -> None:
        """Raise RuntimeError if only this machine may look, but others reach this process."""
        if self.local:
            self._look_at = NEVER_YET
            reached = self._look()
            self._look_at = NEVER_YET  # most servers bind after the start: a request looks again
            if reached is not None:
                raise RuntimeError(f"Dashboard(local=True): {_exposure(reached)}")

    def _look(self) -> str | None:
        """Return where others reach this process; once they do, that is not forgotten."""
        now = self._clock.now()
        if self._exposed is None and now >= self._look_at:
            self._look_at = now + LOOKED_AGAIN
            self._exposed = listens_beyond_loopback()
        return self._exposed

    async def admit(self, visit: Visit) -> None:
        """Return if this request may look; else raise `Refusal`."""
        if self.local:
            reached = self._look()
            if reached is not None:
                self.tell("exposed", logging.ERROR, "local=True, but %s", _exposure(reached))
                raise forbidden("Other machines reach this service: this page is not for them.")
            wrong = _not_local(visit)
            if wrong:
                raise forbidden(f"This page is for the machine itself alone: {wrong}.")
        if self.allow is not None and await self._answer("allow", self.allow, visit) is not True:
            raise forbidden("You may not look at this.")

    async def operator(self, visit: Visit) -> str | None:
        """Return the name of who may act by this request, which may look; None if nobody."""
        if self.operate is None:
            return None
        name = await self._answer("operate", self.operate, visit)
        if name is True:
            return "operator"
        if not isinstance(name, str):
            return None
        return name.strip()[:LONGEST_NAME] or None

    async def _answer(self, name: str, ask: Ask, visit: Visit) -> Any:
        """Return what a callback says; None if it fails."""
        import asyncio

        try:
            answer = ask(visit)
            if inspect.isawaitable(answer):
                async with asyncio.timeout(PATIENCE):
                    answer = await answer
        except Refusal:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no permission
            self.tell(name, logging.ERROR, "%s() failed, so it is refused: %r", name, error)
            return None
        wanted = "True or False" if name == "allow" else "the operator's name, or None"
        if answer is not None and not isinstance(answer, bool if name == "allow" else (bool, str)):
            self.tell(
                name, logging.ERROR, "%s() returned %r, so it is refused; return %s",
                name, type(answer), wanted,
            )  # fmt: skip
        return answer

    def tell(self, about: str, level: int, message: str, *told: object) -> None:
        """Log a trouble, unless it was a moment ago."""
        now = self._clock.now()
        if now >= self._quiet.get(about, now):
            self._quiet[about] = now + QUIET
            # What an error says may hold what a stranger wrote: one line, and not a long one.
            log.log(level, "dashboard: %s", shown(redacted(message % told), LONGEST_RECORD))


def _exposure(address: str) -> str:
    return (
        f"this process listens on {address}, which other machines reach. Bind the server to"
        " 127.0.0.1, or write allow=function, which says who may look"
    )


def _not_local(visit: Visit) -> str:
    """Return why a request is not this machine's own; "" if it is."""
    if not is_loopback(visit.peer or ""):
        return "the request comes from another"
    server = visit.scope.get("server")
    name = server[0] if server else None
    if not isinstance(name, str) or not (is_loopback(name) or name == "localhost"):
        return "the request was sent to an address that others reach"
    if _is_old(visit) or any(_is_of_proxy(name.decode("latin-1")) for name, _ in visit.headers):
        return "a proxy stands before it"
    if not _is_loopback_name(visit.header("host")):
        return "write localhost or 127.0.0.1 in the address bar"
    return ""


def _is_old(visit: Visit) -> bool:
    # A plain proxy_pass of nginx adds no header and writes our own address as the Host, but it
    # speaks HTTP/1.0, which no browser does.
    return visit.scope.get("http_version") in ("0.9", "1.0")


def _is_of_proxy(header: str) -> bool:
    name = header.replace("_", "-").lower()  # some write it so, and some take it for the same
    return name in _PROXIED or name.startswith(_PROXIED_AS)


def _is_loopback_name(host: str | None) -> bool:
    if host is None or len(host) > LONGEST_HOST or "%" in host:  # that begins no part of a name
        return False
    name, _, port = (
        host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    )
    if port and not (port.isascii() and port.isdigit()):
        return False
    if name.startswith("[") and name.endswith("]"):
        return ":" in name and is_loopback(name[1:-1])
    return name.lower() == "localhost" or (":" not in name and is_loopback(name))
