"""Clients of boto3 against a stub of DynamoDB and S3 on loopback."""

from __future__ import annotations

import json
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from threading import Event, Thread
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    ReadTimeoutError,
)

from seawall import (
    Breaker,
    CircuitOpen,
    DeadlineExceeded,
    Guard,
    Retry,
    RetryBudget,
    TimedOut,
    Timeout,
    deadline,
    transient,
)
from seawall.clients.boto3 import READS, guard_client
from seawall.clock import SystemClock
from seawall.context import idempotency_key
from seawall.models.budget import RequestRatio
from tests.support import new_guard

ONCE = Config(
    retries={"total_max_attempts": 1},
    connect_timeout=30,
    read_timeout=30,
    s3={"addressing_style": "path"},
    request_checksum_calculation="when_required",
)
CLOCK = SystemClock()
ITEM = {"Item": {"id": {"S": "7"}}}


class Reply(NamedTuple):
    """What the stub answers: a status with a body; no answer at all for the status 0."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


def json_error(code: str, status: int = 400) -> Reply:
    """Return an error as DynamoDB reports it."""
    return Reply(status, json.dumps({"__type": f"com.amazonaws.dynamodb#{code}"}).encode())


def xml_error(code: str, status: int) -> Reply:
    """Return an error as S3 reports it."""
    return Reply(status, f"<Error><Code>{code}</Code></Error>".encode())


BUSY = Reply(503, b"")


class _Handler(BaseHTTPRequestHandler):
    """Answers with the next reply of the script."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StubService

    def answer(self) -> None:
        """Record the request, and answer as the script says."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        service = self.server
        service.seen.append((self.headers, body))
        reply = service.replies[min(len(service.seen), len(service.replies)) - 1]
        if reply.status == 0:
            service.released.wait(10.0)
            self.close_connection = True
            return
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - the library's names

    def handle(self) -> None:
        """Serve a connection, which the client may close at any time."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class StubService(ThreadingHTTPServer):
    """A service of AWS on loopback, as far as its requests and errors look."""

    daemon_threads = True

    def __init__(self, *replies: Reply) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies = replies
        self.seen: list[Any] = []
        self.released = Event()

    def client(self, guard: Guard, name: str = "dynamodb", **settings: Any) -> Any:
        """Return a guarded client of this service."""
        made = boto3.client(  # type: ignore[call-overload]
            name,
            endpoint_url=f"http://127.0.0.1:{self.server_address[1]}",
            region_name="eu-west-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",  # noqa: S106 - of nobody
            config=ONCE,
        )
        return guard_client(made, guard, **settings)


@contextmanager
def stub(*replies: Reply) -> Iterator[StubService]:
    """Run a stub for the length of a `with` block; its last reply is repeated."""
    service = StubService(*replies)
    thread = Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.released.set()
        service.shutdown()
        thread.join()
        service.server_close()


def retrying(*policies: Any) -> Guard:
    """Return a guard that makes up to three attempts, with next to no pause."""
    return new_guard(Retry(on=transient, backoff=0.001), *policies)


@pytest.mark.parametrize(
    "refused",
    [
        json_error("ProvisionedThroughputExceededException"),
        json_error("ThrottlingException"),
        Reply(400, b"{}", {"x-amzn-errortype": "ThrottlingException:http://internal/"}),
        xml_error("SlowDown", 503),
        Reply(429, b""),
    ],
    ids=["throughput", "throttling", "header", "slow down", "429"],
)
def test_throttled_requests_are_repeated_and_counted(refused: Reply):
    """The service did nothing, so a write is repeated too; the breaker counts a failure."""
    breaker = Breaker(counts="attempts", min_calls=9)
    with stub(refused, refused, Reply()) as service:
        guard = retrying(breaker)
        service.client(guard).put_item(TableName="t", **ITEM)
        assert len(service.seen) == 3
        assert guard.snapshot()["policies"][-1]["failures"] == 2
    with stub(refused) as service, pytest.raises(ClientError) as caught:
        service.client(retrying()).put_item(TableName="t", **ITEM)
    assert len(service.seen) == 3
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == refused.status


@pytest.mark.parametrize(
    ("call", "arguments", "sent"),
    [
        ("get_item", {"Key": {"id": {"S": "7"}}}, 3),
        ("put_item", ITEM, 1),
        ("update_item", {"Key": {"id": {"S": "7"}}}, 3),
        ("transact_write_items", {"TransactItems": [{"Put": {"TableName": "t", **ITEM}}]}, 3),
    ],
    ids=["reads", "writes", "is named", "has a token"],
)
def test_what_may_have_been_done_is_repeated_only_where_that_is_safe(
    call: str, arguments: Any, sent: int
):
    """After a 500 a read is repeated, and a write that is named or has a token of its own."""
    table = {} if call.startswith("transact") else {"TableName": "t"}
    with stub(Reply(500)) as service:
        client = service.client(retrying(), repeatable={"UpdateItem"})
        with pytest.raises(ClientError), idempotency_key("of no use to AWS"):
            getattr(client, call)(**table, **arguments)
    assert len(service.seen) == sent
    bodies = {body for _, body in service.seen}
    assert len(bodies) == 1
    assert not any("idempotency-key" in headers for headers, _ in service.seen)


def test_errors_of_the_caller_are_not_failures():
    """A missing item or a failed condition says nothing about the service."""
    breaker = Breaker(consecutive=1)
    with stub(json_error("ConditionalCheckFailedException")) as service:
        client = service.client(retrying(breaker))
        for _ in range(2):
            with pytest.raises(ClientError, match="ConditionalCheckFailed"):
                client.put_item(TableName="t", **ITEM)
    assert (len(service.seen), breaker.state) == (2, "closed")


def test_an_open_circuit_is_an_error_of_botocore():
    """Code that catches botocore's errors catches a refusal; nothing is sent."""
    with stub(BUSY) as service:
        client = service.client(new_guard(Breaker(consecutive=1)))
        with pytest.raises(ClientError):
            client.get_item(TableName="t", Key={"id": {"S": "7"}})
        with pytest.raises(BotoCoreError) as caught:
            client.get_item(TableName="t", Key={"id": {"S": "7"}})
    assert isinstance(caught.value, CircuitOpen)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301
    assert len(service.seen) == 1


@pytest.mark.alone
def test_a_hung_service_is_given_up_on():
    """The deadline lowers botocore's own timeout; after it nothing is sent."""
    guard = new_guard(Timeout(0.2, sync="cooperative"))
    with stub(Reply(0)) as service:
        client = service.client(guard)
        began = CLOCK.now()
        with pytest.raises(TimedOut) as caught:
            client.get_item(TableName="t", Key={"id": {"S": "7"}})
        assert CLOCK.now() - began < 15.0
        assert isinstance(caught.value, ReadTimeoutError)
        with deadline(0.0), pytest.raises(DeadlineExceeded):
            client.get_item(TableName="t", Key={"id": {"S": "7"}})
    assert len(service.seen) == 1


@pytest.mark.alone
def test_connecting_is_bounded_by_the_deadline_too():
    """Connecting to a listener that never accepts ends in time, with nothing sent."""
    guard = new_guard(Timeout(0.2, sync="cooperative"))
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for other in (first, second):
            other.setblocking(False)  # noqa: FBT003 - as in the standard library
            other.connect_ex(full.getsockname())
        service: Any = StubService(Reply())
        service.server_close()
        service.server_address = full.getsockname()
        began = CLOCK.now()
        with pytest.raises(TimedOut):
            service.client(guard).get_item(TableName="t", Key={"id": {"S": "7"}})
        assert CLOCK.now() - began < 15.0


def test_a_lost_connection_is_repeated_for_reads():
    """The guard repeats a read whose connection was lost; a write may have been done."""
    with stub(Reply(0)) as service:
        service.released.set()  # it closes the connection and does not answer
        client = service.client(retrying())
        with pytest.raises(ConnectionClosedError):
            client.get_item(TableName="t", Key={"id": {"S": "7"}})
        assert len(service.seen) == 3
        with pytest.raises(ConnectionClosedError):
            client.put_item(TableName="t", **ITEM)
        assert len(service.seen) == 4


def test_a_refused_connection_is_repeated_for_writes_too():
    """A refused connection sent nothing, so a write is retried as well."""
    with stub(Reply()) as service:
        pass
    guard = retrying()
    with pytest.raises(EndpointConnectionError):
        service.client(guard).put_item(TableName="t", **ITEM)
    assert guard.snapshot()["retries"] == 2


@pytest.mark.parametrize("body", [b"hello", BytesIO(b"hello")], ids=["bytes", "file"])
def test_uploads_are_repeated_whole(body: Any):
    """A PUT is repeated with all of its body; a file is rewound."""
    with stub(BUSY, xml_error("SlowDown", 503), Reply(200, b"")) as service:
        service.client(retrying(), "s3").put_object(Bucket="b", Key="k", Body=body)
    assert [sent for _, sent in service.seen] == [b"hello"] * 3


def test_downloads_are_streamed_with_botocores_own_timeout():
    """The body is read after the guard's verdict: each piece has the time of the client."""
    large = b"x" * 1_000_000
    with stub(BUSY, Reply(200, large)) as service:
        client = service.client(retrying(Timeout(5.0, sync="cooperative")), "s3")
        stream = client.get_object(Bucket="b", Key="k")["Body"]
        assert stream._raw_stream.connection.sock.gettimeout() == 30
        assert stream.read() == large
    assert len(service.seen) == 2


def test_no_connection_leaks():
    """One connection serves all attempts."""
    with stub(BUSY) as service:
        client = service.client(retrying(), "s3")
        for _ in range(10):
            with pytest.raises(ClientError):
                client.get_object(Bucket="b", Key="k")
        pools = client._endpoint.http_session._manager.pools
        assert pools[next(iter(pools.keys()))].num_connections == 1
    assert len(service.seen) == 30


def test_a_budget_bounds_retries_of_all_operations():
    """A service that fails gets a tenth more requests, not three times as many."""
    guard = new_guard(Retry(on=transient, backoff=0.001, budget=RetryBudget(RequestRatio(0.1))))
    with stub(BUSY) as service:
        client = service.client(guard)
        for _ in range(50):
            with pytest.raises(ClientError):
                client.get_item(TableName="t", Key={"id": {"S": "7"}})
    assert 50 <= len(service.seen) <= 56


def test_a_client_that_retries_by_itself_is_refused():
    """Its retries would multiply with the guard's; so would an unknown name be of no use."""
    own = boto3.client("sqs", region_name="eu-west-1")
    with pytest.raises(ValueError, match="total_max_attempts': 1"):
        guard_client(own, new_guard(Breaker()))
    once = boto3.client("sqs", region_name="eu-west-1", config=ONCE)
    with pytest.raises(ValueError, match="'PutItem' is not an operation of sqs"):
        guard_client(once, new_guard(Breaker()), repeatable={"PutItem"})


def test_a_client_has_one_guard():
    """A second one would send each request again."""
    once = guard_client(
        boto3.client("sqs", region_name="eu-west-1", config=ONCE), new_guard(Breaker())
    )
    with pytest.raises(RuntimeError, match="a guard already"):
        guard_client(once, new_guard(Breaker()))


def test_names_that_read_are_those_of_reading_operations():
    """No operation of common services that begins like a read is known to write."""
    writing = {"put", "create", "delete", "update", "write", "send"}
    for service in ("dynamodb", "s3", "sqs", "sns", "secretsmanager", "kms", "lambda"):
        model = boto3.client(service, region_name="eu-west-1").meta.service_model  # type: ignore[call-overload]
        reads = [name for name in model.operation_names if name.startswith(READS)]
        assert reads
        assert not [name for name in reads if any(word in name.lower() for word in writing)]
