"""Waits without a bound are found, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from seawall.audit import audit_source
from seawall.audit.libraries import libraries
from tests.audit.support import assert_findings

METHODS = ("get", "post", "put", "delete", "patch", "options", "head")


@pytest.mark.parametrize("method", METHODS)
def test_requests_must_have_a_timeout(method: str):
    """Without a timeout requests waits for ever; None says so in writing."""
    assert_findings(f"""
        import requests
        requests.{method}("https://example.org", timeout=5)
        requests.{method}("https://example.org")  #! SW101
        requests.{method}("https://example.org", timeout=None)  #! SW101
    """)


@pytest.mark.parametrize("method", METHODS)
def test_httpx_has_a_default_and_only_none_is_found(method: str):
    """The default of httpx is 5 s: only an explicit None is a finding."""
    assert_findings(f"""
        import httpx
        httpx.{method}("https://example.org", timeout=5)
        httpx.{method}("https://example.org")
        httpx.{method}("https://example.org", timeout=None)  #! SW101
    """)


def test_clients_of_httpx_are_found_where_they_are_made():
    """A client that waits for ever is one finding, not one for each of its calls."""
    assert_findings(
        """
        import httpx
        httpx.Client(timeout=5)
        httpx.AsyncClient()
        httpx.Client(timeout=None)  #! SW101
        httpx.AsyncClient(timeout=None)  #! SW101
        with httpx.Client(timeout=None) as client:  #! SW101
            client.get("https://example.org")
        async def bar():
            async with httpx.AsyncClient() as client:
                await client.get("https://example.org")
        with httpx.Client(timeout=5) as other:
            other.get("https://example.org")
            other.get("https://example.org", timeout=None)  #! SW101
        """,
        "SW1",
    )


def test_names_are_followed():
    """Aliases, sessions, attributes, properties and functions that return a session."""
    assert_findings("""
        import requests as r
        from requests import get as fetch, Session
        from functools import partial
        import contextlib

        r.get(url)  #! SW101
        fetch(url)  #! SW101
        shortcut = r.post
        shortcut(url)  #! SW101
        session = Session()
        session.get(url)  #! SW101
        session.get(url, timeout=3)
        with r.Session() as inner:
            inner.put(url)  #! SW101
        with contextlib.closing(r.Session()) as closing:
            closing.put(url)  #! SW101

        def make():
            return r.Session()

        make().get(url)  #! SW101

        class Shop:
            def __init__(self, other: r.Session | None = None):
                self._session = r.Session()
                self._other = other

            @property
            def session(self):
                return self._session

            def ask(self, given: Session):
                self._session.get(url)  #! SW101
                self.session.get(url)  #! SW101
                given.get(url)  #! SW101
                self._session.get(url, timeout=1)

        slow = partial(r.get, headers={})
        slow(url)  #! SW101
        quick = partial(r.get, timeout=3)
        quick(url)
    """)


def test_what_may_be_two_things_is_nothing():
    """A name that the file rebinds, or does not know, is no finding."""
    assert_findings("""
        import requests
        from app import session as foreign
        client = requests.Session() if plain else make_client()
        client.get(url)
        foreign.get(url)
        def ask(given, session=None):
            session = session or requests.Session()
            session.get(url)
            given.get(url)
        def outer():
            session = requests.Session()
            def inner():
                nonlocal session
                session = make_session()
            session.get(url)
        class Session(requests.Session):
            def request(self, *args, **kwargs):
                return super().request(*args, timeout=3, **kwargs)
        Session().get(url)
    """)


def test_keyword_dicts_are_followed():
    """`**options` of this file is looked into; `**kwargs` of the caller is the caller's."""
    assert_findings("""
        import requests
        plain = {"headers": {}}
        timed = dict(headers={}, timeout=3)
        requests.get(url, **plain)  #! SW101
        requests.get(url, **timed)
        requests.get(url, **{"timeout": 3})
        requests.get(*given)
        def later():
            options = {}
            options["timeout"] = 3
            requests.get(url, **options)
        def passed(**kwargs):
            return requests.get(url, **kwargs)
    """)


def test_wrappers_are_followed_to_their_callers():
    """A function that passes its timeout on is found where it is called without one."""
    assert_findings("""
        import requests
        def fetch(url, **kwargs):
            return requests.get(url, **kwargs)
        def ask(url, timeout=None):
            return requests.get(url, timeout=timeout)
        def careful(url, **kwargs):
            kwargs.setdefault("timeout", 3)
            return requests.get(url, **kwargs)
        def nobody(url, **kwargs):
            return requests.get(url, **kwargs)  #! SW101
        nobody("a")
        nobody("b")
        fetch("a", timeout=3)
        fetch("a")  #! SW101
        ask("a", 3)
        ask("a", timeout=3)
        ask("a")  #! SW101
        careful("a")
    """)


def test_constants_are_followed():
    """A name that is always None is None."""
    assert_findings("""
        import requests
        NEVER = None
        SOON = 3
        requests.get(url, timeout=NEVER)  #! SW101
        requests.get(url, timeout=SOON)
        requests.get(url, timeout=settings.timeout)
    """)


def test_sessions_with_an_adapter_of_their_own_are_clean():
    """An adapter other than that of requests may set a timeout; ours does."""
    assert_findings("""
        import requests
        from requests.adapters import HTTPAdapter
        from seawall.clients.requests import GuardedAdapter
        guarded = requests.Session()
        guarded.mount("https://", GuardedAdapter(vendor))
        guarded.get(url)
        plain = requests.Session()
        plain.mount("https://", HTTPAdapter(pool_maxsize=10))
        plain.get(url)  #! SW101
    """)


def test_the_pool_of_an_adapter_gets_the_timeout_of_each_request():
    """An adapter of requests passes the timeout of the request to its pool."""
    assert_findings("""
        from requests.adapters import HTTPAdapter
        from urllib3.poolmanager import PoolManager
        class Pinned(HTTPAdapter):
            def init_poolmanager(self, connections, maxsize, block=False):
                self.poolmanager = PoolManager(connections, maxsize=maxsize)
        class Client:
            def __init__(self):
                self.pool = PoolManager()  #! SW101
    """)


def test_transports_of_ours_are_clean():
    """A guarded transport bounds each request of its client."""
    assert_findings("""
        import httpx
        from seawall.clients.httpx import GuardedTransport
        httpx.Client(transport=GuardedTransport(vendor), timeout=None)
        httpx.Client(transport=httpx.HTTPTransport(), timeout=None)  #! SW101
    """)


def test_what_a_guard_covers_is_clean():
    """Inside a guarded function, a lambda or a call of a guard there is a timeout."""
    assert_findings("""
        import requests, httpx
        from seawall import Bulkhead, Guard, Timeout
        vendor = Guard("vendor", Bulkhead(3), Timeout(2.0, sync="thread"))
        @vendor
        def ask():
            return requests.get(url)
        @Timeout(2.0, sync="thread")
        def alone():
            return requests.get(url)
        def inner():
            return requests.get(url)
        vendor.call(inner)
        vendor.call(lambda: requests.get(url))
        def _helper():
            return requests.get(url)
        @vendor
        def caller():
            return _helper()
        standard = Guard.standard("shop", on=ConnectionError, timeout=2.0)
        @standard
        async def shop(client: httpx.AsyncClient):
            await client.get(url, timeout=None)
        def outside():
            return requests.get(url)  #! SW101
    """)


def test_a_guard_that_cannot_interrupt_covers_nothing():
    """A cooperative timeout sets a deadline that requests never reads; no timeout is none."""
    assert_findings(
        """
        import requests
        from seawall import Bulkhead, Guard, Timeout
        cooperative = Guard("one", Timeout(2.0, sync="cooperative"))
        without = Guard("two", Bulkhead(3))
        @cooperative
        def one():
            return requests.get(url)  #! SW101
        @without
        def two():
            return requests.get(url)  #! SW101
        """,
        "SW101",
    )


def test_blocks_with_a_timeout_are_clean():
    """asyncio.timeout, wait_for and their like bound what runs in them."""
    assert_findings(
        """
        import asyncio, anyio
        async def ask():
            await asyncio.open_connection(host, 80)  #! SW101
            async with asyncio.timeout(5):
                await asyncio.open_connection(host, 80)
            async with asyncio.timeout(None):
                await asyncio.open_connection(host, 80)  #! SW101
            with anyio.fail_after(5):
                await asyncio.open_connection(host, 80)
            await asyncio.wait_for(asyncio.open_connection(host, 80), 5)
            await asyncio.wait_for(asyncio.open_connection(host, 80), None)  #! SW101
            await asyncio.wait_for(inner(), timeout=5)
        async def inner():
            await asyncio.open_connection(host, 80)
        """
    )


@pytest.mark.parametrize(
    ("imported", "without", "with_one"),
    [
        ("urllib.request", "urllib.request.urlopen(u)", "urllib.request.urlopen(u, None, 5)"),
        (
            "http.client",
            "http.client.HTTPConnection(h)",
            "http.client.HTTPConnection(h, timeout=5)",
        ),
        ("smtplib", "smtplib.SMTP(h, 25)", "smtplib.SMTP(h, 25, timeout=5)"),
        ("ftplib", "ftplib.FTP(h)", "ftplib.FTP(h, timeout=5)"),
        ("imaplib", "imaplib.IMAP4_SSL(h)", "imaplib.IMAP4_SSL(h, timeout=5)"),
        ("poplib", "poplib.POP3(h)", "poplib.POP3(h, timeout=5)"),
        ("socket", "socket.create_connection(a)", "socket.create_connection(a, 5)"),
        ("urllib3", "urllib3.PoolManager()", "urllib3.PoolManager(timeout=5)"),
        ("httplib2", "httplib2.Http()", "httplib2.Http(timeout=5)"),
        ("redis", "redis.Redis(host=h)", "redis.Redis(host=h, socket_timeout=1)"),
        ("redis", "redis.Redis(host=h)", "redis.Redis(connection_pool=pool)"),
        ("redis", "redis.from_url('redis://h')", "redis.from_url('redis://h?socket_timeout=1')"),
        ("valkey", "valkey.Valkey()", "valkey.Valkey(socket_timeout=1)"),
        ("psycopg", "psycopg.connect('host=h')", "psycopg.connect('host=h connect_timeout=3')"),
        ("psycopg2", "psycopg2.connect(host=h)", "psycopg2.connect(host=h, connect_timeout=3)"),
        ("psycopg2", "psycopg2.connect(host=h)", "psycopg2.connect(settings.dsn)"),
        ("asyncpg", "asyncpg.connect('postgres://h')", "asyncpg.connect(d, command_timeout=3)"),
        (
            "sqlalchemy",
            "sqlalchemy.create_engine('postgresql://h')",
            "sqlalchemy.create_engine('sqlite://')",
        ),
        ("pymysql", "pymysql.connect(host=h)", "pymysql.connect(host=h, read_timeout=5)"),
        ("pymongo", "pymongo.MongoClient('mongodb://h')", "pymongo.MongoClient(timeoutMS=5)"),
        ("pymssql", "pymssql.connect(h, timeout=0)", "pymssql.connect(h, timeout=5)"),
        ("pika", "pika.ConnectionParameters(h)", "pika.ConnectionParameters(**given)"),
        ("ldap3", "ldap3.Connection(s)", "ldap3.Connection(s, receive_timeout=5)"),
        ("ollama", "ollama.Client()", "ollama.Client(timeout=60)"),
        ("etcd3", "etcd3.client()", "etcd3.client(timeout=5)"),
        ("websocket", "websocket.create_connection(u)", "websocket.create_connection(u, 5)"),
        (
            "kafka",
            "kafka.KafkaProducer().send(t).get()",
            "kafka.KafkaProducer().send(t).get(timeout=5)",
        ),
        (
            "app.shop_pb2_grpc as shop",
            "shop.ShopStub(channel).Buy(order)",
            "shop.ShopStub(channel).Buy(order, timeout=5)",
        ),
        (
            "kubernetes.client as k8s",
            "k8s.CoreV1Api().list_node()",
            "k8s.CoreV1Api().list_node(_request_timeout=5)",
        ),
        (
            "paramiko",
            "paramiko.SSHClient().exec_command(c)",
            "paramiko.SSHClient().exec_command(c, timeout=5)",
        ),
    ],
)
def test_library_waits_for_ever_without_its_timeout(imported: str, without: str, with_one: str):
    """Of each library the call without a timeout is found, and that with one is not."""
    assert_findings(f"import {imported}\n{without}  #! SW101\n{with_one}\n")


def test_only_the_call_over_the_network_is_found():
    """A method of the call that a stub returns waits no longer than that call."""
    assert_findings("""
        from app import shop_pb2_grpc
        async def buy(channel):
            stub = shop_pb2_grpc.ShopStub(channel)
            call = stub.Buy(order, timeout=5)
            await call.trailing_metadata()
            await stub.Buy(order)  #! SW101
    """)


@pytest.mark.parametrize(
    ("imported", "without", "with_one"),
    [
        ("openai", "openai.OpenAI()", "openai.OpenAI(timeout=30)"),
        ("anthropic", "anthropic.Anthropic()", "anthropic.Anthropic(timeout=30)"),
        ("boto3", "boto3.client('s3')", "boto3.client('s3', config=config)"),
        ("aiohttp", "aiohttp.ClientSession()", "aiohttp.ClientSession(timeout=t)"),
        ("litellm", "litellm.completion()", "litellm.completion(timeout=30)"),
    ],
)
def test_defaults_that_are_too_long_are_found(imported: str, without: str, with_one: str):
    """A default of minutes is a finding of its own rule."""
    assert_findings(f"import {imported}\n{without}  #! SW102\n{with_one}\n")


def test_a_client_whose_calls_all_have_a_timeout_is_clean():
    """What the client does not say may be said by each of its calls."""
    assert_findings(
        """
        import aiohttp, asyncio
        async def ask():
            async with aiohttp.ClientSession() as session:
                await session.get(url, timeout=limit)
            async with aiohttp.ClientSession() as bounded, asyncio.timeout(5):
                await bounded.get(url)
            async with aiohttp.ClientSession() as other:  #! SW102
                await other.get(url, timeout=limit)
                await other.get(url)
        """,
        "SW1",
    )


def test_a_socket_is_clean_once_its_timeout_is_set():
    """settimeout, or a default for the whole process, bounds connect."""
    assert_findings("""
        import socket
        plain = socket.socket()
        plain.connect(address)  #! SW101
        timed = socket.socket()
        timed.settimeout(3)
        timed.connect(address)
    """)
    assert_findings("""
        import socket
        local = socket.socket(socket.AF_UNIX)
        local.connect(path)
        here = socket.socket()
        here.connect(("127.0.0.1", 80))
    """)
    assert_findings("""
        import asyncio
        async def ask():
            await asyncio.open_connection("127.0.0.1", port)
            await asyncio.open_connection(host="localhost", port=port)
            await asyncio.open_unix_connection(path)
            await asyncio.open_connection("shop.example", port)  #! SW101
    """)
    assert_findings("""
        import socket, urllib.request
        socket.setdefaulttimeout(10)
        urllib.request.urlopen(url)
    """)


def test_waits_inside_the_process_are_found():
    """Queues, events, locks, futures and child processes; not a worker waiting for work."""
    assert_findings(
        """
        import queue, subprocess, threading
        from concurrent.futures import ThreadPoolExecutor
        items = queue.Queue(10)
        items.get()  #! SW103
        items.get(timeout=3)
        items.get(block=False)
        def worker():
            while True:
                items.get()
        def watch():
            items.get()
        done = threading.Event()
        done.wait()  #! SW103
        done.wait(3)
        lock = threading.Lock()
        lock.acquire()  #! SW103
        lock.acquire(timeout=3)
        lock.acquire(blocking=False)
        def handshake():
            fresh = threading.Lock()
            fresh.acquire()
        subprocess.run(command)  #! SW103
        subprocess.run(command, timeout=60)
        with ThreadPoolExecutor() as pool:
            pool.submit(work).result()  #! SW103
            pool.submit(work).result(5)
        """,
        "SW1",
    )


def test_a_queue_that_has_items_is_not_waited_for():
    """What is taken after a look at the queue is there already, in threads and in a loop."""
    assert_findings("""
        import queue
        class Store:
            def __init__(self):
                self.items = queue.Queue(10)
            def due(self):
                if not self.items.empty():
                    return self.items.get()
                if self.items.qsize() > 0 and self.ready:
                    self.items.get()
                if len(self.items.queue) > 0:
                    self.items.get()
                if self.items.empty():
                    self.items.get()  #! SW103
                if not self.others.empty():
                    self.items.get()  #! SW103
            async def stream(self):
                while True:
                    if not self.items.empty():
                        yield self.items.get()
                    yield self.items.get()  #! SW401
    """)


@pytest.mark.parametrize(
    "with_one",
    [
        "http.client.HTTPConnection(h, 80, 5)",
        "ftplib.FTP(h, user, password, account, 5)",
        "imaplib.IMAP4(h, 143, 5)",
        "poplib.POP3(h, 110, 5)",
        "paramiko.SSHClient().connect(h, 22, user, password, None, None, 5)",
        "pymssql.connect(h, user, password, database, 5)",
        "serial.Serial(port, 9600, 8, 'N', 1, 5)",
        "subprocess.Popen(command).wait(5)",
        "subprocess.Popen(command).communicate(None, 5)",
    ],
)
def test_a_timeout_may_be_given_by_position(with_one: str):
    """A timeout without its name is one too."""
    assert_findings(f"""
        import ftplib, http.client, imaplib, paramiko, poplib, pymssql, serial, subprocess
        {with_one}
        {with_one.replace("5)", "None)")}  #! {"SW103" if "Popen" in with_one else "SW101"}
    """)


def test_children_that_end_anyway_need_no_timeout():
    """Quick programs, those that a timer ends, and those that have ended already."""
    assert_findings("""
        import subprocess, threading
        subprocess.run(["ln", "-sf", a, b])
        subprocess.run(["git", "--version"])
        subprocess.run("git --version", shell=True)
        subprocess.run(["git", "--help"])
        subprocess.run(["git", "rev-parse", "HEAD"])
        subprocess.run("git fetch version", shell=True)  #! SW103
        subprocess.run(f"git checkout {name}; id", shell=True)  #! SW103
        subprocess.run(["timeout", "60", "tar", "xf", archive])
        subprocess.run(f"curl --max-time 5 {url}", shell=True)
        subprocess.run(f"curl --connect-timeout 5 {url}", shell=True)  #! SW103
        def asked():
            child = subprocess.Popen(["git", "rev-parse", "HEAD"])
            child.communicate()
        def described():
            command = f"wait-for {name} --timeout={limit}"
            subprocess.run(f"yes | {command}", shell=True)
            child = subprocess.Popen(["timeout", "60", "tar"])
            child.wait()
        def timed():
            child = subprocess.Popen(command)
            threading.Timer(5, child.kill).start()
            child.communicate()
        def read():
            child = subprocess.Popen(command)
            child.communicate()  #! SW103
            child.wait()
    """)


def test_commands_may_wait_for_their_children():
    """A command may wait for a child process without a timeout; a service may not."""
    code = "import subprocess\nsubprocess.run(command)\n"
    assert audit_source(code, "app/cli/build.py") == []
    assert [one.rule.id for one in audit_source(code, "app/client.py")] == ["SW103"]


def test_the_table_knows_many_libraries():
    """The table has at least 35 libraries, and each entry says what to write."""
    table = libraries()
    assert len(table.names) >= 35
    paths = [*table.timeouts._exact.values(), *table.waits._exact.values()]
    assert all(wait.write and wait.waits and wait.calls for wait in paths)
