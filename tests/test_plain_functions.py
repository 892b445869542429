"""A function whose result is used at once may not be async, wherever one is taken."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, get_origin
from unittest.mock import AsyncMock

import pytest

from seawall import (
    AdaptiveLimit,
    Breaker,
    Cache,
    Guard,
    RateLimit,
    Retry,
    Shed,
    Throttle,
    get_guard,
    subscribe,
)
from seawall.clients.grpc import aio_interceptors
from seawall.clients.llm import Model, Models
from seawall.clients.upstreams import Upstreams
from seawall.config import guard_from_table
from seawall.load import ServiceLevels
from seawall.policies.retry import adaptive_attempts
from seawall.registry import free_name
from seawall.runtime.layers import FAILED, OK
from seawall.shedding import by_fraction, by_queue
from seawall.sim import Latency, Runs, World, rehearse, run_seeds, simulate
from seawall.testing import Step, fail
from seawall.tune import prove
from tests.pipeline.arguments import AWAITED_BY_PIPELINES, DECORATORS
from tests.support import new_guard
from tests.test_bad_arguments import PARTS, SUBJECTS
from tests.test_public_api import MODULES
from tests.tune.support import measured


def _public_functions() -> Iterator[tuple[str, Any]]:
    """Yield all that is public and can be called, with the label of the tables of bad arguments."""
    for module in MODULES:
        prefix = module.__name__.removeprefix("seawall").removeprefix(".").removeprefix("load.")
        if prefix in PARTS:
            prefix = ""
        for name in module.__all__:
            thing = getattr(module, name)
            label = f"{prefix}.{name}" if prefix else name
            if get_origin(thing) is not None or not callable(thing):
                continue
            if not isinstance(thing, type):
                yield label, thing
                continue
            if inspect.isfunction(thing.__init__):
                yield label, thing.__init__
            for method, member in vars(thing).items():
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{label}.{method}", function


def _takes_function(annotation: Any, module: str) -> bool:
    """Tell whether what is annotated so may be a function: named, or by an alias or protocol."""
    known = vars(sys.modules[module])
    for name in re.findall(r"\b[A-Za-z_]\w*", str(annotation)):
        meant = known.get(name)
        protocol = getattr(meant, "_is_protocol", False) and "__call__" in vars(meant)
        alias = get_origin(meant) is not None and "Callable" in str(meant)
        if name == "Callable" or protocol or alias:
            return True
    return False


def _arguments_that_take_functions() -> set[str]:
    return {
        f"{label}({parameter.name})"
        for label, function in _public_functions()
        for parameter in inspect.signature(function).parameters.values()
        if _takes_function(parameter.annotation, function.__module__)
    }


TABLES = {label: make for label, make, *_ in SUBJECTS}

BY_HAND: dict[str, Callable[[Any], Any]] = {
    "Breaker(break_for)": lambda x: Breaker(break_for=x),
    "Breaker(is_failure)": lambda x: Breaker(is_failure=x),
    "Breaker(key)": lambda x: Breaker(key=x),
    "Breaker.update(break_for)": lambda x: Breaker(consecutive=1).update(break_for=x),
    "Cache(key)": lambda x: Cache(1, key=x),
    "Family by": lambda x: Guard.family(free_name("bad"), lambda _key: [])(by=x),
    "adaptive_attempts(rule)": lambda x: adaptive_attempts(3, x),
    "adaptive_attempts(signals)": lambda x: adaptive_attempts(3, signals=[x]),
    "Guard.family(make)": lambda x: Guard.family(free_name("bad"), x),
    "Guard.standard(on)": lambda x: Guard.standard("bad", on=x, timeout=1.0),
    "ServiceLevels(depends_on)": lambda x: ServiceLevels("bad", depends_on={x: "degraded"}),
    "Retry(backoff)": lambda x: Retry(on=OSError, backoff=x),
    "Retry(on)": lambda x: Retry(on=x),
    "Retry(on) of several": lambda x: Retry(on=[OSError, x]),
    "Retry(retry_after)": lambda x: Retry(on=OSError, retry_after=x),
    "Shed.update(load)": lambda x: Shed(by_fraction(0.1)).update(load=x),
    "by_queue(of)": lambda x: by_queue(9, of=x),
    "clients.grpc.aio_interceptors(idempotent)": lambda x: aio_interceptors(
        Guard.standard(free_name("bad"), on=OSError, timeout=1.0), idempotent=x
    ),
    "get_guard(make)": lambda x: get_guard("bad", x),
    "tune.prove(progress)": lambda x: prove(measured(known=False), [], progress=x),
    "subscribe(listener)": subscribe,
    "testing.Step(error)": lambda x: Step(error=x),
    "testing.fail(error)": fail,
    "sim.ClosedUsers(keys)": lambda x: World(seed=1).users("u", print, count=1, keys=x),
    "sim.Latency(draw)": lambda x: Latency("drawn", None, x),
    "sim.Latency.by_concurrency(seconds)": Latency.by_concurrency,
    "sim.OpenClients(keys)": lambda x: World(seed=1).clients("c", print, rate=1.0, keys=x),
    "sim.OpenClients(rate)": lambda x: World(seed=1).clients("c", print, rate=x),
    "sim.Runs.estimate(of)": lambda x: Runs("none", []).estimate(x),
    "sim.Service.down(when)": lambda x: World(seed=1).service("s").down(when=x),
    "sim.Service.errors(error)": lambda x: World(seed=1).service("s").errors(error=x),
    "sim.Service.errors(when)": lambda x: World(seed=1).service("s").errors(when=x),
    "sim.World.clients(keys)": lambda x: World(seed=1).clients("c", print, rate=1.0, keys=x),
    "sim.World.clients(rate)": lambda x: World(seed=1).clients("c", print, rate=x),
    "sim.World.run(progress)": lambda x: World(seed=1).run(seconds=1.0, progress=x),
    "sim.World.users(keys)": lambda x: World(seed=1).users("u", print, count=1, keys=x),
    "sim.rehearse(guard)": lambda x: rehearse(x, latency=0.1, rate=1.0),
    "sim.run_seeds(build)": run_seeds,
    "sim.run_seeds(progress)": lambda x: run_seeds(print, progress=x),
    "sim.simulate(build)": simulate,
    "sim.simulate(progress)": lambda x: simulate(lambda _world: None, seconds=1.0, progress=x),
}

AWAITED = {
    "Breaker(probe)",
    "Fallback(levels)",
    "Guard.standard(fallback)",
    "Hedge(dispose)",
    "ServiceLevels.at(function)",
    "Pool(close)",
    "Pool(connect)",
    "Pool(degraded)",
    "Pool(validate)",
    "Serializer.arun(function)",
    "Worker(handler)",
    "aupdate_optimistically(read)",
    "aupdate_optimistically(write)",
    "clients.llm.Model(ask)",
    "clients.upstreams.HealthCheck(probe)",
    "dashboard.Dashboard(allow)",
    "dashboard.Dashboard(operate)",
    "durable.Database.arun(operation)",
    "durable.Dispatcher(listen)",
    "durable.Dispatcher(sink)",
    "durable.FifoSender.aresend(post)",
    "durable.IdempotentRequests(app)",
    "durable.JobWorker(functions)",
    "durable.JobWorker(listen)",
    "durable.DeferredCalls.run(function)",
    "durable.DeferredCallWorker(function)",
    "durable.Sqlite.arun(work)",
    "members.Heartbeats.watch(probe)",
    "members.Leader.arun(work)",
    "web.Edge(app)",
    "web.Health.add(check_)",
    "web.Lifecycle.lifespan(app)",
    "web.Lifecycle.warm_up(function)",
    "web.checks.DatabaseRead(connect)",
    "web.checks.DatabaseWrite(connect)",
}
"""Arguments that may be async functions: what they return is awaited."""

WORK = {
    "sim.ClosedUsers(call)",
    "sim.OpenClients(call)",
    "sim.Service(handler)",
    "sim.World.background(work)",
    "sim.World.clients(call)",
    "sim.World.service(handler)",
    "sim.World.users(call)",
    "sim.asgi(app)",
    "Guard.attempt(function)",
    "Guard.call(function)",
    "Guard.map(function)",
    "Serializer.run(function)",
    "durable.Database.run(operation)",
    "durable.FifoSender.resend(post)",
    "durable.Sqlite.run(work)",
    "members.Leader.run(work)",
    "update_optimistically(read)",
    "update_optimistically(write)",
}
"""Work of a caller that does not await: refused when it is called, with the async twin's name."""

OURS = {
    "Backoff(generate)",
    "Backoff.delays(rng)",
    "clients.grpc.GuardedInterceptor.intercept_stream_stream(continuation)",
    "clients.grpc.GuardedInterceptor.intercept_stream_unary(continuation)",
    "clients.grpc.GuardedInterceptor.intercept_unary_stream(continuation)",
    "clients.grpc.GuardedInterceptor.intercept_unary_unary(continuation)",
    "clients.grpc.Rpc(send)",
    "clients.upstreams.Pick(is_failure)",
    "durable.Once(count)",
    "members.Action(apply)",
    "telemetry.TelemetrySwitch(off)",
    "web.Lifecycle.closing_send(send)",
    "web.Lifecycle.lifespan(receive)",
    "web.Lifecycle.lifespan(send)",
    "web.grpc.AioServerInterceptor.intercept_service(continuation)",
    "web.wsgi.Edge(app)",
}
"""Arguments that Seawall, or the library it is plugged into, gives."""

NOT_PLAIN = AWAITED | AWAITED_BY_PIPELINES | DECORATORS | WORK | OURS
PLAIN = sorted((_arguments_that_take_functions() | set(BY_HAND)) - NOT_PLAIN)


async def _coroutine_function(*_args: Any, **_kwargs: Any) -> int:
    return 1


async def _async_generator(*_args: Any, **_kwargs: Any) -> AsyncIterator[int]:
    yield 1


def _generator(*_args: Any, **_kwargs: Any) -> Iterator[int]:
    yield 1


class _AsyncCallable:
    async def __call__(self, *_args: Any, **_kwargs: Any) -> int:
        return 1

    async def method(self, *_args: Any, **_kwargs: Any) -> int:
        return 1


WRONG = {
    "coroutine function": _coroutine_function,
    "async generator": _async_generator,
    "generator": _generator,
    "async __call__": _AsyncCallable(),
    "async method": _AsyncCallable().method,
    "partial": partial(partial(_coroutine_function, 1), 2),
    "partial of an object": partial(_AsyncCallable(), 1),
    "mock": AsyncMock(spec=_coroutine_function),
}


def test_every_argument_that_takes_a_function_is_known():
    """A new one stands in a table: it refuses async functions, or is listed as one that awaits."""
    assert [label for label in PLAIN if label not in BY_HAND and label not in TABLES] == []
    assert _arguments_that_take_functions() >= AWAITED | WORK | OURS


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("label", PLAIN)
def test_what_nobody_awaits_is_refused(label: str, wrong: Any):
    """A coroutine is no key, no cost, no yes and no no: the function is refused where given."""
    make = BY_HAND.get(label) or TABLES[label]
    with pytest.raises(TypeError, match=r"plain function|makes (one|a new error)"):
        make(wrong)


def test_plain_functions_of_every_kind_are_taken():
    """Lambdas, builtins, classes, methods, objects with __call__ and partials are plain."""

    class Plain:
        def __call__(self, *_args: Any) -> int:
            return 1

    for plain in (lambda *_: 1, len, str, "x".join, Plain(), Plain().__call__, partial(max, 1)):
        RateLimit("1/s", key=plain)
        Cache(1.0, key=plain)


def _refused_by(throttle: Throttle) -> Callable[..., bool]:
    """Return whether the throttle of a guard counts a call that ended so as refused."""
    (gate,) = new_guard(throttle).bounds

    def refused(error: Exception | None, value: object) -> bool:
        outcome, detail = (OK, value) if error is None else (FAILED, error)
        return gate._was_refused(outcome, detail)

    return refused


ERROR_RULES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "Breaker(is_failure)": lambda x: Breaker(is_failure=x).is_failure,
    "AdaptiveLimit(is_drop)": lambda x: AdaptiveLimit(is_drop=x).is_drop,
    "Upstreams(is_failure)": lambda x: Upstreams("x", ["http://h"], is_failure=x)._is_failure,
    "Models(fall_back_on)": lambda x: partial(
        Models(Model("x", len), fall_back_on=x)._fall_back_on
    ),
    "Retry(on)": lambda x: Retry(on=x).is_retryable,
    "Throttle(on)": lambda x: _refused_by(Throttle(on=x)),
}


@pytest.mark.parametrize("make", ERROR_RULES.values(), ids=ERROR_RULES)
@pytest.mark.parametrize("types", [ConnectionError, (ConnectionError, KeyError)])
def test_types_of_errors_stand_for_a_predicate(make: Any, types: Any):
    """Errors of these types match, groups of nothing else too; others and values do not."""
    matches = make(types)
    one_argument = isinstance(matches, partial)

    def asked(error: Exception | None, value: object = None) -> bool:
        return bool(matches(error) if one_argument else matches(error, value))

    assert asked(ConnectionResetError())
    assert asked(ExceptionGroup("", [ConnectionError(), BrokenPipeError()]))
    assert not asked(ValueError())
    assert not asked(ExceptionGroup("", [ConnectionError(), ValueError()]))
    if not one_argument:
        assert not asked(None, "an answer")


@pytest.mark.parametrize("make", ERROR_RULES.values(), ids=ERROR_RULES)
@pytest.mark.parametrize("wrong", [KeyboardInterrupt, int, (OSError, 5), ()])
def test_what_is_no_type_of_errors_is_refused(make: Any, wrong: Any):
    """Exits are no errors, other classes no predicates, and nothing is not a rule."""
    with pytest.raises((TypeError, ValueError), match="such as"):
        make(wrong)


def test_a_breaker_told_a_type_of_error_counts_that_type_alone():
    """Successes and other errors keep it closed; errors of the type open it."""
    breaker = Breaker(consecutive=2, is_failure=ConnectionError)
    guard = Guard(free_name("typed"), breaker)
    for _ in range(5):
        assert guard.call(lambda: "fine") == "fine"
        with pytest.raises(ValueError, match="bad"):
            guard.call(_raise, ValueError("bad request"))
    assert breaker.state == "closed"
    for _ in range(2):
        with pytest.raises(ConnectionError):
            guard.call(_raise, ConnectionResetError())
    assert breaker.state == "open"


def test_a_table_names_types_of_errors():
    """In TOML the name of an error stands where a predicate may: no code has to be handed over."""
    breaker = {"policy": "breaker", "is_failure": ["ConnectionError", "TimedOut"]}
    limit = {"policy": "adaptive_limit", "is_drop": "busy"}
    names = {"busy": lambda _error, _value: False}
    guard = guard_from_table(free_name("told"), {"policies": [breaker, limit]}, names=names)
    first, second = guard.policies
    assert isinstance(first, Breaker)
    assert isinstance(second, AdaptiveLimit)
    assert repr(first.is_failure) == "(ConnectionError, TimedOut)"
    assert second.is_drop is names["busy"]
    with pytest.raises(ValueError, match="hand it over as names"):
        guard_from_table("x", {"policies": [{"policy": "breaker", "is_failure": "Nonsense"}]})


def _raise(error: Exception) -> None:
    raise error
