"""Values of a service as JSON: what is written for each type, and one text for equal values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from seawall.durable.database.json_values import (
    MOST_COMPARED,
    canonical_document,
    canonical_json,
    json_text,
)

NUMBER = UUID("12345678-1234-5678-1234-567812345678")


@dataclass
class Line:
    """A line of an order."""

    item: UUID
    price: Decimal


class Order(BaseModel):
    """An order as a service's API has it."""

    id: UUID
    placed_at: datetime


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Decimal("12.30"), "12.30"),
        (NUMBER, str(NUMBER)),
        (datetime(2026, 1, 2, 3, 4, 5, 6000, UTC), "2026-01-02T03:04:05.006000+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (Line(NUMBER, Decimal("0.10")), {"item": str(NUMBER), "price": "0.10"}),
        (
            Order(id=NUMBER, placed_at=datetime(2026, 1, 2, tzinfo=UTC)),
            {"id": str(NUMBER), "placed_at": "2026-01-02T00:00:00Z"},
        ),
    ],
)
def test_each_type_is_written_in_its_standard_form(value: object, written: object):
    """At the top and at any depth."""
    assert json.loads(json_text(value)) == written
    assert json.loads(canonical_json({"a": [value]})) == {"a": [written]}


def test_canonical_text_does_not_depend_on_the_order_of_keys():
    """Equal values have one text, without spaces, also inside of dataclasses and models."""
    assert canonical_json({"b": 1, "a": {"d": 2, "c": "é"}}) == '{"a":{"c":"\\u00e9","d":2},"b":1}'
    line = Line(NUMBER, Decimal(1))
    assert canonical_json(line) == canonical_json({"price": "1", "item": str(NUMBER)})


@pytest.mark.parametrize("wrong", [object(), {1, 2}, b"x", Line, {NUMBER: 1}, 1j])
def test_what_has_no_standard_form_is_refused(wrong: object):
    """It raises TypeError, whatever the encoder says of it."""
    for write in (json_text, canonical_json):
        with pytest.raises(TypeError):
            write({"a": wrong})


def test_what_never_ends_is_refused():
    """A cycle, through a dataclass too, and what is nested too deeply."""
    cycle: list[Any] = []
    cycle.append(Line(NUMBER, cycle))  # type: ignore[arg-type]
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for wrong in (cycle, deep):
        with pytest.raises(TypeError):
            json_text(wrong)


def test_numbers_that_json_has_not_are_only_compared():
    """NaN is no JSON: refused where it would be stored, allowed where it is compared."""
    with pytest.raises(TypeError):
        json_text(float("nan"))
    assert canonical_json(float("nan")) == canonical_json(float("nan"))


# Documents of the same meaning


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a":1,"b":[true,null]}', b' { "b" : [ true , null ] ,\n"a" : 1 } '),
        (b'{"name":"\\u0041\\/"}', b'{"name":"A/"}'),
        (b'{"a":{"c":1,"b":2}}', b'{"a":{"b":2,"c":1}}'),
        ('["\u00e9"]'.encode(), b'["\\u00e9"]'),
        (b"12345678901234567890123", b" 12345678901234567890123"),
        (b"[1.5]", b"[ 1.5 ]"),
    ],
)
def test_documents_of_one_meaning_are_equal(one: bytes, other: bytes):
    """The order of members, spaces and escapes are no part of it."""
    assert canonical_document(one) == canonical_document(other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"1", b"1.0"),
        (b"1", b'"1"'),
        (b"true", b'"true"'),
        (b"null", b"0"),
        (b"[1,2]", b"[2,1]"),
        (b'{"a":null}', b"{}"),
        (b"9007199254740993", b"9007199254740992"),
        (b"0.1", b"0.10000000000000002"),
        (b'"a"', b'"A"'),
        ('"e\u0301"'.encode(), '"\u00e9"'.encode()),
    ],
)
def test_documents_of_different_meaning_are_different(one: bytes, other: bytes):
    """Also where some reader of JSON would take them for the same."""
    assert canonical_document(one) != canonical_document(other)
    assert None not in (canonical_document(one), canonical_document(other))


@pytest.mark.parametrize(
    "doubtful",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"\\u0061":1}',
        b'[{"b":{"a":1,"a":1}}]',
        b"[1.50]",
        b"1E3",
        b"1e400",
        b"-0",
        b"-0.0e0",
        b"0.1000000000000000055511151231257827",
        b"9" * 5000,
        b"NaN",
        b"[-Infinity]",
        b'"\xff"',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b"{} {}",
        b"",
        b'"' + b"x" * MOST_COMPARED + b'"',
    ],
    ids=lambda data: data[:12],
)
def test_in_doubt_the_bytes_are_compared(doubtful: bytes):
    """What readers of JSON do not agree on has no canonical form."""
    assert canonical_document(doubtful) is None


def test_deep_nesting_is_read_or_in_doubt():
    """It depends on the Python how deep it reads; what it cannot read raises nothing."""
    deep = b"[" * 30_000 + b"]" * 30_000
    assert canonical_document(deep) in {None, deep}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_equal_forms_mean_equal_values(one: Any, other: Any):
    """No two values have one canonical form, unless `json` writes both of them the same."""
    forms = [canonical_document(json.dumps(value, indent=1).encode()) for value in (one, other)]
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (forms[0] == forms[1] and forms[0] is not None) == (same and forms[0] is not None)
