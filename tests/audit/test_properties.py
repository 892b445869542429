"""Whatever Python there is, the audit reads it, and always says the same."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.audit import RULES, audit_source
from seawall.audit.findings import in_order

STANDARD = Path(sysconfig.get_paths()["stdlib"])
FILES = sorted(path for path in STANDARD.glob("*.py") if path.stat().st_size < 60_000)

NAMES = st.sampled_from(
    ["requests", "session", "self", "client", "a", "b", "retry", "asyncio", "time", "Guard"]
)
ATTRIBUTES = st.sampled_from(["get", "post", "Session", "sleep", "gather", "call", "Queue", "x"])


def calls(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions around other expressions."""
    return st.one_of(
        st.tuples(inner, ATTRIBUTES).map(lambda one: f"{one[0]}.{one[1]}"),
        st.tuples(inner, inner).map(lambda one: f"{one[0]}({one[1]})"),
        st.tuples(inner, inner).map(lambda one: f"{one[0]}(timeout={one[1]})"),
        st.tuples(inner, inner).map(lambda one: f"{one[0]}(*[{one[1]} for a in b])"),
        st.tuples(inner, inner).map(lambda one: f"{one[0]}(**{one[1]})"),
        st.tuples(inner, inner).map(lambda one: f"({one[0]} if b else {one[1]})"),
        inner.map(lambda one: f"(lambda a: {one})"),
        inner.map(lambda one: f"(a := {one})"),
    )


EXPRESSIONS = st.recursive(st.one_of(NAMES, st.sampled_from(["None", "3", "'x'"])), calls)


def indented(body: str) -> str:
    return "\n".join(f"    {line}" for line in body.splitlines())


def blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Statements around other statements."""
    body = st.lists(inner, min_size=1, max_size=3).map("\n".join).map(indented)
    return st.one_of(
        body.map(lambda one: f"while True:\n{one}"),
        st.tuples(EXPRESSIONS, body).map(lambda one: f"for a in {one[0]}:\n{one[1]}"),
        body.map(lambda one: f"try:\n{one}\nexcept Exception as b:\n    time.sleep(1)"),
        st.tuples(EXPRESSIONS, body).map(lambda one: f"with {one[0]} as session:\n{one[1]}"),
        st.tuples(NAMES, body).map(lambda one: f"def {one[0]}(self, a=None, **b):\n{one[1]}"),
        st.tuples(EXPRESSIONS, body).map(lambda one: f"@{one[0]}\nasync def b(a: 'x'):\n{one[1]}"),
        body.map(lambda one: f"class Guard(a):\n{one}"),
        body.map(lambda one: f"match a:\n    case [b, *c]:\n{indented(one)}"),
    )


LINES = st.one_of(
    EXPRESSIONS,
    st.tuples(NAMES, EXPRESSIONS).map(lambda one: f"{one[0]} = {one[1]}"),
    EXPRESSIONS.map(lambda one: f"self.session = {one}"),
    EXPRESSIONS.map(lambda one: f"a, (b, *self.x) = {one}"),
    st.sampled_from(
        [
            "import requests, time, asyncio, queue",
            "from requests import Session as Guard, get as a",
            "from tenacity import retry",
            "from seawall import Guard, Timeout",
            "from . import b",
            "del a",
            "pass",
            "a += 1",
            "a: requests.Session | None",
            "x = 1  # seawall: ok",
        ]
    ),
)
PROGRAMS = st.lists(st.recursive(LINES, blocks, max_leaves=12), max_size=6).map("\n".join)


@given(PROGRAMS)
def test_any_program_is_read(text: str):
    """No program raises; each finding is in the file; twice the same, in the one order."""
    found = audit_source(text)
    assert found == audit_source(text) == sorted(found, key=in_order)
    lines = text.count("\n") + 1
    assert all(1 <= one.line <= lines and one.rule.id in RULES for one in found)


@given(st.text())
def test_any_text_is_read(text: str):
    """What is no program is at most one finding about that."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        assert [one.rule.id for one in audit_source(text)] == ["SW900"]
    else:
        audit_source(text)


@pytest.mark.parametrize("first", range(4))
def test_the_standard_library_is_read(first: int):
    """Real code of all kinds is read, without a finding that it cannot be."""
    files = FILES[first::4]
    assert len(files) > 10
    for path in files:
        found = audit_source(path.read_text("utf-8"), path.name)
        assert not [one for one in found if one.rule.id == "SW900"], path


@given(PROGRAMS)
def test_a_comment_above_moves_findings_and_changes_nothing(text: str):
    """Findings depend on the code and not on its lines."""
    before, after = audit_source(text), audit_source(f"# one\n# two\n{text}")
    if any(one.rule.id == "SW900" for one in before):
        return
    assert [(one.line + 2, one.rule, one.fingerprint) for one in before] == [
        (one.line, one.rule, one.fingerprint) for one in after
    ]


def test_it_is_fast():
    """At least 100 000 lines a minute of processor time; a slow rule is noticed here."""
    texts = [path.read_text("utf-8") for path in FILES[::4]]
    lines = sum(text.count("\n") for text in texts)
    before = process_time()
    for text in texts:
        audit_source(text)
    assert lines / (process_time() - before) * 60 > 100_000


def test_deep_code_is_read():
    """A long sum and a long chain of calls are no deeper than others."""
    deep = "import requests\nx = " + " + ".join(["requests.get(u)"] * 700)
    assert len(audit_source(deep)) == 700
    audit_source("import requests\nrequests" + ".get()" * 90)
