"""Records of events as people read them: the message, and how loud it is."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Fallback, Guard, Retry, events, static
from seawall.backoff import constant
from seawall.clock import VirtualClock
from seawall.events import Event, log
from seawall.events.bus import emit, muted
from seawall.policies.breaker import single_probe
from seawall.runtime import degradation
from seawall.telemetry import log_events, logs
from seawall.testing import ScriptedService, answer, fail, virtual_time


@pytest.fixture
def read(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return what is logged, from INFO on."""
    caplog.set_level(logging.INFO, "seawall.events")
    return caplog


def _lines(read: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in read.records]


def test_the_life_of_a_breaker_can_be_read_from_messages(read: pytest.LogCaptureFixture):
    """Opening, probing and closing are different lines, and the probes are no warnings."""
    read.set_level(logging.DEBUG, "seawall.events")
    vendor = ScriptedService(fail(ConnectionError("refused")), answer(1)).call
    with virtual_time() as clock, log_events():
        guard = Guard("vendor", Breaker(consecutive=1, break_for=5.0, probes=single_probe()))
        guard.attempt(vendor)
        clock.advance(5.0)
        guard.attempt(vendor)
    named, said = "breaker_changed in 'vendor':", "failure='ConnectionError: refused'"
    assert _lines(read) == [
        ("WARNING", f"{named} closed -> open (tripped) reason=ConnectionError {said}"),
        ("DEBUG", f"{named} open -> half_open (break over)"),
        ("WARNING", f"{named} half_open -> closed (probes passed)"),
    ]


def test_retries_tell_the_error_in_the_message(read: pytest.LogCaptureFixture):
    """Values are told by name, in the order of the event's fields."""
    retry = Retry(on=ConnectionError, attempts=2, backoff=constant(0.25))
    with virtual_time(), log_events():
        Guard("vendor", retry).attempt(ScriptedService(fail(ConnectionError)).call)
    named = "reason=ConnectionError failure=ConnectionError"
    assert _lines(read) == [
        ("INFO", f"call_retried in 'vendor': attempt=1 delay=0.25 {named}"),
        ("WARNING", f"retry_stopped in 'vendor': attempt=2 cause=attempts {named}"),
    ]


def _changed(before: str, after: str, **rest: Any) -> dict[str, Any]:
    return {"before": before, "after": after, **rest}


@pytest.mark.parametrize(
    ("kind", "bad", "good"),
    [
        (
            events.LevelChanged,
            _changed("full", "cached", cause="load"),
            _changed("cached", "full", cause="load"),
        ),
        (
            events.StoreModeChanged,
            _changed("shared", "local", cause="lost", policy="breaker", store="redis"),
            _changed("local", "shared", cause="it answers", policy="breaker", store="redis"),
        ),
        (
            events.HealthChanged,
            _changed("healthy", "degraded", check="db", output="slow"),
            _changed("degraded", "healthy", check="db", output=""),
        ),
        (
            events.LoopBlocked,
            {"seconds": 1.0, "stack": "here", "over": False},
            {"seconds": 2.0, "stack": "here", "over": True},
        ),
    ],
)
def test_the_end_of_a_trouble_is_as_loud_as_its_beginning(
    read: pytest.LogCaptureFixture, kind: type[Event], bad: dict[str, Any], good: dict[str, Any]
):
    """A log of warnings says that it is over, also when there were too many troubles for it."""
    with log_events(burst=1, per_second=0.001):
        for _ in range(3):
            emit(kind, "vendor", **bad)
        emit(kind, "vendor", **good)
    assert [record.levelname for record in read.records] == ["WARNING", "WARNING"]


def test_a_check_that_is_healthy_at_its_first_look_is_no_warning(read: pytest.LogCaptureFixture):
    """A service that begins has recovered from nothing."""
    with log_events():
        emit(events.HealthChanged, "shop", **_changed("unknown", "healthy", check="db", output=""))
        emit(events.HostRestored, "shop", host="http://a", cause="checks passed")
    assert [record.levelname for record in read.records] == ["INFO", "WARNING"]


def test_a_level_that_was_given_is_that_of_good_news_too(read: pytest.LogCaptureFixture):
    """With `level=` all records have it."""
    with log_events(level=logging.ERROR):
        emit(events.LevelChanged, "service_levels", **_changed("cached", "full", cause="load"))
    assert [record.levelname for record in read.records] == ["ERROR"]


def test_a_change_of_state_is_told_among_the_other_values(read: pytest.LogCaptureFixture):
    """What has more to tell than its states tells it by name; what is empty is left out."""
    with log_events():
        emit(
            events.StoreModeChanged,
            "vendor",
            **_changed("shared", "local", cause="no route\nto host", policy="breaker", store="r 1"),
        )
        emit(events.HealthChanged, "shop", **_changed("unknown", "healthy", check="db", output=""))
    lost, healthy = (message for _level, message in _lines(read))
    told = r"policy=breaker store='r 1' shared -> local ('no route\nto host')"
    assert lost == f"store_mode_changed in 'vendor': {told}"
    assert healthy == "health_changed in 'shop': check=db unknown -> healthy"


def test_a_message_tells_how_many_were_left_out(read: pytest.LogCaptureFixture):
    """Also who reads nothing but messages learns that it was a flood."""
    fields = {"policy": "breaker", "reason": "circuit_open", "enforced": True}
    with virtual_time() as clock, log_events(burst=1, clock=clock):
        for _ in range(8):
            emit(events.CallRejected, "vendor", **fields)
        clock.advance(1.0)
        emit(events.CallRejected, "vendor", **fields)
    told = "call_rejected in 'vendor': policy=breaker reason=circuit_open enforced=True"
    assert [message for _level, message in _lines(read)] == [told, f"{told} left_out=7"]


def test_a_long_value_is_cut_and_the_field_has_more_of_it(read: pytest.LogCaptureFixture):
    """A message stays short, whatever an event quotes."""
    with log_events():
        emit(events.SettingsDiffer, "v" * 900, policy="p", shared_name="n", own="o" * 900, other="")
    (record,) = read.records
    own = "o" * 119 + "…"
    name = "v" * 119 + "…"
    told = f"settings_differ in {name!r}: policy=p shared_name=n own={own}"
    assert record.getMessage() == told
    assert vars(record)["seawall_own"] == "o" * 499 + "…"


@given(values=st.lists(st.text(max_size=300), min_size=5, max_size=5), number=st.floats())
def test_a_record_is_short_and_printable(values: list[str], number: float):
    """No name, cause or number breaks the line or a field, or makes it long."""
    logger = logging.Logger("apart")  # noqa: LOG001 - one for each example
    written: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record)

    logger.addHandler(Kept())
    guard, *rest = values
    names = ("policy", "before", "after", "cause")
    fields = dict(zip(names, rest, strict=True))
    with log_events(logger):
        emit(events.StoreModeChanged, guard, store="redis", **fields)
        emit(events.CallTimedOut, guard, seconds=number)
    assert len(written) == 2
    for record in written:
        message = record.getMessage()
        assert message.isprintable()
        assert len(message) < 2000
        fields = {n: v for n, v in vars(record).items() if n.startswith("seawall_")}
        assert len(fields) > 2
        for value in fields.values():
            assert not isinstance(value, str) or (value.isprintable() and len(value) <= 500)


def test_fields_of_a_record_are_escaped_as_its_message_is(read: pytest.LogCaptureFixture):
    """A key with line breaks writes no line of its own, whichever formatter prints the fields."""
    forged = "7\n2026-01-01 CRITICAL all is lost\r\x1b[31m\u2028\x00"
    with log_events():
        emit(events.BreakerChanged, forged, **_changed("closed", "open", cause="x", key=forged))
        emit(events.LoopBlocked, "loop", seconds=1.0, stack="a\n  b" * 500, over=False)
    changed, blocked = (vars(record) for record in read.records)
    escaped = "7\\n2026-01-01 CRITICAL all is lost\\r\\x1b[31m\\u2028\\x00"
    assert changed["seawall_key"] == changed["seawall_guard"] == escaped
    assert blocked["seawall_stack"].startswith("a\\n  ba\\n  b")
    assert len(blocked["seawall_stack"]) == 500
    formatter = logging.Formatter("%(message)s %(seawall_guard)s %(seawall_key)s")
    assert len(formatter.format(read.records[0]).splitlines()) == 1


def test_no_field_of_an_event_hides_one_of_the_record() -> None:
    """`seawall_event` is the name of the event, of whatever sort it is."""
    import seawall.durable
    import seawall.redis

    assert seawall.durable.EventDied
    assert seawall.redis
    sorts = [Event]
    for sort in sorts:
        sorts += sort.__subclasses__()
        assert not {"event", "left_out"} & set(sort.__slots__), sort
    assert len(sorts) > 20


# Changes of state, without any configuration


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> log.ChangeLog:
    """Return what writes changes of state, with a bound that no other test has used."""
    fresh = log.ChangeLog()
    monkeypatch.setattr(log, "changes", fresh)
    monkeypatch.setattr(logs, "changes", fresh)
    return fresh


def trip(name: str = "vendor") -> Breaker:
    """Open a breaker, after a call that is refused; close it."""
    breaker = Breaker(consecutive=1)
    guard = Guard(name, Retry(on=ConnectionError, attempts=2, backoff=0.0), breaker)
    with virtual_time():
        for _ in range(2):
            guard.attempt(ScriptedService(fail(ConnectionError("refused"))).call)
        breaker.close()
    return breaker


@pytest.mark.usefixtures("changes")
def test_changes_of_state_are_logged_without_configuration(read: pytest.LogCaptureFixture):
    """One line for each, and a breaker closes as loudly as it opened; nothing of single calls."""
    trip()
    named = "breaker_changed in 'vendor':"
    failed = "reason=ConnectionError failure='ConnectionError: refused'"
    assert _lines(read) == [
        ("WARNING", f"{named} closed -> open (tripped) {failed}"),
        ("WARNING", f"{named} open -> closed (close())"),
    ]
    assert {record.name for record in read.records} == {"seawall.events"}


def test_log_events_adds_the_rest_and_doubles_nothing(
    read: pytest.LogCaptureFixture, changes: log.ChangeLog
):
    """While it is on, each change is one record still; afterwards they are as before."""
    with log_events():
        trip("first")
    names = [record.getMessage().partition(" ")[0] for record in read.records]
    assert names.count("breaker_changed") == 2
    assert {"call_rejected", "call_retried"} <= set(names)
    assert changes.paused == 0
    read.clear()
    trip("second")
    assert [record.getMessage().partition(" ")[0] for record in read.records] == [
        "breaker_changed"
    ] * 2


@pytest.mark.usefixtures("changes")
def test_a_breaker_that_flaps_does_not_flood_the_log(
    read: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """After a few lines there is one in a while, which tells how many were left out."""
    clock = VirtualClock()
    monkeypatch.setattr(log, "SYSTEM", clock)
    monkeypatch.setattr(log, "changes", log.ChangeLog())
    fields = {"cause": "tripped", "key": None}

    def flap(times: int) -> None:
        for _ in range(times):
            emit(events.BreakerChanged, "vendor", before="closed", after="open", **fields)

    flap(100)
    assert len(read.records) == log.CHANGES_AT_ONCE
    clock.advance(1 / log.CHANGES_PER_SECOND)
    read.clear()
    flap(100)
    (line,) = read.records
    assert line.getMessage().endswith(f"left_out={100 - log.CHANGES_AT_ONCE}")


def outage(seconds: float) -> None:
    """Call a standard guard ten times a second: through an outage, and until it is closed again."""
    with virtual_time() as clock:
        guard = Guard.standard(
            "vendor", on=ConnectionError, timeout=1.0, attempts=1, sync="cooperative"
        )
        (breaker,) = (policy for policy in guard.policies if isinstance(policy, Breaker))

        def vendor() -> None:
            if clock.now() < seconds:
                raise ConnectionError

        while clock.now() < seconds or breaker.state != "closed":
            guard.attempt(vendor)
            clock.advance(0.1)
        guard.close()


@pytest.mark.usefixtures("changes")
def test_outage_of_a_minute_is_one_warning_and_one_at_its_end(read: pytest.LogCaptureFixture):
    """A breaker probes about once a second: that is no news while the probes fail."""
    outage(60.0)
    assert [(level, line.partition(" reason=")[0]) for level, line in _lines(read)] == [
        ("WARNING", "breaker_changed in 'vendor': closed -> open (tripped)"),
        ("WARNING", "breaker_changed in 'vendor': half_open -> closed (probes passed)"),
    ]


def test_probes_do_not_use_up_the_line_that_a_breaker_closed(
    read: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """With DEBUG on, they are bounded apart from it."""
    monkeypatch.setattr(log, "SYSTEM", VirtualClock())
    monkeypatch.setattr(log, "changes", log.ChangeLog())
    read.set_level(logging.DEBUG, "seawall.events")
    outage(60.0)
    levels = [level for level, _ in _lines(read)]
    assert (levels[0], levels[-1]) == ("WARNING", "WARNING")
    assert levels.count("DEBUG") == log.CHANGES_AT_ONCE


@pytest.mark.usefixtures("changes")
def test_openings_do_not_use_up_the_line_that_a_breaker_closed(
    read: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Both are warnings, and bounded apart from each other."""
    monkeypatch.setattr(log, "SYSTEM", VirtualClock())
    monkeypatch.setattr(log, "changes", log.ChangeLog())
    for _ in range(2 * log.CHANGES_AT_ONCE):
        emit(events.BreakerChanged, "vendor", **_changed("closed", "open", cause="x", key=None))
    emit(events.BreakerChanged, "vendor", **_changed("open", "closed", cause="x", key=None))
    level, line = _lines(read)[-1]
    assert (level, line) == ("WARNING", "breaker_changed in 'vendor': open -> closed (x)")


# Degraded answers, without any configuration


def hidden_bug() -> str:
    """Fail as a typo does."""
    return "prompt".uper()  # type: ignore[attr-defined]


SAID = (
    "call_degraded in 'vendor': source=static level=1 reason=AttributeError"
    """ message="'str' object has no attribute 'uper'\""""
)


def test_first_degraded_answer_of_a_guard_is_logged_and_then_one_a_minute(
    read: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """One WARNING tells the cause; the next tells how many there were in the meantime."""
    clock = VirtualClock()
    monkeypatch.setattr(log, "SYSTEM", clock)
    monkeypatch.setattr(log, "changes", log.ChangeLog())
    guard = Guard("vendor", Fallback(static("later")))
    assert [guard.call(hidden_bug) for _ in range(8)] == ["later"] * 8
    assert _lines(read) == [("WARNING", SAID)]
    clock.advance(59.0)
    guard.call(hidden_bug)
    assert len(read.records) == 1
    clock.advance(2.0)
    guard.call(hidden_bug)
    guard.call(hidden_bug)
    assert _lines(read)[1:] == [("WARNING", f"{SAID} left_out=8")]
    assert {record.name for record in read.records} == {"seawall.events"}
    read.clear()
    Guard("other", Fallback(static("later"))).call(hidden_bug)
    assert len(read.records) == 1  # each guard has a line of its own


@pytest.mark.usefixtures("changes")
def test_a_degraded_answer_is_one_line_while_log_events_is_on(read: pytest.LogCaptureFixture):
    """It is not written twice."""
    with log_events():
        Guard("vendor", Fallback(static("later"))).call(hidden_bug)
    assert _lines(read) == [("WARNING", SAID)]


@pytest.mark.usefixtures("changes")
def test_a_degraded_answer_that_is_not_logged_is_not_built(monkeypatch: pytest.MonkeyPatch):
    """The flood of an outage costs no redaction of its errors."""
    guard = Guard("vendor", Fallback(static("later")))
    built: list[Exception] = []
    reason_of = degradation.reason_of

    def counted(error: Exception) -> str:
        built.append(error)
        return reason_of(error)

    monkeypatch.setattr(degradation, "reason_of", counted)
    for _ in range(8):
        guard.call(hidden_bug)
    assert len(built) == 1


@pytest.mark.usefixtures("changes")
def test_a_simulation_logs_no_degraded_answers(read: pytest.LogCaptureFixture):
    """What is only forecast has not happened."""
    with muted():
        Guard("vendor", Fallback(static("later"))).call(hidden_bug)
    assert _lines(read) == []


@pytest.mark.usefixtures("changes")
def test_a_death_is_logged_once(read: pytest.LogCaptureFixture):
    """By the worker with its traceback, or by the event where no handler raised."""
    died: dict[str, Any] = {"job": "7", "attempts": 3}
    emit(events.JobDied, "mails", **died, cause="ValueError: no", traceback="Traceback ...")
    assert _lines(read) == []
    emit(events.JobDied, "mails", **died, cause="the lease was over")
    said = "job_died in 'mails': job=7 attempts=3 cause='the lease was over'"
    assert _lines(read) == [("ERROR", said)]


@pytest.mark.usefixtures("changes")
def test_logging_that_fails_harms_no_call(monkeypatch: pytest.MonkeyPatch):
    """Whatever a handler or a filter of the user's raises."""

    def broken(*_args: object, **_fields: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(logging.getLogger("seawall.events"), "log", broken)
    assert trip().state == "closed"


@pytest.mark.usefixtures("changes")
def test_a_simulation_logs_no_changes(read: pytest.LogCaptureFixture):
    """What is only forecast has not happened."""
    with muted():
        trip()
    assert _lines(read) == []


def test_a_program_without_logging_prints_troubles_to_stderr():
    """As the standard library does for warnings where nothing is configured."""
    program = """
from seawall import Breaker, Fallback, Guard, static
breaker = Breaker(consecutive=1)
Guard("vendor", breaker).attempt(lambda: 1 / 0)
breaker.close()
Guard("search", Fallback(static("later"))).call(lambda: "prompt".uper())
"""
    ran = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    opened, closed, degraded = ran.stderr.splitlines()
    assert opened.startswith("breaker_changed in 'vendor': closed -> open (tripped)")
    assert closed == "breaker_changed in 'vendor': open -> closed (close())"
    assert degraded == SAID.replace("vendor", "search")
    assert ran.stdout == ""
