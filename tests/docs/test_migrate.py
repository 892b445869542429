"""Migration pages: both versions do the same, and what the pages say of other libraries is true.

The blocks themselves are run by test_snippets.py, with their output.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event
from time import sleep  # noqa: TID251 - other libraries know no virtual time
from typing import get_args

import circuitbreaker
import limits
import pybreaker
import pytest
import redis
import slowapi
import slowapi.util
import stamina
import tenacity

from seawall import Breaker, CircuitOpen, Guard, RateLimit, RedisStore
from seawall.policies.breaker import single_probe
from seawall.runtime.policy import Mode
from seawall.testing import empty_registry
from tests.docs.test_snippets import DOCS, expected_output
from tests.test_public_api import MODULES

WORDS = DOCS / "migrate" / "words.md"
PAGES = sorted(set((DOCS / "migrate").glob("*.md")) - {WORDS, DOCS / "migrate" / "index.md"})
VERSION = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_versions_come_in_pairs_that_print_the_same(page: Path):
    """A block of the library is followed by one of Seawall's, with the same output."""
    versions = VERSION.findall(page.read_text("utf-8"))
    assert len(versions) >= 2
    theirs, ours = versions[::2], versions[1::2]
    assert {title.lower() for title, _ in theirs} == {page.stem}
    assert {title for title, _ in ours} == {"Seawall"}
    for (_, before), (_, after) in zip(theirs, ours, strict=True):
        assert expected_output(before)
        assert expected_output(before) == expected_output(after)
    assert page.stem in theirs[0][1]
    assert "seawall" not in "".join(text for _, text in theirs)
    assert "from seawall" in ours[0][1]


# --- What the pages say of other libraries ---


@pytest.fixture(autouse=True)
def free_names() -> Iterator[None]:
    with empty_registry():
        yield


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


def meet(others: Barrier) -> bool:
    """Wait for other calls; return whether they came."""
    try:
        others.wait()
    except BrokenBarrierError:
        return False
    return True


def test_pybreaker_runs_one_call_at_a_time_and_we_do_not(callers: ThreadPoolExecutor):
    """Two calls that wait for each other never meet under pybreaker's lock."""
    breaker, others = pybreaker.CircuitBreaker(), Barrier(2, timeout=0.2)
    theirs = [callers.submit(breaker.call, meet, others) for _ in range(2)]
    assert [call.result() for call in theirs] == [False, False]
    guard, others = Guard("side by side", Breaker()), Barrier(2, timeout=30.0)
    ours = [callers.submit(guard.call, meet, others) for _ in range(2)]
    assert [call.result() for call in ours] == [True, True]


def test_call_that_trips_has_its_own_error_here_and_not_in_pybreaker():
    """The call that opens the circuit gets an error of pybreaker's there."""

    def fail() -> None:
        raise ConnectionError

    with pytest.raises(pybreaker.CircuitBreakerError):
        pybreaker.CircuitBreaker(fail_max=1).call(fail)
    breaker = Breaker(consecutive=1)
    with pytest.raises(ConnectionError):
        Guard("tripped", breaker).call(fail)
    assert breaker.state == "open"


def test_half_open_circuitbreaker_admits_everybody_and_we_admit_one(callers: ThreadPoolExecutor):
    """After the break three callers at once are three calls there, and one here."""

    def fail() -> None:
        raise ConnectionError

    others = Barrier(3, timeout=30.0)
    theirs = circuitbreaker.CircuitBreaker(failure_threshold=1, recovery_timeout=0.01)
    with contextlib.suppress(ConnectionError):
        theirs.call(fail)
    sleep(0.02)
    met = [callers.submit(theirs.call, meet, others) for _ in range(3)]
    assert [call.result() for call in met] == [True] * 3

    ours = Breaker(consecutive=1, break_for=0.01, probes=single_probe())
    guard = Guard("half open", ours)
    guard.attempt(fail)
    sleep(0.02)
    running, done = Event(), Event()
    probe = callers.submit(guard.call, lambda: (running.set(), done.wait(30.0)))
    running.wait(30.0)
    with pytest.raises(CircuitOpen):
        guard.call(int)
    done.set()
    probe.result()
    assert ours.state == "closed"


def test_defaults_of_others_are_those_on_the_pages():
    """Attempts of stamina, the endless retry of tenacity, the window of slowapi."""
    defaults = inspect.signature(stamina.retry).parameters
    assert (defaults["attempts"].default, defaults["timeout"].default) == (10, 45.0)
    endless = tenacity.Retrying()
    assert endless.stop is tenacity.stop_never
    assert isinstance(endless.wait, tenacity.wait_none)
    limiter = slowapi.Limiter(key_func=slowapi.util.get_remote_address)
    assert isinstance(limiter.limiter, limits.strategies.FixedWindowRateLimiter)


def test_limits_raises_the_error_of_its_client_where_we_go_on_alone():
    """Without a server, `limits` fails and a `RateLimit` counts by itself."""
    nowhere = "redis://127.0.0.1:1"  # nobody listens there
    with pytest.raises(redis.ConnectionError):
        limits.strategies.FixedWindowRateLimiter(limits.storage.RedisStorage(nowhere)).hit(
            limits.parse("1/hour")
        )
    with RedisStore(nowhere) as store:
        guard = Guard("alone", RateLimit("1/h", shared=store, name="alone"))
        assert [guard.attempt(int).ok for _ in range(2)] == [True, False]


# --- Words ---

NAME = re.compile(r"(\w+)(?:\((\w+)=\)|\.(\w+))?")


def our_words() -> Iterator[str]:
    """Yield the code in the last column of each table."""
    for line in WORDS.read_text("utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            last = line.strip("| ").split(" | ")[-1]
            yield from re.findall(r"`([^`]+)`", last)


def names_something(word: str) -> bool:
    """Return whether it is a public name, an argument or a method of one, or a mode."""
    if word.startswith('"'):
        return word.strip('"') in get_args(Mode)
    match = NAME.fullmatch(word)
    found = [
        getattr(module, match[1]) for module in MODULES if match and match[1] in module.__all__
    ]
    if not match or not found:
        return False
    if match[2]:
        return match[2] in inspect.signature(found[0]).parameters
    return not match[3] or hasattr(found[0], match[3])


def test_our_words_are_in_the_public_api():
    """Each name in the last column is public, with the argument or method given there."""
    words = list(our_words())
    assert len(words) > 60
    assert [word for word in words if not names_something(word)] == []


@pytest.mark.parametrize("word", ["Breakers", "Breaker(ratio=)", "Breaker.explode", '"dim"'])
def test_a_wrong_word_is_noticed(word: str):
    """A name that is not ours is found."""
    assert not names_something(word)
