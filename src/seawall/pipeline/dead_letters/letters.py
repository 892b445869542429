"""Dead letters: items that were set aside, kept until they are replayed or dropped.

    letters = DatabaseDeadLetters(database, "orders")
    pipeline = Pipeline("orders", dead_letters=letters)
    page = await letters.abrowse(search="timeout")
    await letters.aretry(page.items[0].id)

A letter is dead; `retry` marks it, and it waits for a pipeline of that name, in any process; that
claims it and sends it through the stage where it failed. In the sink, the letter is deleted. If it
fails again it is dead again, with its new cause, and its attempts are added up.

Promises:
- A letter that was added is there until it has ended in a sink, was dropped by a stage, or by an
  operator. The same item is one letter, however often it is added.
- A process that dies with a claimed letter loses nothing: after the lease another one claims it. A
  letter with which `MOST_CLAIMS` processes have died is dead again.
- A value that cannot be stored holds nothing up: its text is kept, and it cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from seawall.jobs.wakeups import Wakeups
from seawall.jobs.work_list import WorkList
from seawall.pipeline.item import DeadLetter

MOST_DEAD_LETTERS: Final = 1000
MOST_CLAIMS: Final = 3
"""Maximum number of processes that die while they replay a letter; then it is dead again."""
CLAIM_AT_ONCE: Final = 50
LONGEST_ID: Final = 400
LONGEST_REPR: Final = 65_536
"""Characters that are kept of a value that cannot be stored."""
LOST: Final = f"{MOST_CLAIMS} processes died, or were cut off, while they replayed it"
STATES: Final = ("dead", "waiting", "claimed")


class DeadLettersFull(Exception):
    """There is no room for another dead letter: the pipeline waits until there is."""


class ReplayClaim(NamedTuple):
    """A letter that is replayed, and by which claim."""

    letter: DeadLetter
    epoch: int
    """The claim counts as long as no later one is made."""


@runtime_checkable
class DeadLetters(WorkList, Protocol):
    """Where the letters of one pipeline are kept, looked through, and claimed for replay."""

    lease: float
    """Seconds for which a claim holds, unless it is renewed."""
    poll: float | None
    """Seconds between two looks for letters to replay; None if `wakeups` ring for each."""
    wakeups: Wakeups

    async def aadd(self, letter: DeadLetter, claim: ReplayClaim | None = None) -> None:
        """Keep a letter; with `claim` it was replayed, and is dead again."""

    async def aclaim(self, most: int) -> list[ReplayClaim]:
        """Claim letters that wait to be replayed."""

    async def arenew(self, claims: Sequence[ReplayClaim]) -> list[ReplayClaim]:
        """Hold claims for another lease; return those that still count."""

    async def asettle(self, claims: Sequence[ReplayClaim]) -> None:
        """Delete letters whose items have ended well."""

    async def arelease(self, claims: Sequence[ReplayClaim]) -> None:
        """Let letters wait again: their items were not finished."""


def checked_letter_id(id_: Any) -> str:
    """Return `id_` if it can be the id of a letter, or raise."""
    if not isinstance(id_, str) or not id_:
        raise TypeError(f"id={id_!r}: write the id of a letter, such as 'orders:17'")
    return id_


def acts_on(state: str, *, can_replay: bool) -> tuple[str, ...]:
    """Return what an operator may do with a letter in that state."""
    if state == "claimed":
        return ()
    return ("retry", "drop") if state == "dead" and can_replay else ("drop",)


def repr_of(value: Any) -> str:
    """Return the `repr` of a value, cut, whatever its type does."""
    try:
        return repr(value)[:LONGEST_REPR]
    except Exception:  # noqa: BLE001 - of the user's type
        return f"<{type(value).__name__}>"


def stored_id(id_: str) -> str:
    """Return the id of a letter; of one that is too long, or unprintable, a shorter one."""
    if len(id_) <= LONGEST_ID and id_.isprintable():
        return id_
    digest = blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    kept = "".join(one if one.isprintable() else "?" for one in id_[: LONGEST_ID - 40])
    return f"{kept}~{digest}"


def whole_micros(seconds: float) -> int:
    """Return an instant as the databases keep it."""
    return round(seconds * 1e6)
