"""Peers that send slowly, not at all, too much or nonsense, over real sockets of loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from seawall.members import Cluster, Keyring, MemberChanged, transport
from seawall.members.transport import (
    MOST_BUFFERED,
    MOST_CONNECTIONS,
    MOST_QUEUED,
    Traffic,
    Transport,
)
from seawall.members.wire import MOST_BYTES, Codec
from seawall.models.detection.gossip import GossipUpdate, MemberState
from seawall.models.detection.messages import Message, MessageKind
from tests.members.cluster.network import PATIENCE, until

KEY = "a secret of the tests, 32 bytes.."
PING = Message(MessageKind.PING, "peer", number=1, target="own")


def codec(key: str = KEY) -> Codec:
    """Return a codec of the group that the tests speak to."""
    return Codec(Keyring(key), group="hostile")


def frame(data: bytes) -> bytes:
    """Return `data` as it goes through a connection."""
    return len(data).to_bytes(4, "big") + data


class Peer:
    """The other end of a connection."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""
        async with asyncio.timeout(PATIENCE):
            await self._loop.sock_sendall(self.socket, data)

    async def drip(self) -> None:
        """Send a byte now and then, until that fails."""
        never = asyncio.Event()
        for _ in range(MOST_BYTES):
            await self.send(b"x")
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await never.wait()

    async def is_closed(self) -> bool:
        """Wait until the other side has closed the connection."""
        async with asyncio.timeout(PATIENCE):
            with suppress(OSError):
                while await self._loop.sock_recv(self.socket, 65_536):
                    pass
        return True


class World:
    """A transport, and those who connect to it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.heard: list[Message] = []
        self.labels: list[str] = []
        self.refused: list[str] = []
        self.transport = Transport(
            bind="127.0.0.1:0",
            advertise=None,
            codec=codec(),
            receive=self._receive,
            note_refused=lambda reason, _address: self.refused.append(reason),
            traffic=Traffic(),
        )
        self._stack = stack

    def _receive(self, message: Message, address: str, reliable: bool) -> None:  # noqa: FBT001 - a callback
        self.heard.append(message)
        self.labels.append(address)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Where the transport listens."""
        host, _, port = self.transport.address.rpartition(":")
        return host, int(port)

    async def connect(self) -> Peer:
        """Open a connection."""
        opened = self._stack.enter_context(socket.socket())
        opened.settimeout(0)
        async with asyncio.timeout(PATIENCE):
            await asyncio.get_running_loop().sock_connect(opened, self.endpoint)
        return Peer(opened)

    async def talk(self, peer: Peer) -> None:
        """Send a valid message, and wait until it was heard."""
        before = len(self.heard)
        await peer.send(frame(codec().encode(PING)))
        await until(lambda: len(self.heard) > before)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Give a transport that listens."""
    async with AsyncExitStack() as stack:
        made = World(stack)
        made.transport.open()
        stack.push_async_callback(made.transport.close)
        yield made
    assert made.transport.buffered == 0
    assert len(made.transport._everybody()) == 0


def test_a_peer_that_sends_byte_by_byte_is_cut_off(monkeypatch):
    """A message has a time in which it arrives, however lively its bytes are."""
    monkeypatch.setattr(transport, "SLOWEST", 0.3)

    async def main() -> None:
        async with world() as here:
            peer = await here.connect()
            await peer.send(MOST_BYTES.to_bytes(4, "big"))
            with pytest.raises(OSError):  # noqa: PT011 - the system says which one
                await peer.drip()
            assert here.transport.traffic.refused == {"slow": 1}

    asyncio.run(main())


@pytest.mark.parametrize("begun", [b"", b"\0\0", b"\0\0\1\0"])
def test_a_peer_that_falls_silent_is_forgotten(monkeypatch, begun):
    """Before the first byte, within the length, and within the message."""
    monkeypatch.setattr(transport, "SLOWEST", 0.2)

    async def main() -> None:
        async with world() as here:
            here.transport.kept = 0.2
            peer = await here.connect()
            await peer.send(begun)
            assert await peer.is_closed()
            await until(lambda: len(here.transport._everybody()) == 0)

    asyncio.run(main())


def test_silent_connections_starve_nobody():
    """However many there are, members get through; those that are known keep their connection."""

    async def main() -> None:
        async with world() as here:
            for _ in range(2 * MOST_CONNECTIONS):
                await here.connect()
            member = await here.connect()
            await here.talk(member)
            assert len(here.transport._everybody()) <= MOST_CONNECTIONS
            for _ in range(2 * MOST_CONNECTIONS):
                await here.connect()
            await until(lambda: here.transport.traffic.refused["connections"] > MOST_CONNECTIONS)
            await here.talk(member)
            assert len(here.transport._everybody()) <= MOST_CONNECTIONS

    asyncio.run(main())


@pytest.mark.parametrize("length", [MOST_BYTES + 1, 2**32 - 1])
def test_a_message_that_is_announced_as_too_long_is_not_read(length):
    """The connection ends with its length."""

    async def main() -> None:
        async with world() as here:
            peer = await here.connect()
            await peer.send(length.to_bytes(4, "big"))
            assert await peer.is_closed()
            assert here.transport.traffic.refused == {"size": 1}

    asyncio.run(main())


def test_strangers_fill_no_memory_and_members_get_through(monkeypatch):
    """What has arrived in part is bounded over all connections; the largest part gives way."""
    monkeypatch.setattr(transport, "MOST_BUFFERED", 2**20)

    async def main() -> None:
        async with world() as here:
            strangers = [await here.connect() for _ in range(8)]
            for peer in strangers:
                with suppress(OSError):
                    await peer.send(MOST_BYTES.to_bytes(4, "big") + bytes(250_000))
            await until(lambda: here.transport.traffic.refused["buffer"] > 0)
            assert here.transport.buffered <= 2**20
            updates = tuple(
                GossipUpdate(MemberState.ALIVE, f"m{number}", 1, "10.0.0.1:1", b"m" * 100)
                for number in range(1000)
            )
            push = codec().encode(Message(MessageKind.PUSH, "peer", updates))
            member = await here.connect()
            await member.send(frame(push))
            await until(lambda: here.heard)
            assert len(here.heard[0].updates) == 1000

    asyncio.run(main())
    assert MOST_BUFFERED <= 64 * 2**20


def test_a_connection_that_had_to_make_room_holds_no_bytes_beyond_the_limit(monkeypatch):
    """It is no longer among the connections when it reads its last piece."""
    monkeypatch.setattr(transport, "MOST_BUFFERED", 2**20)

    async def main() -> None:
        async with world() as here:
            peer = await here.connect()
            await until(lambda: here.transport._accepted)
            (connection,) = here.transport._accepted.values()
            here.transport._accepted.clear()
            with pytest.raises(transport._RefusedError, match="buffer"):
                here.transport.hold(connection, 2**20 + 1)
            here.transport.release(connection)
            assert here.transport.buffered == 0
            connection.task.cancel()
            assert await peer.is_closed()

    asyncio.run(main())


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch):
    """What waits for it is bounded, and dropped with its connection."""

    async def main() -> None:
        async with world() as here:
            peer = await here.connect()
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await here.talk(peer)
            monkeypatch.setattr(transport, "SLOWEST", 0.2)
            view = tuple(
                GossipUpdate(MemberState.ALIVE, f"m{number}", 1, "10.0.0.1:1", b"m" * 500)
                for number in range(10_000)
            )
            large = Message(MessageKind.PULL, "own", view)
            sent = 8
            for _ in range(sent):
                here.transport.send(here.labels[0], large, reliable=True)
            connection = here.transport._accepted[here.labels[0]]
            assert sum(map(len, connection._queue)) <= MOST_BYTES
            assert len(connection._queue) <= MOST_QUEUED
            await until(lambda: len(here.transport._everybody()) == 0)
            traffic = here.transport.traffic
            dropped = traffic.dropped["queue"] + traffic.dropped["connection"]
            assert dropped + traffic.sent == sent
            assert dropped > sent / 2

    asyncio.run(main())


@pytest.mark.parametrize("tcp_only", [False, True])
def test_what_strangers_send_changes_nothing(tcp_only):
    """Wrong key, replay, truncation, random bytes, a push of 20 MiB, 10 000 forged members."""

    async def main() -> None:
        options: dict[str, Any] = {"keyring": Keyring(KEY), "tcp_only": tcp_only}
        async with (
            Cluster("hostile", member="a", bind="127.0.0.1:0", **options) as first,
            Cluster("hostile", member="b", bind="127.0.0.1:0", seeds=[first.address], **options),
        ):
            await until(lambda: first.alive == ["a", "b"])
            heard: list[MemberChanged] = []
            first.subscribe(heard.append)
            loop = asyncio.get_running_loop()
            host, _, port = first.address.rpartition(":")
            endpoint = host, int(port)
            forged = tuple(
                GossipUpdate(MemberState.ALIVE, f"forged-{number}", 1, "192.0.2.1:1")
                for number in range(10_000)
            )
            stranger = codec("another secret of 16 bytes")
            member = codec()
            gossip = member.encode(Message(MessageKind.GOSSIP, "b"))
            random = Random(3)
            small = [
                *(gossip[:end] for end in range(len(gossip))),
                *(random.randbytes(random.randrange(1, 1400)) for _ in range(50)),
                *(stranger.encode(Message(MessageKind.GOSSIP, "b", (one,))) for one in forged[:50]),
            ]
            large = [
                stranger.encode(Message(MessageKind.PUSH, "b", forged)),
                b"\1" + random.randbytes(MOST_BYTES - 1),
            ]

            async def by_connection(*frames: bytes) -> None:
                with socket.socket() as opened:
                    opened.settimeout(0)
                    await loop.sock_connect(opened, endpoint)
                    peer = Peer(opened)
                    with suppress(OSError):
                        for one in frames:
                            await peer.send(one)
                    opened.shutdown(socket.SHUT_WR)
                    await peer.is_closed()

            def refused() -> int:
                return int(first.snapshot()["messages"]["refused"])

            await by_connection(frame(gossip), frame(gossip))
            assert first.snapshot()["refused"] == {"replay": 1}
            for data in (*small[:20], *small[-20:], *large):
                await by_connection(frame(data))
            assert refused() == 43
            await by_connection((MOST_BYTES + 1).to_bytes(4, "big"))
            assert refused() == 44, "one of the reasons is that of the transport too"
            if not tcp_only:
                with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
                    for number, data in enumerate(small, start=45):
                        datagrams.sendto(data, endpoint)
                        if number % 20 == 0 or data is small[-1]:  # the system keeps only so many
                            await until(lambda number=number: refused() == number)
            assert {change.member for change in heard} <= {"b"}, "a busy machine may suspect it"
            assert set(first.members) == {"a", "b"}

    asyncio.run(main())
