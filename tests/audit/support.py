"""Code under audit, with the findings that it must have written beside it."""

from __future__ import annotations

import re
from textwrap import dedent

from seawall.audit import audit_source

EXPECTED = re.compile(r"#! (SW\d+(?:, SW\d+)*)$")


def assert_findings(code: str, *families: str) -> None:
    """Check that `code` has exactly the findings of its `#! SW101` comments.

    Only rules whose ids begin with one of `families` count; all, if none is given.
    """
    text = dedent(code)
    expected = [
        (number, rule)
        for number, line in enumerate(text.splitlines(), 1)
        if (match := EXPECTED.search(line))
        for rule in match[1].split(", ")
    ]
    found = [(one.line, one.rule.id) for one in audit_source(text)]
    if families:
        found = [one for one in found if one[1].startswith(families)]
    assert sorted(found) == sorted(expected)
