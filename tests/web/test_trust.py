from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seawall.web import trust as trust_module
from seawall.web.trust import Trust
from tests.support import falsified

V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address)
STRANGERS = (V4 | V6).filter(lambda a: not str(a).startswith("10."))
PROXY = "10.0.0.1"


def forwarded_for(*lines: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-forwarded-for", line.encode("latin-1", "replace")) for line in lines]


def forwarded(*lines: str) -> list[tuple[bytes, bytes]]:
    return [(b"forwarded", line.encode("latin-1", "replace")) for line in lines]


def key_of(address: IPv4Address | IPv6Address) -> str:
    """Return the key of an address, as a plain reader of the promise would compute it."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if isinstance(address, IPv4Address):
        return str(address)
    return f"{IPv6Address(int(address) // 2**64 * 2**64)}/64"


# --- The address of a peer ---


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("::FFFF:CB00:7109", "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:0DB8:0001:0002::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        (None, "unix"),
        ("testclient", "testclient"),
        ("a\nb", "unknown"),
        ("", "unknown"),
        ("x" * 100, "x" * 64),
    ],
)
def test_the_peer_is_the_client(peer: str | None, key: str):
    """Without proxies the connection's address counts, in one form for all its spellings."""
    trust = Trust()
    headers = forwarded_for("198.51.100.1") + forwarded("for=198.51.100.1")
    assert trust.client_address(peer, headers) == key
    assert trust.client_address(peer, headers) == key  # from memory, the second time


@given(V4 | V6)
def test_every_address_has_its_key(address: IPv4Address | IPv6Address):
    """IPv4 stays, IPv6 becomes its /64, and IPv4 in IPv6 becomes IPv4."""
    trust = Trust()
    assert trust.client_address(str(address), ()) == key_of(address)
    if isinstance(address, IPv6Address):
        assert trust.client_address(address.exploded.upper(), ()) == key_of(address)
    else:
        assert trust.client_address(f"::ffff:{address}", ()) == str(address)


# --- Through proxies ---


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        (["203.0.113.9"], "203.0.113.9"),
        (["203.0.113.9, 10.0.0.7,10.0.0.8"], "203.0.113.9"),
        (["198.51.100.1, 203.0.113.9, 10.0.0.7"], "203.0.113.9"),
        (["198.51.100.1", "203.0.113.9", "10.0.0.7"], "203.0.113.9"),
        (["203.0.113.9:5678"], "203.0.113.9"),
        (["[2001:db8::1]:443"], "2001:db8::/64"),
        (["[2001:db8::1]"], "2001:db8::/64"),
        (["::ffff:203.0.113.9, ::ffff:10.0.0.7"], "203.0.113.9"),
        (["10.0.0.9, 10.0.0.7"], "10.0.0.9"),
        ([], PROXY),
        ([""], PROXY),
        (["unknown"], PROXY),
        (["203.0.113.9, unknown, 10.0.0.7"], "10.0.0.7"),
        (["203.0.113.9, , 10.0.0.7"], "10.0.0.7"),
        (["203.0.113.09"], PROXY),
        (["203.0.113.9:port"], PROXY),
        (["[203.0.113.9]"], PROXY),
        (["[2001:db8::1"], PROXY),
        (["[2001:db8::1]x"], PROXY),
        (["203.0.113.9:123456"], PROXY),
        (['"203.0.113.9"'], PROXY),
        (["203.0.113.9\0"], PROXY),
    ],
)
def test_x_forwarded_for(lines: list[str], key: str):
    """Right to left to the first that is no proxy; what cannot be read ends the walk."""
    trust = Trust(proxies=["10.0.0.0/8"])
    headers = forwarded_for(*lines) + forwarded("for=198.51.100.99")
    assert trust.client_address(PROXY, headers) == key


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        (["for=203.0.113.9"], "203.0.113.9"),
        (["For=203.0.113.9;proto=https;by=10.0.0.1"], "203.0.113.9"),
        (["proto=https ; for=203.0.113.9;"], "203.0.113.9"),
        (['for="203.0.113.9:80"'], "203.0.113.9"),
        (['for="[2001:db8:cafe::17]:4711"'], "2001:db8:cafe::/64"),
        (['for="[2001:db8:cafe::17]", for=10.0.0.7'], "2001:db8:cafe::/64"),
        (["for=198.51.100.1", "for=203.0.113.9, for=10.0.0.7"], "203.0.113.9"),
        (['for="203.0.113.\\9"'], "203.0.113.9"),
        (["for=_hidden, for=10.0.0.7"], "10.0.0.7"),
        (["for=unknown"], PROXY),
        (["for=2001:db8::1"], PROXY),
        (['for="2001:db8::1"'], PROXY),
        (["for=203.0.113.9;for=198.51.100.1"], PROXY),
        (["proto=https"], PROXY),
        (['for="203.0.113.9'], PROXY),
        (['for=203.0.113.9";a="'], PROXY),
        (["a=b;" * 17 + "for=203.0.113.9"], PROXY),
        (["203.0.113.9"], PROXY),
        (["for = 203.0.113.9"], PROXY),
        ([""], PROXY),
    ],
)
def test_forwarded(lines: list[str], key: str):
    """The same for RFC 7239: quotes, brackets, ports, hidden and unknown nodes."""
    trust = Trust(proxies=["10.0.0.0/8"], forwarded="forwarded")
    headers = forwarded(*lines) + forwarded_for("198.51.100.99")
    assert trust.client_address(PROXY, headers) == key


PIECES = [*'019af.:,;="\\[]% _-', "for=", "10.0.0.2", ', for="', "203.0.113.9"]
JUNK = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=40)


def sender_cannot_choose(case: tuple[str, IPv4Address | IPv6Address]) -> None:
    """Whatever a stranger writes, the proxy appends its address, and that is what counts."""
    junk, address = case
    trust = Trust(proxies=["10.0.0.0/8"])
    headers = forwarded_for(f"{junk}, {address}")
    assert trust.client_address(PROXY, headers) == key_of(address)
    trust = Trust(proxies=["10.0.0.0/8"], forwarded="forwarded")
    node = address if isinstance(address, IPv4Address) else f'"[{address}]:443"'
    headers = forwarded(f"{junk}, for={node};proto=https")
    assert trust.client_address(PROXY, headers) == key_of(address)


@given(st.tuples(JUNK, STRANGERS))
def test_a_sender_cannot_choose_its_address(case: tuple[str, IPv4Address | IPv6Address]):
    """What stands left of what the proxy wrote has no influence."""
    assume(not key_of(case[1]).startswith("10."))
    sender_cannot_choose(case)


def test_reading_from_the_left_would_let_it_choose(monkeypatch: pytest.MonkeyPatch):
    """The property depends on the direction of the walk."""
    monkeypatch.setattr(trust_module, "reversed", list, raising=False)
    assert falsified(sender_cannot_choose, st.tuples(JUNK, STRANGERS))


CHAINS = st.lists(
    V4 | V6 | st.integers(0, 255).map(lambda n: ip_address(f"10.0.0.{n}")), max_size=6
)


@given(CHAINS)
def test_the_walk_is_the_promised_one(hops: list[IPv4Address | IPv6Address]):
    """The client is the last in the list that is no proxy, or the first if all are."""
    trust = Trust(proxies=["10.0.0.0/8", "2001:db8::/32"])
    expected = PROXY
    for hop in reversed(hops):
        expected = key_of(hop)
        if not expected.startswith(("10.", "2001:db8:")):
            break
    headers = forwarded_for(", ".join(map(str, hops))) if hops else []
    assert trust.client_address(PROXY, headers) == expected


def test_hops_are_capped():
    """The walk ends after 32 hops, even through proxies of ours."""
    trust = Trust(proxies=["10.0.0.0/8"])
    near = ["10.0.0.2"] * 31
    assert trust.client_address(PROXY, forwarded_for(", ".join(["203.0.113.9", *near]))) == (
        "203.0.113.9"
    )
    far = ["203.0.113.9", "10.1.1.1", *near]
    assert trust.client_address(PROXY, forwarded_for(", ".join(far))) == "10.1.1.1"


def test_length_is_capped():
    """A list of more than 8 KiB, in one line or several, is as if it were not there."""
    trust = Trust(proxies=["10.0.0.0/8"])
    long = "198.51.100.1, " * 600
    assert trust.client_address(PROXY, forwarded_for(f"{long}203.0.113.9")) == PROXY
    half = "198.51.100.1, " * 300 + "198.51.100.1"
    assert trust.client_address(PROXY, forwarded_for(half, half, "203.0.113.9")) == PROXY
    assert trust.client_address(PROXY, forwarded_for(half, "203.0.113.9")) == "203.0.113.9"


def test_without_the_caps_longer_lists_would_be_walked(monkeypatch: pytest.MonkeyPatch):
    """Both bounds are what ends the walk."""
    trust = Trust(proxies=["10.0.0.0/8"])
    hops = forwarded_for("203.0.113.9" + ", 10.0.0.2" * 32)
    long = forwarded_for("198.51.100.1, " * 600 + "203.0.113.9")
    assert [trust.client_address(PROXY, given) for given in (hops, long)] == ["10.0.0.2", PROXY]
    monkeypatch.setattr(trust_module, "_MOST_HOPS", 33)
    monkeypatch.setattr(trust_module, "LONGEST", 1 << 20)
    assert {trust.client_address(PROXY, given) for given in (hops, long)} == {"203.0.113.9"}


def test_a_unix_socket_can_be_a_proxy():
    """A peer without an address is believed only if it was named."""
    headers = forwarded_for("203.0.113.9")
    assert Trust(proxies=["10.0.0.0/8"]).client_address(None, headers) == "unix"
    assert Trust(proxies=["unix"]).client_address(None, headers) == "203.0.113.9"
    assert Trust(callers=["unix"]).believes(None)
    assert not Trust(callers=["10.0.0.0/8"]).believes(None)


# --- Who is believed ---


@pytest.mark.parametrize(
    ("peer", "believed"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("11.1.2.3", False),
        ("::1", False),
        ("2001:db8::5", True),
        (None, False),
        ("testclient", False),
        ("10.1.2.3 ", False),
    ],
)
def test_callers_are_believed(peer: str | None, believed: bool):  # noqa: FBT001
    """Only peers in the networks of callers, however they spell it."""
    trust = Trust(callers=["10.0.0.0/8", "2001:db8::/32"])
    assert trust.believes(peer) is believed
    assert Trust().believes(peer) is False


def test_a_mapped_network_is_meant_as_ipv4():
    """A network of IPv4 in IPv6 holds the same addresses."""
    assert Trust(callers=["::ffff:10.0.0.0/104"]).believes("10.1.2.3")


STRANGE = STRANGERS.filter(lambda a: not key_of(a).startswith("10."))


def strangers_are_not_believed(case: tuple[str, IPv4Address | IPv6Address]) -> None:
    """Ask as a stranger through a proxy inside the callers' network, where it often is."""
    junk, address = case
    trust = Trust(proxies=[PROXY], callers=["10.0.0.0/8"])
    assert not trust.believes(PROXY, forwarded_for(f"{junk}, {address}"))
    assert not trust.believes(PROXY, forwarded_for(f"{junk}, nobody"))
    assert not trust.believes(PROXY, forwarded_for(junk + "x" * 9000))


@given(st.tuples(JUNK, STRANGE))
def test_a_stranger_behind_a_proxy_stays_one(case: tuple[str, IPv4Address | IPv6Address]):
    """Who comes through a proxy is not believed because the proxy would be."""
    strangers_are_not_believed(case)


def test_the_proxys_own_address_would_vouch_for_strangers(monkeypatch: pytest.MonkeyPatch):
    """The property depends on asking for the sender instead of the peer."""
    monkeypatch.setattr(Trust, "_origin", lambda _self, proxy, _headers: (proxy, True))
    assert falsified(strangers_are_not_believed, st.tuples(JUNK, STRANGE))


def test_a_caller_behind_a_proxy_is_believed():
    """A service of yours is believed also through proxies."""
    trust = Trust(proxies=["10.0.0.0/24"], callers=["10.0.0.0/8"])
    assert trust.believes(PROXY, forwarded_for("10.5.5.5"))
    assert trust.believes(PROXY, forwarded_for("10.5.5.5, 10.0.0.7"))


@pytest.mark.parametrize(
    "headers",
    [
        [],
        forwarded("for=203.0.113.9"),
        forwarded_for("10.0.0.9"),
        forwarded_for("203.0.113.9" + ", 10.0.0.9" * 32),
        forwarded_for("10.5.5.5" + ", 10.0.0.9" * 32),
    ],
    ids=["nothing", "the other header", "only proxies", "33 hops", "a caller after 32"],
)
def test_a_proxy_that_does_not_say_who_it_is_vouches_for_nobody(
    headers: list[tuple[bytes, bytes]],
):
    """A proxy in the callers' network is no caller: anybody may be behind it."""
    trust = Trust(proxies=["10.0.0.0/24"], callers=["10.0.0.0/8"])
    assert not trust.believes(PROXY, headers)
    assert not Trust(proxies=["unix"], callers=["unix"]).believes(None, headers[:0])


# --- Settings ---


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"proxies": "10.0.0.0/8"}, TypeError, r"write a list of networks"),
        ({"callers": 5}, TypeError, r"write a list of networks"),
        ({"callers": [5]}, TypeError, r"write a network"),
        ({"callers": ["localhost"]}, ValueError, r"is no network"),
        ({"proxies": ["10.0.0.1/8"]}, ValueError, r"no bits set behind"),
        ({"forwarded": "x-real-ip"}, ValueError, r"write one of 'x-forwarded-for', 'forwarded'"),
    ],
)
def test_bad_settings(settings: dict, error: type[Exception], message: str):
    """Each mistake is told with what to write instead."""
    with pytest.raises(error, match=message):
        Trust(**settings)


def test_repr():
    """It shows whom it believes."""
    assert repr(Trust()) == "Trust()"
    assert repr(Trust(proxies=["10.0.0.0/8"], callers=["unix"])) == (
        "Trust(proxies=['10.0.0.0/8'], callers=['unix'], forwarded='x-forwarded-for')"
    )
