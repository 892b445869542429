"""From a URL or a redis-py client to clients of our own.

`clients_for(target)` reads where the servers are and how to sign in (a `StoreAddress`), and nothing
else: the user's own connections are never used, because they belong to another event loop, may
decode replies, and have their own timeouts and retries. `ClientFactory.make(timeout)` then builds a
new asyncio client, without retries (a retry would spend the store's timeout more than once), with
replies as bytes.

Nothing here connects, and no message or `repr` shows a password: messages about a URL name the part
that is wrong and never quote it, because with a password that is not percent-encoded, any part may
hold a piece of the password.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

AddressKind = Literal["single", "sentinel", "cluster"]
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
_KINDS: Final[dict[str, AddressKind]] = {
    "": "single",
    "+sentinel": "sentinel",
    "+cluster": "cluster",
}
_SCHEMES: Final = {base + end: (_TLS[base], _KINDS[end]) for base in _TLS for end in _KINDS}

_PLAIN_OPTIONS: Final[tuple[str, ...]] = ("db", "client_name", "socket_keepalive")
_SSL: Final = (
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_cert_reqs",
    "ssl_ca_certs",
    "ssl_ca_data",
    "ssl_ca_path",
    "ssl_check_hostname",
    "ssl_min_version",
    "ssl_ciphers",
    "ssl_password",
)
_URL_SSL: Final = tuple(name for name in _SSL if name not in {"ssl_ca_data", "ssl_min_version"})

NOT_IN_CLUSTERS: Final = ("ssl_ca_path", "ssl_password")
"""redis-py's asyncio cluster client has no such arguments."""

_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
_YES_NO: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, repr=False)
class StoreAddress:
    """Where the servers are and how to sign in; the names in `options` are redis-py's."""

    kind: AddressKind
    nodes: tuple[Node, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None
    service: str | None = None
    sentinel: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        # As a URL without user name and password.
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


def parse(url: str) -> StoreAddress:
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


def _unix_place(parts: SplitResult) -> StoreAddress:
    login, _, host = parts.netloc.rpartition("@")
    if host or not parts.path.strip("/"):
        raise ValueError('the store\'s URL has no path: write "unix:///path/to/socket?db=0"')
    options = {**_login(login), **_query(parts.query, _PLAIN_OPTIONS)}
    return StoreAddress("single", (), options, path=unquote(parts.path))


def _place(parts: SplitResult, tls: bool, kind: AddressKind) -> StoreAddress:  # noqa: FBT001 - from a table
    login, _, hosts = parts.netloc.rpartition("@")
    nodes = _nodes(hosts, SENTINEL_PORT if kind == "sentinel" else PORT)
    if kind == "single" and len(nodes) > 1:
        raise ValueError(
            "the store's URL has several hosts: write redis+cluster:// or redis+sentinel://"
        )
    known = _PLAIN_OPTIONS + (_URL_SSL if tls else ())
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
    return StoreAddress(kind, nodes, options, service=service, sentinel=sentinel)


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


CONNECTIONS: Final = 128
"""Maximum connections of one client per server. redis-py raises above it; a link uses fewer."""

_LOGIN: Final = ("username", "password", "credential_provider", "client_name")
_SOCKET: Final = ("socket_keepalive", "socket_keepalive_options")


class ClientFactory:
    """Makes clients for one place; they are ours alone."""

    def __init__(self, place: StoreAddress, remap: Any = None) -> None:
        """Connect to `place`; `remap` changes addresses that a cluster names."""
        self.place = place
        self._remap = remap

    def __repr__(self) -> str:
        return f"ClientFactory({self.place!r})"

    def make(self, timeout: float) -> Redis | RedisCluster:
        """Return a new asyncio client, not yet connected; its `aclose` closes everything it opened.

        Use it in one event loop. `timeout`: seconds for connecting, and for each reply.
        """
        if self.place.kind == "cluster":
            return self._cluster(timeout)
        return self._one_server(timeout)

    def make_listener(self, timeout: float, attempt: int = 0) -> Redis:
        """Return a new asyncio client for subscriptions.

        In a cluster, any node forwards what is published at any other, so there it is a client of
        one node. Increment `attempt` after each failure to use the next node.
        """
        if self.place.kind == "cluster":
            return self._node(self.place.nodes[attempt % len(self.place.nodes)], timeout)
        return self._one_server(timeout)

    def _one_server(self, timeout: float) -> Redis:
        place = self.place
        if place.kind == "sentinel":
            return self._behind_sentinels(timeout)
        return self._node(place.nodes[0] if place.nodes else None, timeout)

    def _node(self, node: Node | None, timeout: float) -> Redis:
        from redis.asyncio import Redis

        where: dict[str, Any] = {"unix_socket_path": self.place.path}
        if node is not None:
            where = {"host": node[0], "port": node[1]}
        return Redis(**where, **self.place.options, **_quick(timeout))

    def _cluster(self, timeout: float) -> RedisCluster:
        from redis.asyncio import RedisCluster
        from redis.asyncio.cluster import ClusterNode

        client = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self.place.nodes],
            address_remap=self._remap,
            **self.place.options,
            **_quick(timeout),
        )
        commands: Any = _OnlyScripts()
        client.commands_parser = commands
        return client

    def _behind_sentinels(self, timeout: float) -> Redis:
        from redis.asyncio import Redis
        from redis.asyncio.sentinel import Sentinel

        maker: Any = Sentinel
        guards = [
            maker([node], sentinel_kwargs={**self.place.sentinel, **_quick(timeout)})
            for node in self.place.nodes
        ]

        class AnySentinel(Sentinel):
            """Asks all sentinels concurrently: a dead one would take the whole timeout."""

            async def discover_master(self, service_name: str) -> Any:
                return await _first_answer(one.discover_master(service_name) for one in guards)

        class SentinelClient(Redis):
            """Also closes the connections to the sentinels: redis-py leaves them open."""

            async def aclose(self, *args: Any, **kwargs: Any) -> None:
                try:
                    await super().aclose(*args, **kwargs)
                finally:
                    for one in guards:
                        for client in one.sentinels:
                            await client.aclose()

        maker = AnySentinel
        client: Redis = maker([]).master_for(
            self.place.service, redis_class=SentinelClient, **self.place.options, **_quick(timeout)
        )
        return client


class _OnlyScripts:
    """Replaces redis-py's list of the server's commands, which says where their keys are.

    Loading it blocks the event loop for tens of milliseconds at every new view of the cluster; and
    only scripts are sent here, of which redis-py knows where the keys are.
    """

    async def initialize(self, node: Any) -> None:
        """Load nothing."""

    async def get_keys(self, *command: Any) -> None:
        """Return no keys: redis-py then refuses to send the command."""


def clients_for(target: object) -> ClientFactory:
    """Read the settings of a URL or of a redis-py client (sync or asyncio), or raise.

    A client may be a `Redis`, a `RedisCluster`, or the return value of `Sentinel.master_for`.
    """
    try:
        import redis
        import redis.asyncio as aio
    except ImportError:
        raise ImportError('RedisStore needs redis-py: pip install "seawall[redis]"') from None
    if isinstance(target, str):
        return ClientFactory(parse(target))
    if isinstance(target, (redis.RedisCluster, aio.RedisCluster)):
        return _of_cluster(target)
    if isinstance(target, (redis.Redis, aio.Redis)):
        return _of_pool(target.connection_pool)
    raise TypeError(f"RedisStore({type(target).__name__}): {FORMS}, or pass a client of redis-py")


def _quick(timeout: float) -> dict[str, Any]:
    """Return arguments that bound every wait by `timeout`, and switch off redis-py's retries."""
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
        "protocol": 2,
        "health_check_interval": 0,
        "max_connections": CONNECTIONS,
    }


async def _first_answer(questions: Iterable[Any]) -> Any:
    """Return the first good answer and cancel the others; raise the last error if there is none."""
    import asyncio

    tasks = [asyncio.ensure_future(question) for question in questions]
    error: Exception | None = None
    try:
        for task in asyncio.as_completed(tasks):
            try:
                return await task
            except Exception as caught:  # noqa: BLE001 - another may still answer
                error = caught
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise error or RuntimeError("nobody was asked")


def _of_pool(pool: Any) -> ClientFactory:
    given = pool.connection_kwargs
    options = _taken(given, pool.connection_class)
    if hasattr(pool, "sentinel_manager"):
        return _of_sentinel(pool, options)
    if "path" in given:
        return ClientFactory(StoreAddress("single", (), options, path=str(given["path"])))
    return ClientFactory(StoreAddress("single", (_address(given, PORT),), options))


def _of_sentinel(pool: Any, options: Mapping[str, Any]) -> ClientFactory:
    if not pool.is_master:
        raise ValueError(
            "RedisStore(client): this client reads from replicas; pass what Sentinel.master_for"
            " returns"
        )
    guards = [one.connection_pool for one in pool.sentinel_manager.sentinels]
    nodes = tuple(_address(one.connection_kwargs, SENTINEL_PORT) for one in guards)
    sentinel = _taken(guards[0].connection_kwargs, guards[0].connection_class)
    service = str(pool.service_name)
    return ClientFactory(
        StoreAddress("sentinel", nodes, options, service=service, sentinel=sentinel)
    )


def _of_cluster(client: Any) -> ClientFactory:
    manager = client.nodes_manager
    given = manager.connection_kwargs
    options = _taken(given, given.get("connection_class"))
    options.pop("db", None)
    for name in NOT_IN_CLUSTERS:
        if name in options:
            raise ValueError(
                f"RedisStore(client): redis-py has no {name} for clusters under asyncio; use"
                " ssl_ca_certs, and a key file without a password"
            )
    nodes = tuple((str(n.host), int(n.port)) for n in manager.startup_nodes.values())
    return ClientFactory(
        StoreAddress("cluster", nodes, options), getattr(manager, "address_remap", None)
    )


def _address(given: Mapping[str, Any], port: int) -> Node:
    return str(given.get("host", "localhost")), int(given.get("port", port))


def _taken(given: Mapping[str, Any], connection_class: type | None) -> dict[str, Any]:
    """Return the client's arguments that we adopt: the login, TLS and the database."""
    from redis.asyncio import SSLConnection as AsyncSSLConnection
    from redis.connection import SSLConnection

    tls = given.get("ssl") or (
        connection_class is not None
        and issubclass(connection_class, (SSLConnection, AsyncSSLConnection))
    )
    names = (*_LOGIN, *_SOCKET, "db", *(_SSL if tls else ()))
    options = {name: given[name] for name in names if given.get(name) is not None}
    if tls:
        options["ssl"] = True
    return options
