"""A small server on virtual time, and clients who come as they please: for scenarios.

The server has so many workers, a queue of its own without end, and takes a random time for each
request. Clients come at random instants whatever the server does (an open loop), wait for a while
and leave; the server does not notice, as servers do not, and works on for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, NamedTuple

from seawall import Criticality, Rejected, criticality


class Server:
    """`workers` serve at once, first come first served; a request takes `seconds` in the mean."""

    def __init__(self, workers: int, seconds: float, rng: Random) -> None:
        self.workers = workers
        self.seconds = seconds
        self.busy = 0
        self.served = 0
        self._rng = rng
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def capacity(self) -> float:
        """Requests a second when all workers are busy."""
        return self.workers / self.seconds

    @property
    def present(self) -> int:
        """Requests that are served or wait in the server."""
        return self.busy + len(self._queue)

    async def serve(self) -> None:
        """Wait for a worker, and be served."""
        loop = asyncio.get_running_loop()
        if self.busy < self.workers:
            self.busy += 1
        else:
            turn = loop.create_future()
            self._queue.append(turn)
            await turn
        done = loop.create_future()
        loop.call_later(self._rng.expovariate(1 / self.seconds), _wake, done)
        try:
            await done
        finally:
            self.served += 1
            self._next()

    def _next(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.busy -= 1


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Answer(NamedTuple):
    """What became of one request: `seconds` is None if it was refused or never answered."""

    at: float
    rank: Criticality
    seconds: float | None


class Report:
    """The answers of a run of `seconds`; clients wait for `patience`."""

    def __init__(self, answers: list[Answer], seconds: float, patience: float) -> None:
        self.answers = answers
        self.seconds = seconds
        self.patience = patience

    def goodput(self, since: float = 0.0) -> float:
        """Return answers a second that came within the run and while the client still waited."""
        good = [answer for answer in self.answers_since(since) if self._good(answer)]
        in_time = sum(answer.at + (answer.seconds or 0.0) <= self.seconds for answer in good)
        return in_time / (self.seconds - since)

    def kept(self, *ranks: Criticality) -> float:
        """Return the share of requests of these classes that were answered in time."""
        own = [answer for answer in self.answers if answer.rank in ranks]
        return sum(map(self._good, own)) / len(own)

    def quantile(self, p: float) -> float:
        """Return what a share `p` of the answered took at most."""
        took = sorted(answer.seconds for answer in self.answers if answer.seconds is not None)
        return took[min(len(took) - 1, int(p * len(took)))]

    def answers_since(self, since: float) -> list[Answer]:
        """Return what became of the requests that came after `since`."""
        return [answer for answer in self.answers if answer.at >= since]

    def _good(self, answer: Answer) -> bool:
        return answer.seconds is not None and answer.seconds <= self.patience


async def run_clients(
    handle: Callable[[], Awaitable[Any]],
    rates: dict[Criticality, float],
    *,
    seconds: float,
    patience: float,
    rng: Random,
) -> Report:
    """Let clients of each class come at its rate, for `seconds`, and return what they got.

    Who has no answer when the last client's patience is over gets none.
    """
    loop = asyncio.get_running_loop()
    answers: list[Answer] = []
    open_requests: set[asyncio.Task[None]] = set()

    async def request(at: float, rank: Criticality) -> None:
        took = None
        try:
            with criticality(rank):
                await handle()
            took = loop.time() - at
        except Rejected:
            pass
        finally:
            answers.append(Answer(at, rank, took))

    def come(rank: Criticality, rate: float) -> None:
        if loop.time() > end:
            return
        task = loop.create_task(request(loop.time(), rank))
        open_requests.add(task)
        task.add_done_callback(open_requests.discard)
        loop.call_later(rng.expovariate(rate), come, rank, rate)

    end = loop.time() + seconds
    for rank, rate in rates.items():
        if rate:
            loop.call_later(rng.expovariate(rate), come, rank, rate)
    over = loop.create_future()
    loop.call_later(seconds + patience, _wake, over)
    await over
    left = list(open_requests)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return Report(answers, seconds, patience)
