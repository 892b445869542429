"""How-to pages are for somebody in a hurry: code first, few words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_snippets import DOCS, FENCE

PAGES = sorted(page for page in (DOCS / "how-to").glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_opens_with_code_and_is_short(page: Path):
    """Below the title comes a block that is run; the prose has less than 300 words."""
    text = page.read_text("utf-8")
    first = FENCE.search(text)
    assert first
    assert first[1] == "python"
    before = text[: first.start()].replace("<!-- real time -->", "").strip().splitlines()
    assert len(before) == 1
    assert before[0].startswith("# ")
    assert len(FENCE.sub("", text).split()) < 300
