"""The lifecycle of a service: starting, ready, draining, stopped; and its requests in flight.

Promises:

- The service is ready only after the app's own startup and every warm-up step.
- Readiness ends at the moment when draining begins.
- Accepted requests are served until they end, or until the drain timeout; the number of requests
  cut off is reported.
- Nothing that the app needs is closed before that.
"""

from __future__ import annotations

from asyncio import (
    AbstractEventLoop,
    Event,
    Future,
    Task,
    TimerHandle,
    current_task,
    get_running_loop,
    shield,
)
from asyncio import timeout as time_limit
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import SystemRandom
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall.events import LifecycleChanged
from seawall.events.bus import emit
from seawall.models.backoff import exponential
from seawall.runtime.driver import sleep_async
from seawall.web.asgi_types import App, Message, Receive, Scope, Send
from seawall.web.lifecycle.server_stop import ServerStop, Signals, Stop
from seawall.web.registered_calls import RegisteredCall, legible

__all__ = ["Drained", "Lifecycle"]

State: TypeAlias = Literal["starting", "ready", "draining", "stopped"]
StepFunction: TypeAlias = Callable[[], Any]
OnFailure: TypeAlias = Literal["retry", "ignore", "fail"]

CHECK_SIGNALS_AFTER: Final = 1.0
"""Seconds after the start at which servers have installed their own signal handlers too."""

MOST_STEPS: Final = 100
"""Maximum number of warm-up steps. More than any service has: beyond it, the same steps are
probably being added repeatedly."""

PAUSES: Final = exponential(0.5, cap=30.0, jitter="equal")
"""Pauses between attempts of a step, with jitter: pods that start together must not retry together.
"""


class Drained(NamedTuple):
    """Result of draining: its duration, and the number of requests that did not end in time."""

    seconds: float
    cut: int


class Lifecycle:
    """Lifecycle phase of a service; belongs to the event loop that serves.

    The edge counts requests in and out (`begin`, `end`), websockets separately (`begin_socket`,
    `end_socket`), and forwards the lifespan protocol. The lifecycle restarts with the next
    lifespan, and in the next event loop, as in tests of apps.
    """

    def __init__(
        self,
        *,
        name: str = "service",
        drain_timeout: float = 25.0,
        delay: float = 0.0,
        signals: bool = True,
    ) -> None:
        """Drain for at most `drain_timeout` seconds; still accept requests for the first `delay`.

        With `signals`, SIGTERM starts the draining, and the server's own handler runs after
        `delay`. That needs a server which handles the signal in the main thread, as uvicorn does;
        under another server a warning in the log says that the delay has no effect.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: write a name, such as 'orders'")
        self.name = name
        self.drain_timeout = check.seconds("drain_timeout", drain_timeout, zero=True)
        self.delay = check.seconds("delay", delay, zero=True)
        if self.delay and self.delay >= self.drain_timeout:
            raise ValueError(
                f"delay={delay!r}: it is part of drain_timeout={drain_timeout!r}; write less"
            )
        self.refused = 0
        """Number of requests that came too late."""
        self.last_drain: Drained | None = None
        self._count_in_flight: Callable[[], int] | None = None
        """Function that returns the number of requests in flight, where others count them."""
        self._signals = Signals() if check.flag("signals", signals) else None
        self._steps: list[_WarmUpStep] = []
        self._in_lifespan = False
        self._reset()
        registry.enter(self, "lifecycle", name)

    def _reset(self) -> None:
        self._in_flight = 0
        self.sockets = 0
        """Number of websockets among them."""
        self._loop: AbstractEventLoop | None = None  # the serving event loop; None before the start
        self._state: State = "starting"
        self.draining = False
        """Whether the service is draining: connections should be closed after the response."""
        self._accepts = False
        self._refuses = False
        self._requests_ended: Future[None] | None = None
        self._sockets_closed: Future[None] | None = None
        self._stop_server: Stop | None = None
        self._warming: Task[None] | None = None
        self._drain: Task[Drained] | None = None
        self._drain_until = 0.0  # time at which draining ends at the latest
        self._may_stop_server = False  # whether the server may be stopped
        self._signal_check: TimerHandle | None = None
        self._drain_begun = Event()
        self._skip_delay = Event()

    @property
    def in_flight(self) -> int:
        """Number of requests in flight, including streams and websockets."""
        return self._in_flight if self._count_in_flight is None else self._count_in_flight()

    def __repr__(self) -> str:
        return f"<Lifecycle {self.name!r}: {self._state}, {self.in_flight} in flight>"

    # Called by the edge for each request

    def begin(self) -> bool:
        """Count a request in; return False if it must be refused as the service is stopping."""
        if not self._accepts:
            self.start_if_needed()
            if self._refuses:
                self.refused += 1
                return False
        self._in_flight += 1
        return True

    def end(self) -> None:
        """Count out a request that was counted in."""
        if self._in_flight > 0:  # otherwise it belongs to an earlier life
            self._in_flight -= 1
        if self._requests_ended is not None and not self._in_flight:
            set_done(self._requests_ended)

    def begin_socket(self) -> bool:
        """Count a websocket in; the server, which would cut it off, is stopped only after it."""
        accepted = self.begin()
        self.sockets += accepted
        return accepted

    def end_socket(self) -> None:
        """Count out a websocket that was counted in."""
        if self.sockets > 0:
            self.sockets -= 1
        if self._sockets_closed is not None and not self.sockets:
            set_done(self._sockets_closed)
        self.end()

    def start_if_needed(self) -> None:
        """Start without a lifespan event: some servers serve without the lifespan protocol."""
        if self._in_lifespan:
            return
        over = self._drain is None or _is_gone(self._drain)
        if self._refuses and over and self._loop is not get_running_loop():
            self._reset()  # the last life belonged to another event loop
        if not self._accepts and not self._refuses:
            if self._signals is not None:
                self._warn_of_delay("its server does not tell of its start (ASGI lifespan)")
            self.start_serving()
        elif self._warming is not None and self._state == "starting" and _is_gone(self._warming):
            self._warm_up()

    def start_serving(self) -> None:
        """Accept requests from now on, and warm up; for servers that do not report their start."""
        self._begin_to_accept()
        self._warm_up()

    def closing_send(self, scope: Scope, send: Send) -> Send:
        """Return `send`; while draining, one that closes the connection after the response.

        So keep-alive connections end between two requests, and not during a request in transit.
        From HTTP/2 on that is the server's responsibility, and the header is forbidden.
        """
        leaves = self._state in {"draining", "stopped"}
        if not leaves or not str(scope.get("http_version", "1.1")).startswith("1"):
            return send

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [h for h in message.get("headers", ()) if h[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        return send_and_close

    # State

    @property
    def state(self) -> State:
        """The phase: "starting", "ready", "draining" or "stopped"."""
        return self._state

    async def until_draining(self) -> None:
        """Wait until draining begins: for streams and websockets that should end then.

        A server that gets a signal waits for open streams before it notifies the app, so the signal
        itself ends the wait too.
        """
        stop, begun = ServerStop.of_this_loop(), self._drain_begun
        listener = partial(begun.set)  # a distinct object for each waiting task
        stop.listen(listener)
        try:
            if not stop.is_stopping():  # the stop may have come before the listener
                await begun.wait()
        finally:
            stop.ignore(listener)

    def snapshot(self) -> dict[str, Any]:
        """Return phase, requests in flight, refused requests, and pending warm-up steps."""
        return {
            "name": self.name,
            "state": self._state,
            "in_flight": self.in_flight,
            "sockets": self.sockets,
            "refused": self.refused,
            "warming_up": [step.name for step in self._steps if not step.done],
            "cut": 0 if self.last_drain is None else self.last_drain.cut,
        }

    # Warm-up

    def warm_up(
        self,
        function: StepFunction,
        *,
        timeout: float = 30.0,
        on_failure: OnFailure = "retry",
    ) -> StepFunction:
        """Call `function` after the app's own startup, and be ready only when it has finished.

        Steps run in the order in which they were added; a plain function runs in a thread. A step
        that fails, or takes more than `timeout` seconds, is retried with growing pauses ("retry"),
        skipped ("ignore"), or fails the start ("fail": such steps run first, before the server
        accepts a connection). Return the function, so that this works as a decorator.
        """
        if self._state != "starting":
            raise RuntimeError("warm_up(): the service is up already; add steps before it starts")
        if len(self._steps) >= MOST_STEPS:
            raise ValueError(f"warm_up(): at most {MOST_STEPS} steps; add each of them once")
        self._steps.append(_WarmUpStep(function, timeout, on_failure))
        return function

    def _begin_to_accept(self) -> None:
        self._accepts = True
        self._loop = get_running_loop()
        for step in self._steps:
            step.done = False

    def _warm_up(self) -> None:
        left = [step for step in self._steps if not step.done]
        if not left:
            self._enter_state("ready")
            return
        self._warming = get_running_loop().create_task(self._warm_in_background(left))

    async def _warm_in_background(self, steps: list[_WarmUpStep]) -> None:
        for step in steps:
            await step.run(self.name)
        if self._warming is current_task():  # otherwise another life has begun
            self._enter_state("ready")

    # Draining

    async def drain(self) -> Drained:
        """Stop being ready, refuse after `delay`, wait for requests in flight; return the result.

        Calls during draining wait for the same result. Cancelling a call does not stop the
        draining.
        """
        return await shield(self._draining(None))

    def _draining(self, stop: Stop | None) -> Task[Drained]:
        loop = get_running_loop()
        self._stop_server = stop or self._stop_server
        if self._drain is None:
            if self._warming is not None:
                self._warming.cancel()
            self._enter_state("draining")
            self._drain_begun.set()
            self._drain_until = loop.time() + self.drain_timeout
            self._drain = loop.create_task(self._run_drain())
        elif stop is not None and self._may_stop_server:  # the signal came after that decision
            stop(self._drain_until - loop.time())
        return self._drain

    async def _run_drain(self) -> Drained:
        loop = get_running_loop()
        over = self._drain_until
        if self.delay:
            await _wait_at_most(self._skip_delay.wait(), self.delay)
        self._accepts = False
        self._refuses = True
        if self.sockets:
            self._sockets_closed = loop.create_future()
            await _wait_at_most(self._sockets_closed, over - loop.time())
        cut = self.in_flight if loop.time() >= over else 0
        self._may_stop_server = True
        if self._stop_server is not None:
            self._stop_server(over - loop.time())
        self._requests_ended = loop.create_future()
        if self.in_flight:  # in this order, as other threads may count requests out
            await _wait_at_most(self._requests_ended, over - loop.time())
        seconds = loop.time() - over + self.drain_timeout
        drained = self.last_drain = Drained(seconds, max(cut, self.in_flight))
        self._enter_state("stopped")
        if drained.cut:
            _warn(
                "service %r: %d requests were still in flight after %.1f s of draining",
                self.name, drained.cut, drained.seconds,
            )  # fmt: skip
        return drained

    def _enter_state(self, state: State) -> None:
        before, self._state = self._state, state
        self.draining = state == "draining"
        if before != state:
            emit(LifecycleChanged, self.name, before=before, after=state, in_flight=self.in_flight)

    # The lifespan protocol

    async def lifespan(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a "lifespan" scope: forward it to `app`, and act on startup and shutdown.

        An app that does not know the protocol is assumed to have nothing to start or stop. A second
        server of the same app gets its lifespan from the app alone: this lifecycle follows the
        first.
        """
        if self._in_lifespan:
            await app(scope, receive, send)
            return
        if self._loop is not None:
            self._reset()
        self._in_lifespan = True
        exchange = _LifespanExchange(self, receive, send)
        try:
            try:
                await app(scope, exchange.receive, exchange.send)
            except Exception:
                if exchange.failure is not None and not exchange.has_replied:
                    await exchange.refuse(exchange.failure)
                # Otherwise it does not know the protocol.
                if exchange.app_has_received or exchange.has_replied:
                    raise
            if not exchange.has_replied:
                await exchange.run_without_app()
        finally:
            self._end_lifespan()
            if not exchange.has_replied:
                self._reset()  # a server that does not require lifespan may still serve it

    async def _start(self) -> None:
        """Run what must precede the report of a complete startup, or raise."""
        self._begin_to_accept()
        for step in self._steps:
            if step.on_failure == "fail":
                await step.run(self.name)
        if self._signals is not None:
            why = self._signals.install(self._draining)
            if why is not None:
                self._warn_of_delay(why)
            elif self.delay:
                loop = get_running_loop()
                self._signal_check = loop.call_later(CHECK_SIGNALS_AFTER, self._check_signals)
        self._warm_up()

    def _check_signals(self) -> None:
        """Warn if the server replaced the signal handler after the start, as some do."""
        if self._signals is not None and not self._signals.is_first():
            self._warn_of_delay("its server has taken over SIGTERM since the start")

    def _warn_of_delay(self, why: str) -> None:
        if self.delay:
            _warn(
                "service %r: %s, so the delay of %g s cannot hold; have drain() called before the"
                " signal comes",
                self.name, why, self.delay,
            )  # fmt: skip

    async def _shut_down(self) -> None:
        """Drain without delay: the server accepts no more requests."""
        signals = self._signals
        is_without_signal = self._drain is None and signals is not None and signals.is_first()
        if is_without_signal and not signals.is_before_uvicorn():  # type: ignore[union-attr]
            # Under uvicorn that was Ctrl+C, which is not delayed.
            self._warn_of_delay("its server stopped without a SIGTERM for this process")
        self._skip_delay.set()
        await self.drain()

    def _end_lifespan(self) -> None:
        self._in_lifespan = False
        if self._signal_check is not None:
            self._signal_check.cancel()
        if self._signals is not None:
            self._signals.restore()
        if self._warming is not None:
            self._warming.cancel()
        if self._drain is not None and not self._drain.done():
            self._drain.cancel()  # the server did not wait: its loop is ending
        self._accepts = False
        self._refuses = True
        self._enter_state("stopped")


class _LifespanExchange:
    """Lifespan messages between a server and the app, with the actions of the lifecycle."""

    def __init__(self, lifecycle: Lifecycle, receive: Receive, send: Send) -> None:
        self._lifecycle = lifecycle
        self._receive = receive
        self._send = send
        self._startup_received = False
        self.app_has_received = False
        """Whether the app has called `receive`."""
        self.has_replied = False
        """Whether a message was sent to the server."""
        self.failure: Exception | None = None
        """The exception that prevented the start, if it was not raised by the app itself."""

    async def receive(self) -> Message:
        """Receive from the server; pass a shutdown on only after draining."""
        self.app_has_received = True
        message = await self._receive()
        if message["type"] == "lifespan.startup":
            self._startup_received = True
        elif message["type"] == "lifespan.shutdown":
            await self._lifecycle._shut_down()
        return message

    async def send(self, message: Message) -> None:
        """Send to the server; report a complete startup only after the lifecycle's own start."""
        if message["type"] == "lifespan.startup.complete":
            try:
                await self._lifecycle._start()
            except Exception as error:
                self.failure = error
                raise  # in the app, so that it closes what it has opened
        self.has_replied = True
        await self._send(message)

    async def refuse(self, error: Exception) -> None:
        """Report to the server that the service could not start."""
        self.has_replied = True
        await self._send({"type": "lifespan.startup.failed", "message": str(error)})

    async def run_without_app(self) -> None:
        """Run the exchange for an app that does not know the protocol."""
        if not self._startup_received:
            await self.receive()
        try:
            await self.send({"type": "lifespan.startup.complete"})
        except Exception as error:
            if not self.has_replied:
                await self.refuse(error)
            raise
        await self.receive()
        await self.send({"type": "lifespan.shutdown.complete"})


class _WarmUpStep:
    """One warm-up step, and whether it is done."""

    def __init__(self, function: StepFunction, timeout: float, on_failure: OnFailure) -> None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self.name = legible(str(name)).rpartition("<locals>.")[2]
        self._call = RegisteredCall(
            self.name, function, "a function without arguments, def or async def"
        )
        self._timeout = check.seconds("timeout", timeout)
        self.on_failure = check.choice("on_failure", on_failure, ("retry", "ignore", "fail"))
        self.done = False
        self._tries = 0

    async def run(self, service: str) -> None:
        """Run the step as often as `on_failure` says; raise only if it must fail the start."""
        for pause in PAUSES.delays(SystemRandom().random):
            self._tries += 1
            try:
                async with time_limit(self._timeout):
                    await self._call()
            except Exception as error:
                _warn(
                    "service %r: warm-up step %r failed (try %d): %s",
                    service, self.name, self._tries, described(error),
                )  # fmt: skip
                if self.on_failure == "fail":
                    raise RuntimeError(f"warm-up step {self.name!r} failed") from error
                if self.on_failure == "ignore":
                    break
                await sleep_async(pause)
            else:
                break
        self.done = True


def set_done(future: Future[None]) -> None:
    """Let `future` be done, in its loop; later calls do nothing."""
    if not future.done():
        future.set_result(None)


def _is_gone(task: Task[Any]) -> bool:
    return task.done() or task.get_loop().is_closed()


def _warn(message: str, *values: object) -> None:
    import logging

    logging.getLogger("seawall").warning(message, *values)


async def _wait_at_most(awaited: Awaitable[object], seconds: float) -> None:
    with suppress(TimeoutError):
        async with time_limit(max(0.0, seconds)):
            await awaited
