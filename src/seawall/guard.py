"""Guard: an ordered stack of policies around one dependency."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from functools import partial, update_wrapper
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload
from weakref import ref

from seawall import _checks as check
from seawall import registry, rules
from seawall._failures import reason_of
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock, new_random
from seawall.context import reset
from seawall.models.backoff import Backoff
from seawall.models.breaker.probes import growing, slow_start
from seawall.models.pressure import Pressure
from seawall.policies.breaker import Breaker
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.fallback import Fallback
from seawall.policies.retry import Retry, RetryBudget
from seawall.policies.retry.conditions import On
from seawall.policies.retry.policy import AdaptiveAttempts, RetryFlow
from seawall.policies.slots import SlotPolicy
from seawall.policies.timeout import Timeout
from seawall.policies.timeout.policy import AdaptiveSeconds, Sync
from seawall.runtime.batch import CONCURRENCY, Batch, Room, arun_batch, run_batch
from seawall.runtime.blocks import Attempts, Hold
from seawall.runtime.call import Call, Trace, trace_var
from seawall.runtime.fastpath import hosts_around
from seawall.runtime.functions import NO_CALL, NO_PLAIN_CALL, awaiting, is_async, kind_of, refuse
from seawall.runtime.layers import Kind, Layer
from seawall.runtime.parameters import parameters_of
from seawall.runtime.plan import Plan
from seawall.runtime.policy import GateBound, Policy, bind
from seawall.runtime.result import Result
from seawall.runtime.stats import Stats

if TYPE_CHECKING:
    from random import Random
    from types import FrameType

    from seawall.family import Family, Make
    from seawall.runtime.store import Store

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Guard:
    """An ordered stack of policies around one dependency; the first is outermost.

    Use it as a decorator for `def`, `async def`, generators and async generators, or through
    `call`, `acall`, `attempt`, `aattempt`, `attempts` and `hold`. The same guard can be used by
    several threads and event loops at the same time.
    """

    def __init__(
        self,
        name: str,
        *policies: Policy,
        max_wait: float | None = None,
        idempotent: bool = True,
        replace: bool = False,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Stack `policies` under `name`, which must be unique among live guards.

        The guard lives until it is closed.

        `max_wait` bounds the total time a call waits at all gates, over all of its attempts: for
        slots, for its turn at a rate limit, for answers of a shared store. Each gate's own
        `max_wait` applies as well. None means no bound.

        `idempotent=False` says that repeating a call repeats its effect: such a call is retried
        only with an idempotency key. `replace=True` closes a live guard of the same name (for
        notebooks, app factories and reloads). `clock` and `rng` let tests control time and
        randomness.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"Guard({name!r}): the first argument is a name, such as 'vendor'")
        rules.check_stack(policies)
        max_wait = None if max_wait is None else check.seconds("max_wait", max_wait, zero=True)
        check.flag("idempotent", idempotent)
        check.flag("replace", replace)
        if clock is not None:
            check_clock(clock)
        if rng is not None:
            check.chance("rng", rng)
        with registry.reserved(name, replace=replace):
            self._set_up(
                name, policies, max_wait=max_wait, idempotent=idempotent, clock=clock, rng=rng
            )
            self.made_at = _caller()
            registry.add(self)

    def _set_up(
        self,
        name: str,
        policies: tuple[Policy, ...],
        *,
        max_wait: float | None = None,
        idempotent: bool = True,
        clock: Clock | None = None,
        rng: Random | None = None,
        around: Layer | None = None,
    ) -> None:
        self.name = name
        self.made_at = ""
        """File and line that made the guard; see the registry's log record on too many guards."""
        self.closed = False
        """Whether `close()` was called."""
        self.policies = policies
        self.max_wait = max_wait
        """Maximum total seconds a call may wait at all of its gates; None means no bound."""
        self.idempotent = idempotent
        self.clock: Clock = clock or current_clock()
        self.keeps_statistics = True
        self._rng = rng
        self._own_rng = rng is None
        self.stats = Stats(self.clock.now())
        survives_fork(self)
        self.bounds = [bind(policy, self) for policy in policies]
        if any(isinstance(policy, Retry) for policy in policies):
            self.stats.watch = self._note_retries_around
        self._around = around
        """A layer that the guard's owner puts around all policies; it belongs to no policy."""
        self._plan = Plan(self, self.bounds, around)
        self._dangers: dict[str, None] = {}

    def __repr__(self) -> str:
        stack = " > ".join(type(policy).__name__ for policy in self.policies)
        return f"<Guard {self.name!r}: {stack}>"

    @property
    def rng(self) -> Random:
        """The random number generator: the one given, or the guard's own."""
        if self._rng is None:
            self._rng = new_random(self.name)
        return self._rng

    @classmethod
    def standard(
        cls,
        name: str,
        *,
        on: On,
        timeout: float | AdaptiveSeconds,
        attempts: int | AdaptiveAttempts = 3,
        backoff: float | Backoff = 0.1,
        total_timeout: float | None = None,
        rate: str | None = None,
        limit: int | None = None,
        max_wait: float = 0.0,
        fallback: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
        breaker: Breaker | None = None,
        shared: Store | None = None,
        sync: Sync | None = None,
        idempotent: bool = True,
        replace: bool = False,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> Guard:
        """Build the recommended stack from a few numbers.

        `timeout` applies to each attempt, `total_timeout` to all of them together (default: what
        `attempts` of them can take, with their pauses and waits). `rate` is the rate limit, such as
        "60/s", and `limit` the maximum number of concurrent calls; neither applies if not given. A
        call waits for slots up to `max_wait` seconds, over all of its attempts. Plain functions
        need `sync`, as in `Timeout`. The retry budget uses its defaults. So does the breaker,
        except for short, growing breaks and a slow start, unless `breaker` is given. With a
        `shared` store, all pods share the breaker and the rate under the guard's name.
        """
        stack: list[Policy] = []
        if fallback is not None:
            if isinstance(fallback, Iterable) and not isinstance(fallback, str):
                stack.append(Fallback(*fallback))
            else:
                stack.append(Fallback(fallback))
        retry = Retry(on=on, attempts=attempts, backoff=backoff, budget=RetryBudget())
        attempt = Timeout(timeout, sync=sync)
        # The attempt's Timeout has its own thread; the total Timeout must not add a second one.
        around: Sync | None = None if sync is None else "cooperative"
        if total_timeout is not None:
            stack.append(Timeout(total_timeout, sync=around))
        elif retry.most_attempts > 1:
            waits = check.seconds("max_wait", max_wait, zero=True)
            delays = retry.backoff.delays(lambda: 1.0)
            pauses = sum(next(delays) for _ in range(retry.most_attempts - 1))
            total = attempt.longest * retry.most_attempts + pauses + waits
            stack.append(Timeout(total, sync=around))
        if retry.most_attempts > 1:
            stack.append(retry)
        among: dict[str, Any] = {} if shared is None else {"shared": shared, "name": name}
        if breaker is None:
            # Recover soon after the vendor does, but gradually (docs/policies/breaker.md).
            breaker = Breaker(break_for=growing(0.25, cap=1.0), probes=slow_start(), **among)
        stack.append(breaker)
        if rate is not None:
            from seawall.policies.rate_limit import RateLimit

            stack.append(RateLimit(rate, **among))
        if limit is not None:
            stack.append(Bulkhead(limit, max_wait=max_wait))
        elif check.seconds("max_wait", max_wait, zero=True):
            raise ValueError("max_wait is how long to wait for one of `limit` slots: write limit=")
        stack.append(attempt)
        return cls(
            name,
            *stack,
            max_wait=max_wait or None,
            idempotent=idempotent,
            replace=replace,
            clock=clock,
            rng=rng,
        )

    @classmethod
    def alone(cls, policy: Policy, function: F) -> F:
        """Put one policy around a function, in a guard that is not registered."""
        guard = cls._unregistered(getattr(function, "__qualname__", repr(function)), (policy,))
        # An unregistered guard has no name to look it up by, so its statistics would never be read.
        guard.keeps_statistics = policy._needs_statistics  # noqa: SLF001 - not for users
        return guard(function)

    @classmethod
    def family(
        cls,
        name: str,
        make: Make,
        *,
        max_keys: int = 1024,
        max_wait: float | None = None,
        idempotent: bool = True,
        replace: bool = False,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> Family:
        """Make a guard for each key on its first use, with the policies of `make(key)`.

        See `Family`: `family[key].call(...)`, `@family(by="host")`.
        """
        # Imported by name: a family is made of guards, so importing it here would be circular.
        made: Family = import_module("seawall.family").Family(
            name,
            make,
            max_keys=max_keys,
            max_wait=max_wait,
            idempotent=idempotent,
            replace=replace,
            clock=clock,
            rng=rng,
        )
        return made

    @classmethod
    def _unregistered(cls, name: str, policies: tuple[Policy, ...], **settings: Any) -> Guard:
        """Make a guard that is not registered: it lives as long as its owner holds a reference."""
        rules.check_stack(policies)
        guard = cls.__new__(cls)
        guard._set_up(name, policies, **settings)  # noqa: SLF001
        return guard

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, /, *, idempotent: bool) -> Callable[[F], F]: ...
    def __call__(self, function: Any = None, /, *, idempotent: bool | None = None) -> Any:
        """Decorate a function: `@guard`, or `@guard(idempotent=False)` for this function only."""
        if function is not None:
            return self._wrap(function)
        if idempotent is None:
            raise TypeError(f"write @guard, or @guard(idempotent=...), not @{self.name}()")
        check.flag("idempotent", idempotent)
        host = self if idempotent == self.idempotent else MarkedGuard(self, idempotent=idempotent)
        return host.__call__

    def _wrap(self, function: F) -> F:
        kind = kind_of(function)
        guarded: Any
        if kind in ("sync", "async"):
            self._plan.check(kind)
            guarded = self._plan.bind(function, kind, parameters_of(function))
        else:
            from seawall.runtime.generators import guard_async_generator, guard_generator

            layers = self._stream_layers("sync" if kind == "generator" else "async")
            guard_stream = guard_generator if kind == "generator" else guard_async_generator
            guarded = guard_stream(lambda _args, _kwargs: (self, layers), function)
        update_wrapper(guarded, function)
        # Marked by identity: another decorator may copy attributes.
        guarded.__seawall__ = (self, ref(guarded))
        wrapped: F = guarded
        return wrapped

    def _stream_layers(self, kind: Any) -> list[Layer]:
        return self._plan.layers(kind, "guard a generator, which gives its items bit by bit")

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a plain function under this guard."""
        plan, bare = self._plan_for(function, NO_PLAIN_CALL)
        value: T = plan.bind(bare, "sync")(*args, **kwargs)
        return value

    @overload
    async def acall(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def acall(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def acall(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an async function under this guard; or a plain one, if it has a ThreadBulkhead."""
        plan, bare = self._async_plan_for(function)
        return await plan.bind(bare, "async")(*args, **kwargs)

    def attempt(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Result[T]:
        """Call a plain function and return its `Result`; raise only cancellation and exits."""
        plan, bare = self._plan_for(function, NO_PLAIN_CALL)
        guarded = plan.bind_interpreted(bare, "sync")
        with _CatchingAttempt(self) as attempt:
            attempt.value = guarded(*args, **kwargs)
        return attempt.result()

    @overload
    async def aattempt(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result[T]: ...
    @overload
    async def aattempt(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result[T]: ...
    async def aattempt(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an async function and return its `Result`; raise only cancellation and exits."""
        plan, bare = self._async_plan_for(function)
        guarded = plan.bind_interpreted(bare, "async")
        with _CatchingAttempt(self) as attempt:
            attempt.value = await guarded(*args, **kwargs)
        return attempt.result()

    def map(
        self, function: Callable[[A], T], items: Iterable[A], /, *, concurrency: int | None = None
    ) -> Batch[A, T]:
        """Call a plain function with each of `items` under this guard; return all results.

        At most `concurrency` calls run at the same time, in threads. The default is what the
        guard's bulkheads admit, up to 10. An item that fails does not stop the others. With 1, all
        calls run in this thread.
        """
        check.plain_function("function", function, "amap(...) is for an async one")

        def one(item: A) -> Result[T]:
            return self.attempt(function, item)

        room = Room(self.name, one)
        return run_batch(lambda _item: room, items, self._concurrency(concurrency))

    @overload
    async def amap(
        self,
        function: Callable[[A], Awaitable[T]],
        items: Iterable[A] | AsyncIterable[A],
        /,
        *,
        concurrency: int | None = None,
    ) -> Batch[A, T]: ...
    @overload
    async def amap(
        self,
        function: Callable[[A], T],
        items: Iterable[A] | AsyncIterable[A],
        /,
        *,
        concurrency: int | None = None,
    ) -> Batch[A, T]: ...
    async def amap(
        self,
        function: Any,
        items: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        concurrency: int | None = None,
    ) -> Any:
        """Async twin of `map`: call an async function with each of `items`, each in its own task.

        Items may also come from an async source, which is read as capacity frees up. Cancelling
        this call cancels all items.
        """
        check.function("function", function)
        room = Room(self.name, partial(self.aattempt, function))
        return await arun_batch(lambda _item: room, items, self._concurrency(concurrency))

    def _concurrency(self, given: int | None) -> int:
        """Return the concurrency of a batch: the given number, or what the bulkheads admit."""
        if given is not None:
            return check.count("concurrency", given)
        return min([CONCURRENCY, *(limit for _, limit in self._bulkheads())])

    def _bulkheads(self) -> list[tuple[int, int]]:
        gates = []
        for policy in self.policies:
            gate: Any = policy
            if policy.kind in ("bulkhead", "adaptive_limit"):
                gates.append((id(policy), max(1, int(gate.limit))))
            elif policy.kind == "thread_bulkhead":
                gates.append((id(policy), gate.pool.size))
        return gates

    def _plan_for(self, function: Any, wrong: int = NO_CALL) -> tuple[Plan, Any]:
        """Return the plan and function to call; unwrap a function that this guard has decorated."""
        mark = getattr(function, "__seawall__", None)
        if mark is not None:
            host, guarded = mark
            if host.bounds is self.bounds and guarded() is getattr(function, "__func__", function):
                owner = getattr(function, "__self__", None)
                bare = function.__wrapped__
                bare = bare if owner is None else bare.__get__(owner)
                return host._plan, bare  # noqa: SLF001 - this guard's own plan, or a marked copy's
        code = getattr(function, "__code__", None)
        if code is not None and code.co_flags & wrong:
            refuse(function)
        return self._plan, function

    def _async_plan_for(self, function: Any) -> tuple[Plan, Any]:
        """Return the plan and a function to await; in a thread, a plain one stays as it is."""
        plan, bare = self._plan_for(function)
        if not is_async(bare) and not plan.runs_in_threads:
            bare = awaiting(bare)
        return plan, bare

    def hold(self, *args: Any, **kwargs: Any) -> Hold:
        """Enter only the gates (breaker, bulkhead) for a `with` or `async with` block.

        The arguments are passed to the `key=` functions of gates.
        """
        gates: list[Layer] = [] if self._around is None else [self._around]
        gates += [bound for bound in self.bounds if isinstance(bound, GateBound)]
        return Hold(self, gates, args, kwargs)

    def attempts(self, *args: Any, **kwargs: Any) -> Attempts:
        """Run a block of code under the whole stack, as often as `Retry` allows.

            async for attempt in guard.attempts():
                async with attempt:
                    ...

        An error of the block is swallowed if another attempt follows; otherwise the `with` raises
        it. Plain code uses the same loop without `async`. The arguments are passed to `key=`
        functions. Policies that would have to run the block elsewhere, twice, or answer in its
        place (`Cache`, `Fallback`, `Hedge`, threads) are refused with a TypeError.
        """
        for policy in self.policies:
            if isinstance(policy, Fallback):
                raise TypeError(
                    f"guard {self.name!r}: {policy!r} cannot answer in place of a block of code:"
                    " put the block into a function, or catch its error after the loop"
                )
        return Attempts(self, self._block_layers, args, kwargs)

    def _block_layers(self, kind: Kind) -> list[Layer]:
        return self._plan.layers(
            kind, "stand around a block of code, which runs once, where it is written"
        )

    def pressure(self, *args: Any, **kwargs: Any) -> Pressure:
        """Return the current load on the dependency, as this guard sees it.

        A keyed breaker is checked for the key of a call with these arguments; without, for any.
        """
        slots = self._slot_policies()
        return self._pressure([one.in_flight / one.limit for one in slots], args, kwargs)

    def pressure_on(self, call: Call) -> Pressure:
        """Return the pressure of calls other than `call` on this guard and those around it."""
        held: Sequence[object] = call.layers[: len(call.tickets)]
        holds = [bound.policy for bound in self.bounds if bound in held]
        slots = self._slot_policies()
        others = [one.crowding(own=int(one in holds)) for one in slots]
        pressure = self._pressure(others, call.args, call.kwargs)
        for host in hosts_around(self):
            pressure = pressure.worst(host.pressure_inside())
        return pressure

    def pressure_inside(self) -> Pressure:
        """Return the pressure on this guard, not counting one call inside it."""
        crowded = [one.crowding(own=1) for one in self._slot_policies()]
        return self._pressure(crowded, (), {}, keyed=False)

    def _slot_policies(self) -> list[SlotPolicy]:
        return [policy for policy in self.policies if isinstance(policy, SlotPolicy)]

    def _pressure(
        self,
        saturation: list[float],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        keyed: bool = True,
    ) -> Pressure:
        now = self.clock.now()
        breakers = [
            policy
            for policy in self.policies
            if isinstance(policy, Breaker) and (keyed or policy.key is None)
        ]
        queues = [policy.slots for policy in self._slot_policies()]
        retries = [policy for policy in self.policies if isinstance(policy, Retry)]
        return Pressure(
            breaker_open=any(breaker.is_open(now, *args, **kwargs) for breaker in breakers),
            queue_wait=max((queue.recent_wait(now) for queue in queues), default=0.0),
            average_queue_wait=max((queue.average_wait(now) for queue in queues), default=0.0),
            saturation=max(saturation, default=0.0),
            error_rate=self.stats.error_rate(now),
            load=max((retry.load() for retry in retries), default=0.0),
        )

    def _note_retries_around(self) -> None:
        """Record the guards around this call that retry too."""
        for host in hosts_around(self):
            policies: Iterable[Policy] = getattr(host, "policies", ())
            if any(isinstance(policy, Retry) for policy in policies):
                for bound in self.bounds:
                    if isinstance(bound, RetryFlow):
                        bound.note_retried_by(host.name)

    def snapshot(self) -> dict[str, Any]:
        """Return all observable state: counts, latency, and each policy's state."""
        now = self.clock.now()
        return {
            "name": self.name,
            "switches": rules.switches(),
            **self.stats.snapshot(now),
            "policies": [
                {"policy": bound.policy.kind, **bound.snapshot(now)} for bound in self.bounds
            ],
        }

    def note_danger(self, danger: str) -> None:
        """Add a warning to `explain()`, about what the guard was plugged into."""
        self._dangers[danger] = None

    def explain(self) -> str:
        """Return the stack as text, its dangers, and its expected behaviour in an outage."""
        lines = [f"guard {self.name!r}, outermost first:"]
        lines += [f"{'  ' * depth}{policy!r}" for depth, policy in enumerate(self.policies, 1)]
        lines += self._expected()
        found = self.dangers()
        if found:
            lines += ["take care:", *(f"  - {danger}" for danger in found)]
            lines.append(f"recommended order: {rules.RECOMMENDED}")
        return "\n".join(lines)

    def dangers(self) -> list[str]:
        """Return what is dangerous in the stack, each with its remedy."""
        return [
            *rules.switched(),
            *rules.dangers(self.name, self.policies, idempotent=self.idempotent),
            *rules.nested_retries(self, registry.guards()),
            *self._dangers,
        ]

    def _expected(self) -> list[str]:
        """Return load on the dependency and share of served calls, at growing failure rates."""
        from seawall.forecast import RATE, forecasts

        def make_host(policies: tuple[Policy, ...], clock: Clock, rng: Random) -> Any:
            guard = Guard.__new__(Guard)
            guard._set_up(self.name, policies, clock=clock, rng=rng)  # noqa: SLF001
            return guard, guard._plan.layers("sync", "be forecast")  # noqa: SLF001

        expected = forecasts(self.policies, make_host)
        if not expected:
            return []
        head = f"if attempts fail by chance, at {RATE} calls a second:"
        return [head, *(f"  {forecast}" for forecast in expected)]

    def _after_fork(self) -> None:
        """Drop the generator, so that a child process draws other numbers than its parent."""
        if self._own_rng:
            self._rng = None

    def close(self) -> None:
        """Free the name for another guard; calls in progress and decorated functions continue."""
        if not self.closed:
            self.closed = True
            registry.remove(self)


class MarkedGuard(Guard):
    """The same guard for functions with another `idempotent` mark; shares all state."""

    def __init__(self, guard: Guard, *, idempotent: bool) -> None:
        vars(self).update(vars(guard))
        self._original = guard
        self.idempotent = idempotent
        self._plan = Plan(self, guard.bounds, guard._around)  # noqa: SLF001 - it is the same guard

    @property
    def rng(self) -> Random:
        """The random number generator of the guard itself, which a fork replaces."""
        return self._original.rng


def _caller() -> str:
    """Return the innermost caller's file and line outside of Seawall."""
    import sys

    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - no other way to get the line
    while frame is not None and frame.f_globals.get("__name__", "").startswith("seawall."):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _CatchingAttempt:
    """Collects the outcome of one call."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._trace = Trace(guard.name)
        self._error: Exception | None = None
        self.value: Any = None

    def __enter__(self) -> Self:
        self._began = self._guard.clock.now()
        self._token = trace_var.set(self._trace)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        reset(trace_var, self._token)
        if isinstance(error, Exception):
            self._error = error
            return True
        return False

    def result(self) -> Result[Any]:
        trace, error = self._trace, self._error
        less = None if error is not None else trace.degradation
        # Break the cycle: both errors' tracebacks refer to the caller's frame, and that to this.
        self._error = trace.degradation = None
        cause = None if less is None else less.error
        known = cause if error is None else error
        return Result(
            value=self.value,
            error=error,
            level=0 if less is None else less.level,
            reason=None if known is None else reason_of(known),
            attempts=trace.attempts,
            elapsed=self._guard.clock.now() - self._began,
            source=None if less is None else less.source,
            cause=cause,
            age=None if less is None else less.age,
        )
