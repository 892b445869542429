"""Guarded clients of boto3 and botocore.

    s3 = guard_client(boto3.client("s3", config=Config(retries={"total_max_attempts": 1})), guard)

See docs/clients/boto3.md for what is retried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

try:
    from botocore.awsrequest import AWSPreparedRequest, AWSResponse
except ImportError as error:
    raise ImportError("seawall.clients.boto3 needs boto3: pip install 'seawall[boto3]'") from error

from botocore.client import BaseClient
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    ReadTimeoutError,
)
from botocore.httpchecksum import AwsChunkedWrapper

from seawall.clients.http.bodies import is_text, rewinds
from seawall.clients.http.exchange import Carrier, exchange
from seawall.clients.http.library import Library, lower_urllib3_timeout, relax_urllib3_timeout
from seawall.clients.http.terms import Terms
from seawall.guard import Guard

__all__ = ["guard_client"]

Client = TypeVar("Client")

THROTTLED: Final = frozenset(
    {
        "BandwidthLimitExceeded",
        "EC2ThrottledException",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
"""Error codes of requests that the service refused to carry out for now."""

READS: Final = ("BatchGet", "Describe", "Get", "Head", "List", "Query", "Scan", "TransactGet")
"""How the names of operations begin that change nothing."""

_CODE: Final = re.compile(rb"<Code>([\w.]{1,100})</Code>")
_TOO_MANY: Final = 429
_OPERATION: Final = "seawall.operation"
_REWINDS: Final = "seawall.rewinds"
_TIMEOUT: Final = "seawall.timeout"


class _Botocore(Library):
    """What an exchange must know about botocore."""

    honours_keys = False

    def __init__(self) -> None:
        super().__init__(
            "boto3",
            error=HTTPClientError,
            timeout_error=ReadTimeoutError,
            transient=(ReadTimeoutError, EndpointConnectionError, ConnectionClosedError),
            attributes={"request": None, "response": None, "kwargs": {}},
            timeouts=(ReadTimeoutError, ConnectTimeoutError),
        )
        self.response = "botocore.awsrequest.AWSResponse"

    def replayable(self, request: Any) -> bool:
        body = request.body
        return is_text(body) or isinstance(body, AwsChunkedWrapper) or rewinds(body)

    def shareable(self, request: Any) -> bool:
        return is_text(request.body)

    def headers(self, request: Any) -> dict[str, str]:
        return {}  # nothing is sent to AWS that the request does not have already

    def copy(self, request: Any, headers: Mapping[str, str], tried: set[str]) -> Any:
        if request.context[_REWINDS]:
            request.reset_stream()
        return AWSPreparedRequest(
            request.method,
            request.url,
            request.headers,
            request.body,
            request.stream_output,
            dict(request.context),
        )

    def nothing_sent(self, error: Exception) -> bool:
        return isinstance(
            error, (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError)
        )

    def throttled(self, response: Any) -> bool:
        status: int = response.status_code
        return status == _TOO_MANY or _error_code(response) in THROTTLED

    def request_of_error(self, request: Any) -> str:
        address: str = request.url
        return address


_LIBRARY = _Botocore()


def guard_client(client: Client, guard: Guard, *, repeatable: Collection[str] = ()) -> Client:
    """Send all requests of a client of boto3 through `guard`; return the client.

    Its own retries must be off: `Config(retries={"total_max_attempts": 1})`. `repeatable` names
    operations that may be repeated though they write, such as {"PutItem"}.
    """
    if not isinstance(client, BaseClient):
        raise TypeError(f"client={client!r}: write a client of boto3, such as boto3.client('s3')")
    reader = client._endpoint.http_session._get_request_timeout
    if isinstance(getattr(reader, "__self__", None), _ClientGuard):
        raise RuntimeError(  # noqa: TRY004 - no bad type
            "guard_client(): this client has a guard already"
        )
    own = (client.meta.config.retries or {}).get("total_max_attempts")
    if own != 1:
        raise ValueError(
            f"this client retries by itself ({own} attempts), beside the guard: write"
            " boto3.client(..., config=Config(retries={'total_max_attempts': 1}))"
        )
    _ClientGuard(client, guard, repeatable)
    return client


class _ClientGuard:
    """Sends the requests of one client, as the handler of an event before each is sent."""

    def __init__(self, client: BaseClient, guard: Guard, repeatable: Collection[str]) -> None:
        service = client.meta.service_model
        unknown = sorted(set(_names(repeatable)) - set(service.operation_names))
        if unknown:
            raise ValueError(
                f"repeatable: {unknown[0]!r} is not an operation of {service.service_name};"
                f" write names such as {service.operation_names[0]!r}"
            )
        self._service, self._repeatable = service, frozenset(repeatable)
        self._terms = Terms(guard, _LIBRARY, "sync", repeatable=self._may_repeat, propagate=False)
        session = client._endpoint.http_session
        self._session, self._timeout = session, session._timeout
        self._timeout_of = session._get_request_timeout
        session._get_request_timeout = self._lowered_timeout
        self._carrier = Carrier(self._send, _keep, _close, self._relax)
        client.meta.events.register_last("before-send", self._handle)

    def _handle(self, request: AWSPreparedRequest, event_name: str, **_: object) -> AWSResponse:
        request.context = {
            **(request.context or {}),
            _OPERATION: event_name.rpartition(".")[2],
            _REWINDS: _LIBRARY.replayable(request),
        }
        return exchange(self._terms, request, self._carrier)

    def _may_repeat(self, request: AWSPreparedRequest) -> bool:
        name = request.context[_OPERATION]
        if name.startswith(READS) or name in self._repeatable:
            return True
        # Such an operation has a token, which botocore fills in: the service carries it out once.
        return bool(self._service.operation_model(name).idempotent_members)

    def _send(
        self, attempt: AWSPreparedRequest, seconds: float | None, _cancels: object
    ) -> AWSResponse:
        own = self._timeout_of(attempt) or self._timeout
        lowered = None if seconds is None else lower_urllib3_timeout(own, seconds)
        attempt.context[_TIMEOUT] = lowered
        return self._session.send(attempt)

    def _lowered_timeout(self, attempt: AWSPreparedRequest) -> Any:
        return (attempt.context or {}).get(_TIMEOUT) or self._timeout_of(attempt)

    def _relax(self, attempt: AWSPreparedRequest, response: AWSResponse) -> None:
        relax_urllib3_timeout(response.raw, self._timeout_of(attempt) or self._timeout)


def _names(repeatable: object) -> Collection[str]:
    if isinstance(repeatable, str) or not isinstance(repeatable, Collection):
        raise TypeError(f"repeatable={repeatable!r}: write a set of names, such as {{'PutItem'}}")
    return repeatable


def _error_code(response: AWSResponse) -> str:
    """Return the code of an error, from its header, JSON or XML; empty if there is none."""
    code = response.headers.get("x-amzn-errortype") or ""
    if not code:
        found = _CODE.search(response.content)
        code = found[1].decode() if found else _json_code(response.content)
    return code.partition(":")[0].rpartition("#")[2]


def _json_code(body: bytes) -> str:
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    code = (fields.get("__type") or fields.get("code")) if isinstance(fields, dict) else None
    return code if isinstance(code, str) else ""


def _keep(response: AWSResponse) -> bool:
    """Read a failed response, as botocore would do; it keeps what it has read."""
    return response.content is not None


def _close(response: AWSResponse) -> None:
    response.raw.close()
