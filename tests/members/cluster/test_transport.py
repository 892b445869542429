"""The sockets of one member: addresses, what is not sent, and running out of descriptors."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.members import transport
from seawall.members.transport import Traffic, Transport, join_address, split_address
from seawall.members.wire import Codec
from seawall.models.detection.messages import Message, MessageKind
from tests.members.cluster.network import until

PING = Message(MessageKind.PING, "peer", number=1, target="own")


def ignore(*_: Any) -> None:
    """Do nothing with it."""


def made(receive: Callable[..., None] = ignore, **options: Any) -> Transport:
    options = {"bind": "127.0.0.1:0", "advertise": None, "note_refused": ignore, **options}
    return Transport(codec=Codec(None, group="g"), receive=receive, traffic=Traffic(), **options)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.5:80", ("10.0.0.5", 80)),
        ("10.0.0.5", ("10.0.0.5", 7946)),
        ("members.internal:0", ("members.internal", 0)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", 7946)),
        ("::1", ("::1", 7946)),
        ("fe80::1%eth0", ("fe80::1%eth0", 7946)),
    ],
)
def test_addresses_are_read_as_people_write_them(text, address):
    """With a port or without, with IPv4, IPv6 and names."""
    assert split_address(text) == address


BAD_ADDRESSES = [
    *("", ":80", "host:", "host:x", "host:-1", "host:65536", "h:²"),
    *(
        "http://foo:1",
        "http://foo",
        "//foo:1",
        "foo/:1",
        "me@foo:1",
        "a:b:c",
        "a:1, b:1",
        "[x:y]:1",
    ),
]


@pytest.mark.parametrize("text", BAD_ADDRESSES)
def test_other_texts_are_no_addresses(text):
    """The error says what to write."""
    with pytest.raises(ValueError, match="write an address as host:port"):
        split_address(text)


@given(st.ip_addresses(), st.integers(0, 65_535))
def test_an_address_that_was_written_is_read_again(host, port):
    """Of both versions."""
    assert split_address(join_address(str(host), port)) == (str(host), port)


@given(st.text(max_size=40))
def test_no_text_but_a_numeric_address_leads_anywhere(text):
    """What other members tell is not trusted: no name is looked up, and nothing raises."""
    endpoint = transport._endpoint(text, socket.AF_INET)
    assert endpoint is None or socket.inet_aton(endpoint[0])


def connections(member: Transport) -> int:
    """Return how many connections the member has open."""
    return len(member._everybody())


@pytest.mark.parametrize("address", ["a.internal:7946", "[::1]:7946", "10.0.0.1:0", "nonsense"])
def test_what_cannot_be_reached_is_dropped_and_counted(monkeypatch, address):
    """Also a name: to resolve it would block, or ask the DNS for what a stranger wants."""

    def refuse(*_arguments: object) -> None:
        raise AssertionError("nobody asks the DNS")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    async def main() -> None:
        here = made()
        here.open()
        for reliable in (False, True):
            here.send(address, PING, reliable=reliable)
        assert here.traffic.dropped == {"address": 2}
        assert connections(here) == 0
        await here.close()
        here.send("127.0.0.1:9", PING, reliable=False)  # after the end it does nothing
        assert here.traffic.sent == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bind", "advertise", "host"),
    [
        ("127.0.0.1:0", None, "127.0.0.1"),
        ("127.0.0.1:0", "127.0.0.9", "127.0.0.9"),
        ("0.0.0.0:0", "10.1.2.3", "10.1.2.3"),
    ],
)
def test_a_member_is_reached_where_it_says(bind, advertise, host):
    """At the port that the system has chosen, unless another one is written."""

    async def main() -> None:
        here = made(bind=bind, advertise=advertise)
        here.open()
        port = here._listener.getsockname()[1]
        assert here.address == f"{host}:{port}"
        await here.close()
        other = made(bind=bind, advertise=f"{host}:80")
        other.open()
        assert other.address == f"{host}:80"
        await other.close()

    asyncio.run(main())


def test_a_machine_without_a_way_to_others_must_say_its_address(monkeypatch):
    """On a wildcard; nothing stays open."""

    class Unreachable(socket.socket):
        def connect(self, _address: object) -> None:
            raise OSError(errno.ENETUNREACH, "no way")

    async def main() -> None:
        here = made(bind="0.0.0.0:0")
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", Unreachable)
            with pytest.raises(ValueError, match="write advertise="):
                here.open()
        await here.close()
        assert here._listener.fileno() == here._datagrams.fileno() == -1

    asyncio.run(main())


def test_messages_arrive_by_datagram_and_by_connection_and_replies_go_back():
    """The reply to a message by connection goes by that connection."""

    async def main() -> None:
        heard: list[tuple[str, bool]] = []
        replies: list[bool] = []

        def answer(message: Message, address: str, reliable: bool) -> None:  # noqa: FBT001 - a callback
            heard.append((message.source, reliable))
            here.send(address, PING._replace(source="here"), reliable=reliable)

        here = made(answer)
        there = made(lambda _message, _address, reliable: replies.append(reliable))
        here.open()
        there.open()
        for reliable in (False, True, True):
            there.send(here.address, PING, reliable=reliable)
        await until(lambda: len(replies) == 3)
        assert sorted(heard) == [("peer", False), ("peer", True), ("peer", True)]
        assert sorted(replies) == [False, True, True]
        assert connections(here) == connections(there) == 1
        assert there.traffic.sent == there.traffic.received == 3
        assert there.traffic.bytes_sent == here.traffic.bytes_received
        await there.close()
        await here.close()

    asyncio.run(main())


def test_a_process_without_free_descriptors_accepts_again_later(monkeypatch):
    """Meanwhile the loop does not spin, and datagrams arrive."""
    monkeypatch.setattr(transport, "_ACCEPT_AGAIN", 0.01)

    class Exhausted:
        """The listener, whose first calls fail."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener = listener
            self.failures = 3

        def fileno(self) -> int:
            return self.listener.fileno()

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return self.listener.accept()

        def close(self) -> None:
            self.listener.close()

    async def main() -> None:
        heard: list[Message] = []
        here, there = made(lambda message, *_: heard.append(message)), made()
        here.open()
        there.open()
        here._listener = Exhausted(here._listener)
        there.send(here.address, PING, reliable=True)
        await until(lambda: heard)
        assert here.traffic.refused["connections"] == 3
        await there.close()
        await here.close()

    asyncio.run(main())


def test_a_peer_that_is_not_there_costs_one_message():
    """A refused connection loses one message; the next message connects again."""

    async def main() -> None:
        here = made()
        here.open()
        with socket.socket() as free:
            free.bind(("127.83.71.6", 0))  # an address that no other test listens on
            address = f"127.83.71.6:{free.getsockname()[1]}"
        for number in (1, 2):
            here.send(address, PING, reliable=True)
            await until(lambda wanted=number: here.traffic.dropped["connection"] == wanted)
            await until(lambda: connections(here) == 0)
        await here.close()

    asyncio.run(main())
