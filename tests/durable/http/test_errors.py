"""What an app raises, and what it answers that no server could send: what is done again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from seawall import errors
from seawall.durable.http.completion import response_of
from seawall.durable.http.middleware import IdempotentRequests
from seawall.models.idempotency import Answer
from seawall.web.asgi_types import Message
from tests.durable.conftest import Opening, opening_by
from tests.durable.http.support import Shop, edge_of, post


@pytest.fixture
def quick(tmp_path: Path) -> Opening:
    """Return what opens a database for tests of what no database changes."""
    return opening_by("sqlite", None, tmp_path)  # type: ignore[arg-type]


def counted(app: IdempotentRequests) -> dict[str, int]:
    """Return what was counted, without what was not."""
    return {name: count for name, count in app.snapshot().items() if count}


# What is raised

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.SeawallError)
]


class Raising:
    """An app that has its effect, and then raises."""

    def __init__(self, error: Exception, cause: Exception | None = None) -> None:
        self.error = error
        self.cause = cause
        self.runs = 0

    async def __call__(self, _scope: Any, _receive: Any, _send: Any) -> None:
        """Do it."""
        self.runs += 1
        raise self.error from self.cause

    async def asked_twice(self, opening: Opening) -> list[list[Message]]:
        """Return what each of two requests was sent before the error came out, if it did."""
        sent: list[list[Message]] = [[], []]
        async with edge_of(opening, self) as middleware:
            for messages in sent:
                with suppress(type(self.error)):
                    await post(middleware, on_send=messages.append)
        return sent


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_only_refusals_are_done_again(quick: Opening, kind: type[errors.SeawallError]):
    """Every error of ours is kept as failed, but for those which say that nothing was tried."""
    app = Raising(kind("after the effect"))
    first, again = asyncio.run(app.asked_twice(quick))
    if issubclass(kind, errors.Rejected):
        assert app.runs == 2
        assert first == again == []  # the edge outside answers
    else:
        assert app.runs == 1
        assert first[0]["status"] >= 500
        assert b"retry-after" not in dict(first[0]["headers"])
        assert again[0]["headers"] == [*first[0]["headers"], (b"idempotent-replayed", b"true")]
        assert again[1]["body"] == first[1]["body"]


@pytest.mark.parametrize(
    ("cause", "runs"),
    [
        (errors.CircuitOpen("open", retry_after=3.0), 2),
        (errors.StoreUnavailable("away"), 1),
        (errors.UnknownJob("none"), 1),
        (None, 1),
    ],
)
def test_an_error_of_an_sdk_is_what_it_wraps(quick: Opening, cause: Exception | None, runs: int):
    """A refusal that a client's library has wrapped is one; all else that it raises is none."""
    app = Raising(httpx.ConnectError("no answer"), cause)
    asyncio.run(app.asked_twice(quick))
    assert app.runs == runs


# What no server could send


UNSENDABLE: list[tuple[int, list[tuple[bytes, bytes]]]] = [
    (700, []),
    (103, []),
    (201, [(b"x-note", b"a\nb")]),
    (201, [(b"set-cookie", b"a=1\r\nx-evil: 1")]),
    (201, [(b"x note", b"a")]),
    (201, [(b"x-\xe9", b"a")]),
    (201, [(b"x:note", b"a")]),
    (201, [(b"", b"a")]),
]


@pytest.mark.parametrize(("status", "headers"), UNSENDABLE)
def test_what_no_server_could_send_has_failed(quick: Opening, status: int, headers: Any):
    """It is an error of the app's, told at once and kept: nothing waits, nothing runs again."""
    shop = Shop(status=status, headers=headers)

    async def main() -> None:
        async with edge_of(quick, shop) as app:
            with pytest.raises(ValueError, match=r"^(status=|headers: )"):
                await post(app)
            assert (await post(app)).status == 500
            assert len(shop.orders) == 1
            assert counted(app) == {"executed": 1, "failed": 1, "replays": 1}

    asyncio.run(main())


def test_an_app_may_answer_otherwise(quick: Opening):
    """Where it hears that an answer cannot be sent it may send another, and that is kept."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 201}
        with pytest.raises(ValueError, match="line's end"):
            await send({**start, "headers": [(b"x-note", b"two\nlines")]})
        await send({**start, "headers": [(b"x-note", b"two lines")]})
        await send({"type": "http.response.body", "body": b"done"})

    async def main() -> None:
        async with edge_of(quick, app) as middleware:
            for _ in range(2):
                answer = await post(middleware)
                assert (answer.status, answer.headers["x-note"]) == (201, "two lines")
            assert counted(middleware) == {"executed": 1, "replays": 1}

    asyncio.run(main())


@pytest.mark.parametrize(("status", "headers"), UNSENDABLE)
def test_nothing_is_completed_with_what_no_server_could_send(status: int, headers: Any):
    """`complete` raises before anything is committed: else every repeat would be unreadable."""
    with pytest.raises(ValueError, match=r"^(status=|headers: )"):
        response_of(Answer(status, headers, b""))
    response = Response(status_code=status)
    response.raw_headers = headers
    with pytest.raises(ValueError, match=r"^(status=|headers: )"):
        response_of(response)
