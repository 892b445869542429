"""What a client writes into the baggage of its requests, beside what is there already."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Criticality, criticality
from seawall.clients.http import headers as _exchange_headers
from seawall.clients.http.headers import PROPAGATED, headers_for
from seawall.context import tenant
from seawall.wire.criticality import read_baggage, read_criticality, read_tenant, write_baggage
from tests.support import falsified

WITH_TENANT = PROPAGATED | {"tenant"}
LEVELS = st.none() | st.sampled_from(Criticality)
TENANTS = st.none() | st.sampled_from(["mine", "theirs", "acme corp"])
SAID = st.tuples(LEVELS, TENANTS)


def sent(
    context: tuple[Criticality | None, str | None],
    existing: str | None,
    propagate: frozenset[str] = WITH_TENANT,
) -> str | None:
    """Return the baggage that a request has, made in such a context with such a header."""
    level, name = context
    given_ = {} if existing is None else {"baggage": existing}
    with ExitStack() as stack:
        if level is not None:
            stack.enter_context(criticality(level))
        if name is not None:
            stack.enter_context(tenant(name))
        return (given_ | headers_for(propagate, given_, None, None)).get("baggage")


def the_context_counts(case: tuple[tuple, tuple, bool]) -> None:
    """Send with baggage that another library passes on: less, but never more, than the context."""
    context, said, whole = case
    existing = write_baggage("a=1;p=2", *said)
    told = sent(context, existing, WITH_TENANT if whole else PROPAGATED)
    assert told is not None
    members = read_baggage(told)
    levels = [level for level in (context[0], said[0]) if level is not None]
    level = read_criticality(members)
    assert (Criticality.CRITICAL if level is None else level) == min(
        levels, default=Criticality.CRITICAL
    )
    assert read_tenant(members) == (context[1] if whole and context[1] else said[1])
    assert members["a"] == "1"
    assert told.endswith("a=1;p=2")


CASES = st.tuples(SAID, SAID, st.booleans())


@given(CASES)
def test_existing_baggage_does_not_beat_the_context(case: tuple[tuple, tuple, bool]):
    """Criticality only falls; the tenant is the context's, if it has one and tells it."""
    the_context_counts(case)


def test_without_the_minimum_criticality_would_rise(monkeypatch: pytest.MonkeyPatch):
    """The property depends on taking the lower."""
    monkeypatch.setattr(_exchange_headers, "min", lambda known, _level: known, raising=False)
    assert falsified(the_context_counts, CASES)


@pytest.mark.parametrize(
    ("context", "existing", "told"),
    [
        ((None, None), None, None),
        ((Criticality.CRITICAL, None), None, None),
        ((Criticality.SHEDDABLE, None), None, "seawall.criticality=sheddable"),
        ((None, None), "seawall.criticality=critical-plus", "seawall.criticality=critical-plus"),
        ((Criticality.CRITICAL, None), "seawall.criticality=critical-plus, a=1",
         "seawall.criticality=critical, a=1"),
        ((Criticality.CRITICAL, None), " a=1 ", " a=1 "),
        ((None, "acme corp"), " seawall.tenant = acme+corp ", " seawall.tenant = acme+corp "),
        ((None, "mine"), "seawall.tenant=a,seawall.tenant=b", "seawall.tenant=mine"),
    ],
)  # fmt: skip
def test_what_need_not_change_stays_to_the_letter(
    context: tuple[Criticality | None, str | None], existing: str | None, told: str | None
):
    """Nothing is written that is there already, or that goes without saying."""
    assert sent(context, existing) == told
