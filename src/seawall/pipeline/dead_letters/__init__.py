"""Dead letters of pipelines: items that were set aside, kept until they are replayed or dropped."""

from seawall.pipeline.dead_letters.database import DatabaseDeadLetters
from seawall.pipeline.dead_letters.letters import (
    DeadLetters,
    DeadLettersFull,
    MemoryDeadLetters,
    ReplayClaim,
)

__all__ = [
    "DatabaseDeadLetters",
    "DeadLetters",
    "DeadLettersFull",
    "MemoryDeadLetters",
    "ReplayClaim",
]
