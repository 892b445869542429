"""The lifespan protocol, with what the lifecycle does in between: see `Lifecycle.lifespan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seawall.web.asgi_types import Message, Receive, Send
    from seawall.web.lifecycle.lifecycle import Lifecycle


class Lifespan:
    """One conversation of a server with the app, and what the lifecycle does in between."""

    def __init__(self, lifecycle: Lifecycle, receive: Receive, send: Send) -> None:
        """Stand between a server, heard by `receive` and told by `send`, and the app."""
        self._lifecycle = lifecycle
        self._receive = receive
        self._send = send
        self._asked = False
        self.listened = False
        """Whether the app has asked for what the server says."""
        self.answered = False
        """Whether the server was told anything."""
        self.failure: Exception | None = None
        """Why the service could not start, if that was not the app's fault."""

    async def receive(self) -> Message:
        """Hear the server; what it says about the end is passed on when all is drained."""
        self.listened = True
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
