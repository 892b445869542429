"""`on=transient`: one name for the errors that pass, of every client that is known."""

from __future__ import annotations

import errno
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import anthropic
import asyncpg
import grpc
import httpx
import httpx2
import openai
import psycopg
import psycopg_pool
import pytest
import redis
import requests
import sqlalchemy.exc
import urllib3

from seawall import CircuitOpen, Retry, TimedOut, transient
from seawall.testing import ScriptedService, answer, fail, virtual_time
from tests.support import new_guard

REQUEST = httpx.Request("GET", "http://vendor.example")


def _of(module: str, name: str, *bases: type[Exception], **attributes: Any) -> Exception:
    """Return an error of a library that is not installed."""
    kind = type(name, bases or (Exception,), {"__module__": module, **attributes})
    return kind("said")


def _status(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(status))


def _sdk(module: Any, status: int) -> Exception:
    response = httpx2.Response(status, request=httpx2.Request("GET", "http://vendor.example"))
    error: Exception = module.APIStatusError("", response=response, body=None)
    return error


def _rpc(code: grpc.StatusCode, **attributes: Any) -> grpc.RpcError:
    methods = {"code": lambda _: code, "details": lambda _: ""}
    return type("Failed", (grpc.RpcError,), {**methods, **attributes})()


def _wrapped(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class _Busy(Exception):
    transient = True


PASSING: dict[str, Exception] = {
    "connection": ConnectionResetError(),
    "timeout": TimeoutError(),
    "own timeout": TimedOut(),
    "no route": OSError(errno.EHOSTUNREACH, "no route"),
    "says so": _Busy(),
    "urllib": URLError(ConnectionRefusedError()),
    "httpx connect": httpx.ConnectError(""),
    "httpx read timeout": httpx.ReadTimeout(""),
    "httpx cut off": httpx.RemoteProtocolError(""),
    "httpx2 pool": httpx2.PoolTimeout(""),
    "httpx 503": _status(503),
    "httpx 429": _status(429),
    "requests": requests.ConnectionError(),
    "requests timeout": requests.ReadTimeout(),
    "urllib3 protocol": urllib3.exceptions.ProtocolError(),
    "urllib3 retries": urllib3.exceptions.MaxRetryError(
        None,
        "/",
        urllib3.exceptions.ConnectTimeoutError(),  # type: ignore[arg-type]
    ),
    "aiohttp": _of("aiohttp.client_exceptions", "ClientConnectionError"),
    "aiohttp 503": _of(
        "aiohttp.client_exceptions",
        "ClientResponseError",
        status=503,
        request_info=SimpleNamespace(),
    ),
    "redis": redis.ConnectionError(),
    "redis loading": redis.BusyLoadingError(),
    "redis timeout": redis.TimeoutError(),
    "psycopg connect": psycopg.OperationalError("connection refused"),
    "psycopg conflict": psycopg.errors.SerializationFailure(),
    "psycopg restart": psycopg.errors.AdminShutdown(),
    "psycopg pool": psycopg_pool.PoolTimeout(),
    "asyncpg": asyncpg.ConnectionDoesNotExistError(""),
    "asyncpg deadlock": asyncpg.DeadlockDetectedError(""),
    "sqlalchemy": sqlalchemy.exc.OperationalError("", None, psycopg.errors.DeadlockDetected()),
    "grpc": _rpc(grpc.StatusCode.UNAVAILABLE),
    "grpc exhausted, come again": _rpc(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=1.0),
    "openai": openai.APIConnectionError(request=None),  # type: ignore[arg-type]
    "openai 429": _sdk(openai, 429),
    "anthropic 529": _sdk(anthropic, 529),
}
LASTING: dict[str, Exception] = {
    "mistake": ValueError(),
    "no file": FileNotFoundError(errno.ENOENT, "no"),
    "refusal": CircuitOpen("open"),
    "httpx 404": _status(404),
    "httpx url": httpx.UnsupportedProtocol(""),
    "requests certificate": requests.exceptions.SSLError(),
    "redis password": redis.AuthenticationError(),
    "psycopg syntax": psycopg.errors.SyntaxError(),
    "psycopg password": psycopg.errors.InvalidPassword(),
    "asyncpg": asyncpg.UniqueViolationError(""),
    "sqlalchemy": sqlalchemy.exc.IntegrityError("", None, psycopg.errors.UniqueViolation()),
    "grpc": _rpc(grpc.StatusCode.INVALID_ARGUMENT),
    "grpc message too large": _rpc(grpc.StatusCode.RESOURCE_EXHAUSTED),
    "openai 400": _sdk(openai, 400),
    "openai around a refusal": _wrapped(
        openai.APIConnectionError(request=None),  # type: ignore[arg-type]
        CircuitOpen("open"),
    ),
    "name alone": _of("shop", "OperationalError"),
}


@pytest.mark.parametrize("which", PASSING)
def test_errors_that_pass_are_transient(which: str):
    """Whichever client raised them."""
    assert transient(PASSING[which])


@pytest.mark.parametrize("which", LASTING)
def test_errors_that_last_are_not_transient(which: str):
    """Another attempt would end in the same way."""
    assert not transient(LASTING[which])


def test_an_error_that_cannot_be_looked_at_is_not_transient():
    """Somebody else's property may raise."""

    class Strange(Exception):
        @property
        def transient(self) -> bool:
            raise RuntimeError

    assert not transient(Strange())


def test_a_retry_on_transient_errors_looks_at_no_value():
    """So a success pays nothing for it."""
    assert not Retry(on=transient).checks_values
    assert Retry(on=(transient, lambda _error, value: value is None)).checks_values


def test_a_guard_retries_what_is_transient():
    """And nothing else."""
    with virtual_time():
        guard = new_guard(Retry(on=transient, attempts=3))
        service = ScriptedService(fail(httpx.ConnectError("")), fail(_status(503)), answer("well"))
        assert guard.call(service.call) == "well"
        result = guard.attempt(ScriptedService(fail(_status(404), times=None)).call)
    assert result.attempts == 1


def test_no_client_is_imported_to_know_its_errors():
    """They are known by module and name."""
    code = """if True:
        import sys
        from seawall import transient
        assert transient(ConnectionError())
        clients = {"httpx", "requests", "redis", "grpc", "psycopg", "asyncpg", "openai"}
        print(sorted(clients & set(sys.modules)))
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert ran.stdout.strip() == "[]"
