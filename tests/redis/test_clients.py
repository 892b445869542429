"""Where a store may be: URLs, clients of redis-py, and each kind of server for real."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from textwrap import dedent
from types import SimpleNamespace

import pytest
import redis
import redis.asyncio as aio
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from seawall.clock import SYSTEM
from seawall.errors import StoreUnavailable
from seawall.leases.lease import Lease
from seawall.redis import clients
from seawall.redis.clients import clients_for, parse
from seawall.redis.store import RedisStore
from tests.redis.support import Server, binary, free_port

SECRET = "s3cr3t!/@:?#"  # noqa: S105 - of no server but ours
QUOTED = "s3cr3t!%2F%40%3A%3F%23"


# What a URL says


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("redis://user:pw@host:7000/3", "redis://host:7000/3"),
        ("redis://host?db=4", "redis://host:6379/4"),
        ("valkey://[::1]:7000", "redis://[::1]:7000/0"),
        ("rediss://host", "rediss://host:6379/0"),
        ("valkeys://host/1", "rediss://host:6379/1"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
        ("unix://user:pw@/run/a%20b.sock", "unix:///run/a b.sock?db=0"),
        ("redis+cluster://a,b:7001", "redis+cluster://a:6379,b:7001"),
        ("valkeys+cluster://a", "rediss+cluster://a:6379"),
        ("redis+sentinel://a,b:7001/main", "redis+sentinel://a:26379,b:7001/main/0"),
        ("rediss+sentinel://u:p@a/main/5", "rediss+sentinel://a:26379/main/5"),
    ],
)
def test_a_url_says_where_the_servers_are(url, shown):
    """What is shown of it has the defaults, and no login."""
    assert repr(clients_for(url).place) == shown
    assert repr(clients_for(url)) == f"ClientFactory({shown})"


def test_a_url_says_how_to_sign_in():
    """User names, passwords and options are taken from it, percent-decoded."""
    options = {"username": "us er", "password": SECRET, "db": 1, "client_name": "shop"}
    assert parse(f"redis://us%20er:{QUOTED}@host/1?client_name=shop").options == options
    assert parse(f"redis://:{QUOTED}@host").options == {"password": SECRET}
    sentinel = parse("rediss+sentinel://u@a/main?sentinel_password=p&ssl_cert_reqs=none")
    assert sentinel.options == {"username": "u", "ssl": True, "ssl_cert_reqs": "none"}
    assert sentinel.sentinel == {"password": "p", "ssl": True, "ssl_cert_reqs": "none"}
    tls = parse("rediss://host?ssl_check_hostname=no&ssl_ca_certs=/ca.pem&socket_keepalive=yes")
    assert tls.options == {
        "ssl": True,
        "ssl_check_hostname": False,
        "ssl_ca_certs": "/ca.pem",
        "socket_keepalive": True,
    }


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "has no known scheme"),
        ("localhost:6379", "has no known scheme"),
        ("http://localhost", "has no known scheme"),
        ("redis+moon://localhost", "has no known scheme"),
        ("redis://", "has no known scheme"),
        ("redis:///0", "bad host"),
        ("redis://[::1", "bad host"),
        ("redis://::1", "bad host"),
        ("redis://host:port", "bad port: write one from 1 to 65535"),
        ("redis://host:0", "bad port"),
        ("redis://host:65536", "bad port"),
        ("redis://a,b", "several hosts: write redis[+]cluster:// or redis[+]sentinel://"),
        ("redis://host/one", "bad database: write a number"),
        ("redis://host/-1", "bad database"),
        ("redis://host/1?db=1", "two databases: write one"),
        ("redis+cluster://a/1", "a cluster has only 0"),
        ("redis+sentinel://a:26379", "no service: write"),
        ("unix://host/run/redis.sock", "no path: write"),
        ("unix://", "no known scheme"),
        ("redis://host?socket_timeout=3", "write RedisStore[(]url, timeout="),
        ("redis://host?retry_on_timeout=1", "never retries"),
        ("redis://host?colour=blue", "write one of db, client_name"),
        ("redis://host?ssl_ca_certs=x", "unknown or given twice"),
        ("redis://host?db=1&db=1", "unknown or given twice"),
        ("rediss+cluster://host?ssl_ca_path=/etc/ca", "unknown or given twice: write one of"),
        ("rediss+cluster://host?ssl_password=x", "unknown or given twice: write one of"),
        ("rediss://host?ssl_check_hostname=perhaps", "write yes or no"),
        ("rediss://host?ssl_cert_reqs=perhaps", "write none, optional or required"),
        ("redis://user:pa@ss/word@host", "percent-encoded"),
        ("redis://user:pa#ss@host", "percent-encoded"),
        ("redis://user:pa?ss@host", "percent-encoded"),
    ],
)
def test_a_bad_url_is_refused_at_once(url, message):
    """The message says what to write."""
    with pytest.raises(ValueError, match=message):
        RedisStore(url)


PIECES = st.sampled_from(
    ["redis://", "rediss+sentinel://", "unix://", "u:", SECRET, "host", "@", ":", "/", ",", "?",
     "#", "[", "db=", "1"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=9).map("".join))
def test_no_message_shows_a_password(url):
    """However a URL is broken, or where a password slipped to: nothing of it is quoted."""
    try:
        shown = repr(clients_for(url))
    except ValueError as error:
        assert "s3cr3t" not in str(error)  # noqa: PT017 - it may also be a good URL
    else:
        host = parse(url)
        if not any("s3cr3t" in node[0] for node in host.nodes) and "s3cr3t" not in str(host.path):
            assert "s3cr3t" not in shown.replace(str(host.service), "")


@pytest.mark.parametrize("target", [None, 7, b"redis://host", object(), redis.Redis])
def test_what_is_no_place_is_refused_at_once(target):
    """The message says what to pass."""
    with pytest.raises(TypeError, match=r"write a URL such as .* or pass a client of redis-py"):
        RedisStore(target)


def test_without_redis_py_the_message_says_what_to_install(monkeypatch):
    """The rest of the library does not need it."""
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r'pip install "seawall\[redis\]"'):
        RedisStore("redis://host")


# What is taken of a client


def test_of_a_client_only_place_and_login_are_taken():
    """Not its decoding, timeouts and retries, and none of its connections."""
    given = {
        "host": "host",
        "port": 7000,
        "db": 2,
        "username": "u",
        "password": SECRET,
        "decode_responses": True,
        "socket_timeout": 77.0,
        "ssl": True,
        "ssl_ca_certs": "/ca.pem",
    }
    for client in (redis.Redis(**given), aio.Redis(**given)):
        clients = clients_for(client)
        assert repr(clients.place) == "rediss://host:7000/2"
        made = clients.make(0.25)
        assert made.connection_pool is not client.connection_pool
        kept = made.connection_pool.connection_kwargs
        assert (kept["username"], kept["password"]) == ("u", SECRET)
        assert kept["ssl_ca_certs"] == "/ca.pem"
        assert kept["socket_timeout"] == kept["socket_connect_timeout"] == 0.25
        assert kept["decode_responses"] is False
        assert kept["retry"].get_retries() == 0
        assert SECRET not in repr(clients)


def test_a_client_of_replicas_is_refused():
    """They cannot be written to."""
    client = Sentinel([("host", 26379)]).slave_for("main")
    with pytest.raises(ValueError, match=r"pass what Sentinel.master_for returns"):
        clients_for(client)


@pytest.mark.parametrize("option", ["ssl_ca_path", "ssl_password"])
def test_what_a_cluster_cannot_use_is_refused(option):
    """TLS without what was asked for would be another TLS than the user believes."""

    class Nowhere(redis.RedisCluster):
        def __init__(self):
            self.nodes_manager = SimpleNamespace(
                connection_kwargs={"ssl": True, option: "x"}, startup_nodes={}
            )

        def __del__(self):
            pass

    with pytest.raises(ValueError, match=f"redis-py has no {option} for clusters"):
        clients_for(Nowhere())
    assert option in parse(f"rediss://host?{option}=x").options


def test_a_listener_of_a_cluster_takes_node_after_node():
    """After a failure it goes on to the next one; elsewhere there is only one place."""
    clients = clients_for("redis+cluster://a:1,b:2")
    ports = [
        clients.make_listener(1.0, attempt).connection_pool.connection_kwargs["port"]
        for attempt in range(3)
    ]
    assert ports == [1, 2, 1]
    single = clients_for("redis://a:1").make_listener(1.0, 1)
    assert single.connection_pool.connection_kwargs["port"] == 1


def test_the_first_good_answer_counts():
    """Others are dropped; if none is good, the last error is raised."""

    async def answer(value):
        if isinstance(value, Exception):
            raise value
        return value

    async def never():
        await asyncio.get_running_loop().create_future()

    async def scenario():
        found = await clients._first_answer([never(), answer(LookupError()), answer(7)])
        assert found == 7
        with pytest.raises(LookupError):
            await clients._first_answer([answer(LookupError())])

    asyncio.run(scenario())


# Real servers


def check_place(target):
    """Hand a lease from one pod to another: scripts and messages work, for threads and tasks."""
    prefix = f"test-{token_hex(4)}"
    with (
        closing(RedisStore(target, prefix=prefix, timeout=5.0)) as one,
        closing(RedisStore(target, prefix=prefix, timeout=5.0)) as two,
    ):
        first, second = Lease(one, "place", ttl=60.0), Lease(two, "place", ttl=60.0)
        first.acquire(10)
        waiter = threading.Thread(target=lambda: second.acquire(10))
        waiter.start()
        waiter.join(0.1)
        assert first.release()
        waiter.join(10)
        assert second.token > first.token
        assert second.release()

        async def scenario():
            async with first:
                assert not second.try_acquire()
            await one.aclose()

        asyncio.run(scenario())


RIGHTS = [
    *("~test-*", "&test-*", "+@read", "+@write", "+@scripting", "+@pubsub", "+@connection"),
    *("+time", "-@dangerous", "+cluster|slots"),
]
"""As docs/pods/store.md has them, but for the prefix."""


@pytest.fixture(scope="module")
def plain():
    """Return a server with a user, also behind a socket in the file system."""
    folder = Path("/tmp") / f"seawall-{token_hex(4)}.sock"  # noqa: S108 - such paths must be short
    made = Server("--unixsocket", str(folder))
    made.path = folder
    try:
        with made.client() as client:
            client.execute_command("ACL SETUSER", "bob", "on", f">{SECRET}", *RIGHTS)
        yield made
    finally:
        made.close()
        folder.unlink(missing_ok=True)


def test_one_server_with_a_user_of_its_own(plain):
    """A URL signs in; a few commands are enough, on keys and channels of the store's prefix."""
    check_place(f"redis://bob:{QUOTED}@127.0.0.1:{plain.port}/0")
    with (
        closing(RedisStore(f"redis://bob:wrong@127.0.0.1:{plain.port}", timeout=5.0)) as store,
        pytest.raises(StoreUnavailable, match="invalid username-password pair") as caught,
    ):
        store._core.call("probe", [store._core.key("any", "key")], [])
    assert "wrong" not in str(caught.value)


def test_one_server_by_clients_of_either_kind(plain):
    """Their database and login are used."""
    login = {"port": plain.port, "username": "bob", "password": SECRET}
    with redis.Redis(**login, decode_responses=True) as client:
        check_place(client)
    check_place(aio.Redis(**login))


def test_a_socket_in_the_file_system(plain):
    """By URL, and by a client of either kind."""
    check_place(f"unix://bob:{QUOTED}@{plain.path}")
    with redis.Redis(unix_socket_path=str(plain.path)) as client:
        check_place(client)
    check_place(aio.Redis(unix_socket_path=str(plain.path)))


# A key for tests only: it protects nothing. The server in the wheel has no TLS, a proxy adds it.
KEY = dedent("""
    -----BEGIN EC PRIVATE KEY-----
    MHcCAQEEIFKWYic3oahh8GJcfqeoeeAZXHTNjhZyvToKcKwujI+ToAoGCCqGSM49
    AwEHoUQDQgAEiu59UkSvUrbAwNPBv8f77KpdZ3qyOcVgzI7HgvrALFWSpF44DSBw
    +CDnFg0OfW245eg28dcIo6j6pYPEqWWRQQ==
    -----END EC PRIVATE KEY-----
""")
CERTIFICATE = dedent("""
    -----BEGIN CERTIFICATE-----
    MIIBeDCCAR2gAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
    c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
    CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABIrufVJEr1K2wMDT
    wb/H++yqXWd6sjnFYMyOx4L6wCxVkqReOA0gcPgg5xYNDn1tuOXoNvHXCKOo+qWD
    xKllkUGjXjBcMA8GA1UdEwEB/wQFMAMBAf8wGgYDVR0RBBMwEYIJbG9jYWxob3N0
    hwR/AAABMA4GA1UdDwEB/wQEAwIChDAdBgNVHQ4EFgQUkNXPpPgaqt1cjnp5IWQ1
    XD3avFIwCgYIKoZIzj0EAwIDSQAwRgIhAMuvzhhKt0zsDBul1WDUG6nzg+YcGkZ9
    d7tZWyOet8aNAiEAtvQIChFdKdCR+PF34oU+wWMq5fjKs3NUxuaxPotsIgg=
    -----END CERTIFICATE-----
""")


@pytest.fixture
def tls(plain, tmp_path):
    """Return the port of a TLS proxy in front of the server, and the file of its certificate."""
    certificate = tmp_path / "ca.pem"
    certificate.write_text(KEY + CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    port, ready, loop = free_port(), threading.Event(), asyncio.new_event_loop()

    async def copy(reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader, writer):
        inward, outward = await asyncio.open_connection("127.0.0.1", plain.port)
        await asyncio.gather(copy(reader, outward), copy(inward, writer))

    async def run(over):
        server = await asyncio.start_server(serve, "127.0.0.1", port, ssl=context)
        ready.set()
        await over
        server.close()

    over = loop.create_future()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run(over)))
    thread.start()
    assert ready.wait(10)
    yield port, certificate
    loop.call_soon_threadsafe(over.set_result, None)
    thread.join(10)
    for task in asyncio.all_tasks(loop):
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_tls(tls):
    """By URL and by a client; a certificate that is not known is refused."""
    port, certificate = tls
    check_place(f"rediss://bob:{QUOTED}@localhost:{port}?ssl_ca_certs={certificate}")
    with redis.Redis(port=port, ssl=True, ssl_ca_certs=str(certificate)) as client:
        check_place(client)
    with (
        closing(RedisStore(f"rediss://localhost:{port}", timeout=5.0)) as store,
        pytest.raises(StoreUnavailable, match=r"(?i)certificate"),
    ):
        store._core.call("probe", [store._core.key("any", "key")], [])


@pytest.fixture(scope="module")
def sentinel(plain, tmp_path_factory):
    """Return the port of a sentinel that watches the server."""
    port, folder = free_port(), tmp_path_factory.mktemp("sentinel")
    settings = folder / "sentinel.conf"
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {plain.port} 1\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - the server of the tests
            [str(binary()), str(settings), "--sentinel"], stdout=log, stderr=log, cwd=folder
        )
    until = SYSTEM.now() + 10
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.sentinel_get_master_addr_by_name("main")
                break
            except redis.exceptions.ConnectionError:
                assert SYSTEM.now() < until
                SYSTEM.sleep(0.02)
    yield port
    process.kill()
    process.wait(10)


def test_behind_sentinels(sentinel):
    """By URL and by clients of either kind, though the first sentinel is dead."""
    dead = free_port()
    check_place(f"redis+sentinel://127.0.0.1:{dead},127.0.0.1:{sentinel}/main/0")
    nodes = [("127.0.0.1", dead), ("127.0.0.1", sentinel)]
    check_place(Sentinel(nodes).master_for("main"))
    check_place(AsyncSentinel(nodes).master_for("main"))


def test_a_service_that_no_sentinel_knows(sentinel):
    """It is a failure of the store, as any other."""
    url = f"redis+sentinel://127.0.0.1:{sentinel}/another"
    with (
        closing(RedisStore(url, timeout=5.0)) as store,
        pytest.raises(StoreUnavailable, match="No master found for 'another'"),
    ):
        store._core.call("probe", [store._core.key("any", "key")], [])


@pytest.fixture(scope="module")
def cluster():
    """Return the port of a cluster of one node."""
    made = Server("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    until = SYSTEM.now() + 20
    try:
        with made.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            while client.cluster("INFO")["cluster_state"] != "ok":
                assert SYSTEM.now() < until
                SYSTEM.sleep(0.02)
        yield made.port
    finally:
        made.close()


def test_a_cluster(cluster):
    """By URL and by clients of either kind, though the first node is dead."""
    check_place(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster}")
    with redis.RedisCluster(host="127.0.0.1", port=cluster) as client:
        check_place(client)
    check_place(aio.RedisCluster(host="127.0.0.1", port=cluster))


def test_a_cluster_is_asked_nothing_but_scripts(cluster):
    """The list of its commands is not loaded, which would block the event loop for long."""

    async def scenario():
        client = clients_for(f"redis+cluster://127.0.0.1:{cluster}").make(5.0)
        try:
            assert await client.eval("return 7", 1, "{a}") == 7
            with pytest.raises(redis.exceptions.RedisClusterException, match="No way to dispatch"):
                await client.execute_command("INCR", "{a}")
        finally:
            await client.aclose()

    asyncio.run(scenario())
