"""Bad arguments of what is kept in a database: what is called, the bad values, and the advice."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from math import inf, nan
from random import Random
from typing import Any

from fastapi import FastAPI

from seawall import Guard
from seawall.clock import SystemClock
from seawall.durable import (
    Answer,
    Database,
    DeferredCalls,
    DeferredCallWorker,
    Dispatcher,
    DjangoAlias,
    Fence,
    FifoReceiver,
    FifoSender,
    FromRow,
    Idempotency,
    IdempotentRequest,
    IdempotentRequests,
    Inbox,
    JetStream,
    Jobs,
    JobsApi,
    JobWorker,
    KeyClaim,
    NewEvent,
    Outbox,
    RedisStream,
    Sqlite,
    Webhook,
    amigrate,
    cleaning,
    fingerprint_of,
    idempotent_request,
    migrate,
    sign_webhook,
    verify_webhook,
)
from seawall.durable.http.completion import RequestName
from seawall.durable.jobs.worker import JobHandle
from seawall.jobs import Claim
from seawall.web import Trust

HUGE = 10**400

_NUMBERS = [(-1.0, ValueError), (nan, ValueError), ("2", TypeError), (True, TypeError)]
_FINITE = [*_NUMBERS, (HUGE, ValueError), ([1], TypeError), (inf, ValueError)]
_SECONDS = [*_FINITE, (None, TypeError)]
_POSITIVE = [*_SECONDS, (0, ValueError)]
_NATURALS = [(-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)]
_COUNTS = [*_NATURALS, (0, ValueError), (None, TypeError)]
_LIMITED = [*_COUNTS, (HUGE, ValueError)]
_RATIOS = [(-0.1, ValueError), (1.1, ValueError), (nan, ValueError), ("0.5", TypeError)]
_FLAGS = [("yes", TypeError), (1, TypeError), (None, TypeError)]
_CHOICES = [("nonsense", ValueError), (5, ValueError), (None, ValueError)]
_FUNCTIONS = [(5, TypeError), ("f", TypeError)]
_NAMES = [("", ValueError), (b"x", TypeError), (None, TypeError), ("x" * 5000, ValueError)]
_NUL = [*_NAMES, ("a\0b", ValueError)]
_CLOCKS = [(5, TypeError), (SystemClock, TypeError)]
_RNGS = [(5, TypeError), (Random, TypeError)]
_DATABASES = [(None, TypeError), ("orders.db", TypeError), (Database, TypeError)]
_CONNECTIONS = [(5, TypeError), ("x", TypeError), (None, TypeError)]
_GUARDS = [(5, TypeError), (Guard, TypeError)]
_TRUSTS = [(5, TypeError), (Trust, TypeError), (["10.0.0.0/8"], TypeError)]
_KEYS = [("", ValueError), (5, (TypeError, ValueError)), (None, TypeError), ("a b\n", ValueError)]
_KEYS += [("k" * 256, ValueError), ("é", ValueError)]
_FINGERPRINTS = [(object(), TypeError), ({5}, TypeError), ({"a": b"b"}, TypeError)]
_BACKOFFS = [("fast", TypeError), ([], ValueError), (-1.0, ValueError), (nan, ValueError)]
_ERRORS = [(5, TypeError), ("OSError", TypeError), ((OSError, 5), TypeError), (int, TypeError)]
_ERRORS += [(KeyboardInterrupt, TypeError), (OSError(), TypeError)]
_JSON = [({1}, TypeError), (nan, ValueError), (object(), TypeError)]
_BYTES = [(5, TypeError), ({}, TypeError), (None, TypeError)]
_POLLS = [(1.0, TypeError), ((1.0,), TypeError), ((0, 1), ValueError), ((1, "2"), TypeError)]
_POLLS += [((2.0, 1.0), ValueError)]
_OTHERS = [(5, TypeError), (None, TypeError)]
_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - of the tests
_SECRETS = [(5, TypeError), (None, TypeError), (_SECRET.encode(), TypeError), ([], ValueError)]
_SECRETS += [("x" * 32, ValueError), ("whsec_c2hvcnQ=", ValueError), ([_SECRET, "x"], ValueError)]
_SECRETS += [(_SECRET + "!", ValueError), ("whsec_" + "YWJj" * 22, ValueError)]
_BODIES = [("text", TypeError), (5, TypeError), (None, TypeError)]
_CLEANUP: Any = {"batch": (_LIMITED, "write"), "within": (_POSITIVE, "seconds")}

Bads = list[tuple[Any, Any]]
Row = tuple[str, Callable[[Any], Any], Bads, str]


class _Untouched(Database):
    """A database that is never asked: what is wrong is to be told before."""

    def run(self, operation: Any) -> Any:
        """Begin, and fail if something is asked."""
        next(operation())
        raise AssertionError("the database was asked")

    async def arun(self, operation: Any) -> Any:
        """Do the same."""
        self.run(operation)


def _database(**settings: Any) -> Database:
    """Make one, and free its name, whatever comes of it."""
    source = settings.pop("source", Sqlite("never-made.db"))
    database = _Untouched(source, **{"name": "bad arguments", **settings})
    database.close()
    return database


DATABASE = _database()
POSTGRES = _database()
POSTGRES.dialect = "postgres"
JOB_ID = "00000000-0000-4000-8000-000000000000"
JOB_CLAIM = Claim(JOB_ID, None, 1, 1, 1.0, kind="report", scope="acme", owner="owner")
CLAIM = KeyClaim("acme", "pay", b"x" * 32, "owner", 1)
_ODD = Answer(99, [], b"")
CONNECTION = object()
"""Stands for a connection that is made for one call."""


class _Awaited:
    """What is known as a connection of asyncpg, and can be asked for nothing."""

    __module__ = "asyncpg"

    def is_in_transaction(self) -> bool:
        """Tell that there is one."""
        return True


_Awaited.__name__ = "Connection"


async def _app(_scope: Any, _receive: Any, _send: Any) -> None:
    pass


async def _deliver(_event: Any) -> None:
    pass


def _report(_job: Any) -> None:
    pass


class _Client:
    """As little of a client as a sink looks at."""

    stream = pipeline = publish = print


def _who(_incoming: Any) -> str:
    return "acme"


def _idempotency(**settings: Any) -> Idempotency:
    return Idempotency(settings.pop("database", DATABASE), **settings)


def _keyed() -> IdempotentRequest:
    return IdempotentRequest(
        RequestName("acme", "pay", "k", b""), CLAIM, _idempotency(), frozenset()
    )


def _jobs() -> Jobs:
    return Jobs(DATABASE)


def _decorated(**settings: Any) -> Any:
    return _idempotency().idempotent(**settings)(lambda order: order)


def _handle() -> JobHandle:
    return JobHandle(JOB_CLAIM)


def _answer(value: Any = 1, **more: Any) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        once = _idempotency().once(connection, **_RECORD)
        once.first, once._claim = True, CLAIM
        once.answer(value, **more)


_NAMED = {"scope": "acme", "operation": "pay"}
_KEYED: dict[str, Any] = {"key": "k", "fingerprint": None}
_RECORD = {**_NAMED, **_KEYED}
_RECORD_BAD: dict[str, tuple[Bads, str]] = {
    "scope": (_NAMES, "write"),
    "operation": (_NAMES, "write"),
    "key": (_KEYS, "write"),
    "fingerprint": (_FINGERPRINTS, "what JSON has"),
}
_SUBMIT = {"conn": None, "kind": "report", "scope": "acme"}
_EVENT = {
    "conn": CONNECTION,
    "aggregate": "order",
    "aggregate_id": "1",
    "event_type": "paid",
    "payload": {},
}
_EVENT_BAD: dict[str, tuple[Bads, str]] = {
    "conn": (_CONNECTIONS, "pass"),
    "aggregate": (_NUL, "write"),
    "aggregate_id": (_NUL, "write"),
    "event_type": (_NUL, "write"),
    "payload": ([({1}, TypeError), (nan, TypeError), (b"x" * 2**20, ValueError)], "write|at most"),
    "headers": ([(5, TypeError), ({"a": 5}, TypeError), ({"a": "\n"}, TypeError)], "write"),
    "notify": (_FLAGS, "True or False"),
}


def _called(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call, with a connection where one is wanted; await where that is wanted."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("BEGIN")
        own: Any = _Awaited() if inspect.iscoroutinefunction(function) else connection
        values = {k: own if v is CONNECTION else v for k, v in given.items()}

        async def awaited() -> Any:
            result = function(**values)
            return await result if inspect.isawaitable(result) else result

        if inspect.iscoroutinefunction(function):
            return asyncio.run(awaited())
        return function(**values)


def _rows(
    label: str,
    call: Callable[[], Callable[..., Any]],
    good: dict[str, Any],
    bad: dict[str, tuple[Bads, str]],
) -> Iterator[Row]:
    for name, (values, advice) in bad.items():
        yield (
            f"durable.{label}({name})",
            lambda x, name=name: _called(call(), {**good, name: x}),
            values,
            advice,
        )


def _new(make: Callable[..., Any], good: dict[str, Any], **bad: tuple[Bads, str]) -> Iterator[Row]:
    """Yield the rows of a constructor, or a function."""
    return _rows(make.__name__, lambda: make, good, bad)


def _method(
    make: Callable[[], Any],
    name: str,
    good: dict[str, Any],
    *twins: str,
    **bad: tuple[Bads, str],
) -> Iterator[Row]:
    """Yield the rows of a method, and of its twins that are awaited."""
    kind, method = name.split(".")
    for word in (method, *twins):
        yield from _rows(f"{kind}.{word}", lambda word=word: getattr(make(), word), good, bad)


def _of_database(**settings: Any) -> Database:
    return _database(**settings)


_of_database.__name__ = "Database"

DURABLE: list[Row] = [
    *_new(
        _of_database,
        {},
        source=([*_OTHERS, ("orders.db", TypeError), (Sqlite, TypeError)], "pass an asyncpg pool"),
        schema=([(5, TypeError), ("", ValueError), ("a\0", ValueError)], "write"),
        prefix=([*_OTHERS, ("a\0", ValueError), ("x" * 64, ValueError)], "write"),
        attempts=(_COUNTS, "write"),
        name=([(5, TypeError), ("", TypeError)], "name"),
        clock=(_CLOCKS, "Clock"),
    ),
    *_method(_database, "Database.connection", {}, raw=(_CONNECTIONS, "pass")),
    *_new(
        Sqlite,
        {"path": "never-made.db"},
        path=([*_OTHERS, ("", TypeError), (":memory:", ValueError)], "write|gone"),
        busy_timeout=(_POSITIVE, "seconds"),
    ),
    *_new(DjangoAlias, {}, alias=([*_OTHERS, ("", TypeError)], "write an alias")),
    *_new(migrate, {}, database=(_DATABASES, "pass a Database")),
    *_new(amigrate, {}, database=(_DATABASES, "pass a Database")),
    # Idempotency
    *_new(
        Idempotency,
        {"database": DATABASE},
        database=(_DATABASES, "pass a Database"),
        lease=(_POSITIVE, "seconds"),
        ttl=([*_POSITIVE, (30.0, ValueError)], "seconds"),
        max_body=(_NATURALS, "write"),
        unscoped=(_FLAGS, "True or False"),
        name=(_NAMES[:3], "write"),
        clock=(_CLOCKS, "Clock"),
    ),
    *_method(
        _idempotency,
        "Idempotency.reserve",
        _RECORD,
        "areserve",
        **_RECORD_BAD,
        wait=(_SECONDS, "seconds"),
    ),
    *_method(
        _idempotency,
        "Idempotency.lookup",
        {**_NAMED, "key": "k"},
        "alookup",
        **{name: _RECORD_BAD[name] for name in ("scope", "operation", "key")},
    ),
    *_method(
        _idempotency,
        "Idempotency.forget",
        {**_NAMED, "key": "k"},
        "aforget",
        **{name: _RECORD_BAD[name] for name in ("scope", "operation", "key")},
    ),
    *_method(
        _idempotency,
        "Idempotency.complete",
        {"claim": CLAIM, "answer": 1},
        "acomplete",
        claim=(_OTHERS, "claim of a Fresh"),
        answer=([(object(), TypeError), ({1}, TypeError)], "write|JSON"),
        failed=(_FLAGS, "True or False"),
    ),
    *(
        row
        for word in ("abandon", "renew", "keeping")
        for row in _method(
            _idempotency, f"Idempotency.{word}", {}, f"a{word}", claim=(_OTHERS, "claim of a Fresh")
        )
    ),
    *_method(
        _idempotency,
        "Idempotency.once",
        {"conn": CONNECTION, **_RECORD},
        conn=(_CONNECTIONS, "pass"),
        wait=(_FLAGS, "True or False"),
        **_RECORD_BAD,
    ),
    *_method(
        lambda: _idempotency(database=POSTGRES),
        "Idempotency.single",
        {"sql": "DELETE FROM x RETURNING 1", "arguments": {}, **_RECORD},
        "asingle",
        **_RECORD_BAD,
        sql=([*_OTHERS, ("", TypeError)], "RETURNING"),
        arguments=([*_OTHERS, ({"seawall_scope": 1}, ValueError)], "arguments"),
        outbox=([(5, TypeError)], "pass an Outbox"),
        events=([(5, TypeError), ([NewEvent("a", "1", "b", 1)], TypeError)], "events"),
        conn=([(5, TypeError), ("x", TypeError)], "pass"),
    ),
    (
        "durable.Idempotency.idempotent(operation)",
        lambda x: _decorated(operation=x),
        [("", ValueError), (5, TypeError), ("x" * 5000, ValueError)],
        "write",
    ),
    (
        "durable.Idempotency.idempotent(key)",
        lambda x: _decorated(key=x),
        [(5, TypeError), ("nonsense", ValueError)],
        "function",
    ),
    (
        "durable.Idempotency.idempotent(scope)",
        lambda x: _decorated(scope=x),
        [(5, TypeError), ("nonsense", ValueError)],
        "function",
    ),
    (
        "durable.Idempotency.idempotent(fingerprint)",
        lambda x: _decorated(fingerprint=x),
        [(5, TypeError), ("nonsense", TypeError)],
        "function",
    ),
    ("durable.Idempotency.idempotent(wait)", lambda x: _decorated(wait=x), _SECONDS, "seconds"),
    ("durable.Idempotency.idempotent(keep)", lambda x: _decorated(keep=x), _ERRORS, "keep="),
    ("durable.Idempotency.idempotent(codec)", lambda x: _decorated(codec=x), _FUNCTIONS, "dumps"),
    *_method(
        _idempotency,
        "Idempotency.cleanup",
        {},
        "acleanup",
        **_CLEANUP,
    ),
    (
        "durable.Once.answer(value)",
        _answer,
        [(object(), TypeError), ({1}, TypeError)],
        "write|JSON",
    ),
    (
        "durable.Once.answer(events)",
        lambda x: _answer(events=x),
        [(5, TypeError), ([NewEvent("a", "1", "b", 1)], TypeError)],
        "events",
    ),
    (
        "durable.Once.answer(outbox)",
        lambda x: _answer(outbox=x, events=[NewEvent("a", "1", "b", 1)]),
        [(5, TypeError), (None, TypeError)],
        "outbox",
    ),
    (
        "durable.Once.answer(notify)",
        lambda x: _answer(notify=x),
        _FLAGS,
        "True or False",
    ),
    (
        "durable.fingerprint_of(parts)",
        lambda x: fingerprint_of(b"a", x),
        _BYTES,
        "bytes or text",
    ),
    # Requests
    *_new(
        IdempotentRequests,
        {"app": _app, "idempotency": _idempotency(), "routes": ["/orders"], "scope": _who},
        app=(_OTHERS, "function"),
        idempotency=([*_OTHERS, (DATABASE, TypeError)], "pass an Idempotency"),
        routes=(
            [(5, TypeError), ("/orders", TypeError), ([], ValueError), (["x"], ValueError)],
            "routes|write",
        ),
        scope=([(5, TypeError), ("acme", TypeError), (None, TypeError), (_app, TypeError)], "func"),
        unscoped=([*_FLAGS, (True, ValueError)], "True or False|leave"),
        methods=([(5, TypeError), ("POST", TypeError), (["get"], ValueError)], "write"),
        keep=([(5, TypeError), ("201", TypeError), ([99], ValueError), (_app, TypeError)], "keep"),
        fingerprint=([(5, TypeError), ("body", TypeError), (_app, TypeError)], "function"),
        required=(_FLAGS, "True or False"),
        wait=(_SECONDS, "seconds"),
        retry_after=(_POSITIVE, "seconds"),
        max_request_body=(_COUNTS, "write"),
        never_store=([(5, TypeError), ("x-a", TypeError), ([5], TypeError)], "write a list"),
        clean_every=([case for case in _POSITIVE if case[0] is not None], "seconds"),
        trust=(_TRUSTS, "Trust"),
    ),
    *_method(
        lambda: IdempotentRequests(_app, _idempotency(), routes=["/orders"], scope=_who),
        "IdempotentRequests.forget",
        {**_NAMED, "key": "k"},
        "aforget",
        scope=([(5.0, TypeError), (None, TypeError)], "scope"),
        **{name: _RECORD_BAD[name] for name in ("operation", "key")},
    ),
    *_new(idempotent_request, {}, request=(_OTHERS, "pass the request")),
    *_new(idempotent_request, {"request": {}}, required=(_FLAGS, "True or False")),
    *_method(
        _keyed,
        "IdempotentRequest.complete",
        {"conn": None, "answer": 1},
        "acomplete",
        conn=(_CONNECTIONS, "pass"),
        answer=(
            [(object(), TypeError), (b"x", TypeError), (_ODD, ValueError)],
            "JSON|Answer|status",
        ),
        outbox=([(5, TypeError)], "pass an Outbox"),
        events=([(5, TypeError), ([NewEvent("a", "1", "b", 1)], TypeError)], "events"),
        notify=(_FLAGS, "True or False"),
    ),
    (
        "durable.IdempotentRequest.part(name)",
        lambda x: _keyed().part(x),
        [(5, ValueError), ("", ValueError)],
        "write",
    ),
    ("durable.cleaning(stores)", cleaning, _OTHERS, "acleanup"),
    *_new(cleaning, {}, every=(_POSITIVE, "seconds")),
    # Jobs
    *_new(
        Jobs,
        {"database": DATABASE},
        database=(_DATABASES, "pass a Database"),
        name=(_NUL, "write|characters"),
        lease=(_POSITIVE, "seconds"),
        attempts=(_LIMITED, "write"),
        max_size=([case for case in _COUNTS if case[0] is not None], "write"),
        notify=(_FLAGS, "True or False"),
        result_ttl=(_POSITIVE, "seconds"),
        gone_for=(_SECONDS, "seconds"),
        max_payload=(_COUNTS, "write"),
        max_result=(_COUNTS, "write"),
        clock=(_CLOCKS, "Clock"),
    ),
    *_method(
        _jobs,
        "Jobs.submit",
        _SUBMIT,
        "asubmit",
        conn=([(5, TypeError), ("x", TypeError)], "pass"),
        kind=(_NUL, "write|characters"),
        payload=([*_JSON, ("x" * 300_000, ValueError)], "payload"),
        scope=(_NUL, "write|characters"),
        key=(_optional := [case for case in _KEYS if case[0] is not None], "write"),
        priority=([(-1, ValueError), (10, ValueError), ("1", TypeError)], "write"),
        delay=(_SECONDS, "seconds"),
        attempts=([case for case in _LIMITED if case[0] is not None], "write"),
    ),
    *(
        row
        for word, twin in (("get", "aget"), ("cancel", "acancel"), ("join", "ajoin"))
        for row in _method(
            _jobs,
            f"Jobs.{word}",
            {"id": JOB_ID, "scope": "acme"},
            twin,
            id=([("x", LookupError), (5, LookupError), (None, LookupError)], "no such job"),
            scope=(_NUL, "write|characters"),
        )
    ),
    *_method(
        _jobs, "Jobs.join", {"id": JOB_ID, "scope": "a"}, "ajoin", timeout=(_FINITE, "seconds")
    ),
    *_method(_jobs, "Jobs.cleanup", {}, "acleanup", **_CLEANUP),
    *(
        row
        for make, word in ((_jobs, "Jobs"), (lambda: Outbox(DATABASE), "Outbox"))
        for row in _method(
            make,
            f"{word}.browse",
            {},
            "abrowse",
            state=([(5, ValueError), ("no", ValueError)], "write one of"),
            search=([(5, TypeError), ("x" * 201, ValueError), ("a\0", ValueError)], "write"),
            after=([(5, ValueError), ("x", ValueError)], "of the page before"),
            limit=(_LIMITED, "write"),
            payloads=(_FLAGS, "True or False"),
        )
    ),
    *_method(_jobs, "Jobs.inspect", {"id": JOB_ID}, "ainspect", payload=(_FLAGS, "True or False")),
    *(
        row
        for word in ("inspect", "retry", "drop")
        for row in _method(
            _jobs,
            f"Jobs.{word}",
            {},
            f"a{word}",
            id=([(5, TypeError), (None, TypeError)], "write a job's id"),
        )
    ),
    *_method(
        lambda: Outbox(DATABASE),
        "Outbox.inspect",
        {"id": "a"},
        "ainspect",
        id=(_NUL, "write"),
        payload=(_FLAGS, "True or False"),
    ),
    *_method(
        _jobs,
        "Jobs.claim",
        {"kinds": ["report"], "owner": "me"},
        "aclaim",
        kinds=([*_NUL, ([], ValueError)], "write|kind"),
        count=(_LIMITED, "write"),
        owner=(_NUL, "write|owner"),
    ),
    *_method(_jobs, "Jobs.succeed", {}, "asucceed", claim=(_OTHERS, "pass the claim")),
    *_method(
        _jobs,
        "Jobs.fail",
        {"claim": JOB_CLAIM, "error": "no"},
        "afail",
        claim=(_OTHERS, "pass the claim"),
        delay=(_SECONDS, "seconds"),
        retry=(_FLAGS, "True or False"),
        progress=([*_RATIOS, (None, TypeError)], "progress"),
    ),
    *_method(
        _jobs,
        "Jobs.give_back",
        {"claim": JOB_CLAIM},
        "agive_back",
        claim=(_OTHERS, "pass the claim"),
        delay=(_SECONDS, "seconds"),
    ),
    *_new(
        JobWorker,
        {"jobs": _jobs(), "functions": {"report": _report}},
        jobs=([*_OTHERS, (DATABASE, TypeError)], "pass Jobs"),
        functions=(
            [*_OTHERS, ({}, TypeError), ({"": _report}, ValueError), ({"x": 5}, TypeError)],
            "function|kind",
        ),
        concurrency=(_LIMITED, "write"),
        backoff=(_BACKOFFS, "seconds|delay|backoff"),
        give_up_on=(_ERRORS, "give_up_on="),
        rng=(_RNGS, "Random"),
    ),
    *_new(
        JobWorker,
        {"jobs": Jobs(POSTGRES), "functions": {"report": _report}},
        poll=(_POLLS, "poll"),
        listen=(_FUNCTIONS, "function"),
    ),
    *_method(
        lambda: JobWorker(_jobs(), {"report": _report}),
        "JobWorker.stop",
        {},
        grace=(_SECONDS, "seconds"),
    ),
    *_method(
        lambda: JobWorker(_jobs(), {"report": _report}),
        "JobWorker.run_sync",
        {},
        drain=(_SECONDS, "seconds"),
    ),
    *_method(
        lambda: DeferredCallWorker(DeferredCalls(DATABASE, "mail"), _report),
        "DeferredCallWorker.stop",
        {},
        grace=(_SECONDS, "seconds"),
    ),
    *_method(
        lambda: DeferredCallWorker(DeferredCalls(DATABASE, "mail"), _report),
        "DeferredCallWorker.run_sync",
        {},
        drain=(_SECONDS, "seconds"),
    ),
    *_method(_handle, "JobHandle.progress", {}, share=([*_RATIOS, (None, TypeError)], "share")),
    *_new(
        JobsApi,
        {"jobs": _jobs(), "scope": _who},
        jobs=([*_OTHERS, (DATABASE, TypeError)], "pass Jobs"),
        scope=([*_OTHERS, ("acme", TypeError), (_app, TypeError)], "function"),
        base=(
            [("", ValueError), ("jobs", ValueError), ("/jobs/", ValueError), (5, ValueError)],
            "path",
        ),
        max_wait=(_SECONDS, "seconds"),
        max_waiting=(_NATURALS, "write"),
        poll=(_POLLS, "poll"),
        inline_result=(_NATURALS, "write"),
        show_errors=(_FLAGS, "True or False"),
        trust=(_TRUSTS, "Trust"),
    ),
    *(
        row
        for word, good in (
            ("scope_of", {}),
            ("answer", {"job": None}),
            ("submitted", {"kind": "report"}),
        )
        for row in _method(
            lambda: JobsApi(_jobs(), scope=_who),
            f"JobsApi.{word}",
            good,
            request=(_OTHERS, "pass the request"),
        )
    ),
    *_method(
        lambda: JobsApi(_jobs(), scope=_who),
        "JobsApi.submitted",
        {"request": {"type": "http", "headers": []}, "kind": "report"},
        required=(_FLAGS, "True or False"),
    ),
    *_method(
        lambda: JobsApi(_jobs(), scope=_who),
        "JobsApi.describe",
        {"app": FastAPI()},
        app=(_OTHERS, "pass a FastAPI app"),
        submits=([(5, TypeError), ("/reports", TypeError)], "submits"),
        required=(_FLAGS, "True or False"),
    ),
    # Outbox
    *_new(
        Outbox,
        {"database": DATABASE},
        database=(_DATABASES, "pass a Database"),
        name=(_NUL, "write"),
        max_payload=(_LIMITED, "write"),
        clock=(_CLOCKS, "Clock"),
    ),
    *_method(lambda: Outbox(DATABASE), "Outbox.add", _EVENT, "aadd", **_EVENT_BAD),
    *_method(
        lambda: Outbox(DATABASE),
        "Outbox.add_all",
        {"conn": CONNECTION, "events": []},
        "aadd_all",
        conn=(_CONNECTIONS, "pass"),
        notify=(_FLAGS, "True or False"),
        events=([(5, TypeError), ([5], TypeError), ([("a", "1", "b", 1)], TypeError)], "NewEvent"),
    ),
    *_new(FromRow, {}, column=([*_OTHERS, ("", ValueError), ("a\0", ValueError)], "write")),
    *_method(
        lambda: Outbox(POSTGRES),
        "Outbox.rows_cte",
        {"events": []},
        events=([(5, TypeError), ([5], TypeError), ([("a", "1", "b", 1)], TypeError)], "NewEvent"),
        source=([(5, ValueError), ("", ValueError), ("a b", ValueError)], "write"),
    ),
    *_method(lambda: Outbox(DATABASE), "Outbox.dead", {}, "adead", limit=(_LIMITED, "write")),
    *_method(lambda: Outbox(DATABASE), "Outbox.blocked", {}, "ablocked", limit=(_LIMITED, "write")),
    *_method(lambda: Outbox(DATABASE), "Outbox.retry", {}, "aretry", id=(_NUL, "write")),
    *_method(lambda: Outbox(DATABASE), "Outbox.drop", {}, "adrop", id=(_NUL, "write")),
    *_method(
        lambda: Outbox(DATABASE),
        "Outbox.unblock",
        {"aggregate": "order", "aggregate_id": "1"},
        "aunblock",
        aggregate=(_NUL, "write"),
        aggregate_id=(_NUL, "write"),
        skip=(_FLAGS, "True or False"),
    ),
    *_method(
        lambda: Outbox(DATABASE),
        "Outbox.cleanup",
        {},
        "acleanup",
        keep=(_SECONDS, "seconds"),
        keep_dead=(_SECONDS, "seconds"),
        **_CLEANUP,
    ),
    *_method(
        lambda: Outbox(DATABASE),
        "Outbox.forget",
        {"idle": 60.0},
        "aforget",
        idle=(_POSITIVE, "seconds"),
        **_CLEANUP,
    ),
    *_new(
        Dispatcher,
        {"outbox": Outbox(DATABASE), "sink": _deliver},
        outbox=([*_OTHERS, (DATABASE, TypeError)], "pass an Outbox"),
        sink=(_OTHERS, "function"),
        batched=([("yes", TypeError), (1, TypeError)], "True or False"),
        batch=(_LIMITED, "write"),
        concurrency=(_LIMITED, "write"),
        lease=(_POSITIVE, "seconds"),
        timeout=([*_FINITE, (0, ValueError)], "seconds"),
        attempts=(_LIMITED, "write"),
        backoff=(_BACKOFFS, "seconds|delay|backoff"),
        poison=(_CHOICES, "'block', 'skip'"),
        poll=(_POSITIVE, "seconds"),
        keep=(_SECONDS, "seconds"),
        listen=(_FUNCTIONS, "function"),
        rng=(_RNGS, "Random"),
    ),
    *_method(
        lambda: Dispatcher(Outbox(DATABASE), _deliver),
        "Dispatcher.stop",
        {},
        grace=(_SECONDS, "seconds"),
    ),
    *_method(
        lambda: Dispatcher(Outbox(DATABASE), _deliver),
        "Dispatcher.run_sync",
        {},
        drain=(_SECONDS, "seconds"),
    ),
    *_new(
        Webhook,
        {"url": "https://example.com", "client": _Client(), "secret": None},
        url=([*((bad, ValueError) for bad in (5, "", "example.com", "ftp://x"))], "address"),
        client=(_OTHERS, "httpx"),
        secret=([bad for bad in _SECRETS if bad[0] is not None], "write"),
        guard=(_GUARDS, "pass a Guard"),
    ),
    *_new(
        RedisStream,
        {"target": "redis://127.0.0.1:1", "stream": "orders"},
        target=(_OTHERS, "redis"),
        stream=([(5, ValueError), ("", ValueError)], "write"),
        partitions=([bad for bad in _COUNTS if bad[0] is not None], "write"),
        max_length=(_COUNTS, "write"),
    ),
    *_new(
        JetStream,
        {"context": _Client()},
        context=(_OTHERS, "JetStream"),
        subject=([(5, ValueError), ("", ValueError), ("a.>", ValueError)], "write"),
    ),
    *_new(
        sign_webhook,
        {"secret": _SECRET, "body": b"", "message_id": "a", "now": 1},
        secret=(_SECRETS, "write"),
        body=(_BODIES, "body"),
        now=([("1", TypeError), (1.5, TypeError), (-1, ValueError)], "now"),
        message_id=([(bad, ValueError) for bad in (5, None, "", "a.b", "ü", "a b")], "write"),
    ),
    *_new(
        verify_webhook,
        {"secret": _SECRET, "headers": {}, "body": b""},
        secret=(_SECRETS, "write"),
        headers=([(5, TypeError), ("", TypeError), ({}, ValueError)], "headers|no signature"),
        body=(_BODIES, "body"),
        tolerance=(_POSITIVE, "seconds"),
        now=([("1", TypeError), (nan, ValueError), (True, TypeError)], "now"),
    ),
    *_new(
        Fence,
        {"database": DATABASE, "resource": "reports"},
        database=(_DATABASES, "pass a Database"),
        resource=([(5, TypeError), ("", TypeError)], "write a name"),
    ),
    *_method(
        lambda: Fence(DATABASE, "reports"),
        "Fence.check",
        {"conn": CONNECTION, "token": 7},
        "acheck",
        conn=(_CONNECTIONS, "pass"),
        token=(_COUNTS, "write"),
    ),
    # Inbox and FIFO
    *_new(
        Inbox,
        {"database": DATABASE},
        database=(_DATABASES, "pass a Database"),
        ttl=(_POSITIVE, "seconds"),
    ),
    *_method(
        lambda: Inbox(DATABASE),
        "Inbox.once",
        {"conn": CONNECTION, "consumer": "billing", "message_id": "1"},
        conn=(_CONNECTIONS, "pass"),
        consumer=(_NUL, "write"),
        message_id=(_NAMES, "write"),
    ),
    *_method(
        lambda: Inbox(DATABASE),
        "Inbox.seen",
        {"consumer": "billing", "message_id": "1"},
        "aseen",
        consumer=(_NUL, "write"),
        message_id=(_NAMES, "write"),
    ),
    *_method(
        lambda: Inbox(DATABASE),
        "Inbox.cleanup",
        {},
        "acleanup",
        **_CLEANUP,
    ),
    *_new(
        FifoReceiver,
        {"database": DATABASE, "name": "billing"},
        database=(_DATABASES, "pass a Database"),
        name=(_NUL, "write"),
        window=(_LIMITED, "write"),
        batch=(_LIMITED, "write"),
        gap_timeout=(_POSITIVE, "seconds"),
        on_gap=(_CHOICES, "'wait', 'skip'"),
        max_payload=(_COUNTS, "write"),
    ),
    *_method(
        lambda: FifoReceiver(DATABASE, "billing"),
        "FifoReceiver.receive",
        {"conn": CONNECTION, "sender": "shop", "sequence": 1, "payload": b""},
        conn=(_CONNECTIONS, "pass"),
        sender=(_NUL, "write"),
        sequence=(_LIMITED, "write"),
        payload=([*_BYTES, (b"x" * 2**21, ValueError)], "bytes"),
        epoch=(_NATURALS, "write"),
    ),
    *_method(
        lambda: FifoReceiver(DATABASE, "billing"),
        "FifoReceiver.drain",
        {"conn": CONNECTION, "sender": "shop"},
        conn=(_CONNECTIONS, "pass"),
        sender=(_NUL, "write"),
    ),
    *(
        row
        for word in ("gaps", "skipped")
        for row in _method(
            lambda: FifoReceiver(DATABASE, "billing"),
            f"FifoReceiver.{word}",
            {},
            f"a{word}",
            limit=(_LIMITED, "write"),
        )
    ),
    *_method(
        lambda: FifoReceiver(DATABASE, "billing"),
        "FifoReceiver.skip",
        {"sender": "shop", "to": 2},
        "askip",
        sender=(_NUL, "write"),
        to=(_LIMITED, "write"),
    ),
    *_method(
        lambda: FifoReceiver(DATABASE, "billing"),
        "FifoReceiver.cleanup",
        {},
        "acleanup",
        older_than=(_SECONDS, "seconds"),
        **_CLEANUP,
    ),
    *_new(
        FifoSender,
        {"database": DATABASE, "sender": "shop", "to": "billing"},
        database=(_DATABASES, "pass a Database"),
        sender=(_NUL, "write"),
        to=(_NUL, "write"),
        max_unacknowledged=(_COUNTS, "write"),
        max_payload=(_COUNTS, "write"),
    ),
    *_method(
        lambda: FifoSender(DATABASE, "shop", to="billing"),
        "FifoSender.send",
        {"conn": CONNECTION, "payload": b""},
        "asend",
        conn=(_CONNECTIONS, "pass"),
        payload=([*_BYTES, (b"x" * 2**21, ValueError)], "bytes"),
    ),
    *_method(
        lambda: FifoSender(DATABASE, "shop", to="billing"),
        "FifoSender.unacknowledged",
        {},
        "aunacknowledged",
        limit=(_LIMITED, "write"),
    ),
    *_method(
        lambda: FifoSender(DATABASE, "shop", to="billing"),
        "FifoSender.resend",
        {"post": _deliver},
        "aresend",
        post=(_OTHERS, "function"),
        limit=(_LIMITED, "write"),
    ),
    *_method(
        lambda: FifoSender(DATABASE, "shop", to="billing"),
        "FifoSender.acknowledge",
        {},
        "aacknowledge",
        ack=([*_OTHERS, (("a", "b"), TypeError), (("a", "b", 1, 0, 1), ValueError)], "pass|write"),
    ),
    # DeferredCalls
    *_new(
        DeferredCalls,
        {"database": DATABASE, "name": "mail"},
        database=(_DATABASES, "pass a Database"),
        name=(_NUL, "write"),
        ttl=(_POSITIVE, "seconds"),
        delay=(_SECONDS, "seconds"),
        max_waiting=(_LIMITED, "write"),
        max_size=(_COUNTS, "write"),
        keep_dead=(_SECONDS, "seconds"),
        key=(_FUNCTIONS, "function"),
    ),
    *_method(
        lambda: DeferredCalls(DATABASE, "mail"),
        "DeferredCalls.run",
        {},
        function=(_OTHERS, "function"),
    ),
    (
        "durable.DeferredCalls.run(options)",
        lambda x: asyncio.run(DeferredCalls(DATABASE, "mail").run(print, **x)),
        [({"attempts": 0}, ValueError), ({"poll": "1"}, TypeError)],
        "write",
    ),
    *_method(
        lambda: DeferredCalls(DATABASE, "mail"),
        "DeferredCalls.dead",
        {},
        "adead",
        limit=(_LIMITED, "write"),
    ),
    *_method(
        lambda: DeferredCalls(DATABASE, "mail"),
        "DeferredCalls.retry",
        {},
        "aretry",
        dead=(_NUL, "write"),
    ),
    *_method(
        lambda: DeferredCalls(DATABASE, "mail"),
        "DeferredCalls.discard",
        {},
        "adiscard",
        stored=(_NUL, "write"),
    ),
    *_method(
        lambda: DeferredCalls(DATABASE, "mail"), "DeferredCalls.cleanup", {}, "acleanup", **_CLEANUP
    ),
    *_new(
        DeferredCallWorker,
        {"calls": DeferredCalls(DATABASE, "mail"), "function": _report},
        calls=([*_OTHERS, (DATABASE, TypeError)], "pass DeferredCalls"),
        function=(_OTHERS, "function"),
        guard=(_GUARDS, "pass a Guard"),
        concurrency=(_LIMITED, "write"),
        attempts=(_COUNTS, "write"),
        lease=(_POSITIVE, "seconds"),
        backoff=(_BACKOFFS, "seconds|delay|backoff"),
        poll=(_POSITIVE, "seconds"),
        ordered=(_FLAGS, "True or False"),
        give_up_on=(_ERRORS, "give_up_on="),
        rng=(_RNGS, "Random"),
    ),
]


def _given_by_seawall(name: str, *arguments: str) -> Iterable[str]:
    return (f"durable.{name}({argument})" for argument in arguments)


UNCHECKED_BY_DURABLE = frozenset(
    [
        # operations are Seawall's own, work of the user's is called as it is
        *_given_by_seawall("Database.run", "operation"),
        *_given_by_seawall("Database.arun", "operation"),
        *_given_by_seawall("Sqlite.run", "work"),
        *_given_by_seawall("Sqlite.arun", "work"),
        # what Seawall makes and hands out
        *_given_by_seawall("JobHandle", "claim"),
        # shown to operators, or stored as JSON
        *_given_by_seawall("Jobs.succeed", "result", "message"),
        *_given_by_seawall("Jobs.asucceed", "result", "message"),
        *_given_by_seawall("Jobs.fail", "error", "message"),
        *_given_by_seawall("Jobs.afail", "error", "message"),
        *_given_by_seawall("IdempotentRequest", "name", "claim", "idempotency", "never"),
        *_given_by_seawall("Once", "connection", "request", "terms", "count", "wait"),
        *_given_by_seawall("Received", "verdict", "messages", "ack"),
        # a job that `Jobs` has handed out, and what `Jobs.asubmit` checks
        *_given_by_seawall("JobsApi.accepted", "job", "request"),
        *_given_by_seawall("JobsApi.answer", "job"),
        *_given_by_seawall("JobsApi.submitted", "kind", "payload", "options"),
        # what may be anything: it is made fit to be shown
        *_given_by_seawall("JobHandle.progress", "message"),
    ]
)
"""What Seawall itself gives, or what may be anything."""
