"""FIFO messages, each processed once, over a network that loses, repeats and reorders them.

A `FifoSender` numbers messages in the transaction that sends them, and keeps them until a
`FifoReceiver` confirms that they took effect. The transport is up to the user: HTTP, a queue, a
file; a message is four values (`FifoMessage`), an acknowledgement five (`FifoAck`).
"""

from seawall.durable._fifo_receiver import FifoReceiver, Received
from seawall.durable._fifo_sender import FifoSender
from seawall.durable._fifo_wire import FifoAck, FifoMessage, Gap, Skipped
from seawall.errors import FifoFull, FifoStateLost
from seawall.events import FifoGap

__all__ = [
    "FifoAck",
    "FifoFull",
    "FifoGap",
    "FifoMessage",
    "FifoReceiver",
    "FifoSender",
    "FifoStateLost",
    "Gap",
    "Received",
    "Skipped",
]
