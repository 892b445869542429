"""Authorization: which requests may look, and which may act.

Promises:
- Each request is checked anew.
- Anything undecidable (a callback that fails, hangs or returns something else) is refused.
- A refused client sees only fixed texts, not the reason.

With `local`, only this machine may look. Checking the peer's address is not enough, because any web
page can make a browser on this machine send requests, and a proxy on this machine forwards those of
others. So all of this must hold:

- the connection comes from a loopback address to a loopback address;
- the Host is a loopback name, not a foreign name that points here (DNS rebinding);
- no header comes from a proxy, and the request is not HTTP/1.0, which only proxies still use;
- this process listens on no address that another machine can reach.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import stat
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any, Final

from seawall import _checks as check
from seawall._redaction import redacted
from seawall.clock import Clock
from seawall.dashboard.bounds import shown
from seawall.dashboard.responses import RequestRefused, forbidden
from seawall.dashboard.visit import Visit

Ask = Callable[[Visit], Any]
"""`allow` or `operate`: plain or async."""
PATIENCE: Final = 10.0
"""Timeout in seconds for a callback."""
LOOKED_AGAIN: Final = 10.0
"""Interval in seconds at which this process's listening addresses are looked up again."""
NEVER_YET: Final = float("-inf")
QUIET: Final = 60.0
"""Minimum number of seconds between two records of one problem: clients must not fill the log."""
LONGEST_NAME: Final = 80
LONGEST_HOST: Final = 300
LONGEST_RECORD: Final = 1000

_PROXIED: Final = frozenset(
    {
        *("cdn-loop", "client-ip", "forwarded", "forwarded-for", "true-client-ip", "via"),
        *("x-client-ip", "x-cluster-client-ip", "x-host", "x-real-ip"),
        *("x-remote-addr", "x-remote-ip"),
    }
)
_PROXIED_AS: Final = (
    *("cf-", "fastly-", "fly-", "x-amzn-", "x-appengine-", "x-azure-", "x-envoy-"),
    *("x-forwarded", "x-original-", "x-proxy", "x-varnish"),
)
"""Headers that proxies add: these names, and all that start with these prefixes."""

log: Final = logging.getLogger("seawall.dashboard")


class Authorization:
    """Decides about each request, by the settings of the dashboard."""

    def __init__(
        self, allow: Ask | None, operate: Ask | None, *, local: bool, clock: Clock
    ) -> None:
        """Raise ValueError if anyone could look, RuntimeError if `local` does not hold."""
        self.allow = None if allow is None else check.function("allow", allow)
        self.operate = None if operate is None else check.function("operate", operate)
        self.local = check.flag("local", local)
        self._clock = clock
        self._exposed: str | None = None
        self._check_at = NEVER_YET
        self._quiet: dict[str, float] = {}
        if allow is None and not local:
            raise ValueError(
                "Dashboard(): it would show itself to everybody. Write allow=function, which is"
                " given each request and returns True for those who may look; or local=True for a"
                " service that only this machine reaches"
            )
        self.check_exposure()

    def check_exposure(self) -> None:
        """Raise RuntimeError if only this machine may look, but others can reach this process."""
        if self.local:
            self._check_at = NEVER_YET
            reached = self._exposed_address()
            self._check_at = NEVER_YET  # most servers bind after the start: a request looks again
            if reached is not None:
                raise RuntimeError(f"Dashboard(local=True): {_exposure(reached)}")

    def _exposed_address(self) -> str | None:
        """Return an address at which others reach this process; once found, it is remembered."""
        now = self._clock.now()
        if self._exposed is None and now >= self._check_at:
            self._check_at = now + LOOKED_AGAIN
            self._exposed = listens_beyond_loopback()
        return self._exposed

    async def admit(self, visit: Visit) -> None:
        """Return if this request may look; otherwise raise `RequestRefused`."""
        if self.local:
            reached = self._exposed_address()
            if reached is not None:
                self.report("exposed", logging.ERROR, "local=True, but %s", _exposure(reached))
                raise forbidden("Other machines reach this service: this page is not for them.")
            wrong = _not_local(visit)
            if wrong:
                raise forbidden(f"This page is for the machine itself alone: {wrong}.")
        if self.allow is not None and await self._answer("allow", self.allow, visit) is not True:
            raise forbidden("You may not look at this.")

    async def operator(self, visit: Visit) -> str | None:
        """Return the name of the operator of an admitted request; None if it may not act."""
        if self.operate is None:
            return None
        name = await self._answer("operate", self.operate, visit)
        if name is True:
            return "operator"
        if not isinstance(name, str):
            return None
        return name.strip()[:LONGEST_NAME] or None

    async def _answer(self, name: str, ask: Ask, visit: Visit) -> Any:
        """Return the result of a callback; None if it fails."""
        try:
            answer = ask(visit)
            if inspect.isawaitable(answer):
                async with asyncio.timeout(PATIENCE):
                    answer = await answer
        except RequestRefused:
            raise
        except Exception as error:  # noqa: BLE001 - any failure means no permission
            self.report(name, logging.ERROR, "%s() failed, so it is refused: %r", name, error)
            return None
        wanted = "True or False" if name == "allow" else "the operator's name, or None"
        if answer is not None and not isinstance(answer, bool if name == "allow" else (bool, str)):
            self.report(
                name, logging.ERROR, "%s() returned %r, so it is refused; return %s",
                name, type(answer), wanted
            )  # fmt: skip
        return answer

    def report(self, about: str, level: int, message: str, *arguments: object) -> None:
        """Log a problem, unless it was logged a moment ago."""
        now = self._clock.now()
        if now >= self._quiet.get(about, now):
            self._quiet[about] = now + QUIET
            # An error may quote what a client sent, so write one line of limited length.
            log.log(level, "dashboard: %s", shown(redacted(message % arguments), LONGEST_RECORD))


def _exposure(address: str) -> str:
    return (
        f"this process listens on {address}, which other machines reach. Bind the server to"
        " 127.0.0.1, or write allow=function, which says who may look"
    )


def _not_local(visit: Visit) -> str:
    """Return why a request does not come from this machine; "" if it does."""
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
    # A plain proxy_pass of nginx adds no header and sends our own address as the Host, but it uses
    # HTTP/1.0, which no browser does.
    return visit.scope.get("http_version") in ("0.9", "1.0")


def _is_of_proxy(header: str) -> bool:
    # Some write underscores, and some treat them as the same.
    name = header.replace("_", "-").lower()
    return name in _PROXIED or name.startswith(_PROXIED_AS)


def _is_loopback_name(host: str | None) -> bool:
    if host is None or len(host) > LONGEST_HOST or "%" in host:  # % never occurs in a valid name
        return False
    has_port = ":" in host and not host.endswith("]")
    name, _, port = host.rpartition(":") if has_port else (host, "", "")
    if port and not (port.isascii() and port.isdigit()):
        return False
    if name.startswith("[") and name.endswith("]"):
        return ":" in name and is_loopback(name[1:-1])
    return name.lower() == "localhost" or (":" not in name and is_loopback(name))


FOLDERS: Final = ("/proc/self/fd", "/dev/fd")
"""Where systems list the open files of a process; on others, nothing is known."""
_ANYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_CLOSED: Final = 7
"""The state, in Linux's TCP_INFO, of a socket that neither listens nor is connected."""


def is_loopback(address: str) -> bool:
    """Return whether `address` can be reached from this machine only."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (parsed if mapped is None else mapped).is_loopback


def listens_beyond_loopback() -> str | None:
    """Return an address and port at which other machines can reach this process, if any.

    Return None too if the system does not provide it (Windows).
    """
    for descriptor in _open_files():
        address = _listening_at(descriptor)
        if address is not None and not is_loopback(address[0]):
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            return f"{host}:{address[1]}"
    return None


def _open_files() -> list[int]:
    for folder in FOLDERS:
        try:
            return sorted(int(name) for name in os.listdir(folder) if name.isdigit())  # noqa: PTH208
        except OSError:
            continue
    return []


def _listening_at(descriptor: int) -> tuple[str, int] | None:
    """Return the address at which this file listens; None if it is no listening TCP socket."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        # A copy: the owner of the file may close it in the meantime, and this must not close
        # another one.
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        looked_at = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with looked_at:
        try:
            return _where(looked_at)
        except OSError:
            return None


def _where(looked_at: socket.socket) -> tuple[str, int] | None:
    if looked_at.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port = looked_at.getsockname()[:2]
    listens = looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return (str(host), int(port)) if listens or _is_about_to(looked_at, host, port) else None


def _is_about_to(bound: socket.socket, host: str, port: int) -> bool:
    """Return whether a server has bound this socket for all addresses, and will listen on it.

    Some servers bind before the app is started, to share the port with other processes.
    """
    if not port or host not in _ANYWHERE or bound.type != socket.SOCK_STREAM:
        return False
    if not hasattr(socket, "TCP_INFO"):
        return False
    return bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED
