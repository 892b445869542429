from __future__ import annotations

import gc
import threading

import pytest

from seawall import (
    Breaker,
    CpuPool,
    Guard,
    IoPool,
    ThreadBulkhead,
    Timeout,
    check_threads,
    get_guard,
    guards,
)


@pytest.fixture(autouse=True)
def _no_garbage():
    """Let no guard of another test, dead but not collected, be listed here."""
    gc.collect()


def _mine():
    return [guard for guard in guards() if guard.name.startswith("registry ")]


def test_live_guards_are_listed_by_name():
    """guards() lists those that live, sorted; a closed one is gone."""
    b = Guard("registry b", Timeout(1.0))
    a = Guard("registry a", Timeout(1.0))
    assert _mine() == [a, b]
    b.close()
    assert _mine() == [a]


def test_a_dead_guard_is_not_listed():
    """The registry keeps no guard alive."""
    Guard("registry a", Timeout(1.0), Breaker())
    gc.collect()
    assert _mine() == []


def test_a_guard_is_found_by_name():
    """get_guard() returns the guard itself, or names those there are."""
    guard = Guard("registry a", Timeout(1.0))
    assert get_guard("registry a") is guard
    with pytest.raises(KeyError, match=r"no live guard is named 'registry b'.*registry a"):
        get_guard("registry b")


def test_one_of_many_threads_gets_the_name():
    """Of threads that make a guard of one name at once, exactly one succeeds."""
    start = threading.Barrier(8)
    made, refused = [], []

    def make():
        start.wait()
        try:
            made.append(Guard("registry a", Timeout(1.0)))
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(made), len(refused)) == (1, 7)


def test_threads_are_added_up():
    """check_threads() counts every pool once, and pools only where there are threads."""
    before = check_threads(100_000)
    shared = ThreadBulkhead(3)
    kept = [
        Guard("registry a", shared, Timeout(1.0)),
        Guard("registry b", shared, Timeout(1.0, sync="thread", max_threads=5)),
    ]
    assert check_threads(100_000) == before + 8
    kept.pop().close()
    assert check_threads(100_000) == before + 3


def test_threads_of_executors_are_added_up_until_they_are_closed():
    """check_threads() counts the threads of IoPool and CpuPool; a process has one too."""
    before = check_threads(100_000)
    reports = IoPool("registry reports", workers=5)
    resize = CpuPool("registry resize", workers=2)
    assert check_threads(100_000) == before + 7
    with pytest.raises(ValueError, match=r"registry reports 5"):
        check_threads(before + 6)
    reports.close()
    assert check_threads(100_000) == before + 2
    resize.close()
    assert check_threads(100_000) == before


def test_too_many_threads_are_told_by_guard():
    """Over the budget it raises, with the threads of each guard."""
    kept = [Guard("registry a", ThreadBulkhead(3)), Guard("registry b", ThreadBulkhead(4))]
    with pytest.raises(ValueError, match=r"budget is 6: .*registry a 3, registry b 4"):
        check_threads(6)
    assert kept
