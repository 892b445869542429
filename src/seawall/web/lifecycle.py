"""The life of a service: starting, ready, draining, stopped; and how many requests it is serving.

Promises: it is ready only after the app's own start-up and every warm-up step; readiness falls in
the moment in which draining begins; what was accepted is served to its end, or until the deadline,
and what was cut is told; nothing that the app needs is closed before that.
"""

from __future__ import annotations

from asyncio import Event, Future, Task, get_running_loop, shield
from asyncio import timeout as time_limit
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from seawall import _checks as check
from seawall.runtime.edge_events import LifecycleChanged
from seawall.runtime.events import emit
from seawall.web._lifecycle_signals import Signals, Stop
from seawall.web._lifecycle_steps import OnFailure, Step, StepFunction, warm

__all__ = ["Drained", "Lifecycle"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
State: TypeAlias = Literal["starting", "ready", "draining", "stopped"]

MOST_STEPS: Final = 100
"""More warm-up steps than any service has: whoever adds them does so again and again."""


class Drained(NamedTuple):
    """How draining went: the seconds it took, and how many requests did not end in time."""

    seconds: float
    cut: int


class Lifecycle:
    """Knows in which phase of its life a service is; belongs to the event loop that serves.

    The edge counts requests in and out (`begin`, `end`) and hands over the lifespan protocol.
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
        `delay`. That needs a server which handles the signal in the main thread, as uvicorn does.
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
        self.in_flight = 0
        """How many requests (streams and websockets too) are being served."""
        self.refused = 0
        """How many came too late."""
        self.last_drain: Drained | None = None
        self._signals = Signals() if check.flag("signals", signals) else None
        self._steps: list[Step] = []
        self._alive = False
        self._begin_life()

    def _begin_life(self) -> None:
        self._state: State = "starting"
        self._accepts = False
        self._refuses = False
        self._idle: Future[None] | None = None
        self._warming: Task[None] | None = None
        self._drain: Task[Drained] | None = None
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
        self.in_flight -= 1
        if self._idle is not None and self.in_flight <= 0:
            self._note_idle()

    def _begin_otherwise(self) -> bool:
        if self._refuses:
            self.refused += 1
            return False
        self.notice()
        self.in_flight += 1
        return True

    def notice(self) -> None:
        """Begin to live, if nobody has said so: a server without the lifespan protocol serves."""
        if not self._accepts and not self._refuses and not self._alive:
            self._begin_to_accept()
            self._warm_up()

    def answering(self, scope: Scope, send: Send) -> Send:
        """Return `send`; while draining, one that has the connection closed after the answer.

        So keep-alive connections end between two requests, and not under one that is on its way.
        """
        if self._state != "draining" or not str(scope.get("http_version", "1.1")).startswith("1"):
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

    @property
    def draining(self) -> bool:
        """Whether it is going away: connections should be closed after the answer."""
        return self._state == "draining"

    async def until_draining(self) -> None:
        """Suspend this task until draining begins: for streams and websockets that end by then."""
        await self._told.wait()

    def snapshot(self) -> dict[str, Any]:
        """Return the phase, how many are in flight, were refused, and what warm-up waits for."""
        return {
            "name": self.name,
            "state": self._state,
            "in_flight": self.in_flight,
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
        self._accepts = True
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
        self._move("ready")

    # The way out

    async def drain(self) -> Drained:
        """Be not ready, refuse after `delay`, wait for what is in flight; tell how it went.

        Whoever asks while it is draining waits for the same end. Giving up on it stops nothing.
        """
        return await shield(self._draining(None))

    def _draining(self, stop: Stop | None) -> Task[Drained]:
        if self._drain is None:
            self._leave()
            self._drain = get_running_loop().create_task(self._run_drain(stop))
        elif stop is not None:  # the signal came late: nothing is left to wait for
            stop(self.drain_timeout)
        return self._drain

    def _leave(self) -> None:
        """Fall from readiness, in this very moment."""
        if self._warming is not None:
            self._warming.cancel()
        self._move("draining")
        self._told.set()

    async def _run_drain(self, stop: Stop | None) -> Drained:
        loop = get_running_loop()
        began = loop.time()
        over = began + self.drain_timeout
        if self.delay:
            await _passed(self._hurry.wait(), self.delay)
        self._accepts, self._refuses = False, True
        if stop is not None:
            stop(over - loop.time())
        if self.in_flight > 0:
            self._idle = loop.create_future()
            await _passed(self._idle, over - loop.time())
            self._idle = None
        drained = self.last_drain = Drained(loop.time() - began, max(0, self.in_flight))
        self._move("stopped")
        if drained.cut:
            import logging

            logging.getLogger("seawall").warning(
                "service %r: %d requests were still in flight after %.1f s of draining",
                self.name, drained.cut, drained.seconds,
            )  # fmt: skip
        return drained

    def _note_idle(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _move(self, state: State) -> None:
        before, self._state = self._state, state
        if before != state:
            emit(LifecycleChanged, self.name, before=before, after=state, in_flight=self.in_flight)

    # The lifespan protocol

    async def lifespan(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a "lifespan" scope: pass it on to `app`, and act on start-up and shutdown.

        An app that does not know the protocol is taken to have nothing to start or stop.
        """
        if self._alive:
            raise RuntimeError(f"{self!r} is running: one Lifecycle serves one event loop")
        if self._state != "starting":
            self._begin_life()
        self._alive = True
        talk = _Lifespan(self, receive, send)
        try:
            try:
                await app(scope, talk.receive, talk.send)
            except Exception:
                if talk.failure is not None and not talk.answered:
                    await talk.refuse(talk.failure)
                if talk.answered or talk.failure is not None:
                    raise
            if not talk.answered:
                await talk.alone()
        finally:
            self._end_life()

    async def _start(self) -> None:
        """Do what must be done before the server is told that all is well, or raise."""
        self._begin_to_accept()
        for step in self._steps:
            if step.on_failure == "fail":
                await warm(step, self.name)
        if self._signals is not None:
            self._signals.install(self._on_signal)
        self._warm_up()

    async def _shut(self) -> None:
        """Drain; the server accepts no more, so there is nothing to delay for."""
        self._hurry.set()
        await self.drain()

    def _on_signal(self, stop: Stop) -> None:
        self._draining(stop)

    def _end_life(self) -> None:
        self._alive = False
        if self._signals is not None:
            self._signals.restore()
        if self._warming is not None:
            self._warming.cancel()
        if self._drain is not None and not self._drain.done():
            self._drain.cancel()  # the server did not wait for it: its loop is ending
        self._accepts, self._refuses = False, True
        self._move("stopped")


class _Lifespan:
    """One conversation of a server with the app, and what the lifecycle does in between."""

    def __init__(self, lifecycle: Lifecycle, receive: Receive, send: Send) -> None:
        self._lifecycle = lifecycle
        self._receive = receive
        self._send = send
        self._asked = False
        self.answered = False
        """Whether the server was told anything."""
        self.failure: Exception | None = None
        """Why the service could not start, if that was not the app's fault."""

    async def receive(self) -> Message:
        """Hear the server; what it says about the end is passed on when all is drained."""
        message = await self._receive()
        if message["type"] == "lifespan.startup":
            self._asked = True
        elif message["type"] == "lifespan.shutdown":
            await self._lifecycle._shut()
        return message

    async def send(self, message: Message) -> None:
        """Tell the server; that the app has started, only if the rest has too."""
        if message["type"] == "lifespan.startup.complete":
            try:
                await self._lifecycle._start()
            except Exception as error:
                self.failure = error
                raise  # in the app, so that it closes what it has opened
        self.answered = True
        await self._send(message)

    async def refuse(self, error: Exception) -> None:
        """Tell the server that the service could not start."""
        self.answered = True
        await self._send({"type": "lifespan.startup.failed", "message": str(error)})

    async def alone(self) -> None:
        """Go through it for an app that does not know the protocol."""
        if not self._asked:
            await self.receive()
        try:
            await self.send({"type": "lifespan.startup.complete"})
        except Exception as error:
            if not self.answered:
                await self.refuse(error)
            raise
        await self.receive()
        await self.send({"type": "lifespan.shutdown.complete"})


async def _passed(awaited: Awaitable[object], seconds: float) -> bool:
    """Wait for it, for at most so long; tell whether it came."""
    try:
        async with time_limit(max(0.0, seconds)):
            await awaited
    except TimeoutError:
        return False
    return True
