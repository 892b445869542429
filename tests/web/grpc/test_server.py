from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    CircuitOpen,
    Criticality,
    Guard,
    Overloaded,
    RateLimit,
    Retry,
    TimedOut,
    Timeout,
    current_deadline,
    transient,
)
from seawall.clients.grpc import GuardedInterceptor
from seawall.context import current_criticality, current_tenant
from seawall.errors import (
    KeyInFlight,
    KeyMissing,
    KeyReused,
    Rejected,
    SeawallError,
    StoreUnavailable,
    UnknownJob,
)
from seawall.web.edge import inbound
from seawall.web.grpc import AioServerInterceptor, ServerInterceptor, interceptors
from seawall.web.trust import Trust
from seawall.wire.retries import read_attempt
from tests.clients.grpc.support import (
    KINDS,
    aconnected,
    arun,
    aserving,
    connected,
    full,
    one_loop,
    serving,
)
from tests.support import falsified, let_pass, new_guard, received_attempt

pytestmark = pytest.mark.alone

Code = grpc.StatusCode
UU, US, SU, SS = KINDS
LOOPBACK = Trust(callers=["127.0.0.1"])


@pytest.fixture(autouse=True, scope="module")
def _one_loop() -> Iterator[None]:
    """Run all async tests of this file in one loop."""
    with one_loop():
        yield


class Service:
    """Methods of all four kinds that do the same: note their context, then what a test says."""

    def __init__(self, do: Callable[[Any], Any] | None = None) -> None:
        self.do = do
        self.seen: list[dict[str, Any]] = []

    def _note(self, context: Any) -> None:
        deadline = current_deadline()
        self.seen.append(
            {
                "left": None if deadline is None else deadline.remaining(),
                "criticality": current_criticality(),
                "tenant": current_tenant(),
                "attempt": received_attempt(),
            }
        )
        if self.do is not None:
            self.do(context)

    def one(self, _request: Any, context: Any) -> bytes:
        self._note(context)
        return b"ok"

    def some(self, _request: Any, context: Any) -> Iterator[bytes]:
        self._note(context)
        yield b"ok"

    async def aone(self, _request: Any, context: Any) -> bytes:
        self._note(context)
        return b"ok"

    async def asome(self, _request: Any, context: Any) -> Any:
        self._note(context)
        yield b"ok"

    async def awriter(self, _request: Any, context: Any) -> None:
        self._note(context)
        await context.write(b"ok")


class Answered:
    """How a call ended: its code, details and pushback."""

    def __init__(self, error: Any = None) -> None:
        self.code = Code.OK if error is None else error.code()
        self.details = "" if error is None else error.details()
        trailing = () if error is None else error.trailing_metadata() or ()
        self.pushback = dict(trailing).get("grpc-retry-pushback-ms")


class Sync:
    """Runs a scenario on a sync server."""

    name = "sync"
    interceptor: Any = ServerInterceptor

    def functions(self, service: Service) -> dict[str, Callable[..., Any]]:
        return {UU: service.one, US: service.some, SU: service.one, SS: service.some}

    def run(
        self, service: Service, interceptor: Any, *kinds: str, timeout: Any = None, sent: Any = ()
    ) -> list[Answered]:
        """Make calls of these kinds, by a client without guards; return how they ended."""
        metadata = tuple(dict(sent).items())
        functions = self.functions(service)
        with serving(functions, interceptor) as target, connected(target) as channel:
            return [_ask(channel, kind, timeout=timeout, metadata=metadata) for kind in kinds]


class Aio(Sync):
    """Runs the same scenario on an aio server, with async handlers."""

    name = "aio"
    interceptor: Any = AioServerInterceptor

    def functions(self, service: Service) -> dict[str, Callable[..., Any]]:
        return {UU: service.aone, US: service.asome, SU: service.aone, SS: service.awriter}

    def run(
        self, service: Service, interceptor: Any, *kinds: str, timeout: Any = None, sent: Any = ()
    ) -> list[Answered]:
        metadata = tuple(dict(sent).items())

        async def main() -> list[Answered]:
            ended = []
            async with aserving(self.functions(service), interceptor) as target:
                for kind in kinds:
                    ended.append(  # noqa: PERF401 - one after the other
                        await asyncio.to_thread(
                            _ask_once, target, kind, timeout=timeout, metadata=metadata
                        )
                    )
            return ended

        return arun(main())


class Plain(Aio):
    """Runs it on an aio server, with handlers that are plain functions."""

    name = "plain"

    def functions(self, service: Service) -> dict[str, Callable[..., Any]]:
        return Sync().functions(service)


def _ask(channel: grpc.Channel, kind: str, **options: Any) -> Answered:
    request: Any = iter([b"x"]) if kind.startswith("stream") else b"x"
    try:
        result = getattr(channel, kind)(full(kind))(request, **options)
        assert (list(result) if kind.endswith("stream") else [result]) == [b"ok"]
    except grpc.RpcError as error:
        return Answered(error)
    return Answered()


def _ask_once(target: str, kind: str, **options: Any) -> Answered:
    with connected(target) as channel:
        return _ask(channel, kind, **options)


EDGES = [Sync(), Aio(), Plain()]


@pytest.fixture(params=EDGES, ids=lambda edge: edge.name)
def edge(request: pytest.FixtureRequest) -> Sync:
    """Return each kind of server in turn."""
    edge: Sync = request.param
    return edge


@pytest.mark.parametrize("kind", KINDS)
def test_handlers_know_their_deadline(edge: Sync, kind: str) -> None:
    """What gRPC says of the time left is the deadline that guards inside the handler obey."""
    service = Service()
    (ended,) = edge.run(service, edge.interceptor(), kind, timeout=20.0)
    assert ended.code is Code.OK
    assert 15.0 < service.seen[0]["left"] <= 20.3


def test_the_server_has_the_last_word_on_time(edge: Sync) -> None:
    """Nobody gets more than the server's maximum; streams have one of their own, or none."""
    service = Service()
    interceptor = edge.interceptor(timeout=5.0, stream_timeout=None)
    edge.run(service, interceptor, UU, timeout=20.0)
    edge.run(service, interceptor, UU)
    edge.run(service, interceptor, US)
    edge.run(service, edge.interceptor(stream_timeout=7.0), SS, timeout=20.0)
    lefts = [seen["left"] for seen in service.seen]
    assert lefts[2] is None
    assert [0 < left <= most for left, most in ((lefts[0], 5), (lefts[1], 5), (lefts[3], 7))] == [
        True
    ] * 3


EXPIRED = {"x-server-timeout": "0", "baggage": "seawall.criticality=sheddable"}


def _not_run(edge: Sync) -> None:
    service = Service()
    ended = edge.run(service, edge.interceptor(trust=LOOPBACK), *KINDS, sent=EXPIRED)
    assert [(end.code, end.pushback) for end in ended] == [(Code.DEADLINE_EXCEEDED, "-1")] * 4
    assert not service.seen


def test_expired_work_is_not_run(edge: Sync) -> None:
    """A call whose time is over is answered so, without running, and not to be repeated."""
    _not_run(edge)


def test_it_would_run_if_the_headers_were_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the known headers only gRPC's own deadline would count."""
    monkeypatch.setattr(inbound, "least_timeout", lambda _pairs: None)
    with pytest.raises(AssertionError):
        _not_run(Sync())


SAID = {
    "baggage": "seawall.criticality=sheddable-plus,seawall.tenant=acme",
    "seawall-attempt": "2",
    "x-envoy-expected-rq-timeout-ms": "2000",
}


@pytest.mark.parametrize("kind", KINDS)
def test_callers_of_ones_own_are_believed(edge: Sync, kind: str) -> None:
    """Criticality, tenant, attempt and timeout of a trusted peer are the handler's context."""
    service = Service()
    edge.run(service, edge.interceptor(trust=LOOPBACK), kind, sent=SAID)
    (seen,) = service.seen
    assert seen.pop("left") <= 2.0
    assert seen == {"criticality": Criticality.SHEDDABLE_PLUS, "tenant": "acme", "attempt": 2}


def _ignored(said: dict[str, str]) -> None:
    service = Service()
    interceptor = ServerInterceptor(trust=Trust(callers=["10.0.0.0/8"]), timeout=None)
    Sync().run(service, interceptor, UU, sent=said)
    (seen,) = service.seen
    assert seen.pop("attempt") == (read_attempt(said.get("seawall-attempt", "")) or 0)
    assert seen == {"left": None, "criticality": Criticality.CRITICAL, "tenant": None}


METADATA = st.dictionaries(
    st.sampled_from(sorted(SAID)),
    st.sampled_from([*SAID.values(), "1", "0.5", "nan", "-1", "1e9", ";;;=,"]),
)


@settings(max_examples=25)
@given(METADATA)
def test_strangers_are_not(said: dict[str, str]) -> None:
    """Whatever a peer says that nobody named, nothing of it counts but its attempt."""
    _ignored(said)


def test_that_is_what_trust_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If everybody were believed, strangers would choose."""
    monkeypatch.setattr(Trust, "believes", lambda *_arguments: True)
    assert falsified(_ignored, METADATA)


def test_calls_are_ranked_by_the_server() -> None:
    """`classify` sees the method; what a trusted peer says only lowers its answer."""

    def classify(incoming: Any) -> Criticality | None:
        return Criticality.CRITICAL_PLUS if incoming.route.endswith(UU) else None

    for said, level in (("critical", Criticality.CRITICAL), ("", Criticality.CRITICAL_PLUS)):
        service = Service()
        sent = {"baggage": f"seawall.criticality={said}"} if said else ()
        Sync().run(service, ServerInterceptor(trust=LOOPBACK, classify=classify), UU, sent=sent)
        assert service.seen[0]["criticality"] is level


def test_nobody_raises_their_own_criticality() -> None:
    """A trusted peer can matter less, not more than the server allows."""
    service = Service()
    sent = {"baggage": "seawall.criticality=critical-plus"}
    Sync().run(service, ServerInterceptor(trust=LOOPBACK), UU, sent=sent)
    assert service.seen[0]["criticality"] is Criticality.CRITICAL


@pytest.mark.parametrize("kind", KINDS)
def test_full_means_refused_before_any_work(edge: Sync, kind: str) -> None:
    """A gate's refusal is a status with pushback, and the handler does not run."""
    guard = new_guard(Bulkhead(1))
    service = Service()
    with guard.hold():
        (ended,) = edge.run(service, edge.interceptor(guard), kind)
    assert ended.code is Code.RESOURCE_EXHAUSTED
    assert int(ended.pushback or "0") > 0
    assert guard.name not in ended.details
    assert not service.seen
    assert edge.run(service, edge.interceptor(guard), kind)[0].code is Code.OK
    assert guard.snapshot()["policies"][0]["in_flight"] == 0


def test_limits_count_by_the_callers_address(edge: Sync) -> None:
    """A key function is given the request: its client, its path, its headers."""
    guard = new_guard(RateLimit("2/h", burst=2, key=lambda incoming: incoming.client))
    ended = edge.run(Service(), edge.interceptor(guard), UU, US, UU)
    assert [end.code for end in ended] == [Code.OK, Code.OK, Code.RESOURCE_EXHAUSTED]
    assert 1000.0 < int(ended[2].pushback or "0") <= 3_600_000


@pytest.mark.parametrize(
    ("error", "code", "pushback"),
    [
        (CircuitOpen("secret", retry_after=1.5), Code.UNAVAILABLE, "1500"),
        (Overloaded("secret", retry_after=0.25), Code.RESOURCE_EXHAUSTED, "250"),
        (Rejected("secret", retry_after=float("inf")), Code.UNAVAILABLE, "-1"),
        (TimedOut("secret"), Code.DEADLINE_EXCEEDED, "-1"),
        (StoreUnavailable("secret"), Code.UNAVAILABLE, "1000"),
        (UnknownJob("secret"), Code.NOT_FOUND, None),
        (KeyInFlight("secret", retry_after=2.0), Code.ABORTED, "2000"),
        (KeyMissing("secret"), Code.INVALID_ARGUMENT, None),
        (KeyReused("secret"), Code.FAILED_PRECONDITION, None),
        (SeawallError("secret"), Code.INTERNAL, None),
    ],
)
def test_errors_of_handlers_become_statuses(
    edge: Sync, error: SeawallError, code: Code, pushback: str | None
) -> None:
    """Handlers raise, the edge maps; nothing that an exception says is told."""

    def fail(_context: Any) -> None:
        raise error

    for ended in edge.run(Service(fail), edge.interceptor(), *KINDS):
        assert (ended.code, ended.pushback) == (code, pushback)
        assert "secret" not in ended.details


def test_own_errors_pass_through(edge: Sync) -> None:
    """An error that is not Seawall's is gRPC's to report, and a failure to the gates."""

    def fail(_context: Any) -> None:
        raise LookupError("mine")

    guard = new_guard(Bulkhead(1))
    ended = edge.run(Service(fail), edge.interceptor(guard), *KINDS)
    assert {end.code for end in ended} == {Code.UNKNOWN}
    assert guard.snapshot()["failed"] == 4


def test_answers_are_no_failures() -> None:
    """A handler that aborts with NOT_FOUND has done its work; one with INTERNAL has not."""
    guard = new_guard(Bulkhead(1))
    Sync().run(
        Service(lambda context: context.abort(Code.NOT_FOUND, "")), ServerInterceptor(guard), *KINDS
    )
    assert (guard.snapshot()["succeeded"], guard.snapshot()["failed"]) == (4, 0)
    Sync().run(
        Service(lambda context: context.set_code(Code.INTERNAL)), ServerInterceptor(guard), *KINDS
    )
    assert (guard.snapshot()["succeeded"], guard.snapshot()["failed"]) == (4, 4)


def test_health_is_never_shed() -> None:
    """The standard health service passes by the gates."""
    guard = new_guard(Bulkhead(1))
    service = Service()
    handler = grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(service.one)}
    )

    class Health(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return handler.service(details)

    interceptor = ServerInterceptor(guard)
    details: Any = type("Details", (), {"method": "/grpc.health.v1.Health/Check"})()
    found = interceptor.intercept_service(Health().service, details)
    with guard.hold():
        assert found.unary_unary(b"", _Context()) == b"ok"
    assert service.seen


class _Context:
    """As much of a servicer's context as admission asks for."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:5") -> None:
        self._peer = peer

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("x", "y")]

    def peer(self) -> str:
        return self._peer

    def code(self) -> None:
        return None


def test_unknown_methods_stay_unknown(edge: Sync) -> None:
    """What the server does not have is UNIMPLEMENTED, and takes no place."""
    guard = new_guard(RateLimit("1/h"))

    class Nothing(Service):
        pass

    service = Nothing()
    edge_functions = edge.functions
    try:
        edge.functions = lambda service: {UU: edge_functions(service)[UU]}  # type: ignore[method-assign]
        ended = edge.run(service, edge.interceptor(guard), US, UU)
    finally:
        del edge.functions
    assert [end.code for end in ended] == [Code.UNIMPLEMENTED, Code.OK]


def test_aio_handlers_are_stopped_in_time() -> None:
    """A handler that takes longer than its time is cancelled, and the caller is told."""
    stopped = []

    async def wait(*_arguments: Any) -> bytes:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append("one")
            raise
        return b""

    async def items(*_arguments: Any) -> Any:
        try:
            yield b"1"
            await asyncio.Event().wait()
        finally:
            stopped.append("some")

    async def main() -> list[Answered]:
        guard = new_guard(Bulkhead(1))
        interceptor = AioServerInterceptor(guard, timeout=0.02, stream_timeout=0.02)
        functions = {UU: wait, US: items, SU: wait, SS: wait}
        ended = []
        async with aserving(functions, interceptor) as target, aconnected(target) as channel:
            for kind in KINDS:
                request: Any = [b"x"] if kind.startswith("stream") else b"x"
                call = getattr(channel, kind)(full(kind))(request)
                try:
                    if kind.endswith("stream"):
                        assert [item async for item in call] == [b"never"]
                    else:
                        await call
                except grpc.RpcError as error:
                    ended.append(Answered(error))
        assert guard.snapshot()["policies"][0]["in_flight"] == 0
        return ended

    ended = arun(main())
    assert [(end.code, end.pushback) for end in ended] == [(Code.DEADLINE_EXCEEDED, "-1")] * 4
    assert len(stopped) == 4


def _hanging() -> dict[str, Callable[..., Any]]:
    async def one(_request: Any, _context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def some(_request: Any, _context: Any) -> Any:
        while True:
            yield b"1" * 1000

    async def written(requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(request)
        await asyncio.Event().wait()

    return {UU: one, US: some, SU: one, SS: written}


async def _left_after(plan: list[tuple[int, int]]) -> int:
    """Let clients go after so many turns; return how many slots the server did not give back."""
    guard = new_guard(Bulkhead(4, max_wait=5.0, max_waiting=8))
    interceptor = AioServerInterceptor(guard)
    async with aserving(_hanging(), interceptor) as target, aconnected(target) as channel:

        async def visit(kind: str) -> None:
            request: Any = [b"x"] if kind.startswith("stream") else b"x"
            call = getattr(channel, kind)(full(kind))(request)
            try:
                if kind.endswith("stream"):
                    async for _ in call:
                        await let_pass(0.0)
                else:
                    await call
            finally:
                call.cancel()

        tasks = [asyncio.create_task(visit(KINDS[which])) for which, _ in plan]
        # At least one has arrived.
        for _ in range(500):
            if guard.snapshot()["policies"][0]["in_flight"]:
                break
            await let_pass(0.001)
        for task, (_, turns) in zip(tasks, plan, strict=True):
            for _ in range(turns):
                await let_pass(0.0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(200):
            if not guard.snapshot()["policies"][0]["in_flight"]:
                break
            await let_pass(0.001)
        seen = guard.snapshot()["policies"][0]
        kept: int = seen["in_flight"] + seen["recovered"]
    return kept


def _nothing_leaks(plan: list[tuple[int, int]]) -> None:
    assert arun(_left_after(plan)) == 0


PLANS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=8)


@settings(max_examples=15)
@given(PLANS)
def test_clients_that_go_leave_nothing_behind(plan: list[tuple[int, int]]) -> None:
    """Whenever a client cancels, in whatever kind of call, its slot is free again."""
    _nothing_leaks(plan)


def test_they_would_if_gates_were_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without leaving the gates at a cancellation, slots would be lost."""

    @contextmanager
    def only_if_well(leave: Any, _context: Any) -> Iterator[None]:
        yield
        leave(None)

    monkeypatch.setattr(interceptors, "_left", only_if_well)
    assert arun(_left_after([(0, 5)])) == 1


def test_sync_streams_are_let_go() -> None:
    """A sync handler whose client cancels in mid-stream gives its slot back."""
    guard = new_guard(Bulkhead(1))

    def endless(request: bytes, _context: Any) -> Iterator[bytes]:
        while True:
            yield request

    with serving({US: endless}, ServerInterceptor(guard)) as target, connected(target) as channel:
        stream = channel.unary_stream(full(US))(b"x")
        assert next(stream) == b"x"
        assert guard.snapshot()["policies"][0]["in_flight"] == 1
        stream.cancel()
        _settle(guard)
    assert guard.snapshot()["cancelled"] == 1


def _settle(guard: Guard) -> None:
    """Wait until gRPC's own thread has noticed that the client is gone."""
    over = threading.Event()
    for _ in range(300):
        if not guard.snapshot()["policies"][0]["in_flight"]:
            return
        over.wait(0.01)
    pytest.fail("a slot is still held")


def _chain(retry_at: str) -> tuple[int, list[float]]:
    """Call through three services of which the last one fails; return its calls, and times left."""
    calls: list[float] = []
    lefts: list[float] = []

    def client(target: str, stack: list[Any]) -> Any:
        guard = new_guard(Retry(on=transient, attempts=3, backoff=0.001))
        manager = connected(
            target,
            GuardedInterceptor(guard, idempotent=True, retry_at=retry_at),  # type: ignore[arg-type]
        )
        stack.append(manager)
        return manager.__enter__().unary_unary(full(UU))

    def note() -> None:
        deadline = current_deadline()
        assert deadline is not None
        lefts.append(deadline.remaining())

    def last(_request: bytes, context: Any) -> bytes:
        note()
        calls.append(1)
        context.abort(Code.UNAVAILABLE, "always")
        return b""

    def hop(following: Any) -> Callable[..., Any]:
        def middle(request: bytes, context: Any) -> bytes:
            note()
            try:
                answer: bytes = following(request)
            except grpc.RpcError as error:
                told: Any = error
                context.abort(told.code(), "")
            return answer

        return middle

    stack: list[Any] = []
    edge = ServerInterceptor(trust=LOOPBACK, timeout=10.0)
    with (
        serving({UU: last}, edge) as third,
        serving({UU: hop(client(third, stack))}, edge) as second,
        serving({UU: hop(client(second, stack))}, edge) as first,
    ):
        ask = client(first, stack)
        with pytest.raises(grpc.RpcError):
            ask(b"x", timeout=5.0)
        for manager in reversed(stack):
            manager.__exit__(None, None, None)
    return len(calls), lefts


def test_a_chain_of_services_does_not_multiply() -> None:
    """Three services of three attempts each: of 27 calls of the last 7 are left, or 3."""
    assert _chain("everywhere")[0] == 7
    calls, lefts = _chain("edge")
    assert calls == 3
    for first, second, third in (lefts[:3], lefts[3:6], lefts[6:]):
        assert 5.0 >= first >= second >= third


def test_the_attempt_header_is_what_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading the attempt, all 27 calls reach the last service."""
    monkeypatch.setattr(inbound, "read_attempt", lambda _value: None)
    assert _chain("everywhere")[0] == 27


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:1.2.3.4:567", "1.2.3.4"),
        ("ipv6:%5B::1%5D:567", "::1"),
        ("ipv6:[2001:db8::1]:567", "2001:db8::1"),
        ("unix:/run/x.sock", None),
        ("unix-abstract:x", None),
        ("inproc:1", "inproc:1"),
    ],
)
def test_peers_are_read(peer: str, address: str | None) -> None:
    """The address in gRPC's name of a peer is what trust is about."""
    assert interceptors._peer_address(peer) == address


@given(st.text())
def test_whatever_a_peer_is_called(peer: str) -> None:
    """No name makes it raise, and none that is no address is believed."""
    address = interceptors._peer_address(peer)
    trust = Trust(callers=["10.0.0.0/8"])
    trust.believes(address)
    assert isinstance(trust.client_address(address, []), str)


def test_unix_sockets_are_peers_too(tmp_path: Path) -> None:
    """A peer on a unix socket is believed if that was said."""
    service = Service()
    interceptor = ServerInterceptor(trust=Trust(callers=["unix"]))
    details: Any = type("Details", (), {"method": full(UU)})()
    handler = grpc.unary_unary_rpc_method_handler(service.one)
    found = interceptor.intercept_service(lambda _details: handler, details)

    class Spoken(_Context):
        def invocation_metadata(self) -> list[tuple[str, str]]:
            return list(SAID.items())

    found.unary_unary(b"", Spoken(f"unix:{tmp_path}"))
    assert service.seen[0]["tenant"] == "acme"


def test_bad_settings_are_told() -> None:
    """What cannot act on a server raises at construction, and says what to write."""
    for make in (ServerInterceptor, AioServerInterceptor):
        with pytest.raises(TypeError, match="Guard"):
            make("api")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="timeout= here"):
            make(new_guard(Timeout(1.0)))
        with pytest.raises(TypeError, match="Trust"):
            make(trust="10.0.0.0/8")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout"):
            make(timeout=0.0)


def test_reprs_and_snapshots() -> None:
    """An interceptor says whose it is, and what it turned away."""
    guard = new_guard(Bulkhead(1))
    assert repr(ServerInterceptor(guard)) == f"<ServerInterceptor {guard.name!r}>"
    assert repr(AioServerInterceptor()) == "<AioServerInterceptor without a guard>"
    interceptor = ServerInterceptor(trust=LOOPBACK)
    Sync().run(Service(), interceptor, UU, US, sent=EXPIRED)
    assert interceptor.snapshot() == {"expired": 2, "dropped": 0, "unclassified": 0}
