"""The supervisor: starts all processes of the demo, controls them, and leaves none behind.

It ends cleanly on an error, on cancellation (Ctrl-C, SIGTERM) and when an indispensable process
dies. If this process itself is killed, the others see EOF on their input and end; the keeper is the
last one, ends Valkey and removes the folder.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from seawall.clock import SYSTEM
from seawall_demo import _valkey, keeper
from seawall_demo._calls import Broken, Caller
from seawall_demo._children import Child, Message, NotStarted
from seawall_demo._relay import Relay
from seawall_demo._serving import free_ports
from seawall_demo._settings import (
    HOST,
    PATIENCE,
    PAUSED_FOR,
    PODS,
    PROTECTED,
    READY_WITHIN,
    RESTART_AFTER,
    SIDES,
    SURGE,
    UNPROTECTED,
    pause,
)
from seawall_demo._switches import PIPELINE, SERVICE, Switch

KEEPER: Final = "keeper"
OK: Final = 200
WARM_UP: Final = 5
"""Number of requests that a new pod gets before its users come."""
KEPT: Final = 90
"""Number of reports of the load that are shown as history."""

Say = Callable[[str], None]


class Supervisor:
    """The processes of a demo, the keeper first. Used as `async with Demo(...) as demo`."""

    switches: ClassVar[tuple[Switch, ...]]
    """The parts that can be broken."""
    first: ClassVar[tuple[str, ...]]
    """The guards that the page shows before the others."""

    def __init__(self, say: Say, detail: Say, server: str | None) -> None:
        """Report important messages to `say`, others to `detail`; `server` is Valkey's path."""
        self._say = say
        self._detail = detail
        self._server = server
        self.folder = Path(tempfile.mkdtemp(prefix="seawall-demo-"))
        self._made: list[Child] = []
        """All processes, the keeper first."""
        self.pods: list[Child] = []
        """The processes that have a dashboard."""
        self.on = {switch.name: False for switch in self.switches}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an exception when a process died that the demo cannot do without."""
        self._valkey_pid: int | None = None

    # Start and end

    async def __aenter__(self) -> Self:
        self._detail(f"folder: {self.folder}")
        self._keeper = self._child(KEEPER, "keeper", str(self.folder), self._server or "")
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._end()

    async def _start(self) -> None:
        """Start the keeper and all other processes."""
        raise NotImplementedError

    def _child(self, name: str, module: str, *arguments: str, **how: Any) -> Child:
        log = self.folder / f"{name}.log"
        child = Child(name, module, arguments, log, **{"on_death": self._lost, **how})
        self._made.append(child)
        return child

    async def _started(self, *children: Child) -> list[Message]:
        async with asyncio.TaskGroup() as group:
            starting = [group.create_task(child.start()) for child in children]
        for child in children:
            place = f", http://{HOST}:{child.port}" if child.port else ""
            self._detail(f"{child.name}: pid {child.pid}{place}")
        return [task.result() for task in starting]

    async def _end(self) -> None:
        """End all processes, the keeper last: it removes the folder."""
        await asyncio.gather(*(one.end() for one in self._made if one.name != KEEPER))
        for kept in self._made[:1]:
            died = not kept.alive
            await kept.end()
            if died and self._valkey_pid is not None:
                _kill(self._valkey_pid)
        shutil.rmtree(self.folder, ignore_errors=True)  # in case the keeper could not

    def _lost(self, child: Child) -> None:
        """End the demo, which cannot do without this process."""
        if not self.failed.done():
            self.failed.set_exception(NotStarted(f"{child.name} died.{child.tail()}"))

    def logs(self) -> str:
        """Return the ends of all logs that are not empty."""
        tails = [f"{one.name}:{one.tail()}" for one in self._made if one.has_written]
        return "\n".join(tails) or "no process has written anything"

    # Control

    def able(self, name: str) -> bool:
        """Return whether that switch has anything to break."""
        return name in self.on

    async def switch(self, name: str, on: bool) -> None:  # noqa: FBT001 - the state of a button
        """Break something, or repair it."""
        raise NotImplementedError

    async def all_well(self) -> None:
        """Repair everything."""
        for name in self.on:
            if self.on[name]:
                await self.switch(name, on=False)

    def shown(self) -> dict[str, Any]:
        """Return what the page shows beside the switches."""
        raise NotImplementedError


class PipelineDemo(Supervisor):
    """A pipeline in its own process, which simulates everything that it depends on."""

    switches = PIPELINE
    first = ("database", "directory")

    def __init__(self, *, say: Say, detail: Say) -> None:
        """Report important messages to `say` and others to `detail`."""
        super().__init__(say, detail, None)
        self.account: dict[str, int] = {}
        """Number of items that the pipeline has read, and how they ended."""
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _start(self) -> None:
        self._pipeline = self._child(
            "plant", "sensors", str(self.folder), on_message=self._on_message
        )
        await self._started(self._keeper, self._pipeline)
        self.pods = [self._pipeline]
        self._pipeline.send(start=True)

    def _on_message(self, message: Message) -> None:
        self.account = message["account"]
        if message.get("finished") and not self._finished.done():
            self._finished.set_result(None)

    async def switch(self, name: str, on: bool) -> None:  # noqa: FBT001 - the state of a button
        """Break something, or repair it."""
        self.on[name] = on
        self._pipeline.send(switch=name, on=on)

    async def finish(self) -> dict[str, int]:
        """Stop the pipeline, and return how all items ended."""
        self._pipeline.send(finish=True)
        await self._finished
        return self.account

    def shown(self) -> dict[str, Any]:
        """Return what the page shows beside the switches."""
        return {
            "sides": [],
            "note": "Five sensors are read ten times a second. S4 and S5 fail now and then, and are"
            " asked again. Each sample ends in the database, complete or marked as degraded, or as"
            " a dead letter with its cause: nothing is lost, whatever is broken.",
        }


class Demo(Supervisor):
    """Pods of a service, with and without protection, a vendor, users and Valkey."""

    switches = SERVICE
    first = ("vendor",)

    def __init__(self, *, rate: float, say: Say, detail: Say, memory: bool = False) -> None:
        """Report important messages to `say` and others to `detail`; `memory`: without Valkey."""
        server, self.why = _valkey.server()
        if memory:
            server, self.why = None, "--memory was given"
        super().__init__(say, detail, server)
        self._rate = rate
        self.recent: dict[str, Any] = {}
        self.past: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._finished: asyncio.Future[Message] | None = None
        self._relay: Relay | None = None
        self._caller = Caller()
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_victim = 0
        self._suspended: Child | None = None
        self._resuming: asyncio.Task[None] | None = None

    @property
    def shared(self) -> bool:
        """Whether the pods share a store."""
        return self._server is not None

    async def _start(self) -> None:
        self._vendor = self._child("vendor", "vendor")
        self._load = self._child("load", "load", str(self._rate), on_message=self._on_message)
        kept, _, _ = await self._started(self._keeper, self._vendor, self._load)
        redis_url = ""
        if self.shared:
            self._valkey_pid = kept["pid"]
            self._detail(f"valkey: pid {self._valkey_pid}")
            self._relay = Relay(self.folder / "valkey" / keeper.SOCKET)
            await self._relay.mend()
            await self._valkey_answers()
            redis_url = f"redis://{HOST}:{self._relay.port}/0"
        vendor_url = f"http://{HOST}:{self._vendor.port}"
        count = PODS if self.shared else 1
        on_death = self._pod_died
        members = [f"{HOST}:{port}" for port in free_ports(count)]
        self.pods = [
            self._child(
                f"pod-{number}", "pod", vendor_url, redis_url, bind, *members, on_death=on_death
            )
            for number, bind in enumerate(members, 1)
        ]
        self._plain = self._child("unprotected", "plain_pod", vendor_url, on_death=self._pod_died)
        await self._started(*self.pods, self._plain)
        await asyncio.gather(*(self._ready(pod) for pod in (*self.pods, self._plain)))
        self._send_targets()
        self._load.send(start=True)

    async def _valkey_answers(self) -> None:
        """Wait until Valkey answers; raise NotStarted if it does not."""
        path = str(self.folder / "valkey" / keeper.SOCKET)
        until = SYSTEM.now() + READY_WITHIN
        while SYSTEM.now() < until and self._keeper.alive:
            try:
                reader, writer = await asyncio.open_unix_connection(path)
            except OSError:
                await pause(0.02)
                continue
            try:
                writer.write(b"PING\r\n")
                async with asyncio.timeout(READY_WITHIN):
                    if (await reader.readline()).startswith(b"+PONG"):
                        return
            finally:
                writer.close()
        raise NotStarted(f"Valkey did not answer.{self._keeper.tail()}")

    async def _ready(self, pod: Child) -> None:
        """Wait until the pod is ready to serve; raise NotStarted if it does not get ready."""
        until = SYSTEM.now() + READY_WITHIN
        while SYSTEM.now() < until and pod.alive:
            try:
                status, _ = await self._caller.get(pod.port, "/health/ready")
            except Broken:
                status = 0
            if status == OK:
                await self._warm_up(pod)
                return
            await pause(0.05)
        raise NotStarted(f"{pod.name} did not become ready.{pod.tail()}")

    async def _warm_up(self, pod: Child) -> None:
        """Send some requests: the first one of a process takes longest."""
        for item in range(WARM_UP):
            try:
                await self._caller.get(pod.port, f"/quote?item={item}")
            except Broken:
                return

    async def _end(self) -> None:
        """End this process's own tasks, and then the other processes."""
        self._resume()
        for task in self._tasks:
            task.cancel()
        self._caller.close()
        try:
            await super()._end()
        finally:
            if self._relay is not None:
                self._relay.close()

    # Events

    def _on_message(self, message: Message) -> None:
        """Store what the load reports."""
        if "recent" in message:
            self.recent = message["recent"]
            self.past.append(self.recent)
        if "phases" in message and self._finished is not None and not self._finished.done():
            self._finished.set_result(message["phases"])

    def _pod_died(self, pod: Child) -> None:
        if not self.on["kill"]:
            self._say(f"{pod.name} died; it is started again in {RESTART_AFTER:g} s.{pod.tail()}")
        self._send_targets()
        task = asyncio.create_task(self._restart(pod))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, pod: Child) -> None:
        await pause(RESTART_AFTER)
        try:
            await pod.start()
            await self._ready(pod)
        except NotStarted as error:
            self._say(str(error))
            return
        finally:
            self.on["kill"] = False
        self._detail(f"{pod.name}: pid {pod.pid}, http://{HOST}:{pod.port}")
        self._send_targets()

    def _send_targets(self) -> None:
        alive = {
            PROTECTED: [pod.port for pod in self.pods if pod.alive and pod.port],
            UNPROTECTED: [self._plain.port] if self._plain.alive else [],
        }
        self._load.send(targets=alive)

    # Control

    def able(self, name: str) -> bool:
        """Return whether that switch has anything to break."""
        return name != "cut" or self.shared

    async def switch(self, name: str, on: bool) -> None:  # noqa: FBT001 - the state of a button
        """Break something, or repair it; a killed or paused pod comes back without that."""
        if name in ("kill", "pause"):
            self._switch_pod(name, on)
            return
        self.on[name] = on
        if name in ("broken", "slow"):
            other = "slow" if name == "broken" else "broken"
            if on:
                self.on[other] = False
            mode = next((mode for mode in ("broken", "slow") if self.on[mode]), "well")
            self._vendor.send(mode=mode)
        elif name == "surge":
            self._load.send(surge=SURGE if on else 1.0)
        elif name == "cut" and self._relay is not None:
            if on:
                self._relay.cut()
            else:
                await self._relay.mend()

    def _switch_pod(self, name: str, on: bool) -> None:  # noqa: FBT001 - the state of a button
        """Kill or pause one of the live pods, in turn; a dead pod cannot be repaired."""
        alive = [pod for pod in self.pods if pod.alive]
        if on and not self.on[name] and alive:
            self.on[name] = True
            pod = alive[self._next_victim % len(alive)]
            self._next_victim += 1
            if name == "kill":
                pod.kill()
            else:
                self._suspend(pod)
        elif not on and name == "pause":
            self._resume()

    def _suspend(self, pod: Child) -> None:
        """Suspend it for a while.

        If this process is killed in the meantime, the keeper resumes it.
        """
        self._suspended = pod
        self._keeper.send(suspended=pod.pid)
        pod.suspend()
        self._resuming = asyncio.create_task(self._resume_later())

    async def _resume_later(self) -> None:
        await pause(PAUSED_FOR)
        self._resuming = None
        self._resume()

    def _resume(self) -> None:
        """Resume the suspended pod, if there is one."""
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if self._suspended is not None:
            self._suspended.resume()
            self._suspended = None
            self._keeper.send(suspended=None)
        self.on["pause"] = False

    def phase(self, name: str | None) -> None:
        """Count requests from now on for this phase."""
        self._load.send(phase=name)

    def shown(self) -> dict[str, Any]:
        """Return what the page shows beside the switches: both sides, now and before."""
        alone = "" if self.shared else f" One pod only, on memory: {self.why}."
        return {
            "sides": list(SIDES),
            "now": self.recent,
            "past": list(self.past),
            "note": "Numbers are of the last 5 seconds, as users see them. Who has no answer after"
            f" {PATIENCE:g} s has given up, which is an error.{alone}",
        }

    async def finish(self, groups: dict[str, list[str]]) -> Message:
        """Stop the load, and return the results for each group of phases."""
        self._finished = asyncio.get_running_loop().create_future()
        self._load.send(finish=groups)
        return await self._finished


def _kill(pid: int) -> None:
    """Kill a server whose keeper is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
