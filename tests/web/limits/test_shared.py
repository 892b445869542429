"""Request limits that all pods share, in a real store: together, given back, and without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import http_sfv
import pytest
import redis

from seawall import RateLimited, subscribe
from seawall.clock import SYSTEM, VirtualClock
from seawall.events import StoreModeChanged
from seawall.models.rate.rates import whole_microseconds
from seawall.redis.store import RedisStore
from seawall.web.limits import LimitGrant, RequestLimit, RequestLimits
from seawall.web.principals import api_key, user
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from tests.redis.support import FrozenClock, Server, eventually
from tests.support import let_pass
from tests.web.support import http_scope

pytestmark = pytest.mark.alone

Stores = Callable[..., RedisStore]


def request(who: str = "ann", client: str = "10.0.0.1", **headers: str) -> Incoming:
    given = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return Incoming(http_scope(client=(client, 1), headers=given, user_id=who), Trust())


def by_user(incoming: Incoming) -> str:
    return str(incoming.scope["user_id"])


async def admitted(limits: RequestLimits, calls: int, incoming: Incoming) -> int:
    """Return how many of so many requests, at once, are let in."""
    asked = [limits.aadmit(incoming) for _ in range(calls)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(answer, (LimitGrant, RateLimited)) for answer in answers), answers
    return sum(isinstance(answer, LimitGrant) for answer in answers)


async def refusal(limits: RequestLimits, incoming: Incoming) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        await limits.aadmit(incoming)
    return caught.value


def told(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


def test_pods_count_together(new_store: Stores) -> None:
    """Each user has one limit on all pods, and each answer tells what is left of it there."""

    async def scene() -> None:
        pods = [
            RequestLimits(
                RequestLimit("6/h", by=user(by_user), tiers={"premium": "8/h"}),
                RequestLimit("100/h", by="address"),
                RequestLimit("9k/s", by=None, local=True),
                shared=new_store(),
                name="shop",
                tier=lambda incoming: incoming.scope["user_id"].partition("-")[0],
            )
            for _ in range(2)
        ]
        assert all(pod.uses_store for pod in pods)
        granted = [await pod.aadmit(request()) for pod in pods]
        assert [told(one.headers())["ratelimit"] for one in granted] == [
            '"user";r=5;t=600',
            '"user";r=4;t=600',
        ]
        assert [await admitted(pod, 5, request()) for pod in pods] == [4, 0]
        assert [await admitted(pod, 9, request("premium-1")) for pod in pods] == [8, 0]
        error = await refusal(pods[1], request())
        assert error.own_limit
        assert (error.limit, error.violated) == ("user", ("user",))
        assert error.retry_after == pytest.approx(600, abs=5)
        fields = told(list(error.headers))
        assert fields["ratelimit-policy"] == '"user";q=6;w=3600, "address";q=100;w=3600'
        assert fields["ratelimit"].startswith('"user";r=0;t=')
        shown = pods[1].snapshot()
        assert shown["limits"]["user"]["over"] == 15  # of both tiers
        assert shown["shared"]["sharing"] == "exact"

    asyncio.run(scene())


def test_threads_count_with_the_other_pods(new_store: Stores) -> None:
    """A thread blocks until the store has answered; what a refusal took is given back."""
    pods = [
        RequestLimits(
            RequestLimit("3/h", by="address"),
            RequestLimit("5/h", by=user(by_user), local=True),
            shared=new_store(),
            name="threads",
        )
        for _ in range(2)
    ]
    first = pods[0].admit(request())
    assert told(first.headers())["ratelimit"].startswith('"address";r=2;')
    pods[1].admit(request())
    pods[0].admit(request())
    for pod in pods:
        for _ in range(9):
            with pytest.raises(RateLimited) as caught:
                pod.admit(request())
            assert caught.value.violated == ("address",)  # by user there is still something left
            assert caught.value.headers
    assert asyncio.run(admitted(pods[1], 2, request(client="10.0.0.2"))) == 2
    assert isinstance(pods[0].admit(request(client="10.0.0.2")), LimitGrant)


@pytest.mark.parametrize(
    "algorithm", ["token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"]
)
def test_the_store_tells_what_memory_would(
    store: RedisStore, frozen: FrozenClock, algorithm: Any
) -> None:
    """The same requests at the same instants: admitted or refused alike, and told the same."""
    rng = Random(algorithm)
    clock = VirtualClock(frozen.now_us / 1e6)
    rules = [
        RequestLimit("4/10s", by="address", algorithm=algorithm),
        RequestLimit("5/10s", by=user(by_user), algorithm=algorithm),
    ]
    local = RequestLimits(*rules, clock=clock)
    shared = RequestLimits(*rules, shared=store, name=algorithm)
    assert shared._shared is not None
    sharing = shared._shared.policy._sharing
    assert sharing is not None

    async def told_by(limits: RequestLimits, incoming: Incoming) -> object:
        sharing.exhausted.clear()  # it is believed in real time, which stands still here
        try:
            granted = await limits.aadmit(incoming)
        except RateLimited as error:
            return error.limit, round(error.retry_after or 0.0, 3)
        return granted.headers()

    async def scene() -> None:
        for _ in range(40):
            pause = rng.choice([0.0, 0.0, 0.7, 4.0])
            clock.advance(pause)
            frozen.set(frozen.now_us + int(pause * 1e6))
            incoming = request(rng.choice("ab"), f"10.0.0.{rng.choice('12')}")
            assert await told_by(local, incoming) == await told_by(shared, incoming)

    asyncio.run(scene())


def test_what_costs_nothing_is_not_asked_for(store: RedisStore) -> None:
    """A limit that a request takes nothing from is not told of; with none left, nobody is asked."""

    async def scene() -> None:
        limits = RequestLimits(
            RequestLimit("4/h", by="address", cost=lambda incoming: int(incoming.path != "/free")),
            RequestLimit(
                "9/h", by=user(by_user), cost=lambda incoming: int(incoming.path != "/none")
            ),
            shared=store,
            name="free",
        )
        free, none = request(), request()
        free.scope["path"], none.scope["path"] = "/free", "/none"
        assert told((await limits.aadmit(free)).headers())["ratelimit"].startswith('"user";r=8;')
        assert told((await limits.aadmit(none)).headers())["ratelimit"].startswith('"address";r=3;')
        assert await admitted(limits, 9, none) == 3
        assert await admitted(limits, 9, free) == 8

    asyncio.run(scene())


def test_a_shared_limit_by_user_does_not_apply_to_nobody(store: RedisStore) -> None:
    """The store counts what applies; where nothing does, it is not asked."""

    async def scene() -> None:
        by = user(lambda incoming: incoming.scope["user_id"] or None)
        limits = RequestLimits(RequestLimit("2/h", by=by), shared=store, name="nobody")
        assert await admitted(limits, 9, request("")) == 9
        assert await admitted(limits, 9, request()) == 2
        both = RequestLimits(
            RequestLimit("2/h", by=by),
            RequestLimit("4/h", by="address"),
            shared=store,
            name="both-nobody",
        )
        first = await both.aadmit(request(""))
        assert told(first.headers())["ratelimit"].startswith('"address";r=3;')
        assert await admitted(both, 9, request("")) == 3
        assert await admitted(both, 9, request("ann", client="10.0.0.2")) == 2

    asyncio.run(scene())


def test_what_the_store_refuses_is_given_back_here(store: RedisStore) -> None:
    """Local and shared limits are taken together, too."""

    async def scene() -> None:
        limits = RequestLimits(
            RequestLimit("2/h", by=user(by_user)),
            RequestLimit("10/h", by="address", local=True),
            RequestLimit("99/h", by="address", soft=True, name="watched"),
            shared=store,
            name="both",
        )
        assert await admitted(limits, 50, request()) == 2
        assert await admitted(limits, 50, request("bob")) == 2
        granted = await limits.aadmit(request("eve"))
        assert told(granted.headers())["ratelimit"].startswith('"user";r=1;')
        granted.open_accounts()  # a store keeps no account of it, and does not mind
        # What was given back a moment later is less by that moment.
        assert local_left(limits, "@10.0.0.1") in (4, 5)
        granted.cancel()
        granted.cancel()

        async def freed() -> bool:
            return await admitted(limits, 2, request("eve")) > 0

        for _ in range(200):  # the background tells the store
            if await freed():
                break
            await let_pass(0.01)
        assert limits.snapshot()["soft"]["watched"]["over"] == 0

    asyncio.run(scene())


async def cancelled_midway(limits: RequestLimits) -> None:
    """Cancel requests at each step on their way through the limits."""
    for steps in range(12):
        task = asyncio.ensure_future(limits.aadmit(request(f"user-{steps}")))
        for _ in range(steps):
            await let_pass(0)
        task.cancel()
        answer = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(answer, LimitGrant):
            answer.cancel()


def local_left(limits: RequestLimits, key: str | None = None) -> int:
    group = limits._local
    assert group is not None
    left: int = group.policy._meters.all[0].standing(key, whole_microseconds(SYSTEM.now()))[0]
    return left


def test_a_cancelled_request_gives_back_what_it_took(store: RedisStore) -> None:
    """Wherever it was on its way: nothing stays taken, here or in the store."""

    async def scene() -> None:
        limits = RequestLimits(
            RequestLimit("5/h", by="address"),
            RequestLimit("20/h", by=None, local=True),
            shared=store,
            name="c",
        )
        await cancelled_midway(limits)
        assert local_left(limits) in (19, 20)
        left = -1
        for _ in range(300):
            if left >= 3:
                break
            await let_pass(0.01)  # what came too late is given back by the background
            try:
                granted = await limits.aadmit(request())
            except RateLimited:
                continue
            state = http_sfv.Item()
            state.parse(dict(granted.headers())[b"ratelimit"])
            left = state.params["r"]
            granted.cancel()
        assert left >= 3

    asyncio.run(scene())


def test_without_giving_back_cancelled_requests_would_stay_taken(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same scene, with a way out that forgets what was taken."""
    monkeypatch.setattr(LimitGrant, "cancel", lambda *_: None)

    async def scene() -> None:
        limits = RequestLimits(
            RequestLimit("5/h", by="address"),
            RequestLimit("20/h", by=None, local=True),
            shared=store,
            name="c",
        )
        await cancelled_midway(limits)
        assert local_left(limits) not in (19, 20)  # how many stay depends on the machine

    asyncio.run(scene())


def test_no_api_key_is_kept_in_the_store(store: RedisStore, client: redis.Redis) -> None:
    """Its hash is: the same for every pod."""

    async def scene() -> None:
        limits = RequestLimits(RequestLimit("5/h", by=api_key()), shared=store, name="keys")
        await limits.aadmit(request(x_api_key="sk-very-secret"))

    asyncio.run(scene())
    kept = b" ".join(client.scan_iter(match=f"{store._core.prefix}:*", count=1000))
    assert b"keys" in kept
    assert b"secret" not in kept


def test_leased_limits_tell_what_they_are_and_not_what_is_left(new_store: Stores) -> None:
    """What other pods have spent is not known without asking, which is what leases spare."""

    async def scene() -> None:
        limits = RequestLimits(
            RequestLimit("50/h", by="address"), shared=new_store(), sharing="leased", name="leased"
        )
        granted = await limits.aadmit(request())
        assert "ratelimit-policy" in told(granted.headers())
        assert await admitted(limits, 100, request()) == 49
        error = await refusal(limits, request())
        assert error.own_limit
        assert told(list(error.headers))["ratelimit"].startswith('"address";r=0')

    asyncio.run(scene())


def test_shared_limits_have_a_name_that_no_others_have(store: RedisStore) -> None:
    """Else those of a route and those of the edge would count together without anybody's wish."""
    with pytest.raises(TypeError, match="write name='orders', too; pods with this name count"):
        RequestLimits(RequestLimit("5/h", by="address"), shared=store)
    first = RequestLimits(RequestLimit("5/h", by="address"), shared=store, name="one")
    again = RequestLimits(RequestLimit("5/h", by="address"), shared=store, name="one")
    assert first.name == again.name
    with pytest.raises(ValueError, match="has other limits of that name on the same store"):
        RequestLimits(RequestLimit("60/h", by="address"), shared=store, name="one")
    del first, again
    RequestLimits(RequestLimit("60/h", by="address"), shared=store, name="one")


@pytest.mark.parametrize("failing", ["local", "open", "closed"])
def test_without_the_store_it_does_as_it_was_told(
    server: Server, new_store: Stores, failing: Any
) -> None:
    """Within the store's timeout, and says so; it is nobody's own fault then."""
    heard: list[StoreModeChanged] = []
    stop = subscribe(heard.append, StoreModeChanged)

    async def scene() -> None:
        store = new_store(url=server.url, timeout=0.2)
        limits = RequestLimits(
            RequestLimit("3/h", by="address"),
            RequestLimit("50/h", by=None, local=True),
            shared=store,
            name="edge",
            on_store_failure=failing,
        )
        await limits.aadmit(request(client="10.0.0.9"))
        server.freeze()
        try:
            for _ in range(4):
                began = SYSTEM.now()
                await asyncio.gather(limits.aadmit(request()), return_exceptions=True)
                assert SYSTEM.now() - began < 0.2 + 0.3
        finally:
            server.thaw()
            server.kill()
        eventually(lambda: not store.up)
        told_of = [(event.guard, event.before, event.after) for event in heard]
        assert told_of == [("edge", "shared", failing)]
        let_in = await admitted(limits, 10, request(client="10.0.0.2"))
        assert let_in == {"local": 3, "open": 10, "closed": 0}[failing]
        if failing == "closed":
            error = await refusal(limits, request())
            assert not error.own_limit
            assert error.retry_after == 1.0
            assert (error.limit, error.violated) == ("", ())
            assert limits.snapshot()["limits"]["address"]["over"] == 0

    try:
        asyncio.run(scene())
    finally:
        stop()
