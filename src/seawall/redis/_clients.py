"""From a URL or a redis-py client to clients of our own.

`settings_of(target)` reads where the servers are and how to sign in, and nothing else: the user's
own connections are never used, because they belong to another event loop, may decode replies, and
have their own timeouts and retries. `Clients.make(timeout)` then builds a new asyncio client,
without retries (a retry would spend the store's timeout more than once), replies as bytes.

Nothing here connects, and no message or `repr` shows a password.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from seawall.redis._urls import FORMS, NOT_IN_CLUSTERS, PORT, SENTINEL_PORT, Node, Place, parse

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

CONNECTIONS: Final = 128
"""Maximum connections of one client per server. redis-py raises above it; a link uses fewer."""

_LOGIN: Final = ("username", "password", "credential_provider", "client_name")
_SOCKET: Final = ("socket_keepalive", "socket_keepalive_options")
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


class Clients:
    """Makes clients for one place; they are ours alone."""

    def __init__(self, place: Place, remap: Any = None) -> None:
        """Connect to `place`; `remap` changes addresses that a cluster names."""
        self.place = place
        self._remap = remap

    def describe(self) -> str:
        """Return the address, without user name and password."""
        return repr(self.place)

    def __repr__(self) -> str:
        """Return a text with the address, without user name and password."""
        return f"Clients({self.describe()})"

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

        class Owner(Redis):
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
            self.place.service, redis_class=Owner, **self.place.options, **_quick(timeout)
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


def settings_of(target: object) -> Clients:
    """Read the settings of a URL or of a redis-py client (sync or asyncio), or raise.

    A client may be a `Redis`, a `RedisCluster`, or the return value of `Sentinel.master_for`.
    """
    try:
        import redis
        import redis.asyncio as aio
    except ImportError:
        raise ImportError('RedisStore needs redis-py: pip install "seawall[redis]"') from None
    if isinstance(target, str):
        return Clients(parse(target))
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


def _of_pool(pool: Any) -> Clients:
    given = pool.connection_kwargs
    options = _taken(given, pool.connection_class)
    if hasattr(pool, "sentinel_manager"):
        return _of_sentinel(pool, options)
    if "path" in given:
        return Clients(Place("single", (), options, path=str(given["path"])))
    return Clients(Place("single", (_address(given, PORT),), options))


def _of_sentinel(pool: Any, options: Mapping[str, Any]) -> Clients:
    if not pool.is_master:
        raise ValueError(
            "RedisStore(client): this client reads from replicas; pass what Sentinel.master_for"
            " returns"
        )
    guards = [one.connection_pool for one in pool.sentinel_manager.sentinels]
    nodes = tuple(_address(one.connection_kwargs, SENTINEL_PORT) for one in guards)
    sentinel = _taken(guards[0].connection_kwargs, guards[0].connection_class)
    service = str(pool.service_name)
    return Clients(Place("sentinel", nodes, options, service=service, sentinel=sentinel))


def _of_cluster(client: Any) -> Clients:
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
    return Clients(Place("cluster", nodes, options), getattr(manager, "address_remap", None))


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
