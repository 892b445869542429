"""Trust in peers: which may name the client of a request, and which may set deadline and rank.

Callers control their headers. The one thing that a caller cannot choose is the address that its
connection comes from. So that address is the client's, and its headers are ignored, unless its
network is configured here:

- `proxies` forward requests of others, and name the client (`X-Forwarded-For`, `Forwarded`).
- `callers` are services of your own: their deadlines, criticality and tenants count. (The attempt
  number is trusted from any caller: it can only make this service do less.)

A request that comes through a proxy belongs to its sender, not to the proxy: it is trusted only if
the proxy names one of the callers as the sender.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Literal, NamedTuple

from seawall import _checks as check
from seawall.wire.text import LONGEST

UNIX: Final = "unix"
"""Name of a peer without an address, also in the lists of proxies or callers."""

_MOST_HOPS: Final = 32
_MOST_PAIRS: Final = 16
_MOST_KNOWN: Final = 4096
_LONGEST_HOP: Final = 64
_NETWORK_BITS: Final = 64
_MAPPED: Final = IPv6Network("::ffff:0:0/96")

_TOKEN: Final = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"  # noqa: S105 - no secret: the term of RFC 9110
_PAIR: Final = re.compile(rf'({_TOKEN})=(?:({_TOKEN})|"((?:[^"\\]|\\.)*)")[ \t]*(?:;[ \t]*|\Z)')
_ESCAPED: Final = re.compile(r"\\(.)")

Header = Iterable[tuple[bytes, bytes]]


class _Known(NamedTuple):
    """Properties of an address: its text in keys, and whether it is a proxy or a caller."""

    key: str
    proxy: bool
    caller: bool


class Trust:
    """Trusted networks, and the client address of a request; by default no peer is trusted.

    Networks are written as `"10.0.0.0/8"`, `"2001:db8::/32"`, an address, or `"unix"` for peers
    without one. `forwarded` names the one header that the proxies set: they do not write the other,
    so it is ignored.
    """

    def __init__(
        self,
        *,
        proxies: Sequence[str] = (),
        callers: Sequence[str] = (),
        forwarded: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for",
    ) -> None:
        """Trust these proxies about client addresses, and these callers about their requests."""
        self._proxies = _networks("proxies", proxies)
        self._callers = _networks("callers", callers)
        check.choice("forwarded", forwarded, ("x-forwarded-for", "forwarded"))
        self._header = forwarded.encode()
        # A cache of parsed addresses: clearing it costs time, and changes no result.
        self._known: dict[str | None, _Known | None] = {}
        self.direct_keys: dict[str, str] = {}
        """Cached peers that are not proxies, with the key that limits use for them: one object, so
        that lookups match by identity."""

    def __repr__(self) -> str:
        listed = [
            f"{name}={[str(network) for network in networks]}"
            for name, networks in (("proxies", self._proxies), ("callers", self._callers))
            if networks
        ]
        if self._proxies:
            listed.append(f"forwarded={self._header.decode()!r}")
        return f"Trust({', '.join(listed)})"

    @property
    def believes_callers(self) -> bool:
        """Whether any caller is trusted about deadline, criticality and tenant."""
        return bool(self._callers)

    def client_address(self, peer: str | None, headers: Header) -> str:
        """Return the client's address as text: IPv4 unchanged, IPv6 as its /64 network.

        `peer` is the address that the connection comes from, None for a unix socket.
        """
        known = self._ask(peer)
        if known is None:  # a server or a test gave a name instead of an address
            short = (peer or "")[:_LONGEST_HOP]
            return short if short and short.isprintable() else "unknown"
        return self._origin(known, headers)[0].key if known.proxy else known.key

    def believes(self, peer: str | None, headers: Header = ()) -> bool:
        """Return whether deadline, criticality and tenant of this request count."""
        if not self._callers:
            return False
        known = self._ask(peer)
        if known is None or not known.proxy:
            return known is not None and known.caller
        origin, certain = self._origin(known, headers)
        return certain and origin.caller

    def is_proxy(self, peer: str | None) -> bool:
        """Return whether `peer` is one of the trusted proxies."""
        known = self._ask(peer) if self._proxies else None
        return known is not None and known.proxy

    def _ask(self, address: str | None) -> _Known | None:
        try:
            return self._known[address]
        except KeyError:
            known = self._look_up(address)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
                self.direct_keys.clear()
            if address is None or len(address) <= _LONGEST_HOP:
                self._known[address] = known
                if address is not None and known is not None and not known.proxy:
                    self.direct_keys[address] = f"@{known.key}"
            return known

    def _look_up(self, text: str | None) -> _Known | None:
        if text is None:
            return _Known(UNIX, UNIX in self._proxies, UNIX in self._callers)
        address = _address(text)
        if address is None:
            return None
        proxy, caller = _within(address, self._proxies), _within(address, self._callers)
        return _Known(_key(address), proxy, caller)

    def _origin(self, proxy: _Known, headers: Header) -> tuple[_Known, bool]:
        """Walk from the proxy towards the sender; return the first address that is not a proxy.

        An unreadable hop ends the walk at the last good hop, and the result is then not certain.
        Nor is it if there are only proxies: the sender behind them is unknown.
        """
        lines = [value for name, value in headers if name == self._header]
        if not lines:
            return proxy, False
        # Several lines are one list. The nearest proxy wrote its right end.
        text = b",".join(lines)
        if len(text) > LONGEST:
            return proxy, False
        last = proxy
        hops = text.decode("latin-1").rsplit(",", _MOST_HOPS)[-_MOST_HOPS:]
        node = _forwarded_node if self._header == b"forwarded" else _plain_node
        for hop in reversed(hops):
            address = node(hop.strip(" \t"))
            known = self._ask(address) if address else None
            if known is None:
                return last, False
            if not known.proxy:
                return known, True
            last = known
        return last, False


def _networks(name: str, given: Sequence[str]) -> tuple[IPv4Network | IPv6Network | str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{name}={given!r}: write a list of networks, such as ['10.0.0.0/8']")
    return tuple(UNIX if text == UNIX else _network(name, text) for text in given)


def _network(name: str, text: object) -> IPv4Network | IPv6Network:
    if not isinstance(text, str):
        raise TypeError(f"{name}: {text!r} is no text; write a network, such as '10.0.0.0/8'")
    try:
        network = ip_network(text)
    except ValueError:
        raise ValueError(
            f"{name}: {text!r} is no network; write an address, a network such as '10.0.0.0/8'"
            " (no bits set behind its mask), or 'unix'"
        ) from None
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        # Addresses are unmapped before they are compared, so networks are too.
        first = IPv4Address(int(network.network_address) & 0xFFFF_FFFF)
        return IPv4Network((first, network.prefixlen - _MAPPED.prefixlen))
    return network


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address without its zone, IPv4-mapped IPv6 as IPv4; None if it is invalid."""
    if len(text) > _LONGEST_HOP:
        return None
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _within(
    address: IPv4Address | IPv6Address, networks: tuple[IPv4Network | IPv6Network | str, ...]
) -> bool:
    return any(not isinstance(network, str) and address in network for network in networks)


def _key(address: IPv4Address | IPv6Address) -> str:
    """Return the key for limits: the owner of one IPv6 address has all of its /64."""
    if isinstance(address, IPv4Address):
        return str(address)
    host_bits = address.max_prefixlen - _NETWORK_BITS
    network = IPv6Address(int(address) >> host_bits << host_bits)
    return f"{network}/{_NETWORK_BITS}"


def _plain_node(hop: str) -> str | None:
    """Return the address of a hop, which some proxies write with a port; None if it is invalid."""
    if hop.startswith("["):
        address, bracket, port = hop[1:].partition("]")
        fine = bracket and ":" in address and (not port or _is_port(port))
        return address if fine else None
    if hop.count(":") == 1:
        address, _, port = hop.partition(":")
        return address if _is_port(f":{port}") else None
    return hop


def _forwarded_node(element: str) -> str | None:
    """Return the address in `for=` of an element (RFC 7239); None if it is absent or hidden."""
    if element.count(";") > _MOST_PAIRS:
        return None
    found: str | None = None
    at = 0
    while at < len(element):
        pair = _PAIR.match(element, at)
        if pair is None:
            return None
        at = pair.end()
        if pair[1].lower() == "for":
            if found is not None:
                return None
            found = pair[2] or pair[3]
            if len(found) > _LONGEST_HOP:
                return None
    if found is None or (found.count(":") > 1 and not found.startswith("[")):
        return None
    return _plain_node(_ESCAPED.sub(r"\1", found))


def _is_port(text: str) -> bool:
    return 1 < len(text) <= 6 and text[1:].isascii() and text[1:].isdigit() and text[0] == ":"  # noqa: PLR2004
