"""Source of messages for `seawall top`: a dashboard's `state` and `events`, over HTTP.

Promises:
- Only the given host is contacted, and redirects are not followed, so given headers go nowhere
  else. The certificate of https is verified.
- Input is bounded: a message of more than `MOST_BYTES`, an endless answer and an endless line are
  refused.
- Every failure is an `Unreachable` with one line that says what it is and what to do. No header
  appears in it.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from random import Random
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from seawall.cli import HEADERS
from seawall.cli.top.messages import NotADashboard, legible, parse
from seawall.clock import Clock, current_clock
from seawall.dashboard.bounds import LONGEST_TEXT
from seawall.models.backoff import exponential

MOST_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of a message in bytes."""
CONNECTING: Final = 5.0
"""Timeout in seconds to connect, and for an answer."""
QUIET: Final = 30.0
"""Seconds without data from `events` after which the connection counts as lost."""
BACKOFF: Final = exponential(0.5, cap=10.0, jitter="equal")
"""Delays before reconnecting."""
_CHUNK: Final = 65_536
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e\xa0-\xff]*")
_OWN_HEADERS: Final = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "host", "transfer-encoding"}
)
_REDIRECTS: Final = range(300, 400)
_STATUS_ADVICE: Final = {
    401: "it asks who you are (401): pass --header 'Authorization: ...'",
    403: "it does not let you in (403): is the header right?",
    404: "there is no dashboard (404): give the address at which it is mounted, such as"
    " http://127.0.0.1:8000/seawall",
}


class Unreachable(OSError):
    """The dashboard cannot be read; the text says why, in a line safe for a terminal."""


class DashboardAddress(NamedTuple):
    """The address at which a dashboard is mounted."""

    tls: bool
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        scheme = "https" if self.tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{self.path}"


def parse_address(url: str) -> DashboardAddress:
    """Parse `url`, or raise ValueError with what to write instead."""
    example = "write the dashboard's address, such as http://127.0.0.1:8000/seawall"
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"the URL has characters that belong in none: {example}")
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if "@" in parts.netloc:  # not repeated in the message: it may contain a password
        raise ValueError("the URL names a user: pass --header 'Authorization: ...' instead")
    if parts.query or parts.fragment:
        raise ValueError(f"the URL has a query or a fragment: {example}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"the URL's port is no port: {example}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is no address of http or https: {example}")
    tls = parts.scheme == "https"
    port = port or (443 if tls else 80)
    return DashboardAddress(tls, parts.hostname, port, parts.path.rstrip("/"))


def parse_header(text: str) -> tuple[str, str]:
    """Return the name and value of a header, or raise ValueError, which does not repeat it."""
    name, colon, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value) or not value:
        raise ValueError("a header is not one: write it as 'Authorization: Bearer ...'")
    if name.lower() in _OWN_HEADERS:
        raise ValueError(f"the header {name} is not yours to set: leave it out")
    return name, value


def add_header_argument(parser: ArgumentParser) -> None:
    """Add --header to `parser`."""
    parser.add_argument(
        "--header",
        action="append",
        metavar="'NAME: VALUE'",
        help=f"send this header, may be repeated; or set {HEADERS}, which other users cannot see",
    )


def client_of(args: Namespace) -> DashboardClient:
    """Return the client for --url, with the headers of --header and of the environment."""
    lines = [*os.environ.get(HEADERS, "").splitlines(), *(args.header or ())]
    headers = dict(parse_header(text) for text in lines if text.strip())
    return DashboardClient(parse_address(args.url), headers)


class Events:
    """Parser of a stream of server-sent events; returns the data of its messages.

    The result does not depend on how the bytes are split into pieces. Raises `NotADashboard` if a
    message is larger than `MOST_BYTES`.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._seen = 0
        self._data: list[bytes] = []
        self._size = 0
        self._kind = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes, and return the messages that they complete."""
        self._rest += piece
        done = []
        while (line := self._line()) is not None:
            message = self._take(line)
            if message is not None:
                done.append(message)
        if len(self._rest) + self._size > MOST_BYTES:
            raise NotADashboard("it sends a message that is too large")
        return done

    def _line(self) -> bytes | None:
        """Return the next line without its end, or None if no line is complete."""
        end = self._rest.find(b"\n", self._seen)
        if end < 0:
            self._seen = len(self._rest)
            return None
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        self._seen = 0
        return line.removesuffix(b"\r")

    def _take(self, line: bytes) -> bytes | None:
        if not line:
            data, kind = b"\n".join(self._data), self._kind
            self._data, self._size, self._kind = [], 0, b""
            return data if data and kind in {b"", b"message"} else None
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._size += len(value) + 1
        elif field == b"event":
            self._kind = value[:64]
        return None


class DashboardClient:
    """A dashboard to read from. One thread reads; any other may call `close`."""

    def __init__(
        self,
        place: DashboardAddress,
        headers: Mapping[str, str] | None = None,
        *,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Read the dashboard at `place`, sending `headers` beside the standard ones."""
        self.place = place
        self._headers = dict(headers or {})
        self._clock = clock or current_clock()
        self._rng = rng or Random()  # noqa: S311 - spreads reconnects; needs no secrecy
        self._lock = threading.Lock()
        self._open: socket.socket | None = None
        self._closed = threading.Event()
        self._running = threading.Lock()  # held until `close`, so that a pause can wait for it
        self._running.acquire()

    def once(self) -> dict[str, Any]:
        """Return the current message, or raise `Unreachable`."""
        return self._get("/state")

    def audit(self, query: str = "") -> dict[str, Any]:
        """Return the audit of the process, or raise `Unreachable`."""
        return self._get(f"/audit{query}", "findings")

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot of the process for tuning, or raise `Unreachable`."""
        return self._get("/snapshot", "guards")

    def _get(self, route: str, listed: str = "views") -> dict[str, Any]:
        with self._asked(route, "application/json") as answer:
            until = self._clock.now() + 2 * CONNECTING
            body = bytearray()
            while piece := answer.read1(_CHUNK):
                body += piece
                if len(body) > MOST_BYTES:
                    raise NotADashboard("it sends a message that is too large")
                if self._clock.now() > until:
                    raise TimeoutError
            if answer.length:  # fewer bytes came than were announced
                raise http.client.IncompleteRead(bytes(body))
            return parse(bytes(body), listed)

    def messages(self, report: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Yield each message as it comes, until `close`; reconnect as often as needed.

        `report` is called with the reason and the next step when the dashboard cannot be read.
        """
        delays = BACKOFF.delays(self._rng.random)
        while not self._closed.is_set():
            try:
                for raw in self._stream():
                    delays = BACKOFF.delays(self._rng.random)
                    yield raw
                lost = "the dashboard ended the connection"
            except Unreachable as error:
                lost = str(error)
            if not self._closed.is_set():
                delay = next(delays)
                report(f"{lost}; next try in {delay:.1f} s")
                if self._clock.wait(self._running, delay):
                    return

    def close(self) -> None:
        """End `messages`, even while it waits for data or for its next try."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._running.release()
            if self._open is not None:
                _wake(self._open)

    def _stream(self) -> Iterator[dict[str, Any]]:
        with self._asked("/events", "text/event-stream") as answer:
            events = Events()
            while piece := answer.read1(_CHUNK):
                for data in events.feed(piece):
                    yield parse(data)

    @contextmanager
    def _asked(self, route: str, kind: str) -> Iterator[http.client.HTTPResponse]:
        """Request `route`, and turn every failure until the end of the block into `Unreachable`."""
        try:
            with closing(self._connection()) as connection:
                path = self.place.path + route
                accepted = {"Accept": kind, "Accept-Encoding": "identity"}
                connection.request("GET", path, headers={**self._headers, **accepted})
                answer = connection.getresponse()
                with closing(answer):
                    self._check(answer, kind)
                    # None if the answer owns it, because nothing follows
                    if connection.sock is not None:
                        timeout = QUIET if kind.startswith("text/") else CONNECTING
                        connection.sock.settimeout(timeout)
                    yield answer
        except (OSError, http.client.HTTPException, NotADashboard, ValueError) as error:
            raise Unreachable(f"{self.place}: {_reason(error, self.place)}") from error
        finally:
            with self._lock:
                self._open = None

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self.place.host, self.place.port
        connection = (
            http.client.HTTPSConnection(
                host, port, timeout=CONNECTING, context=ssl.create_default_context()
            )
            if self.place.tls
            else http.client.HTTPConnection(host, port, timeout=CONNECTING)
        )
        connection.connect()
        with self._lock:
            self._open = connection.sock
            if self._closed.is_set():
                _wake(connection.sock)
        return connection

    def _check(self, answer: http.client.HTTPResponse, kind: str) -> None:
        if answer.status in _REDIRECTS:
            target = legible(answer.getheader("Location", ""), LONGEST_TEXT)
            raise NotADashboard(f"it points to {target!r}: if that is the dashboard, give it")
        if answer.status != http.client.OK:
            raise NotADashboard(
                _STATUS_ADVICE.get(answer.status, f"it answers with status {answer.status}")
            )
        if answer.getheader("Content-Type", "").partition(";")[0].strip().lower() != kind:
            raise NotADashboard("what answers there is not a Seawall dashboard")


def _wake(connection: socket.socket) -> None:
    """Make a thread that reads from `connection` see EOF; the thread itself ends TLS."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        pass  # it has already ended


def _reason(error: Exception, place: DashboardAddress) -> str:
    reason = f"the connection failed ({legible(str(error) or type(error).__name__, LONGEST_TEXT)})"
    if isinstance(error, NotADashboard):
        reason = str(error)
    elif isinstance(error, ssl.SSLCertVerificationError):
        reason = f"its certificate is not trusted ({legible(error.verify_message, LONGEST_TEXT)})"
    elif isinstance(error, ssl.SSLError):
        reason = "TLS failed: is it https that is spoken there?"
    elif isinstance(error, ConnectionRefusedError):
        reason = "nothing listens there (connection refused)"
    elif isinstance(error, (socket.gaierror, UnicodeError)):
        reason = f"there is no host {place.host!r}"
    elif isinstance(error, TimeoutError):
        reason = "it does not answer in time"
    elif isinstance(error, (http.client.RemoteDisconnected, ConnectionResetError)):
        reason = "it ended the connection without an answer"
    elif isinstance(error, (http.client.HTTPException, ValueError)):
        reason = "what answers there does not speak HTTP as it should"
    return reason
