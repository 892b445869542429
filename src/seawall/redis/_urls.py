"""The addresses of a store's servers: a `Place`, read from a URL.

Messages name the part of a URL that is wrong and never quote it: with a password that is not
percent-encoded, any part may hold a piece of the password. Nothing here needs redis-py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

Kind = Literal["single", "sentinel", "cluster"]
Node = tuple[str, int]

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_HIGHEST_PORT: Final = 65535

FORMS: Final = (
    'write a URL such as "redis://user:password@host:6379/0" (rediss:// for TLS, valkey:// and '
    'valkeys:// mean the same), "unix:///path/to/socket?db=0", '
    '"redis+sentinel://h1:26379,h2:26379/service/0" or "redis+cluster://h1:6379,h2:6379"'
)
_QUOTING: Final = 'in a user name or password, write "@", ":", "/", "?" and "#" percent-encoded'

_TLS: Final = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
_KINDS: Final[dict[str, Kind]] = {"": "single", "+sentinel": "sentinel", "+cluster": "cluster"}
_SCHEMES: Final = {base + end: (_TLS[base], _KINDS[end]) for base in _TLS for end in _KINDS}

_PLAIN_OPTIONS: Final = ("db", "client_name", "socket_keepalive")
_SSL_OPTIONS: Final = (
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_cert_reqs",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_check_hostname",
    "ssl_ciphers",
    "ssl_password",
)
NOT_IN_CLUSTERS: Final = ("ssl_ca_path", "ssl_password")
"""redis-py's asyncio cluster client has no such arguments."""

_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
_YES_NO: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, repr=False)
class Place:
    """Where the servers are and how to sign in; the names in `options` are redis-py's."""

    kind: Kind
    nodes: tuple[Node, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None
    service: str | None = None
    sentinel: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the address, as a URL without user name and password."""
        scheme = "rediss" if self.options.get("ssl") else "redis"
        database = int(self.options.get("db", 0))
        if self.path is not None:
            return f"unix://{self.path}?db={database}"
        where = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.nodes)
        if self.kind == "sentinel":
            return f"{scheme}+sentinel://{where}/{self.service}/{database}"
        if self.kind == "cluster":
            return f"{scheme}+cluster://{where}"
        return f"{scheme}://{where}/{database}"


def parse(url: str) -> Place:
    """Return the place that `url` names, or raise and say what to write."""
    scheme, _, rest = url.partition("://")
    if not rest or (scheme != "unix" and scheme not in _SCHEMES):
        raise ValueError(f"the store's URL has no known scheme: {FORMS}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"the store's URL has a bad host: {FORMS}; {_QUOTING}") from None
    if parts.fragment or "@" in parts.path or "@" in parts.query:
        raise ValueError(f"the store's URL cannot be read: {_QUOTING}")
    return _unix_place(parts) if scheme == "unix" else _place(parts, *_SCHEMES[scheme])


def _unix_place(parts: SplitResult) -> Place:
    login, _, host = parts.netloc.rpartition("@")
    if host or not parts.path.strip("/"):
        raise ValueError('the store\'s URL has no path: write "unix:///path/to/socket?db=0"')
    options = {**_login(login), **_query(parts.query, _PLAIN_OPTIONS)}
    return Place("single", (), options, path=unquote(parts.path))


def _place(parts: SplitResult, tls: bool, kind: Kind) -> Place:  # noqa: FBT001 - from a table
    login, _, hosts = parts.netloc.rpartition("@")
    nodes = _nodes(hosts, SENTINEL_PORT if kind == "sentinel" else PORT)
    if kind == "single" and len(nodes) > 1:
        raise ValueError(
            "the store's URL has several hosts: write redis+cluster:// or redis+sentinel://"
        )
    known = _PLAIN_OPTIONS + (_SSL_OPTIONS if tls else ())
    if kind == "sentinel":
        known += _SENTINEL_OPTIONS
    if kind == "cluster":
        known = tuple(name for name in known if name not in NOT_IN_CLUSTERS)
    options, sentinel = _login(login), dict[str, Any]()
    for name, value in _query(parts.query, known).items():
        if name in _SENTINEL_OPTIONS:
            sentinel[name.removeprefix("sentinel_")] = value
        else:
            options[name] = value
    if tls:
        options["ssl"] = True
        sentinel.update({name: options[name] for name in options if name.startswith("ssl")})
    path = [unquote(part) for part in parts.path.split("/") if part]
    service = _service(path) if kind == "sentinel" else None
    if path and "db" in options:
        raise ValueError("the store's URL has two databases: write one, such as /0 or ?db=0")
    if path:
        options["db"] = _database("/".join(path))
    if kind == "cluster" and options.pop("db", 0):
        raise ValueError("the store's URL has a database: a cluster has only 0; leave it out")
    return Place(kind, nodes, options, service=service, sentinel=sentinel)


def _service(path: list[str]) -> str:
    if not path:
        raise ValueError(
            'the store\'s URL has no service: write "redis+sentinel://h1:26379,h2:26379/service/0"'
        )
    return path.pop(0)


def _login(text: str) -> dict[str, Any]:
    user, _, password = text.partition(":")
    found = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in found.items() if value}


def _nodes(text: str, port: int) -> tuple[Node, ...]:
    nodes = []
    for part in text.split(","):
        host, colon, number = part.rpartition(":")
        if not colon or part.endswith("]"):
            host, number = part, str(port)
        bracketed = host.startswith("[") and host.endswith("]")
        host = unquote(host[1:-1] if bracketed else host)
        if not host or (":" in host and not bracketed):
            raise ValueError(f"the store's URL has a bad host: {FORMS}; {_QUOTING}")
        if not number.isascii() or not number.isdigit() or not 0 < int(number) <= _HIGHEST_PORT:
            raise ValueError(
                f"the store's URL has a bad port: write one from 1 to 65535; {_QUOTING}"
            )
        nodes.append((host, int(number)))
    return tuple(nodes)


def _query(text: str, known: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if "timeout" in name or "retry" in name:
            raise ValueError(
                "the store's URL sets a timeout or retries: write RedisStore(url, timeout=0.05);"
                " the store itself never retries"
            )
        if name not in known or name in found:
            raise ValueError(
                "the store's URL has an option that is unknown or given twice: write one of"
                f" {', '.join(known)}"
            )
        found[name] = _option(name, value)
    return found


def _option(name: str, value: str) -> Any:
    if name == "db":
        return _database(value)
    if name in {"ssl_check_hostname", "socket_keepalive"}:
        if value.lower() not in _YES_NO:
            raise ValueError(f"{name} in the store's URL: write yes or no")
        return _YES_NO[value.lower()]
    if name == "ssl_cert_reqs" and value not in {"none", "optional", "required"}:
        raise ValueError(f"{name} in the store's URL: write none, optional or required")
    return value


def _database(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(
            f"the store's URL has a bad database: write a number, such as /0; {_QUOTING}"
        )
    return int(text)
