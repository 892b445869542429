"""FIFO messages, each processed once, over a network that loses, repeats and reorders them.

A `FifoSender` numbers messages in the transaction that sends them, and keeps them until a
`FifoReceiver` confirms that they took effect. The transport is up to the user: HTTP, a queue, a
file; a message is four values (`FifoMessage`), an acknowledgement five (`FifoAck`).
"""

from seawall.durable.fifo.messages import FifoAck, FifoMessage, Gap, Skipped
from seawall.durable.fifo.receiver import FifoReceiver, Received
from seawall.durable.fifo.sender import FifoSender

__all__ = ["FifoAck", "FifoMessage", "FifoReceiver", "FifoSender", "Gap", "Received", "Skipped"]
