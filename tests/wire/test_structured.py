"""Structured fields, compared with a parser that somebody else wrote."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import http_sfv
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from seawall.wire import structured
from seawall.wire.structured import Token, read_item, read_list
from tests.support import falsified

KEYS = st.from_regex(r"[a-z*][a-z0-9_.*-]{0,5}", fullmatch=True)
VISIBLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=8)
BARE = st.one_of(
    st.integers(-structured.MOST, structured.MOST).map(str),
    st.decimals(-999, 999, places=2).map(str),
    VISIBLE.map(structured.string),
    st.from_regex(r"[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]{0,5}", fullmatch=True),
    st.binary(max_size=6).map(structured.byte_sequence),
    st.sampled_from(["?0", "?1", "@1659578233", "@-1", '%"f%c3%bc"', '%""', '""']),
)
PARAMETER = st.tuples(KEYS, st.none() | BARE).map(lambda p: p[0] if p[1] is None else "=".join(p))
ITEM = st.tuples(BARE, st.lists(PARAMETER, max_size=3)).map(lambda i: ";".join([i[0], *i[1]]))
FIELDS = st.lists(ITEM, max_size=4).map(", ".join)
MISTAKES = st.sampled_from([*list(' ,;="\\:?@%()-.0aA*\t\x7f'), "é", ", ", "; ", "==", '""', "1."])

UNFINISHED = re.compile(r"[0-9]\.(?![0-9])")
PADDED = re.compile(r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)")


@st.composite
def damaged(draw):
    """Change a valid field in one to three places."""
    text = draw(FIELDS)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(start + 2, len(text))))
        text = text[:start] + draw(MISTAKES | st.just("")) + text[stop:]
    return text


def plain(value: Any) -> Any:
    """Return a value of the other parser's as ours says it."""
    if isinstance(value, datetime):
        return int((value - datetime(1970, 1, 1, tzinfo=value.tzinfo)).total_seconds())
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, http_sfv.Token | http_sfv.DisplayString):
        return str(value)
    return value


def theirs(text: str) -> list[tuple[Any, dict[str, Any]]] | None:
    """Read a field with the independent parser; an inner list is no item."""
    if not text.strip(" "):
        return []  # it takes no empty list, which a field that is there may well be
    field = http_sfv.List()
    try:
        field.parse(text.encode("latin-1"))
    except (ValueError, OverflowError, TypeError):
        return None
    if any(isinstance(item, http_sfv.InnerList) for item in field):
        return None
    return [
        (plain(item.value), {key: plain(value) for key, value in item.params.items()})
        for item in field
    ]


def ours(text: str) -> list[tuple[Any, dict[str, Any]]] | None:
    items = read_list(text)
    return None if items is None else [(item.value, item.parameters) for item in items]


@given(FIELDS)
def test_valid_fields_mean_the_same(text: str):
    """What is valid, both parsers read, and read as the same."""
    assert ours(text) is not None
    assert ours(text) == theirs(text)


@given(damaged())
@example("1, ")
@example('"a" ,\t"b"')
@example('"a";q="')
@example("1;  a=1; b")
@example("a;A=1")
@example("(1 2), 3")
@example("1234567890123.5")
@example("1234567890123456")
@example('"\\a"')
@example(":YQ:")
@example(":YQ==:")
def test_damaged_fields_are_judged_alike(text: str):
    """What one parser refuses, the other refuses too."""
    assume("@" not in text)  # dates of the far past and future: the other's calendar ends
    assume("%" not in text)  # the two differ in what else a display string may hold
    assume(not UNFINISHED.search(text))  # the other reads "1." as 1.0, which the standard forbids
    binaries = re.findall(r":([^:]*):", text)
    assume(all("=" not in it or PADDED.fullmatch(it) for it in binaries))  # it overlooks the rest
    # The other wants base64 padded; the standard says that a parser should not.
    assert ours(text) == theirs(text) or (":" in text and theirs(text) is None)


@pytest.mark.parametrize("text", [":=:", ":YQ===:", ":YQ==YQ==:", ":YQ ==:"])
def test_wrong_padding_is_no_base64(text: str):
    """Padding may be left out; too much of it, or in the middle, is refused."""
    assert ours(text) is None


def test_tokens_are_not_strings():
    """A word without quotes is told from the same word in quotes."""
    word, quoted = read_list('burst, "burst"') or []
    assert isinstance(word.value, Token)
    assert not isinstance(quoted.value, Token)
    assert word.value == quoted.value


def test_a_date_is_its_seconds():
    """A date is read as the seconds since 1970, as the other parser has it."""
    assert ours("@784111777") == theirs("@784111777") == [(784111777, {})]
    assert datetime.fromtimestamp(784111777, UTC).year == 1994


@pytest.mark.parametrize(
    ("text", "value"),
    [('"a\\"b\\\\c"', 'a"b\\c'), ("?1", True), (":aGk=:", b"hi"), ("-1.5", -1.5), ("42;a", 42)],
)
def test_an_item_alone(text: str, value: object):
    """A field of one item is that item."""
    item = read_item(text)
    assert item is not None
    assert item.value == value


@pytest.mark.parametrize("text", ["", "1, 2", '"open', "(1)", '%"%ff"', "::=:", ":a:", "1.", "--1"])
def test_what_is_no_item(text: str):
    """Nothing, two of them, and what is broken is no item."""
    assert read_item(text) is None


@given(st.text(max_size=20))
def test_any_text_can_be_said(text: str):
    """Whatever a name holds, the field that is written of it can be read."""
    item = read_item(structured.string(text))
    assert item is not None
    assert item.value == "".join(c if " " <= c <= "~" else "?" for c in text)


def test_quotes_must_be_escaped(monkeypatch: pytest.MonkeyPatch):
    """Without the escaping a name could end its string, and write parameters of its own."""

    def check(text: str) -> None:
        item = read_item(structured.string(text))
        assert item is not None
        assert item.value == text

    assert not falsified(check, VISIBLE, most=500)
    monkeypatch.setattr(structured, "string", lambda text: f'"{text}"')
    assert falsified(check, VISIBLE)
