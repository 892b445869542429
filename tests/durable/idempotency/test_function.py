"""Any function as one that is done once for each key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from seawall.context import idempotency_key, tenant
from seawall.durable import Database, Sqlite, migrate
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.errors import (
    AnswerNotKept,
    KeyInFlight,
    KeyMissing,
    KeyReused,
    LeaseLost,
    RecordedFailure,
)
from seawall.models.idempotency import Fresh
from seawall.testing import run_virtual
from tests.durable.conftest import Opening
from tests.durable.idempotency.test_idempotency import Time
from tests.support import let_pass


class Declined(Exception):
    """The card was declined."""


@pytest.fixture
def local(tmp_path: Path) -> Any:
    """Return an idempotency on SQLite, for functions that block."""
    source = Sqlite(tmp_path / "test.db")
    database = Database(source, name=f"local {tmp_path.name}")
    migrate(database)
    yield Idempotency(database)
    database.close()
    source.close()


def test_a_function_is_done_once_for_each_key(opening: Opening):
    """64 calls at once with one key are one execution; another key is another one."""

    async def main() -> None:
        async with opening() as database:
            done = []

            @Idempotency(database).idempotent(key="request", scope="whose", wait=30.0)
            async def charge(whose: str, request: str, cents: int = 5) -> dict[str, Any]:
                """Charge."""
                done.append((whose, request))
                await let_pass(0)
                return {"charged": cents, "n": len(done)}

            assert charge.__doc__ == "Charge."
            results = await asyncio.gather(*(charge("t", "r1") for _ in range(64)))
            assert results == [{"charged": 5, "n": 1}] * 64
            assert await charge("t", "r2") == {"charged": 5, "n": 2}
            assert await charge("other", "r1") == {"charged": 5, "n": 3}
            with pytest.raises(KeyReused):
                await charge("t", "r1", cents=6)

    asyncio.run(main())


def test_key_and_scope_come_from_the_context(local: Idempotency):
    """As a request's edge puts them there; without a key it is not done."""
    done = []

    @local.idempotent(operation="pay")
    def pay(cents: int) -> int:
        done.append(cents)
        return len(done)

    with pytest.raises(KeyMissing):
        pay(1)
    with idempotency_key("k"), pytest.raises(TypeError, match="unscoped=True"):
        pay(1)
    with tenant("t"), idempotency_key("k"):
        assert [pay(1), pay(1)] == [1, 1]
    with tenant("u"), idempotency_key("k"):
        assert pay(1) == 2


def test_functions_say_key_scope_and_payload(local: Idempotency):
    """Whatever a key is made of; methods and other arguments than JSON's, too."""

    class Till:
        @local.idempotent(
            key=lambda _self, thing: thing["id"],
            scope=lambda _self, _thing: "t",
            fingerprint=lambda _self, thing: repr(thing),
        )
        def pay(self, thing: Any) -> bytes:
            return b"\xff"

        @local.idempotent(key=lambda *_: "k", scope=lambda *_: "t")
        def sell(self, thing: Any) -> None:
            """Sell something."""

    assert [Till().pay({"id": "k", "x": {1}}) for _ in range(2)] == [b"\xff"] * 2
    with pytest.raises(KeyReused):
        Till().pay({"id": "k", "x": {2}})
    assert [Till().sell(1), Till().sell(1)] == [None, None]
    with pytest.raises(TypeError, match="write fingerprint="):
        Till().sell({1})


def test_what_a_method_is_called_on_is_no_payload(local: Idempotency):
    """Whatever the first argument is called, of an instance's method or of a class's."""
    once = local.idempotent(key="key", scope=lambda *_: "t")

    def passing(function: Any) -> Any:
        @wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args)

        return inner

    class Till:
        @once
        def pay(this, key: str, cents: int = 5) -> str:  # noqa: N805 - that is the point
            return f"paid {cents}"

        @passing
        @once
        def sell(this, key: str) -> str:  # noqa: N805
            return "sold"

        @classmethod
        @once
        def open(cls, key: str) -> str:
            return key + cls.__name__

        @classmethod
        @once
        def shut(kind, key: str) -> str:  # noqa: N804
            return key + kind.__name__

    class Fast(Till):
        def pay(self, key: str, cents: int = 5) -> str:
            return super().pay(key, cents)

    @once
    def late(cls: Any, key: str) -> str:
        return key + cls.__name__

    Till.late = classmethod(late)  # type: ignore[attr-defined]
    assert [Till().pay("a"), Fast().pay("a"), Till().sell("b")] == ["paid 5", "paid 5", "sold"]
    assert [Till.open("c"), Fast.open("c"), Fast().open("d")] == ["cTill", "cTill", "dFast"]
    assert [Till.shut("e"), Fast.shut("e")] == ["eTill", "eTill"]
    assert Till.late("f") == "fTill"  # type: ignore[attr-defined]
    with pytest.raises(KeyReused):
        Till().pay("a", 6)


def test_the_first_argument_of_no_method_is_payload(local: Idempotency):
    """A static method's and a function's is compared, though it is called as a method's is."""
    once = local.idempotent(key="key", scope=lambda *_: "t")

    class Order(dict[str, int]):
        @staticmethod
        @once
        def pay(order: Order, key: str) -> str:
            return f"{key} {order}"

    @once
    def book(cls: str, key: str) -> str:
        return key + cls

    assert Order.pay(Order(cents=5), "k") == "k {'cents': 5}"
    with pytest.raises(KeyReused):
        Order.pay(Order(cents=6), "k")
    assert book("economy", "k") == "keconomy"
    with pytest.raises(KeyReused):
        book("first", "k")


class Names:
    """A codec that takes anything."""

    def dumps(self, value: Any, /) -> bytes:
        return repr(value).encode()

    def loads(self, data: bytes, /) -> Any:
        return data


@pytest.mark.parametrize("codec", [None, Names()], ids=["json", "codec"])
def test_a_coroutine_that_nobody_awaits_is_not_recorded_as_done(local: Idempotency, codec: Any):
    """What a plain wrapper of an `async def` returns did not run: that is told at each call."""

    async def charge(key: str) -> None:
        """Never run."""

    def wrapper(key: str) -> Any:
        return charge(key)

    async def forgetful(key: str) -> Any:
        return charge(key)

    once = local.idempotent(key="key", scope=lambda *_: "t", keep=Exception, codec=codec)
    for _ in range(2):
        with pytest.raises(TypeError, match="write `async def`"):
            once(wrapper)("k")
        with pytest.raises(TypeError, match="write `async def`"):
            asyncio.run(once(forgetful)("k"))
    assert local.snapshot()["abandoned"] == 4


@pytest.mark.parametrize("after", [0.0, 15.0], ids=["before any renewal", "after one"])
def test_a_call_that_is_closed_renews_its_lease_no_more(local: Idempotency, after: float):
    """Dropped where nothing can be awaited, it lets its lease be over: the next one may begin."""
    found = local.reserve("t", "o", "k", None)
    renewed = []

    async def areserve(*_: Any, **__: Any) -> Any:
        return found

    async def arenew(claim: Any) -> bool:
        renewed.append(claim)
        return True

    local.areserve = areserve  # type: ignore[method-assign]
    local.arenew = arenew  # type: ignore[method-assign]

    @local.idempotent(key=lambda: "k", scope=lambda: "t", operation="o")
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> tuple[int, int]:
        call = work()
        call.send(None)
        await let_pass(after)
        before = len(renewed)
        call.close()
        await let_pass(100.0)
        return before, len(renewed)

    times = int(after > 0)
    assert run_virtual(main()) == (times, times)


def test_an_error_that_cannot_be_told_is_kept(local: Idempotency):
    """Its class is, with no text: what it says for itself must not be in the way of the record."""

    class Odd(Exception):
        def __str__(self) -> str:
            return self.args[5]

    @local.idempotent(key="key", scope=lambda *_: "t", keep=Odd)
    def work(key: str) -> None:
        raise Odd(key)

    with pytest.raises(Odd):
        work("k")
    with pytest.raises(RecordedFailure) as caught:
        work("k")
    assert (caught.value.kind, caught.value.message) == ("Odd", "")


def test_failures_are_not_kept_unless_said(opening: Opening):
    """The next one runs; errors of `keep` are raised again, as recorded."""

    async def main() -> None:
        async with opening() as database:
            idempotency = Idempotency(database)
            done: list[type[BaseException]] = []
            say = {"key": lambda *_: "k", "scope": lambda *_: "t"}

            @idempotency.idempotent(keep=Declined, **say)
            async def pay(error: str) -> str:
                kind = {"v": ValueError, "d": Declined, "c": asyncio.CancelledError}[error]
                done.append(kind)
                raise kind("no money")

            for error, kind in (("v", ValueError), ("c", asyncio.CancelledError), ("d", Declined)):
                with pytest.raises(kind, match="no money"):
                    await pay(error)
            with pytest.raises(RecordedFailure) as caught:
                await pay("d")
            assert (caught.value.kind, caught.value.message) == ("Declined", "no money")
            assert len(done) == 3
            assert idempotency.snapshot()["abandoned"] == 2

    asyncio.run(main())


def test_what_cannot_be_kept_is_not_done_again(local: Idempotency):
    """A result that is too large, or none that can be stored, is done all the same."""
    done = []
    say: dict[str, Any] = {"scope": lambda *_: "t", "key": "key"}

    @local.idempotent(**say)
    def odd(key: str) -> object:
        done.append(key)
        return object()

    @local.idempotent(**say)
    def large(key: str) -> str:
        done.append(key)
        return "x" * (1 << 21)

    with pytest.raises(TypeError, match="cannot be stored"):
        odd("k")
    with pytest.raises(AnswerNotKept):
        odd("k")
    assert len(large("k")) == 1 << 21
    with pytest.raises(AnswerNotKept):
        large("k")
    assert done == ["k", "k"]


def test_a_codec_writes_results(local: Idempotency):
    """What JSON has not, somebody else may write down."""

    class Tuples:
        def dumps(self, value: Any, /) -> bytes:
            return json.dumps(value).encode()

        def loads(self, data: bytes, /) -> Any:
            return tuple(json.loads(data))

    @local.idempotent(key="key", scope=lambda *_: "t", codec=Tuples())
    def pair(key: str) -> Any:
        return (1, key)

    assert [pair("k"), pair("k")] == [(1, "k"), (1, "k")]


def test_threads_have_one_execution(local: Idempotency):
    """Sixteen threads at once, blocking: one runs, the others are told, or wait."""
    begun = Barrier(16)
    done, results = [], []

    @local.idempotent(key="key", scope=lambda *_: "t", wait=30.0)
    def work(key: str) -> int:
        done.append(key)
        return 7

    def one() -> None:
        begun.wait()
        results.append(work("k"))

    threads = [Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (done, results) == (["k"], [7] * 16)


def test_who_does_not_wait_is_told(local: Idempotency):
    """A call inside a call with the same key finds it in flight."""

    @local.idempotent(key="key", scope=lambda *_: "t", fingerprint=None)
    def work(key: str, inner: Callable[[], Any] | None = None) -> Any:
        return inner() if inner else key

    with pytest.raises(KeyInFlight) as caught:
        work("k", lambda: work("k"))
    assert caught.value.retry_after == pytest.approx(30, abs=5)
    assert work("k") == "k"


def test_a_lease_is_renewed_while_it_runs(opening: Opening):
    """Work of many leases is not taken over: each renewal lets it begin anew."""

    async def main() -> None:
        async with opening() as database:
            time = Time(database)
            await time.begin()
            idempotency = Idempotency(database, lease=0.03)
            renewed = asyncio.Event()
            times = 0
            plain = idempotency.arenew

            async def arenew(claim: Any) -> bool:
                nonlocal times
                await time.advance(0.02)
                good = await plain(claim)
                times += 1
                if times == 5:
                    renewed.set()
                return good

            idempotency.arenew = arenew  # type: ignore[method-assign]

            @idempotency.idempotent(key=lambda: "k", scope=lambda: "t", operation="o")
            async def work() -> int:
                await renewed.wait()
                assert not isinstance(await idempotency.areserve("t", "o", "k", None), Fresh)
                return 1

            assert await work() == 1

    asyncio.run(main())


@pytest.mark.parametrize("error", [None, Declined("no money")], ids=["result", "kept error"])
def test_who_was_taken_over_does_not_tell_its_own(local: Idempotency, error: Exception | None):
    """Another one's is the answer by then; so it says that the lease is lost."""

    @local.idempotent(
        key="key", scope=lambda *_: "t", operation="o", fingerprint=None, keep=Declined
    )
    def work(key: str, claims: Any) -> int:
        claims()
        if error is not None:
            raise error
        return len(key)

    def take() -> None:
        from seawall.durable.database.connections import TextQuery

        def steps() -> Any:
            yield TextQuery("UPDATE {idempotency} SET lease_until = 0", {})

        local.database.run(steps)
        found = local.reserve("t", "o", "k", None)
        assert isinstance(found, Fresh)
        local.complete(found.claim, 2)

    with pytest.raises(LeaseLost) as caught:
        work("k", take)
    assert caught.value.__cause__ is error
    assert work("k", take) == 2


def test_a_cancelled_call_writes_down_what_it_did(opening: Opening):
    """Cancelled while its answer is stored, it is stored all the same."""

    async def main() -> None:
        async with opening() as database:
            idempotency = Idempotency(database)
            plain = idempotency.acomplete
            storing = asyncio.Event()

            async def acomplete(*args: Any, **options: Any) -> bool:
                storing.set()
                await let_pass(0)
                return await plain(*args, **options)

            idempotency.acomplete = acomplete  # type: ignore[method-assign]

            @idempotency.idempotent(key=lambda: "k", scope=lambda: "t")
            async def work() -> int:
                return 7

            task = asyncio.create_task(work())
            await storing.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await work() == 7
            assert idempotency.snapshot()["replays"] == 1

    asyncio.run(main())


def test_bad_arguments_are_told(local: Idempotency):
    """When the function is decorated, and not when it is called."""

    def function(key: str) -> None:
        """Do nothing."""

    def generator(key: str) -> Any:
        yield key

    for options, what in (
        ({"key": "no_such"}, "the function has"),
        ({"key": 5}, "pass a function"),
        ({"scope": "no_such"}, "the function has"),
        ({"keep": [BaseException]}, "classes of errors"),
        ({"fingerprint": "key"}, "pass a function"),
        ({"wait": -1}, "wait"),
        ({"operation": ""}, "operation"),
    ):
        with pytest.raises((TypeError, ValueError), match=what):
            local.idempotent(**options)(function)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generator"):
        local.idempotent(key="key")(generator)
    for bad in ({"lease": 0}, {"lease": 10, "ttl": 10}, {"max_body": -1}, {"unscoped": 1}):
        with pytest.raises((TypeError, ValueError)):
            Idempotency(local.database, **bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Database"):
        Idempotency("x")  # type: ignore[arg-type]
    for scope, operation, key, payload in (
        ("", "o", "k", None),
        (None, "o", "k", None),
        (5, "o", "k", None),
        ("s\0", "o", "k", None),
        ("s", "", "k", None),
        ("s", "o", "", None),
        ("s", "o", "k" * 256, None),
        ("s", "o", "ä", None),
        ("s", "o", "k", {7}),
        ("s" * 513, "o", "k", None),
    ):
        with pytest.raises((TypeError, ValueError)):
            local.reserve(scope, operation, key, payload)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="claim"):
        local.complete("x", 1)  # type: ignore[arg-type]
    assert repr(local) == "<Idempotency 'idempotency': lease=30, ttl=86400>"
    open_to_all = Idempotency(local.database, unscoped=True)
    assert isinstance(open_to_all.reserve(None, "o", "k", None), Fresh)
