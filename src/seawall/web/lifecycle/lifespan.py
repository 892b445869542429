"""The lifespan protocol, with the actions of the lifecycle: see `Lifecycle.lifespan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seawall.web.asgi_types import Message, Receive, Send
    from seawall.web.lifecycle.lifecycle import Lifecycle


class Lifespan:
    """Lifespan exchange between a server and the app, with the actions of the lifecycle."""

    def __init__(self, lifecycle: Lifecycle, receive: Receive, send: Send) -> None:
        """Mediate between the app and a server with these `receive` and `send` functions."""
        self._lifecycle = lifecycle
        self._receive = receive
        self._send = send
        self._asked = False
        self.listened = False
        """Whether the app has called `receive`."""
        self.answered = False
        """Whether a message was sent to the server."""
        self.failure: Exception | None = None
        """The exception that prevented the start, if it was not raised by the app itself."""

    async def receive(self) -> Message:
        """Receive from the server; pass a shutdown on only after draining."""
        self.listened = True
        message = await self._receive()
        if message["type"] == "lifespan.startup":
            self._asked = True
        elif message["type"] == "lifespan.shutdown":
            await self._lifecycle._shut()
        return message

    async def send(self, message: Message) -> None:
        """Send to the server; report a complete startup only after the lifecycle's own start."""
        if message["type"] == "lifespan.startup.complete":
            try:
                await self._lifecycle._start()
            except Exception as error:
                self.failure = error
                raise  # in the app, so that it closes what it has opened
        self.answered = True
        await self._send(message)

    async def refuse(self, error: Exception) -> None:
        """Report to the server that the service could not start."""
        self.answered = True
        await self._send({"type": "lifespan.startup.failed", "message": str(error)})

    async def alone(self) -> None:
        """Run the exchange for an app that does not know the protocol."""
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
