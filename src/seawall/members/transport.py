"""Datagrams and connections between the members of a cluster: bounded and non-blocking.

Promises:
- `send` neither blocks nor raises. Messages that cannot be sent are dropped and counted: gossip
  repeats them.
- `drain` receives what has already arrived, so that no member is timed out before its answer is
  read.
- At most `MOST_CONNECTIONS` connections are accepted at a time, and as many are opened. Beyond
  that, the connection that was idle longest is closed, and one that sent nothing valid is closed
  first.
- A message on a connection must arrive within `SLOWEST` seconds. All partly received messages
  together take at most `MOST_BUFFERED` bytes.
- Addresses given by other members must be numeric, or are not used: no member can cause DNS
  lookups.
- In a child process all sockets are closed, without disturbing those of the parent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import count
from typing import Any, Final

from seawall.members.wire import MOST_BYTES, Codec, MessageRefused
from seawall.models.detection.messages import Message

DEFAULT_PORT: Final = 7946
MOST_CONNECTIONS: Final = 128
"""Maximum number of accepted connections, and of opened ones."""
MOST_BUFFERED: Final = 64 * 2**20
"""Maximum number of bytes of partly received messages, over all connections."""
MOST_QUEUED: Final = 64
"""Maximum number of messages queued on one connection."""
SLOWEST: Final = 10.0
"""Timeout in seconds for connecting, for sending a message and for receiving one."""
KEPT_SHORTLY: Final = 5.0
KEPT: Final = 60.0
"""Idle timeouts of a connection in seconds: with datagrams, and with `tcp_only`."""
MOST_DATAGRAMS: Final = 64
"""Maximum number of datagrams received in one turn of the event loop."""
MOST_DRAINED: Final = 4096
"""Maximum number of datagrams received before timeouts are evaluated."""
RECEIVE_BUFFER: Final = 2**20
"""Size in bytes that is requested for the system's receive buffer of datagrams."""
_LARGEST_DATAGRAM: Final = 65_536
_CHUNK: Final = 65_536
_MOST_PORT: Final = 65_535
_NO_HOST: Final = frozenset("/@?# ")
"""Characters of a URL or of a list of addresses, neither of which is an address."""
_PREFIX: Final = 4
_TRIES: Final = 20
_ACCEPT_AGAIN: Final = 0.2

Receive = Callable[[Message, str, bool], None]
"""Takes a message, the address for replies, and whether it came by a connection."""

PARENT_OBJECTS: Final[list[object]] = []
"""Objects of the parent process, kept because finalizing them here would disturb the parent."""


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of `text`: "host:port", "[IPv6]:port", or only the host."""
    host, colon, port = text.rpartition(":")
    is_plain = text.count(":") == 1 or (host.startswith("[") and host.endswith("]"))
    if not colon or not is_plain:
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    is_host = is_numeric(host) if ":" in host else host and _NO_HOST.isdisjoint(host)
    if not is_host or not port.isascii() or not port.isdigit() or int(port) > _MOST_PORT:
        raise ValueError(f"{text!r}: write an address as host:port, such as '10.0.0.5:7946'")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return `host` and `port` as one address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_numeric(host: str) -> bool:
    """Return whether `host` is an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _endpoint(address: str, family: int) -> tuple[str, int] | None:
    """Return host and port to send to; None if a socket of this family cannot reach them."""
    try:
        host, port = split_address(address)
        version = ip_address(host).version
    except ValueError:
        return None
    wanted = 6 if family == socket.AF_INET6 else 4
    return (host, port) if version == wanted and port else None


@dataclass(slots=True)
class Traffic:
    """Counts of sent and received messages, for metrics."""

    sent: int = 0
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Messages that were not sent, by reason: address, network, queue, connection."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused connections and partial messages, by reason: connections, size, slow, buffer."""


class _RefusedError(Exception):
    """A peer exceeded the bounds."""


class Transport:
    """The sockets of one member. All methods run in one event loop."""

    def __init__(
        self,
        *,
        bind: str,
        advertise: str | None,
        codec: Codec,
        receive: Receive,
        note_refused: Callable[[str, str], None],
        traffic: Traffic,
        tcp_only: bool = False,
    ) -> None:
        """Listen on `bind` once opened; other members reach this one at `advertise`."""
        self._host, self._port = split_address(bind)
        self._advertise = advertise
        self._codec = codec
        self._receive = receive
        self._note_refused = note_refused
        """Takes the reason for a refusal and the address of the sender."""
        self._tcp_only = tcp_only
        self.traffic = traffic
        self.family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self.address = ""
        """Address at which others reach this member, once opened."""
        self.kept = KEPT if tcp_only else KEPT_SHORTLY
        self.buffered = 0
        """Number of bytes of partly received messages."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._datagrams: socket.socket | None = None
        self._accepted: dict[str, _Connection] = {}
        self._made: dict[str, _Connection] = {}
        self._serial = count(1)

    # Opening and closing

    def open(self) -> None:
        """Open the sockets and listen, in the running loop."""
        self._loop = asyncio.get_running_loop()
        listener = self._listener = self._listen()
        self.address = self._advertised(listener.getsockname()[1])
        if self._datagrams is not None:
            self._loop.add_reader(self._datagrams, self.drain, MOST_DATAGRAMS)
        self._loop.add_reader(listener, self._accept)

    def _listen(self) -> socket.socket:
        """Bind one port for connections and datagrams; return the listener for connections."""
        tries = _TRIES
        while True:
            tries -= 1
            listener = self._socket(socket.SOCK_STREAM, self._port)
            try:
                listener.listen(MOST_CONNECTIONS)
                if not self._tcp_only:
                    port = listener.getsockname()[1]
                    self._datagrams = self._socket(socket.SOCK_DGRAM, port)
            except OSError:
                listener.close()
                if self._port or not tries:  # the port chosen by the system may be taken for UDP
                    raise
            else:
                return listener

    def _socket(self, kind: socket.SocketKind, port: int) -> socket.socket:
        made = socket.socket(self.family, kind)
        try:
            made.settimeout(0)
            if self.family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if kind == socket.SOCK_STREAM and os.name == "posix":
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if kind == socket.SOCK_DGRAM:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            made.bind((self._host, port))
        except OSError as error:
            made.close()
            where = join_address(self._host, port)
            raise OSError(
                error.errno,
                f"cannot listen on {where} ({error.strerror}): write bind= with an address of this"
                " machine and a free port, or port 0 for one that the system chooses",
            ) from error
        return made

    def _advertised(self, port: int) -> str:
        """Return the address at which others reach this member."""
        if self._advertise is not None:
            host, own_port = split_address(self._advertise)
            has_port = self._advertise not in {host, f"[{host}]"}
            return join_address(host, own_port if has_port else port)
        host = self._host
        if ip_address(host).is_unspecified:
            host = _outward_address(self.family)
        return join_address(host, port)

    async def close(self) -> None:
        """Close everything; queued messages are dropped."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        for listening in (self._listener, self._datagrams):
            if listening is not None:
                loop.remove_reader(listening)
                listening.close()
        connections = self._everybody()
        tasks = [one.task for one in connections if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def abandon(self) -> None:
        """Close the sockets in a child process, without touching the parent's loop."""
        connections = self._everybody()
        for made in (self._listener, self._datagrams, *(one.socket for one in connections)):
            if made is not None:
                made.close()
        PARENT_OBJECTS.append((self, self._loop, connections))
        self._loop = None

    # Sending

    def send(self, address: str, message: Message, *, reliable: bool) -> None:
        """Send `message` to a member, or as a reply to the sender of a message."""
        if self._loop is None:
            return
        connection = self._accepted.get(address)
        if connection is None:
            endpoint = _endpoint(address, self.family)
            if endpoint is None:
                self.traffic.dropped["address"] += 1
                return
            if self._datagrams is not None and not reliable:
                self._send_datagram(self._datagrams, self._codec.encode(message), endpoint)
                return
            connection = self._made.get(address) or self._connect(self._loop, address, endpoint)
        if connection is not None:
            data = self._codec.encode(message)
            connection.send(len(data).to_bytes(_PREFIX, "big") + data)

    def _send_datagram(
        self, datagrams: socket.socket, data: bytes, endpoint: tuple[str, int]
    ) -> None:
        try:
            self.note_sent(datagrams.sendto(data, endpoint))
        except OSError:  # the buffer is full, or there is no route
            self.traffic.dropped["network"] += 1

    def note_sent(self, size: int) -> None:
        """Count a message that was sent."""
        self.traffic.sent += 1
        self.traffic.bytes_sent += size

    # Receiving

    def drain(self, most: int = MOST_DRAINED) -> None:
        """Receive the datagrams that have arrived."""
        for _ in range(most):
            if self._loop is None or self._datagrams is None:
                return  # closed, perhaps while handling a message
            try:
                data, source = self._datagrams.recvfrom(_LARGEST_DATAGRAM)
            # Nothing more has arrived, or an earlier datagram did not reach its host.
            except OSError:
                return
            self.take(data, join_address(source[0], source[1]), reliable=False)

    def take(self, data: bytes, address: str, *, reliable: bool) -> bool:
        """Decode and deliver a message; return False if it was refused."""
        self.traffic.bytes_received += len(data)
        try:
            message = self._codec.decode(data)
        except MessageRefused as refusal:  # counted by the codec
            self._note_refused(refusal.reason, address.partition(" ")[0])
            return False
        self.traffic.received += 1
        self._receive(message, address, reliable)
        return True

    # Connections

    def _accept(self) -> None:
        """Accept a pending connection."""
        loop, listener = self._loop, self._listener
        if loop is None or listener is None:
            return
        try:
            accepted, source = listener.accept()
        except BlockingIOError:
            return  # the peer gave up in the meantime
        except OSError:  # out of file descriptors: the loop would call this again immediately
            self.traffic.refused["connections"] += 1
            loop.remove_reader(listener)
            loop.call_later(_ACCEPT_AGAIN, self._accept_again, listener)
            return
        accepted.settimeout(0)
        label = f"{join_address(source[0], source[1])} #{next(self._serial)}"
        self._make_room(self._accepted)
        self._run(loop, self._accepted, _Connection(self, loop, accepted, label))

    def _accept_again(self, listener: socket.socket) -> None:
        if self._loop is not None:
            self._loop.add_reader(listener, self._accept)

    def _connect(
        self, loop: asyncio.AbstractEventLoop, address: str, endpoint: tuple[str, int]
    ) -> _Connection | None:
        try:
            made = socket.socket(self.family, socket.SOCK_STREAM)
        except OSError:  # out of file descriptors
            self.traffic.dropped["connection"] += 1
            return None
        made.settimeout(0)
        self._make_room(self._made)
        connection = _Connection(self, loop, made, address, endpoint)
        self._run(loop, self._made, connection)
        return connection

    def _make_room(self, connections: dict[str, _Connection]) -> None:
        """Close the least valuable connection if the limit is reached."""
        if len(connections) >= MOST_CONNECTIONS:
            least = min(connections.values(), key=lambda one: (one.is_proven, one.used_at))
            self.traffic.refused["connections"] += 1
            del connections[least.label]
            if least.task is not None:
                least.task.cancel()

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        connections: dict[str, _Connection],
        connection: _Connection,
    ) -> None:
        connections[connection.label] = connection
        connection.task = loop.create_task(connection.run())

        def ended(_task: object) -> None:
            connection.socket.close()  # also closes it if the task was cancelled before it started
            if connections.get(connection.label) is connection:
                del connections[connection.label]

        connection.task.add_done_callback(ended)

    def hold(self, connection: _Connection, size: int) -> None:
        """Account for bytes of a partly received message; raise if there is no room."""
        connection.held += size
        self.buffered += size
        while self.buffered > MOST_BUFFERED:  # drop the largest one, of unproven senders first
            # An evicted connection is no longer in the tables, but may still read a last chunk.
            holders = [one for one in (connection, *self._everybody()) if one.held]
            largest = max(holders, key=lambda one: (not one.is_proven, one.held))
            if largest is connection:
                raise _RefusedError("buffer")
            self.traffic.refused["buffer"] += 1
            self.release(largest)
            if largest.task is not None:
                largest.task.cancel()

    def release(self, connection: _Connection) -> None:
        """Release the bytes that a connection held."""
        self.buffered -= connection.held
        connection.held = 0

    def _everybody(self) -> list[_Connection]:
        return [*self._accepted.values(), *self._made.values()]


class _Connection:
    """One connection: length-prefixed messages in both directions."""

    def __init__(
        self,
        transport: Transport,
        loop: asyncio.AbstractEventLoop,
        opened: socket.socket,
        label: str,
        endpoint: tuple[str, int] | None = None,
    ) -> None:
        """Serve an accepted connection, or connect to `endpoint`."""
        self.socket = opened
        self.label = label
        """Address for replies: the member's address, or a label of an accepted connection."""
        self.is_proven = False
        """Whether a valid message has arrived on it."""
        self.held = 0
        """Number of bytes of a partly received message."""
        self.used_at = loop.time()
        self.task: asyncio.Task[None] | None = None
        self._transport = transport
        self._loop = loop
        self._endpoint = endpoint
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._filled = asyncio.Event()

    def send(self, frame: bytes) -> None:
        """Queue `frame` for sending; drop it if the peer reads too slowly."""
        if len(self._queue) >= MOST_QUEUED or (
            self._queue and self._queued + len(frame) > MOST_BYTES
        ):
            self._transport.traffic.dropped["queue"] += 1
            return
        self._queue.append(frame)
        self._queued += len(frame)
        self._filled.set()

    async def run(self) -> None:
        """Send and receive until the connection is idle, fails, or is cancelled."""
        traffic = self._transport.traffic
        writer: asyncio.Task[None] | None = None
        try:
            self._set_options()
            if self._endpoint is not None:
                async with asyncio.timeout(SLOWEST):
                    await self._loop.sock_connect(self.socket, self._endpoint)
            writer = self._loop.create_task(self._write())
            await self._read()
        except _RefusedError as refused:
            traffic.refused[str(refused)] += 1
        except (OSError, TimeoutError):
            pass  # unsent messages are counted below
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            traffic.dropped["connection"] += len(self._queue)

    def _set_options(self) -> None:
        """Disable Nagle's algorithm and limit unacknowledged time, where the system supports it."""
        with suppress(OSError):
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            unacknowledged = getattr(socket, "TCP_USER_TIMEOUT", None)
            if unacknowledged is not None:
                self.socket.setsockopt(socket.IPPROTO_TCP, unacknowledged, round(SLOWEST * 1000))

    async def _write(self) -> None:
        """Send queued frames; on failure shut the connection down, which ends the reader too."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._queue:
                    frame = self._queue[0]
                    async with asyncio.timeout(SLOWEST):
                        await self._loop.sock_sendall(self.socket, frame)
                    self._queue.popleft()
                    self._queued -= len(frame)
                    self.used_at = self._loop.time()
                    self._transport.note_sent(len(frame) - _PREFIX)
        except (OSError, TimeoutError):
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    async def _read(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._transport.kept):
                    begun = await self._loop.sock_recv(self.socket, _PREFIX)
            except TimeoutError:
                return  # idle, or the peer vanished: the next message opens a new connection
            if not begun:
                return
            try:
                async with asyncio.timeout(SLOWEST):
                    data = await self._message(begun)
            except TimeoutError:
                raise _RefusedError("slow") from None
            if not self._transport.take(data, self.label, reliable=True):
                return
            self.is_proven = True
            self.used_at = self._loop.time()

    async def _message(self, begun: bytes) -> bytes:
        """Return a message whose prefix has started to arrive."""
        try:
            prefix = begun + await self._bytes(_PREFIX - len(begun))
            size = int.from_bytes(prefix, "big")
            if size > MOST_BYTES:
                raise _RefusedError("size")
            return await self._bytes(size)
        finally:
            self._transport.release(self)

    async def _bytes(self, size: int) -> bytes:
        """Return the next `size` bytes; raise ConnectionError if the connection ends before."""
        parts = bytearray()
        while len(parts) < size:
            part = await self._loop.sock_recv(self.socket, min(size - len(parts), _CHUNK))
            if not part:
                raise ConnectionError("the peer has closed the connection")
            self._transport.hold(self, len(part))
            parts += part
        return bytes(parts)


def _outward_address(family: int) -> str:
    """Return the address from which this machine reaches others, without sending anything."""
    elsewhere: Any = ("2001:db8::1", 9) if family == socket.AF_INET6 else ("192.0.2.1", 9)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(elsewhere)
            return str(probe.getsockname()[0])
        except OSError:
            raise ValueError(
                "this machine has no way to others, so its address is not known: write"
                " advertise= with the address at which other members reach it"
            ) from None
