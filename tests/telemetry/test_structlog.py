"""Events as structlog tells them: through its own formatter, as services set it up."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Guard, Retry, Timeout
from seawall._redaction import printable
from seawall.clock import VirtualClock
from seawall.events import BreakerChanged
from seawall.events.bus import emit
from seawall.telemetry import log_events
from seawall.testing import run_virtual
from tests.support import let_pass

LOGGER = "seawall.test.structlog"


def _formatter(*processors: structlog.typing.Processor) -> structlog.stdlib.ProcessorFormatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_log_level, *processors],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
    )


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Return what is written where structlog formats the records of the standard logging."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(structlog.stdlib.ExtraAdder()))
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.propagate = False
    yield stream
    logger.removeHandler(handler)
    logger.propagate = True


def _lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def _down() -> None:
    raise ConnectionRefusedError


def test_an_event_is_one_line_of_json_with_its_values(written: io.StringIO):
    """The message is structlog's `event`, and each value has a key of its own."""
    guard = Guard("structlog-vendor", Breaker(consecutive=1))
    with log_events(LOGGER):
        guard.attempt(_down)
        guard.attempt(_down)
    guard.close()
    opened, refused = _lines(written)
    kind = "ConnectionRefusedError"
    told = f"closed -> open (tripped) reason={kind} failure={kind}"
    assert opened["event"] == f"breaker_changed in 'structlog-vendor': {told}"
    assert opened["seawall_event"] == "breaker_changed"
    assert opened["seawall_guard"] == "structlog-vendor"
    assert opened["level"] == "warning"
    assert refused["seawall_event"] == "call_rejected"
    assert refused["seawall_reason"] == "circuit_open"


def test_what_a_request_has_bound_is_in_its_lines():
    """Each task has its own: an event is written where it happened, also of a timeout."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        _formatter(structlog.contextvars.merge_contextvars, structlog.stdlib.ExtraAdder())
    )
    logger = logging.Logger("apart")  # noqa: LOG001 - one for this test
    logger.addHandler(handler)
    guard = Guard("structlog-request", Retry(on=OSError, attempts=2), Timeout(1.0))

    async def request(name: str, seconds: float) -> None:
        async def ask() -> None:
            await let_pass(seconds)
            raise ConnectionRefusedError

        with structlog.contextvars.bound_contextvars(request_id=name):
            await guard.aattempt(ask)

    async def main() -> None:
        await asyncio.gather(request("r-1", 0.1), request("r-2", 5.0), request("r-3", 0.2))

    with log_events(logger):
        run_virtual(main())
    guard.close()
    told: dict[object, list[object]] = {}
    for line in _lines(stream):
        told.setdefault(line["request_id"], []).append(line["seawall_event"])
    assert told == {
        "r-1": ["call_retried", "retry_stopped"],
        "r-2": ["call_timed_out", "call_retried", "call_timed_out", "retry_stopped"],
        "r-3": ["call_retried", "retry_stopped"],
    }


def test_of_a_flood_the_number_left_out_is_a_number(written: io.StringIO):
    """What was left out is counted in a key of its own."""
    clock = VirtualClock()
    guard = Guard("structlog-flood", Breaker(consecutive=1))
    with log_events(LOGGER, burst=2, clock=clock):
        for _ in range(10):
            guard.attempt(_down)
        clock.sleep(5.0)
        guard.attempt(_down)
    guard.close()
    refusals = [line for line in _lines(written) if line["seawall_event"] == "call_rejected"]
    assert len(refusals) == 3
    assert refusals[-1]["seawall_left_out"] == 7


@given(name=st.text(max_size=30), key=st.text(max_size=30))
def test_no_name_breaks_the_line_or_another_key(name: str, key: str):
    """Whatever users call things, an event is one line, and no key of structlog's is lost."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(structlog.stdlib.ExtraAdder()))
    logger = logging.Logger("apart")  # noqa: LOG001 - one for each example
    logger.addHandler(handler)
    with log_events(logger):
        emit(BreakerChanged, name, before="closed", after="open", cause="failures", key=key)
    (line,) = _lines(stream)
    assert line["seawall_guard"] == printable(name, 500)
    assert str(line["event"]).startswith(f"breaker_changed in {name!r}: closed -> open (failures)")
    assert str(line["event"]).isprintable()
    assert line["level"] == "warning"


def test_without_the_adder_values_are_left_out():
    """The page is right that ExtraAdder takes the values over: without it they are missing."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter())
    logger = logging.Logger("apart")  # noqa: LOG001 - one for this test
    logger.addHandler(handler)
    with log_events(logger):
        emit(BreakerChanged, "vendor", before="closed", after="open", cause="failures", key=None)
    (line,) = _lines(stream)
    assert set(line) == {"event", "level"}
