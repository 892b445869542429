"""The tutorial is followed to the letter, by the same code that follows it from nothing by hand."""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.docs.tutorial import PARTS, STEP, Differs, Reader, environment

pytestmark = pytest.mark.alone  # servers start, and answer in real time


def follow(page: Path, folder: Path) -> None:
    Reader(folder, environment(here=True), here=True).follow(page)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Future[None]]:
    """Follow all parts, three at a time, since they mostly wait."""
    with ThreadPoolExecutor(3) as readers:
        return {
            page: readers.submit(follow, page, tmp_path_factory.mktemp("part")) for page in PARTS
        }


@pytest.mark.parametrize("page", PARTS, ids=lambda page: page.stem)
def test_part_does_what_it_shows(page: Path, followed: dict[Path, Future[None]]):
    """Every file is written, every command is run, and every output is the one on the page."""
    followed[page].result()


def test_parts_are_there_and_short():
    """There are five, each with commands, outputs, and few words: ten minutes are enough."""
    assert len(PARTS) == 5
    for page in PARTS:
        text = page.read_text("utf-8")
        languages = {match["language"] for match in STEP.finditer(text)}
        assert {"sh", "py", "text"} <= languages
        assert len(re.findall(r"\w+", STEP.sub("", text))) < 500


# --- It would notice ---


def try_page(folder: Path, text: str) -> None:
    page = folder / "page.md"
    page.write_text(text, "utf-8")
    follow(page, folder)


SHOWN = "```sh\necho {printed}\n```\n\n{mark}```text\n{shown}\n```\n"


@pytest.mark.parametrize(
    ("printed", "shown", "mark"),
    [
        ("hello", "goodbye", ""),
        ("took 3 ms", "took 4 ms", ""),
        ("took 3 ms", "took 4 ms", "<!-- varies: \\d+ s -->\n"),
        ("hello", "hello\nagain", ""),
        ("'hello\nagain'", "hello", ""),
    ],
)
def test_other_output_is_noticed(tmp_path: Path, printed: str, shown: str, mark: str):
    """Lines that differ, lack or are too many are reported with page and line."""
    text = SHOWN.format(printed=printed, shown=shown, mark=mark)
    with pytest.raises(Differs, match=r"^page\.md:1: the page shows"):
        try_page(tmp_path, text)


def test_what_varies_may_differ(tmp_path: Path):
    """Only what the page marks as varying may differ."""
    mark = "<!-- varies: \\d+ ms -->\n"
    try_page(tmp_path, SHOWN.format(printed="took 3 ms", shown="took 4 ms", mark=mark))


def test_failed_command_is_noticed(tmp_path: Path):
    """A command whose output is not shown has to succeed."""
    with pytest.raises(Differs, match=r"^page\.md:3: the last command ended with 7"):
        try_page(tmp_path, "Title\n\n```sh\n(exit 7)\n```\n")


def test_terminals_keep_their_state_and_are_interrupted(tmp_path: Path):
    """A terminal is a shell of its own; Ctrl-C ends what runs there, and its output stays."""
    try_page(
        tmp_path,
        '```py title="forever.py"\nimport time\n\ntry:\n    print("here")\n'
        '    time.sleep(3600)\nfinally:\n    print("over")\n```\n\n'
        '```sh title="Terminal 2"\nx=5\npython forever.py\n```\n\n```text\nhere\n```\n\n'
        "```sh\necho $x-\n```\n\n```text\n-\n```\n\n"
        "Press Ctrl-C in terminal 2.\n\n"
        '```text title="Terminal 2"\nover\nKeyboardInterrupt\n```\n\n'
        '```sh title="Terminal 2"\necho $x-\n```\n\n```text\n5-\n```\n',
    )


def test_text_that_never_appears_in_a_terminal_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server that does not say what the page shows is reported."""
    monkeypatch.setattr("tests.docs.tutorial.PATIENCE", 0.5)
    text = '```sh title="Terminal 2"\necho here; sleep 3600\n```\n\n```text\nthere\n```\n'
    with pytest.raises(Differs, match=r"^page\.md:1: the page shows\nthere\nbut .*\nhere\n"):
        try_page(tmp_path, text)
