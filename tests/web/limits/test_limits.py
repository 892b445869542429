"""Request limits: who is told apart, what is taken together, who is refused and what is bounded."""

from __future__ import annotations

import threading
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Bulkhead, RateLimit, RateLimited, subscribe
from seawall.context import tenant, tier
from seawall.events import SoftLimitExceeded
from seawall.models.rate.rates import whole_microseconds
from seawall.policies.rate_limit import meters as meter_module
from seawall.redis.keys import key_part
from seawall.testing import run_virtual, virtual_time
from seawall.web import principals
from seawall.web.edge import Edge
from seawall.web.limits import LimitGrant, RequestLimit, RequestLimits, groups
from seawall.web.principals import address_and_route, api_key, user
from seawall.web.request import Incoming
from seawall.web.routes import OTHER, Routes
from seawall.web.trust import Trust
from tests.support import falsified, new_guard
from tests.web.support import Answer, ask, http_scope, text_app

TRUST = Trust()


def request(
    path: str = "/", *, client: str = "10.0.0.1", user: str | None = None, **headers: str
) -> Incoming:
    """Return a request from that address; `user` is what an outer layer has found out."""
    given = [(name.replace("_", "-"), value) for name, value in headers.items()]
    scope = http_scope(path, headers=given, client=(client, 1234), user_id=user)
    return Incoming(scope, TRUST)


def by_user(incoming: Incoming) -> str | None:
    """Return the user that an outer layer has found out."""
    found: str | None = incoming.scope["user_id"]
    return found


def refused(limits: RequestLimits, incoming: Incoming) -> RateLimited | None:
    """Return the refusal of a request; None if it was admitted."""
    try:
        limits.admit(incoming)
    except RateLimited as error:
        return error
    return None


def admitted(limits: RequestLimits, calls: int, incoming: Incoming) -> int:
    """Return how many of so many such requests are let in at this instant."""
    return sum(refused(limits, incoming) is None for _ in range(calls))


def left(limits: RequestLimits) -> list[int]:
    """Return what is left of each local limit for the requests that these tests make."""
    group = limits._local
    assert group is not None
    now = whole_microseconds(group._now())
    return [
        meter.standing(place, now)[0]
        for meter in group.policy._meters.all
        for place in ([None] if meter.limit.key is None else sorted(meter.states))
    ]


# For whom


def test_each_principal_has_a_limit_of_its_own() -> None:
    """Users, tenants, API keys, addresses and addresses at routes are told apart."""
    with virtual_time():
        users = RequestLimits(RequestLimit("2/min", by=user(by_user)))
        assert admitted(users, 5, request(user="ann")) == 2
        assert admitted(users, 5, request(user="bob")) == 2
        keys = RequestLimits(RequestLimit("2/min", by=api_key()))
        assert admitted(keys, 5, request(x_api_key="one")) == 2
        assert admitted(keys, 5, request(x_api_key="two")) == 2
        tenants = RequestLimits(RequestLimit("2/min", by="tenant"))
        for name in ("acme", "umbrella"):
            with tenant(name):
                assert admitted(tenants, 5, request()) == 2
        addresses = RequestLimits(RequestLimit("2/min", by="address"))
        assert admitted(addresses, 5, request(client="10.0.0.1")) == 2
        assert admitted(addresses, 5, request(client="10.0.0.2")) == 2
        assert admitted(addresses, 5, request(client="2001:db8::1")) == 2
        assert admitted(addresses, 5, request(client="2001:db8::2")) == 0  # of the same /64
        routes = RequestLimits(
            RequestLimit("2/min", by=address_and_route("/search", "/orders/{id}"))
        )
        assert admitted(routes, 5, request("/search")) == 2
        assert admitted(routes, 5, request("/orders/7")) == 2
        assert admitted(routes, 5, request("/orders/8")) == 0
        assert admitted(routes, 5, request("/a")) == 2
        assert admitted(routes, 5, request("/b")) == 0  # both are "other"
        assert admitted(routes, 5, request("/search", client="10.0.0.2")) == 2
        everybody = RequestLimits(RequestLimit("3/min", by=None))
        assert admitted(everybody, 2, request(client="10.0.0.1")) == 2
        assert admitted(everybody, 2, request(client="10.0.0.2")) == 1


def test_who_is_unknown_is_limited_by_address() -> None:
    """Neither without a limit, nor in one bucket with everybody else who is unknown."""
    with virtual_time():
        for by in (lambda _: None, api_key(), "tenant"):
            limits = RequestLimits(RequestLimit("2/min", by=by))
            assert admitted(limits, 5, request(client="10.0.0.1")) == 2
            assert admitted(limits, 5, request(client="10.0.0.2")) == 2


def left_by_a_namesake() -> int:
    """Return how many requests of an address are let in after those of users called like it."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("2/min", by=user(by_user), otherwise="address"))
        for name in ("10.0.0.1", "@10.0.0.1", "=10.0.0.1"):
            assert admitted(limits, 5, request(user=name, client="10.0.0.9")) == 2
        return admitted(limits, 5, request())


def test_a_user_cannot_be_called_like_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a name such as "10.0.0.1" takes nothing from those who come from there."""
    assert left_by_a_namesake() == 2

    def as_it_is(principal: Any, _otherwise: Any, incoming: Incoming) -> Any:
        return principal(incoming) or incoming.client

    monkeypatch.setattr(principals, "key_of", as_it_is)
    assert left_by_a_namesake() == 0


def test_made_up_api_keys_count_as_none() -> None:
    """With `known`, a new key for each request is no fresh limit for each request."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("2/min", by=api_key(known={"right"}.__contains__)))
        assert sum(admitted(limits, 1, request(x_api_key=f"k{n}")) for n in range(9)) == 2
        assert admitted(limits, 9, request(x_api_key="right")) == 2


def kept_and_shown() -> tuple[list[str], str]:
    """Return the keys that are kept of a request with a secret, and all that is shown of it."""
    with virtual_time():
        limits = RequestLimits(
            RequestLimit("2/min", by=api_key()), RequestLimit("2/min", by=user(by_user))
        )
        incoming = request(x_api_key="sk-very-secret", user="u" * 5000)
        granted = limits.admit(incoming)
        assert refused(limits, incoming) is None
        error = refused(limits, incoming)
        group = limits._local
        assert group is not None
        kept = [str(key) for meter in group.policy._meters.all for key in meter.states]
        return kept, f"{kept} {limits!r} {limits.snapshot()} {granted!r} {error!r} {vars(error)}"


def test_no_api_key_and_no_long_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept in memory, and would be in a store, is a hash: of one length."""
    kept, shown = kept_and_shown()
    assert len(kept) == 2
    assert all(len(key) <= principals.LONGEST + 1 for key in kept)
    assert "secret" not in shown
    monkeypatch.setattr(principals, "digest", str)
    kept, shown = kept_and_shown()
    assert max(map(len, kept)) > 5000
    assert "secret" in shown


class Name(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 7


class Plan(Enum):
    FREE = 1


PRINCIPALS: list[Any] = [
    "7", 7, b"7", ("7",), ("7", 7), (("7",), 7), (7, b"7"), Plan.FREE, ("1:=", ""), ("", "1:="),
    UUID(int=7), 10**5000, b"7" * 500, ("7" * 500, 7), "7" * 500, "@10.0.0.1",
]  # fmt: skip


def colliding() -> list[str]:
    """Return the ids that share a bucket with a longer one, whose hash they spell."""
    found: list[Any] = [None]
    with virtual_time():
        limits = RequestLimits(RequestLimit("1/h", by=lambda _: found[0], name="own"))
        for long in ("u" * 65, b"7" * 500, ("u" * 65, 7), 10**500):
            found[0] = long
            assert admitted(limits, 2, request()) == 1
        assert limits._local is not None
        (meter,) = limits._local.policy._meters.all
        spelled = [key[start:] for key in list(meter.states) for start in range(4)]
        assert len({key_part(key) for key in (*meter.states, *spelled)}) == len(spelled)
        collided = []
        for found[0] in spelled:
            if not admitted(limits, 1, request()):
                collided.append(found[0])
        return collided


def test_no_short_id_spells_the_key_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes are keys of their own kind, here and so in a store."""
    assert colliding() == []

    def old_key(principal: Any, _otherwise: Any, incoming: Incoming) -> Any:
        text = str(principal(incoming))
        return "=" + (text if len(text) <= principals.LONGEST else principals.digest(text))

    monkeypatch.setattr(principals, "key_of", old_key)
    assert len(colliding()) == 4


def test_a_principal_is_text_a_number_and_their_like() -> None:
    """All of them are different keys, and short ones; nothing else is one."""
    with virtual_time():
        found: list[Any] = [None]
        limits = RequestLimits(RequestLimit("2/min", by=lambda _: found[0], name="own"))
        for found[0] in PRINCIPALS:
            assert admitted(limits, 5, request()) == 2, found
        for found[0] in (None, "", Name("")):
            assert admitted(limits, 5, request(client="10.0.0.7")) == 2 * (found == [None])
        for found[0] in (Name("7"), Name("7" * 500)):  # as the text that it is
            assert admitted(limits, 5, request()) == 0
        assert limits._local is not None
        (meter,) = limits._local.policy._meters.all
        assert all(type(key) is str and len(key) < 70 for key in meter.states)
        coroutine = asks(request())
        for found[0] in (coroutine, object(), 0.5, [], (1, [])):
            with pytest.raises(TypeError, match=r"by= returned \w+: return text, bytes, a whole"):
                limits.admit(request())
        coroutine.close()


def test_a_rate_makes_a_name_without_spaces() -> None:
    """A limit of a function that has no name of its own is called like its rate."""
    names = [RequestLimit(rate, by=lambda _: "x").name for rate in ("10 / min", "600/min", "5 /s")]
    assert names == ["10/min", "600/min", "5/s"]


def test_routes_are_those_below_the_root() -> None:
    """A root path that the server or a mount puts in front is no part of a route."""
    by = address_and_route("/search")
    incoming = request("/api/search")
    assert by(incoming) == "10.0.0.1 other"
    incoming.scope["root_path"] = "/api"
    assert by(incoming) == "10.0.0.1 /search"


PATHS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(["orders", "search", "7", "{}", "*", "", "x"]), max_size=6).map(
        lambda parts: "/" + "/".join(parts)
    ),
)


@given(PATHS)
def test_whatever_the_path_only_known_routes_are_named(path: str) -> None:
    """However paths are made up, there are no more names than templates, and one."""
    routes = Routes(["/", "/search", "/orders/{id}", "/orders/{id}/lines", "/files/*"])
    assert routes.of(http_scope(path)) in {*routes.templates, OTHER}


def test_routes_are_matched_by_segment() -> None:
    """The first match counts, a last star takes the rest, and the rest is "other"."""
    routes = Routes(["/", "/orders/new", "/orders/{id}", "/orders/{id}/lines", "/files/*"])
    expected = {
        "/": "/",
        "/orders/7": "/orders/{id}",
        "/orders/7/": "/orders/{id}",
        "/orders/new": "/orders/new",
        "/orders/new/lines": "/orders/{id}/lines",
        "/files/a/b/c/d/e": "/files/*",
        "/files//a": "/files/*",
        "/files": "/files/*",  # with a slash it would be
        "/orders//lines": OTHER,
        "/orders/7/lines/9": OTHER,
        "orders": OTHER,
        "": "/",
    }
    assert {path: routes.of(http_scope(path)) for path in expected} == expected
    for wrong in (
        ["orders"],
        ["/a/*/b"],
        ["/user-{id"],
        ["/{7}"],
        [7],
        [f"/{n}" for n in range(1001)],
    ):
        with pytest.raises((ValueError, TypeError), match="route"):
            Routes(wrong)


def test_a_template_that_could_never_match_is_refused() -> None:
    """An earlier one matches all of its paths: it has to come first, as in the app."""
    for early, late in (
        ("/a/{x}", "/a/{y}"),
        ("/a/{x}", "/a/b"),
        ("/a/*", "/a/b/{c}"),
        ("/{x:path}", "/a/*"),
        ("/{x:float}", "/{x:int}"),
    ):
        with pytest.raises(ValueError, match=r"matches the same paths and comes first; write"):
            Routes([early, late])
        if early != "/a/{x}" or late != "/a/{y}":
            assert Routes([late, early]).templates == (late, early)
    for either in (["/{a}/x", "/y/{b}"], ["/{a}/{b}", "/{p:path}"], ["/{n:int}", "/{n:float}"]):
        assert len(Routes(either).templates) == 2


def test_templates_of_fastapi_are_read_as_they_are_meant() -> None:
    """A kind in a variable is allowed: "path" stands for the rest, any other for one segment."""
    routes = Routes(["/files/{name:path}", "/orders/{number:int}"])
    expected = {
        "/files/a": "/files/{name:path}",
        "/files/a/b/c": "/files/{name:path}",
        "/orders/7": "/orders/{number:int}",
        "/orders/7/lines": OTHER,
    }
    assert {path: routes.of(http_scope(path)) for path in expected} == expected


# Together or not at all


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob"]),
        st.sampled_from(["10.0.0.1", "10.0.0.2"]),
        st.sampled_from([0.0, 0.0, 0.0, 0.5, 3.0]),
    ),
    min_size=1,
    max_size=40,
)


def three_limits(**options: Any) -> RequestLimits:
    return RequestLimits(
        RequestLimit("2/10s", by=user(by_user), burst=4),
        RequestLimit("3/10s", by="address", burst=3),
        RequestLimit("5/10s", by=None, burst=6),
        **options,
    )


def check_refusals_take_nothing(steps: list[tuple[str, str, float]]) -> None:
    """Of a request that is refused, no limit knows anything."""
    with virtual_time() as clock:
        limits = three_limits()
        for who, where, pause in steps:
            clock.advance(pause)
            before = left(limits)
            if refused(limits, request(user=who, client=where)) is not None:
                assert left(limits) == before


@given(STEPS)
def test_a_refused_request_takes_from_no_limit(steps: list[tuple[str, str, float]]) -> None:
    """All limits are taken together or not at all, whatever came before."""
    check_refusals_take_nothing(steps)


def test_taken_one_by_one_refusals_would_burn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without taking together, who is refused by one limit has paid the others."""

    def one_by_one(group: Any, part: Any, incoming: Incoming) -> Any:
        for entry in part.entries:
            taken = take(group, groups.TierLimits(group, [entry]), incoming)
        return taken

    take = groups.LimitGroup.take
    monkeypatch.setattr(groups, "quick_taking", lambda *_: None)
    monkeypatch.setattr(groups.LimitGroup, "take", one_by_one)
    assert falsified(check_refusals_take_nothing, STEPS)


@given(STEPS)
def test_in_a_hurry_the_verdicts_are_the_same(steps: list[tuple[str, str, float]]) -> None:
    """The way that takes no lock admits, tells and gives back what the slow one does."""
    with virtual_time() as clock:
        quick, slow = three_limits(), three_limits()
        for plan in slow._plans.values():
            assert plan.local is not None
            plan.local.quick = None
        for who, where, pause in steps:
            clock.advance(pause)
            incoming = request(user=who, client=where)
            errors = [refused(quick, incoming), refused(slow, incoming)]
            assert len({error and (error.violated, error.retry_after) for error in errors}) == 1
            assert left(quick) == left(slow)
            if errors[0] is None:
                assert told_of(quick, incoming) == told_of(slow, incoming)
                assert left(quick) == left(slow)


def told_of(limits: RequestLimits, incoming: Incoming) -> object:
    """Return what a request is told that is refused further in; None if it is refused here."""
    try:
        granted = limits.admit(incoming)
    except RateLimited:
        return None
    told = granted.headers()
    granted.cancel()
    return told


def test_what_is_refused_further_in_is_given_back_once() -> None:
    """After `cancel()` all is as before, and a second one gives nothing more."""
    with virtual_time():
        for algorithm in ("token_bucket", "sliding_counter"):
            limits = RequestLimits(
                RequestLimit("4/min", by=user(by_user), algorithm=algorithm),
                RequestLimit("9/min", by=None),
                RequestLimit("5/min", by="address", soft=True),
            )
            incoming = request(user="ann")
            first = limits.admit(incoming)
            for _ in range(20):
                granted = limits.admit(incoming)
                granted.cancel()
                granted.cancel()
            assert limits.snapshot()["soft"]["address"]["over"] == 0
            first.cancel()
            assert admitted(limits, 9, incoming) == 4


WAITS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.3, 1.0]),
        st.sampled_from(["stay", "wait", "wait", "enter", "cancel"]),
    ),
    min_size=1,
    max_size=25,
)


def check_waiting_costs_nothing(steps: list[tuple[float, str]]) -> None:
    """Who waits and is refused then leaves the limits as if it had never come."""
    with virtual_time() as clock:
        limits, without = (
            RequestLimits(
                RequestLimit("10/s", by="address", burst=99),
                RequestLimit("20/s", by=None, burst=99),
            )
            for _ in range(2)
        )
        waiting: list[Any] = []
        for pause, step in [(0.0, "stay"), *steps]:
            clock.advance(pause)
            if step == "cancel":
                for granted in waiting[:1]:
                    granted.cancel()
                del waiting[:1]
                continue
            granted = limits.admit(request())
            if step != "stay":
                granted.open_accounts()
            if step == "wait":
                waiting.append(granted)
                continue
            granted.close_accounts()
            without.admit(request())
        for granted in waiting:
            granted.cancel()
            granted.cancel()
        assert left(limits) == left(without)


@given(WAITS)
def test_whoever_waits_further_in_and_is_refused_has_paid_nothing(steps: Any) -> None:
    """However long it took, whoever came meanwhile, and in whichever order they were refused."""
    check_waiting_costs_nothing(steps)


def test_without_accounts_waiting_would_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of one number gives back only what it cannot have refilled meanwhile."""
    monkeypatch.setattr(LimitGrant, "open_accounts", lambda _: None)
    assert falsified(check_waiting_costs_nothing, WAITS)


def test_a_refusal_is_told_also_if_another_thread_gives_back_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it is explained, the limit may not be exceeded any more: then it is the first named."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("1/h", by="address"), RequestLimit("9/h", by=None))
        granted = limits.admit(request())
        over = groups.LimitGroup._exceeded

        def late(*told: Any) -> Any:
            granted.cancel()
            return over(*told)

        monkeypatch.setattr(groups.LimitGroup, "_exceeded", late)
        error = refused(limits, request())
        assert error is not None
        assert (error.violated, error.own_limit) == (("address",), True)
        assert limits.snapshot()["limits"]["address"]["over"] == 1


def test_what_never_fits_says_no_time() -> None:
    """A cost above the burst is refused without a time after which it would be admitted."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("5/min", by="address", cost=lambda _: 10))
        error = refused(limits, request())
        assert error is not None
        assert error.retry_after is None
        assert dict(error.headers)[b"ratelimit"] == b'"address";r=0'


def test_a_soft_limit_that_fails_refuses_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """What its function raises is logged, once."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("2/min", by=lambda _: 1 / 0, name="own", soft=True))  # type: ignore[arg-type,return-value]
        assert admitted(limits, 5, request()) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "soft limit 'own' fails: not counted"
    ]


def test_a_failing_function_takes_nothing() -> None:
    """What the service's own functions raise passes through, and no limit has paid for it."""

    def broken(_incoming: Incoming) -> str:
        raise LookupError

    with virtual_time():
        limits = RequestLimits(
            RequestLimit("2/min", by="address"), RequestLimit("2/min", by=broken, name="own")
        )
        for _ in range(5):
            with pytest.raises(LookupError):
                limits.admit(request())
        assert left(limits) == []  # nothing was counted


def test_threads_take_exactly_what_there_is() -> None:
    """However many threads ask at once, as many are admitted as the limit says."""
    with virtual_time():
        limits = RequestLimits(
            RequestLimit("500/min", by=user(by_user)),
            RequestLimit("700/min", by=None),
            RequestLimit("9k/min", by="address"),
        )
        counts: list[int] = []

        def ask(who: str) -> None:
            counts.append(admitted(limits, 300, request(user=who)))

        threads = [threading.Thread(target=ask, args=(who,)) for who in ("ann", "bob") * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(counts) == 700


# Tiers, costs, soft limits


def test_tiers_have_rates_of_their_own() -> None:
    """A tier that is not listed has the limit's own rate; the valve counts all tiers."""
    with virtual_time():
        limits = RequestLimits(
            RequestLimit("1/min", by=user(by_user), tiers={"free": "2/min", "premium": "5/min"}),
            RequestLimit("8/min", by=None),
            tier=lambda incoming: incoming.scope["user_id"].partition("-")[0],
        )
        assert admitted(limits, 9, request(user="free-1")) == 2
        assert admitted(limits, 9, request(user="free-2")) == 2
        assert admitted(limits, 9, request(user="odd-1")) == 1
        assert admitted(limits, 9, request(user="premium-1")) == 3  # 8 for all together
        error = refused(limits, request(user="premium-2"))
        assert error is not None
        assert (error.limit, error.violated, error.own_limit) == ("global", ("global",), False)


def test_the_context_says_the_tier_unless_told_otherwise() -> None:
    """What `seawall.tier` has set around the edge counts."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("1/min", by="address", tiers={"free": "3/min"}))
        with tier("free"):
            assert admitted(limits, 9, request()) == 3
        assert admitted(limits, 9, request()) == 1


def test_a_request_may_cost_more_than_one() -> None:
    """`cost` is a number, or a function of the request."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("10/min", by="address", cost=4))
        assert admitted(limits, 9, request()) == 2
        limits = RequestLimits(
            RequestLimit("10/min", by="address", cost=lambda incoming: len(incoming.path))
        )
        assert admitted(limits, 9, request("/abcd")) == 2
        assert refused(limits, request("/a")) is not None
        assert admitted(limits, 9, request("/", client="10.0.0.2")) == 9


def test_soft_limits_refuse_nobody_and_alert_once_a_second() -> None:
    """Everybody over it is counted; who listens is told once a second, and callers are not."""
    heard: list[SoftLimitExceeded] = []
    with virtual_time() as clock:
        limits = RequestLimits(
            RequestLimit("2/min", by="address", soft=True, name="watched"),
            RequestLimit("9/min", by=user(by_user)),
            name="shop",
        )
        stop = subscribe(heard.append, SoftLimitExceeded)
        try:
            assert admitted(limits, 5, request(user="ann")) == 5
            assert [repr(event) for event in heard] == [
                "SoftLimitExceeded(guard='shop', limit='watched')"
            ]
            clock.advance(0.9)
            assert admitted(limits, 2, request(user="ann")) == 2
            assert len(heard) == 1
            clock.advance(0.2)
            granted = limits.admit(request(user="ann"))
            assert len(heard) == 2
        finally:
            stop()
        assert limits.snapshot()["soft"]["watched"]["over"] == 6
        assert b"watched" not in b" ".join(value for _, value in granted.headers())


# Refusals


def test_a_refusal_names_all_limits_that_were_exceeded() -> None:
    """Also by whom: of the caller's own limits it is the caller, of the valve the service."""
    with virtual_time() as clock:
        limits = RequestLimits(
            RequestLimit("2/min", by=user(by_user)),
            RequestLimit("2/h", by="address"),
            RequestLimit("9/min", by=None),
        )
        incoming = request(user="ann")
        assert admitted(limits, 9, incoming) == 2
        error = refused(limits, incoming)
        assert error is not None
        assert error.violated == ("user", "address")
        assert error.limit == "user"
        assert error.own_limit
        assert error.retry_after == pytest.approx(1800)
        assert (error.guard, error.policy) == ("edge", "rate_limit")
        clock.advance(error.retry_after)
        assert refused(limits, incoming) is None
        shown = limits.snapshot()["limits"]
        assert (shown["user"]["over"], shown["address"]["over"], shown["global"]["over"]) == (
            8,
            8,
            0,
        )
        assert shown["user"]["rate"] == "2/min"


def test_who_is_over_its_own_limit_does_not_hear_of_the_valve() -> None:
    """Nor is it the service's fault then, though the valve is exceeded too."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("2/min", by=None), RequestLimit("2/min", by="address"))
        assert admitted(limits, 2, request()) == 2
        error = refused(limits, request())
        assert error is not None
        assert (error.limit, error.violated, error.own_limit) == ("address", ("address",), True)
        error = refused(limits, request(client="10.0.0.2"))
        assert error is not None
        assert (error.limit, error.violated, error.own_limit) == ("global", ("global",), False)
        assert limits.snapshot()["limits"]["global"]["over"] == 2


# At the edge


def test_a_limit_inside_the_app_is_not_the_callers() -> None:
    """A vendor's limit is 503, where the caller's own is 429."""
    vendor = new_guard(RateLimit("1/min"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await vendor.acall(text_app(), scope, receive, send)

    async def scene() -> list[Answer]:
        limits = RequestLimits(RequestLimit("3/min", by="address"))
        edge = Edge(app, name="vendors", limits=limits)
        answers = [await ask(edge) for _ in range(4)]
        edge.close()
        return answers

    answers = run_virtual(scene())
    assert [answer.status for answer in answers] == [200, 503, 503, 429]
    assert "violated-policies" not in answers[1].json()
    assert answers[3].json()["violated-policies"] == ["address"]
    told = [answer.headers["ratelimit"] for answer in answers]
    assert told == [f'"address";r={left};t={t}' for left, t in ((2, 20), (1, 20), (0, 20), (0, 20))]


def test_who_is_refused_further_in_has_paid_nothing() -> None:
    """A full bulkhead behind the limit gives back what the request took."""

    async def scene() -> list[int]:
        limits = RequestLimits(RequestLimit("2/h", by="address"))
        edge = Edge(text_app(), name="full", limits=limits, concurrency=Bulkhead(1))
        with edge.guard.hold():
            statuses = [(await ask(edge)).status for _ in range(5)]
        statuses += [(await ask(edge)).status for _ in range(3)]
        edge.close()
        return statuses

    assert run_virtual(scene()) == [503] * 5 + [200, 200, 429]


# Bounds


def offender_after_a_flood(seed: int) -> RateLimited | None:
    """Return how an offender is answered after a flood of other addresses."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("3/min", by="address"), max_keys=20)
        offender = request(client="10.9.9.9")
        assert admitted(limits, 9, offender) == 3
        for n in range(200):
            refused(limits, request(client=f"10.1.{(seed + n) % 250}.{n % 250}"))
        group = limits._local
        assert group is not None
        assert group.policy._meters.all[0].keys <= 20 + meter_module.SHARED
        return refused(limits, offender)


def check_offenders_stay_refused(seed: int) -> None:
    """No flood of keys makes a limit forget somebody."""
    assert offender_after_a_flood(seed) is not None


@pytest.mark.parametrize("seed", [1, 77])
def test_a_flood_of_keys_resets_no_offender(seed: int) -> None:
    """The map is bounded, and what is forgotten is only what was as good as new."""
    check_offenders_stay_refused(seed)


def test_forgetting_the_oldest_would_reset_an_offender(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the usual eviction, a flood of addresses buys a fresh limit."""

    def forget_oldest(meter: Any, _now: float) -> bool:
        while meter.keys >= meter.max_keys:
            del meter.states[next(iter(meter.states))]
        return True

    monkeypatch.setattr(meter_module.Meter, "_has_room", forget_oldest)
    with pytest.raises(AssertionError):
        check_offenders_stay_refused(1)


# Settings


async def asks(_incoming: Incoming) -> Any:
    """Stand for a function that looks something up, for which nobody waits."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RequestLimit("fast", by=None), "write a number, a slash and a unit"),
        (lambda: RequestLimit("1/s", by="adress"), "by='adress': write one of 'address', 'tenant'"),
        (lambda: RequestLimit("1/s", by=7), "by=7: write 'address'"),
        (lambda: RequestLimit("1/s", by=None, name='a"b'), "without spaces and quotes"),
        (lambda: RequestLimit("1/s", by=None, name="ä"), "without spaces and quotes"),
        (lambda: RequestLimit("1/s", by=None, tiers=["free"]), "write rates by tier"),
        (lambda: RequestLimit("1/s", by=None, tiers={7: "1/s"}), "write a tier as text"),
        (lambda: RequestLimit("1/s", by=None, soft=1), "soft=1: write True or False"),
        (lambda: RequestLimits("1/s"), r"write RequestLimit\('600/min', by='address'\)"),
        (
            lambda: RequestLimits(RequestLimit("1/s", by=None), RequestLimit("2/s", by=None)),
            "two limits are",
        ),
        (
            lambda: RequestLimits(RequestLimit("1/s", by=None), sharing="leased"),
            "are for shared limits",
        ),
        (lambda: RequestLimits(RequestLimit("1/s", by=None), tier="free"), "pass a function"),
        (lambda: RequestLimits(RequestLimit("1/s", by=None), shared=7, name="x"), "pass a store"),
        (lambda: RequestLimit("1/s", by=asks), "pass a plain function"),
        (lambda: user(asks), "pass a plain function"),
        (lambda: api_key(known=asks), "pass a plain function"),
        (lambda: RequestLimit("1/s", by=None, cost=asks), "pass a plain function"),
        (lambda: RequestLimits(RequestLimit("1/s", by=None), tier=asks), "pass a plain function"),
        (lambda: user("ann"), "pass a function"),
        (lambda: api_key(""), "write a header's name"),
        (lambda: api_key(known="x"), "pass a function"),
    ],
)
def test_bad_settings_say_what_to_write(make: Any, message: str) -> None:
    """At once, not at the first request."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_what_is_made_shows_itself() -> None:
    """The reprs say what was written."""
    made = RequestLimits(
        RequestLimit("5/s", by="address", tiers={"free": "1/s"}),
        RequestLimit("9/s", by=user(by_user), soft=True),
        RequestLimit("9/s", by=api_key(known=bool)),
        RequestLimit("9/s", by=address_and_route("/a")),
        RequestLimit("100/s", by=None),
    )
    assert repr(made) == (
        "RequestLimits(RequestLimit('5/s, free: 1/s', by='address', name='address'),"
        " RequestLimit('9/s', by=user(by_user), name='user', soft=True),"
        " RequestLimit('9/s', by=api_key('x-api-key', known=...), name='api-key'),"
        " RequestLimit('9/s', by=address_and_route('/a'), name='address-route'),"
        " RequestLimit('100/s', by=None, name='global'), name='edge')"
    )
