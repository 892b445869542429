"""Structured fields, compared with a parser that somebody else wrote."""

from __future__ import annotations

import http_sfv
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from seawall.wire import structured
from seawall.wire.structured import read_string
from tests.support import falsified

KEYS = st.from_regex(r"[a-z*][a-z0-9_.*-]{0,5}", fullmatch=True)
VISIBLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=8)
STRINGS = VISIBLE.map(structured.string)
USUAL = st.one_of(
    st.integers(-structured.MOST, structured.MOST).map(str),
    STRINGS,
    st.from_regex(r"[A-Za-z*][!#$&'*+^_`|~0-9A-Za-z/-]{0,5}", fullmatch=True),
    st.sampled_from(["?0", "?1", '""']),
)
RARE = st.sampled_from([":aGk=:", "::", "1.5", "-0.25", "@1659578233", "@-1", '%"f%c3%bc"', '%""'])


def fields(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return fields of one string, whose parameters have such values."""
    parameter = st.tuples(KEYS, st.none() | values).map(
        lambda pair: pair[0] if pair[1] is None else "=".join(pair)
    )
    parts = st.tuples(STRINGS, st.lists(parameter, max_size=3))
    return parts.map(lambda pair: ";".join([pair[0], *pair[1]]))


MISTAKES = st.sampled_from([*list(' ,;="\\?()-.0aA*\t\x7f'), "é", ", ", "; ", "==", '""'])


@st.composite
def damaged(draw):
    """Change a valid field in one to three places."""
    text = draw(fields(USUAL))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(start + 2, len(text))))
        text = text[:start] + draw(MISTAKES | st.just("")) + text[stop:]
    return text


def theirs(text: str) -> str | None:
    """Return the string of a field as the independent parser reads it."""
    item = http_sfv.Item()
    try:
        item.parse(text.encode("latin-1"))
    except (ValueError, OverflowError, TypeError):
        return None
    return item.value if type(item.value) is str else None


@given(fields(USUAL | RARE))
def test_valid_fields_mean_the_same(text: str):
    """What is valid, both parsers read, and read as the same."""
    assert read_string(text) is not None
    assert read_string(text) == theirs(text)


@given(damaged())
@example('"a" ')
@example('"a";q="')
@example('"a";  a=1; b')
@example('"a";A=1')
@example('"a", "b"')
@example('"\\a"')
def test_damaged_fields_are_judged_alike(text: str):
    """What one parser refuses, the other refuses too."""
    # In numbers, dates, bytes and display strings of parameters the other accepts more, and less.
    assume(not any(sign in text for sign in ".@:%"))
    assert read_string(text) == theirs(text)


@pytest.mark.parametrize(
    ("text", "value"), [('"a\\"b\\\\c"', 'a"b\\c'), ('""', ""), ('"a";b;c=?1;d=:aGk=:', "a")]
)
def test_a_string_alone(text: str, value: str):
    """A field of one string is that string; parameters do not change it."""
    assert read_string(text) == value


@pytest.mark.parametrize("text", ["", "a", "42", '"a", "b"', '"open', '("a")', '"a";', '"a";b='])
def test_what_is_no_string(text: str):
    """Nothing, two of them, another item, and what is broken is no string."""
    assert read_string(text) is None


@given(st.text(max_size=20))
def test_any_text_can_be_said(text: str):
    """Whatever a name holds, the field that is written of it can be read."""
    written = "".join(c if " " <= c <= "~" else "?" for c in text)
    assert read_string(structured.string(text)) == written


def test_quotes_must_be_escaped(monkeypatch: pytest.MonkeyPatch):
    """Without the escaping a name could end its string, and write parameters of its own."""

    def check(text: str) -> None:
        assert read_string(structured.string(text)) == text

    assert not falsified(check, VISIBLE, most=500)
    monkeypatch.setattr(structured, "string", lambda text: f'"{text}"')
    assert falsified(check, VISIBLE)
