"""The life of a service: starting, ready, draining, stopped; and how many requests it is serving.

Promises: it is ready only after the app's own start-up and every warm-up step; readiness falls in
the moment in which draining begins; what was accepted is served to its end, or until the deadline,
and what was cut is told; nothing that the app needs is closed before that.
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
from collections.abc import Awaitable
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from seawall import _checks as check
from seawall import registry
from seawall.runtime.edge_events import LifecycleChanged
from seawall.runtime.events import emit
from seawall.web.asgi_types import App, Message, Receive, Scope, Send
from seawall.web.lifecycle.lifespan import Lifespan
from seawall.web.lifecycle.server_stop import ServerStop
from seawall.web.lifecycle.signals import Signals, Stop
from seawall.web.lifecycle.steps import OnFailure, Step, StepFunction, warm

__all__ = ["Drained", "Lifecycle"]

State: TypeAlias = Literal["starting", "ready", "draining", "stopped"]

LOOK_AFTER: Final = 1.0
"""Seconds after the start at which servers have installed their handlers of signals, too."""

MOST_STEPS: Final = 100
"""More warm-up steps than any service has: whoever adds them does so again and again."""


class Drained(NamedTuple):
    """How draining went: the seconds it took, and how many requests did not end in time."""

    seconds: float
    cut: int


class Lifecycle:
    """Knows in which phase of its life a service is; belongs to the event loop that serves.

    The edge counts requests in and out (`begin`, `end`), websockets apart (`begin_socket`,
    `end_socket`), and hands over the lifespan protocol. It lives again with the next lifespan, and
    in the next event loop, as in tests of apps.
    """

    def __init__(
        self,
        *,
        name: str = "service",
        drain_timeout: float = 25.0,
        delay: float = 0.0,
        signals: bool = True,
    ) -> None:
        """Drain for at most `drain_timeout` seconds, the first `delay` of which accept requests.

        With `signals`, SIGTERM begins the draining, and the server's own handler comes after
        `delay`. That needs a server which handles the signal in the main thread, as uvicorn does;
        under another one a warning in the log says that the delay cannot hold.
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
        """How many came too late."""
        self.last_drain: Drained | None = None
        self._signals = Signals() if check.flag("signals", signals) else None
        self._steps: list[Step] = []
        self._alive = False
        self._begin_life()
        registry.enter(self, "lifecycle", name)

    def _begin_life(self) -> None:
        self.in_flight = 0
        """How many requests (streams and websockets too) are being served."""
        self.sockets = 0
        """How many of them are websockets."""
        self._loop: AbstractEventLoop | None = None
        """Where it lives; None before."""
        self._state: State = "starting"
        self.draining = False
        """Whether it is going away: connections should be closed after the answer."""
        self.calm = False
        """Whether it accepts requests and is not going away."""
        self._accepts = False
        self._refuses = False
        self._idle: Future[None] | None = None
        self._closed: Future[None] | None = None
        self._stop: Stop | None = None
        self._warming: Task[None] | None = None
        self._drain: Task[Drained] | None = None
        self._over = 0.0
        """When draining ends at the latest."""
        self._stops = False
        """Whether the server may be told to stop."""
        self._look: TimerHandle | None = None
        self._told = Event()
        self._hurry = Event()

    def __repr__(self) -> str:
        return f"<Lifecycle {self.name!r}: {self._state}, {self.in_flight} in flight>"

    # What the edge calls for each request

    def begin(self) -> bool:
        """Count a request in; False if it must be refused, since the service goes away."""
        if self._accepts:
            self.in_flight += 1
            return True
        return self._begin_otherwise()

    def end(self) -> None:
        """Count out a request that was counted in."""
        if self.in_flight > 0:  # else it was one of an earlier life
            self.in_flight -= 1
        if self._idle is not None and not self.in_flight:
            _set(self._idle)

    def begin_socket(self) -> bool:
        """Count a websocket in: the server, which would cut it, is told to stop only after it."""
        accepted = self.begin()
        self.sockets += accepted
        return accepted

    def end_socket(self) -> None:
        """Count out a websocket that was counted in."""
        if self.sockets > 0:
            self.sockets -= 1
        if self._closed is not None and not self.sockets:
            _set(self._closed)
        self.end()

    def _begin_otherwise(self) -> bool:
        self.notice()
        if self._refuses:
            self.refused += 1
            return False
        self.in_flight += 1
        return True

    def notice(self) -> None:
        """Begin to live, if nobody has said so: a server without the lifespan protocol serves."""
        if self._alive:
            return
        if self._refuses and self._was_elsewhere():
            self._begin_life()
        if not self._accepts and not self._refuses:
            if self._signals is not None:
                self._warn_of_delay("its server does not tell of its start (ASGI lifespan)")
            self._begin_to_accept()
            self._warm_up()
        elif self._warming is not None and self._state == "starting" and _is_gone(self._warming):
            self._warm_up()

    def _was_elsewhere(self) -> bool:
        """Tell whether its last life is over, and was that of another event loop."""
        over = self._drain is None or _is_gone(self._drain)
        return over and self._loop is not get_running_loop()

    def answering(self, scope: Scope, send: Send) -> Send:
        """Return `send`; on the way out, one that has the connection closed after the answer.

        So keep-alive connections end between two requests, and not under one that is on its way.
        From HTTP/2 on that is the server's business, and the header is forbidden.
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

    # What anybody may ask

    @property
    def state(self) -> State:
        """The phase: "starting", "ready", "draining" or "stopped"."""
        return self._state

    async def until_draining(self) -> None:
        """Suspend this task until draining begins: for streams and websockets that end by then.

        A server that gets a signal waits for open streams before it tells the app, so the signal
        itself ends the wait, too.
        """
        stop, told = ServerStop.of_this_loop(), self._told
        listener = partial(told.set)  # one for each task that waits
        stop.listen(listener)
        try:
            if not stop.asked():  # before anybody listened
                await told.wait()
        finally:
            stop.ignore(listener)

    def snapshot(self) -> dict[str, Any]:
        """Return the phase, how many are in flight, were refused, and what warm-up waits for."""
        return {
            "name": self.name,
            "state": self._state,
            "in_flight": self.in_flight,
            "sockets": self.sockets,
            "refused": self.refused,
            "warming_up": [step.name for step in self._steps if not step.done],
            "cut": 0 if self.last_drain is None else self.last_drain.cut,
        }

    # Before it is ready

    def warm_up(
        self,
        function: StepFunction,
        *,
        timeout: float = 30.0,
        on_failure: OnFailure = "retry",
    ) -> StepFunction:
        """Call `function` after the app's own start-up, and be ready only when it is done.

        Steps are done in the order in which they were added; a plain function in a thread. One that
        fails, or takes more than `timeout` seconds, is tried again with growing pauses ("retry"),
        left out ("ignore"), or fails the start ("fail": such steps come first, and before the
        server accepts a connection). Returns the function: it works as a decorator.
        """
        if self._state != "starting":
            raise RuntimeError("warm_up(): the service is up already; add steps before it starts")
        if len(self._steps) >= MOST_STEPS:
            raise ValueError(f"warm_up(): at most {MOST_STEPS} steps; add each of them once")
        self._steps.append(Step(function, timeout, on_failure))
        return function

    def _begin_to_accept(self) -> None:
        self._accepts = self.calm = True
        self._loop = get_running_loop()
        for step in self._steps:
            step.done = False

    def _warm_up(self) -> None:
        left = [step for step in self._steps if not step.done]
        if not left:
            self._move("ready")
            return
        self._warming = get_running_loop().create_task(self._warm_in_background(left))

    async def _warm_in_background(self, steps: list[Step]) -> None:
        for step in steps:
            await warm(step, self.name)
        if self._warming is current_task():  # else another life has begun
            self._move("ready")

    # The way out

    async def drain(self) -> Drained:
        """Be not ready, refuse after `delay`, wait for what is in flight; tell how it went.

        Whoever asks while it is draining waits for the same end. Giving up on it stops nothing.
        """
        return await shield(self._draining(None))

    def _draining(self, stop: Stop | None) -> Task[Drained]:
        loop = get_running_loop()
        self._stop = stop or self._stop
        if self._drain is None:
            self._leave()
            self._over = loop.time() + self.drain_timeout
            self._drain = loop.create_task(self._run_drain())
        elif stop is not None and self._stops:  # the signal came late
            stop(self._over - loop.time())
        return self._drain

    def _leave(self) -> None:
        """Fall from readiness, in this very moment."""
        if self._warming is not None:
            self._warming.cancel()
        self._move("draining")
        self._told.set()

    async def _run_drain(self) -> Drained:
        loop = get_running_loop()
        over = self._over
        if self.delay:
            await _passed(self._hurry.wait(), self.delay)
        self._accepts = self.calm = False
        self._refuses = True
        if self.sockets:
            self._closed = loop.create_future()
            await _passed(self._closed, over - loop.time())
        cut = self.in_flight if loop.time() >= over else 0
        self._stops = True
        if self._stop is not None:
            self._stop(over - loop.time())
        if self.in_flight:
            self._idle = loop.create_future()
            await _passed(self._idle, over - loop.time())
        seconds = loop.time() - over + self.drain_timeout
        drained = self.last_drain = Drained(seconds, max(cut, self.in_flight))
        self._move("stopped")
        if drained.cut:
            _warn(
                "service %r: %d requests were still in flight after %.1f s of draining",
                self.name, drained.cut, drained.seconds,
            )  # fmt: skip
        return drained

    def _move(self, state: State) -> None:
        before, self._state = self._state, state
        self.draining = state == "draining"
        self.calm = self._accepts and not self.draining
        if before != state:
            emit(LifecycleChanged, self.name, before=before, after=state, in_flight=self.in_flight)

    # The lifespan protocol

    async def lifespan(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a "lifespan" scope: pass it on to `app`, and act on start-up and shutdown.

        An app that does not know the protocol is taken to have nothing to start or stop. A second
        server of one app has its lifespan for itself: this life is that of the first.
        """
        if self._alive:
            await app(scope, receive, send)
            return
        if self._loop is not None:
            self._begin_life()
        self._alive = True
        talk = Lifespan(self, receive, send)
        try:
            try:
                await app(scope, talk.receive, talk.send)
            except Exception:
                if talk.failure is not None and not talk.answered:
                    await talk.refuse(talk.failure)
                if talk.listened or talk.answered:  # else it does not know the protocol
                    raise
            if not talk.answered:
                await talk.alone()
        finally:
            self._end_life()
            if not talk.answered:  # it may still be served, by a server that does not insist
                self._begin_life()

    async def _start(self) -> None:
        """Do what must be done before the server is told that all is well, or raise."""
        self._begin_to_accept()
        for step in self._steps:
            if step.on_failure == "fail":
                await warm(step, self.name)
        if self._signals is not None:
            why = self._signals.install(self._on_signal)
            if why is not None:
                self._warn_of_delay(why)
            elif self.delay:
                self._look = get_running_loop().call_later(LOOK_AFTER, self._look_at_signals)
        self._warm_up()

    def _look_at_signals(self) -> None:
        """Warn if the server took the signal after the start: some do so only then."""
        if self._signals is not None and not self._signals.holds():
            self._warn_of_delay("its server has taken over SIGTERM since the start")

    def _warn_of_delay(self, why: str) -> None:
        if self.delay:
            _warn(
                "service %r: %s, so the delay of %g s cannot hold; have drain() called before the"
                " signal comes",
                self.name, why, self.delay,
            )  # fmt: skip

    async def _shut(self) -> None:
        """Drain; the server accepts no more, so there is nothing to delay for."""
        signals = self._signals
        unheard = self._drain is None and signals is not None and signals.holds()
        if unheard and not signals.stands_before_uvicorn():  # type: ignore[union-attr]
            # Under uvicorn that was Ctrl+C, which is not delayed.
            self._warn_of_delay("its server stopped without a SIGTERM for this process")
        self._hurry.set()
        await self.drain()

    def _on_signal(self, stop: Stop) -> None:
        self._draining(stop)

    def _end_life(self) -> None:
        self._alive = False
        if self._look is not None:
            self._look.cancel()
        if self._signals is not None:
            self._signals.restore()
        if self._warming is not None:
            self._warming.cancel()
        if self._drain is not None and not self._drain.done():
            self._drain.cancel()  # the server did not wait for it: its loop is ending
        self._accepts = self.calm = False
        self._refuses = True
        self._move("stopped")


def _set(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _is_gone(task: Task[Any]) -> bool:
    return task.done() or task.get_loop().is_closed()


def _warn(message: str, *told: object) -> None:
    import logging

    logging.getLogger("seawall").warning(message, *told)


async def _passed(awaited: Awaitable[object], seconds: float) -> bool:
    """Wait for it, for at most so long; tell whether it came."""
    try:
        async with time_limit(max(0.0, seconds)):
            await awaited
    except TimeoutError:
        return False
    return True
