from __future__ import annotations

import gc
import importlib
import sys
import threading
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from seawall import (
    Breaker,
    CircuitOpen,
    Guard,
    ThreadBulkhead,
    Timeout,
    explain,
    get_guard,
    guards,
    guards_from_toml,
    registry,
)
from seawall.registry import enter
from seawall.resources import CpuPool, IoPool, check_threads
from seawall.telemetry import export_prometheus, log_events
from seawall.testing import empty_registry
from seawall.web import Edge


def _mine():
    return [guard for guard in guards() if guard.name.startswith("registry ")]


def test_live_guards_are_listed_by_name():
    """guards() lists those that live, sorted; a closed one is gone."""
    b = Guard("registry b", Timeout(1.0))
    a = Guard("registry a", Timeout(1.0))
    assert _mine() == [a, b]
    b.close()
    assert _mine() == [a]


def _call_by_a_guard_of_its_own(error: Exception) -> None:
    """Make a guard where none should be made, as many do at first."""
    guard = get_guard("registry a", lambda: Guard("registry a", Breaker(consecutive=3)))
    guard.call(_raise, error)


def _raise(error: Exception) -> None:
    raise error


def test_a_guard_made_inside_a_function_keeps_its_breakers_memory():
    """It lives until it is closed, not until the collector comes: so its breaker opens."""
    for _ in range(3):
        with pytest.raises(ConnectionError):
            _call_by_a_guard_of_its_own(ConnectionError())
        gc.collect()
    with pytest.raises(CircuitOpen):
        _call_by_a_guard_of_its_own(ConnectionError())


def test_a_guard_lives_until_it_is_closed():
    """Nobody has to hold it; once closed it is garbage."""
    alive = ref(Guard("registry a", Timeout(1.0), Breaker()))
    gc.collect()
    assert [guard.name for guard in _mine()] == ["registry a"]
    get_guard("registry a").close()
    gc.collect()
    assert alive() is None


def test_a_guard_around_one_policy_lives_as_long_as_its_function():
    """A policy as a decorator has a guard that is not registered."""

    @Breaker(consecutive=1)
    def function() -> None:
        raise ConnectionError

    assert guards() == []
    with pytest.raises(ConnectionError):
        function()
    gc.collect()
    with pytest.raises(CircuitOpen):
        function()
    alive = ref(function.__seawall__[0])
    del function
    gc.collect()
    assert alive() is None


def test_a_guard_that_is_part_of_an_edge_lives_as_long_as_that():
    """Apps that are made anew in each test leave nothing behind, and free their names."""
    for _ in range(2):
        edge = Edge(_app, name="registry edge")
        assert [guard.name for guard in _mine()] == ["registry edge"]
        del edge


async def _app(*_: Any) -> None:
    """Serve nothing."""


def test_a_guard_is_made_once_however_many_threads_ask():
    """get_guard(name, make) calls make once, and all get the same guard."""
    start = threading.Barrier(8)
    made: list[Guard] = []
    got: list[Guard] = []

    def make() -> Guard:
        made.append(Guard("registry a", Timeout(1.0)))
        return made[-1]

    def ask() -> None:
        start.wait()
        got.append(get_guard("registry a", make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1
    assert got == made * 8


def test_what_is_made_must_have_the_name():
    """A guard of another name would be made again at each call."""
    with pytest.raises(ValueError, match=r"Guard\('registry a', Timeout"):
        get_guard("registry a", lambda: Guard("registry b", Timeout(1.0)))


def test_making_a_guard_may_need_another():
    """make() may ask for guards itself."""

    def make() -> Guard:
        get_guard("registry b", lambda: Guard("registry b", Timeout(1.0)))
        return Guard("registry a", Timeout(1.0))

    assert get_guard("registry a", make).name == "registry a"
    assert len(_mine()) == 2


def test_a_guard_replaces_another_of_its_name():
    """The old one is closed, its functions go on; the name finds the new one."""
    old = Guard("registry a", Timeout(1.0, sync="cooperative"))
    function = old(lambda: "old")
    new = Guard("registry a", Timeout(2.0), replace=True)
    assert old.closed
    assert _mine() == [new]
    assert function() == "old"
    old.close()
    assert _mine() == [new]


def test_a_guard_that_cannot_be_made_replaces_nothing():
    """A mistake in a notebook leaves the guard that works."""
    old = Guard("registry a", Timeout(1.0))
    with pytest.raises(TypeError):
        Guard("registry a", 5, replace=True)  # type: ignore[arg-type]
    assert _mine() == [old]
    assert not old.closed


SERVICE = """\
from prometheus_client import CollectorRegistry
from seawall import Breaker, Guard, Retry, transient
from seawall.telemetry import export_prometheus, log_events

metrics = globals().get("metrics") or CollectorRegistry()
export_prometheus(metrics)
log_events("registry service")
vendor = Guard("registry a", Breaker(), replace=True)
standard = Guard.standard("registry b", on=transient, timeout=1.0, replace=True)
hosts = Guard.family("registry c", lambda host: [Breaker()], replace=True)

@Retry(on=transient)
def alone():
    return "answer"

@vendor
def guarded():
    return alone()
"""
"""A module as users write it: it can be reloaded, and its cells run again."""


def test_a_module_with_guards_can_be_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its guards take the place of the old ones, which are closed and leave nothing behind."""
    (tmp_path / "registry_service.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(tmp_path)
    service: Any = importlib.import_module("registry_service")
    try:
        for _ in range(3):
            assert service.guarded() == "answer"
            old = service.vendor, service.standard, service.hosts
            importlib.reload(service)
            assert all(guard.closed for guard in old)
            assert not service.vendor.closed
            assert get_guard("registry a") is service.vendor
            gone = [ref(guard) for guard in old]
            del old
            gc.collect()
            assert [guard() for guard in gone] == [None] * 3
            assert _mine() == [service.vendor, service.standard]
    finally:
        export_prometheus(service.metrics).close()
        log_events("registry service").close()
        service.hosts.close()
        del sys.modules["registry_service"]


def test_an_app_factory_can_be_called_again():
    """With get_guard its apps share one guard, and what its breaker knows."""

    def make_app() -> Guard:
        return get_guard("registry a", lambda: Guard("registry a", Breaker(consecutive=1)))

    first = make_app()
    first.attempt(lambda: 1 / 0)
    second = make_app()
    assert second is first
    with pytest.raises(CircuitOpen):
        second.call(lambda: "answer")
    assert _mine() == [first]


def test_settings_are_reloaded_whole_or_not_at_all():
    """guards_from_toml(replace=True) replaces all its guards; if one fails, none."""
    good = '[guards."registry a".standard]\non = "OSError"\ntimeout = 1\n'
    old = guards_from_toml(good)["registry a"]
    with pytest.raises(TypeError):
        guards_from_toml(good + '[guards."registry b".standard]\non = "OSError"\n', replace=True)
    assert _mine() == [old]
    new = guards_from_toml(good, replace=True)["registry a"]
    assert _mine() == [new]
    assert old.closed


def test_many_guards_are_told_once_with_the_place(monkeypatch, caplog):
    """Whoever makes a guard for each call is told where, and what to write instead."""
    monkeypatch.setattr(registry, "MANY", 5)
    monkeypatch.setattr(registry, "counts", registry.GuardCounts())
    for number in range(9):
        Guard(f"registry {number}", Timeout(1.0))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "5 guards are alive, 5 of them made at " in told
    assert "test_registry.py:" in told
    assert "get_guard(name, make)" in told
    assert registry.counts.made == 9
    guards()[0].close()
    assert registry.counts.closed == 1


def test_an_emptied_registry_is_filled_again():
    """Inside the block all names are free; afterwards what was there is there, unless closed."""
    kept, shut = Guard("registry a", Timeout(1.0)), Guard("registry b", Timeout(1.0))
    with empty_registry():
        assert guards() == []
        inside = Guard("registry a", Timeout(1.0))
        shut.close()
    assert inside.closed
    assert _mine() == [kept]


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


def test_explain_tells_of_guards_that_are_made_too_often(monkeypatch):
    """Guards made for each call are named by their place; so are those made and closed again."""
    monkeypatch.setattr(registry, "counts", registry.GuardCounts())
    with empty_registry():
        made = [Guard(f"registry {number}", Timeout(1.0)) for number in range(100)]
        assert "100 guards are alive that were made at " in explain()
        assert "test_registry.py" in explain().splitlines()[-1]
        for guard in made[1:]:
            guard.close()
        assert "take care" not in explain()
        made[0].close()
        assert "100 of 100 guards were made and closed again" in explain()


def test_explain_shows_every_guard_and_what_is_dangerous_around_them(monkeypatch):
    """seawall.explain() is the text of all guards, and the warnings of what was entered."""
    monkeypatch.setattr(registry, "counts", registry.GuardCounts())
    first, second = Guard("registry a", Timeout(1.0)), Guard("registry b", Breaker())
    text = explain()
    assert first.explain() in text
    assert second.explain() in text
    assert "in this process" not in text

    class Edge:
        def dangers(self):
            return ["nobody is trusted"]

    edge = Edge()
    enter(edge, "edge", "shop")
    assert explain().splitlines()[-2:] == [
        "in this process, take care:",
        "  - edge 'shop': nobody is trusted",
    ]


def test_families_are_part_of_what_is_checked_for_the_whole_process():
    """Threads of members are added up, explain() has families, and the error knows them."""
    before = check_threads(100_000)
    family = Guard.family("registry family", lambda _key: [ThreadBulkhead(8)])
    assert family["a"] is not family["b"]
    assert check_threads(100_000) == before + 16
    assert family.explain() in explain()
    with pytest.raises(ValueError, match="alive already") as refused:
        Guard("registry family", Timeout(1.0))
    assert "get_guard" not in str(refused.value)
