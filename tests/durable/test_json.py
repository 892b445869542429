"""Values of a service as JSON: what is written for each type, and one text for equal values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from seawall.durable._json import canonical_json, json_text

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
