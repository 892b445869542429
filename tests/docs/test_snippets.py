"""The documentation is run.

Every ```python block of docs/ is executed: the blocks of one page in order, in one namespace, on
one virtual clock, so that nothing really sleeps. `await` is allowed at the top level: such a block
has an event loop of its own, in virtual time. Each block of the README is a program by itself, and
is run as one.

What a block prints must be what its `#>` comments say, line by line, in that order:

    print("hello")  #> hello

A page that says `<!-- real time -->` below its title is about what a real server does: it is run on
the machine's clock, with the address of a server in the environment's REDIS_URL.

The same holds for the files in examples/, which are run as programs (there the formatter writes
`# >`). A failure names the page and the line.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import logging
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest

import seawall
from seawall import registry
from seawall.events import bus
from seawall.models.breaker.state import TRANSITIONS
from seawall.runtime.slots import live_slots
from seawall.testing import run_virtual, virtual_time
from tests.test_public_api import MODULES

pytestmark = pytest.mark.alone  # some pages ask a real server, which has to answer in real time

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
# A worker of Celery takes over the logging of its process, so its page is run after all others.
CELERY = DOCS / "tasks" / "celery.md"
PAGES = [
    *(README, ROOT / "CHANGELOG.md", CONTRIBUTING),
    *sorted(DOCS.rglob("*.md"), key=lambda page: (page == CELERY, page)),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

REAL_TIME = "\n<!-- real time -->\n"
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXPECTED = re.compile(r"(?:^|(?<=\s))# ?>(?: (.*))?$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def place_of(page: Path) -> str:
    """Return where a page is, as its tests are called."""
    return str(page.relative_to(ROOT))


class Block(NamedTuple):
    """A fenced block of a page; `line` is that of its first line of code."""

    language: str
    line: int
    text: str


def blocks(text: str, language: str) -> list[Block]:
    """Return the blocks of a page that are in `language`."""
    found = (
        Block(match[1], text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in FENCE.finditer(text)
    )
    return [block for block in found if block.language == language]


def expected_output(source: str) -> list[str]:
    """Return the lines that the `#>` comments of `source` promise."""
    return [match[1] or "" for match in EXPECTED.finditer(source)]


def compiled(page: Path, block: Block) -> CodeType:
    """Compile a block under the name of its page, at its own lines."""
    source = "\n" * (block.line - 1) + block.text
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(source, str(page), "exec", flags=flags, dont_inherit=True)


def run_page(page: Path) -> None:
    """Run the blocks of a page in order; fail with the page and the line of the first trouble."""
    # A framework may look up the module of a handler to read its annotations, or register by it.
    name = re.sub(r"\W", "_", f"snippets_{page.parent.name}_{page.stem}")
    sys.modules[name] = module = ModuleType(name)
    namespace: dict[str, Any] = vars(module)
    text = page.read_text("utf-8")
    real = REAL_TIME in text
    with contextlib.nullcontext() if real else virtual_time() as clock:
        for block in blocks(text, "python"):
            printed = io.StringIO()
            try:
                code = compiled(page, block)
                with contextlib.redirect_stdout(printed):
                    if code.co_flags & inspect.CO_COROUTINE:
                        run = asyncio.run if clock is None else partial(run_virtual, clock=clock)
                        run(eval(code, namespace))  # noqa: S307
                    else:
                        exec(code, namespace)  # noqa: S102
            except Exception as error:  # noqa: BLE001 - reported with its place
                place = f"{page.name}:{line_of(error, page, block)}"
                pytest.fail(f"{place}: {traceback.format_exc()}", pytrace=False)
            compare(f"{page.name}:{block.line}", block.text, printed.getvalue())


def line_of(error: Exception, page: Path, block: Block) -> int:
    """Return the line of the page at which `error` arose."""
    if isinstance(error, SyntaxError) and error.filename == str(page):
        return error.lineno or block.line
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or block.line for f in frames if f.filename == str(page)), block.line)


def compare(place: str, source: str, printed: str) -> None:
    """Fail unless `printed` is what the comments in `source` promise."""
    wanted, got = expected_output(source), printed.splitlines()
    if wanted != got:
        lines = [f"{place}: it promises", *wanted, "but it prints", *got]
        pytest.fail("\n    ".join(lines), pytrace=False)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the guards, end the subscriptions and forget the slots that a page leaves behind.

    Pools and workers that other tests have left are not shown on a page.
    """
    before = seawall.guards()
    slots = set(live_slots)
    monkeypatch.setattr(bus, "_listeners", ())
    monkeypatch.setattr(registry, "_entries", WeakKeyDictionary())
    monkeypatch.setattr(registry, "counts", registry.GuardCounts())
    yield
    for guard in seawall.guards():
        if guard not in before:
            guard.close()
    live_slots.intersection_update(slots)  # a page shows what becomes of one that is not given back


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("page", PAGES[1:], ids=place_of)
def test_snippets_do_what_the_page_says(
    page: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Every Python block of the page runs, and prints what its comments promise."""
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    monkeypatch.setenv("REDIS_URL", redis_url)
    loggers = [logging.getLogger(name) for name in ("seawall", "seawall.events")]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    try:
        run_page(page)
    finally:  # a handler of this page must not print on the next one
        for logger, logger.handlers, level in before:
            logger.setLevel(level)


@pytest.mark.parametrize(
    "block", blocks(README.read_text("utf-8"), "python"), ids=lambda block: f"line {block.line}"
)
def test_each_block_of_the_readme_runs_when_pasted_into_a_file(block: Block, tmp_path: Path):
    """It has its imports, says nothing on stderr, and prints what its comments promise."""
    pasted = tmp_path / "pasted.py"
    pasted.write_text(block.text, "utf-8")
    ran = subprocess.run(  # noqa: S603 - the project's own page
        [sys.executable, pasted.name],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    compare(f"README.md:{block.line}", block.text, ran.stdout)


def test_each_block_of_the_readme_is_typed(tmp_path: Path):
    """mypy, as strict as it is with Seawall itself, finds nothing wrong in the pasted blocks."""
    pasted = []
    for block in blocks(README.read_text("utf-8"), "python"):
        pasted.append(tmp_path / f"readme_line_{block.line}.py")
        pasted[-1].write_text(block.text, "utf-8")
    assert pasted
    ran = subprocess.run(  # noqa: S603 - the project's own page
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *map(str, pasted)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout.splitlines()) == (0, [])


def test_the_readme_is_short():
    """It is about 500 words: the rest is in docs/."""
    assert 400 < len(README.read_text("utf-8").split()) < 600


def test_no_block_of_the_readme_is_left_unrun():
    """A block of Python is marked as `python`, not as `py`, which is not run."""
    assert blocks(README.read_text("utf-8"), "py") == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_do_what_they_say(example: Path, redis_url: str):
    """Every example runs as a program, warns of nothing, and prints what its comments promise.

    Changes of breakers and members, and the first degraded answer of a guard, are lines on stderr.
    """
    ran = subprocess.run(  # noqa: S603 - the project's own examples
        [sys.executable, "-W", "error", str(example)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    logged = ("breaker_changed in ", "call_degraded in ", "member_changed in ", "own_pause in ")
    assert [line for line in ran.stderr.splitlines() if not line.startswith(logged)] == []
    compare(example.name, example.read_text("utf-8"), ran.stdout)


# --- What else a page must not get wrong ---


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module: ModuleType):
    """Each name that a public module exports is mentioned, as code, on some page of docs/."""
    text = "\n".join(
        page.read_text("utf-8")
        for page in PAGES
        if DOCS in page.parents and (DOCS / "reference") not in page.parents
    )
    code = " ".join(re.findall(r"`[^`\n]+`", text)) + "".join(
        match[2] for match in FENCE.finditer(text)
    )
    missing = [name for name in module.__all__ if not re.search(rf"\b{name}\b", code)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=place_of)
def test_links_lead_somewhere(page: Path):
    """Each relative link leads to a file, and to a heading of it where it names one.

    A page of docs/ leads to pages of docs/ only: the site has no others.
    """
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        outside = DOCS in page.parents and DOCS not in file.resolve().parents
        if (
            outside
            or not file.exists()
            or (anchor and anchor not in anchors(file.read_text("utf-8")))
        ):
            broken.append(target)
    assert broken == []


def test_contributing_names_files_that_exist():
    """Each file or folder of the project that the page names is there."""
    named = re.findall(r"`((?:src|tests|docs)/[\w./-]*)`", CONTRIBUTING.read_text("utf-8"))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def links(page: Path) -> list[Path]:
    """Return the files that a page links to."""
    targets = LINK.findall(FENCE.sub("", page.read_text("utf-8")))
    names = (target.partition("#")[0] for target in targets if "://" not in target)
    return [(page.parent / name).resolve() for name in names]


def anchors(text: str) -> set[str]:
    """Return the anchors that the headings of a page get."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_index():
    """Each page of docs/ is linked from docs/index.md, or from a folder's index linked there."""
    indexes = [DOCS / "index.md"]
    indexes += [page for page in links(indexes[0]) if page.name == "index.md"]
    reached = {page for index in indexes for page in links(index)} | {indexes[0]}
    assert [place_of(page) for page in PAGES if DOCS in page.parents and page not in reached] == []


@pytest.mark.parametrize(
    ("page", "programs"), [("members/members", "members.py"), ("pipeline/tutorial", "sensors/*.py")]
)
def test_a_tutorial_shows_its_example(page: str, programs: str):
    """What the page shows of the program is part of the program, which is run."""
    files = sorted((ROOT / "examples").glob(programs))
    program = "\n".join(file.read_text("utf-8") for file in files)
    shown = blocks((DOCS / f"{page}.md").read_text("utf-8"), "py")
    assert shown
    assert [block.text for block in shown if block.text not in program] == []


def test_breaker_page_has_the_transition_table():
    """The changes of state on the breaker's page are those that the code can make."""
    rows = [
        f"| {before.value} | {cause.value} | {after.value} |"
        for (before, cause), after in TRANSITIONS.items()
    ]
    page = (DOCS / "policies" / "breaker.md").read_text("utf-8")
    assert "\n".join(["| from | when | to |", "| --- | --- | --- |", *rows, "\n"]) in page


CONTENTS = ["docs/how-to/index.md", "docs/migrate/index.md", "docs/tutorial/index.md"]
"""Pages that only list others."""


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=place_of)
def test_pages_open_with_code(page: Path):
    """The first block of a page comes before any list or table, and before many words."""
    text = page.read_text("utf-8")
    assert "```mermaid" not in text, "its script would come from another host"
    if "\n::: seawall" in text or place_of(page) in CONTENTS:
        return
    first = FENCE.search(text)
    assert first, "a page opens with code that runs"
    assert first[1] in {"python", "py", "sh", "toml"}
    before = text[: first.start()]
    assert re.search(r"^\s*(?:[-*|] |\d+\. )", before, re.MULTILINE) is None
    assert len(before.split()) < 150


SECTIONS = ["Usage", "What it promises", "Defaults and why", "Telemetry", "Anti-patterns"]
MECHANISMS = ["durable", "members", "pods", "policies", "resources"]
"""Folders with a page for each mechanism; elsewhere there are also integrations and recipes."""
AROUND = ["members/members", "pods/across-pods", "policies/deadlines", "policies/guard"]
"""Pages in those folders that are not about one mechanism."""


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=place_of)
def test_pages_of_mechanisms_have_the_same_sections(page: Path):
    """A page of a mechanism has the same sections in the same order: its usage comes first."""
    text = FENCE.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    found = [heading for heading in headings if heading in SECTIONS]
    name = str(page.relative_to(DOCS).with_suffix(""))
    required = page.parent.name in MECHANISMS and page.stem != "index" and name not in AROUND
    if required or "What it promises" in found:
        assert found == SECTIONS


# --- The tests above would notice ---


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("snippet", "message"),
    [
        ("x = 1\nassert x == 2", "page.md:5: "),
        ("x = 1\ny =", "page.md:5: "),
        ("async def f():\n    return 1 / 0\nawait f()", "page.md:6: "),
        ("print('a')  #> b", "page.md:4: it promises\n    b\n    but it prints\n    a"),
        ("print('a')", "page.md:4: it promises\n    but it prints\n    a"),
        ("#> b", "page.md:4: it promises\n    b\n    but it prints"),
    ],
)
def test_a_broken_snippet_fails_with_page_and_line(tmp_path: Path, snippet: str, message: str):
    """A snippet that raises, does not parse or prints something else is reported with its place."""
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n```python\n{snippet}\n```\n", "utf-8")
    with pytest.raises(pytest.fail.Exception, match=re.escape(message)):
        run_page(page)


@pytest.mark.usefixtures("clean")
def test_blocks_of_a_page_share_names_and_time(tmp_path: Path):
    """Later blocks see the names of earlier ones, and sleep on the same virtual clock."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport asyncio\nfrom seawall.clock import current_clock\n```\n\n"
        "```python\nawait asyncio.sleep(3600)\n```\n\n"
        "```python\nprint(current_clock().now())  #> 3600.0\n```\n",
        "utf-8",
    )
    run_page(page)
