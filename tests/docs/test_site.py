"""The site of the documentation: it is built without a warning, no link is dead, search works."""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser.conftest import missing_browser
from tests.docs.reference import PINNED, ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]  # its environment may have to be made

DOCS: Final = ROOT / "docs"


class Built(NamedTuple):
    """The site, and what was said while it was built."""

    folder: Path
    said: str


@pytest.fixture(scope="module")
def built() -> Built:
    """Build the site, as a developer does."""
    ran = subprocess.run(  # noqa: S603 - the project's own command
        [ROOT / "dev", "docs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return Built(ROOT / "site", ran.stdout)


@pytest.fixture(scope="module")
def site(built: Built) -> Site:
    """Return every page of the built site by its path, but the one that only servers show."""
    return {
        path.relative_to(built.folder): Parsed(path.read_text("utf-8"))
        for path in built.folder.rglob("*.html")
        if path.name != "404.html"
    }


class Parsed(HTMLParser):
    """The links of a page, what it loads, and where a link can lead to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical" and "href" in given:
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


Site: TypeAlias = dict[Path, Parsed]


def dead_links(site: Site, folder: Path) -> list[str]:
    """Return the links within the site that lead nowhere, or out of it."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    anchors = {path.as_posix(): page.anchors for path, page in site.items()}
    dead = []
    for path, page in site.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme in {"http", "https", "data", "mailto"}:
                continue
            own = path.parent.as_posix() if parts.path else path.as_posix()
            target = posixpath.normpath(posixpath.join(own, unquote(parts.path)))
            if target not in files or unquote(parts.fragment) not in anchors.get(target, {""}):
                dead.append(f"{path}: {link}")
    return dead


def test_the_site_is_built_without_a_warning(built: Built):
    """Zensical, which is strict, finds no issue."""
    assert "No issues found" in built.said
    assert "warning" not in built.said.lower()


def test_every_page_is_on_the_site(site: Site):
    """There is a page of the site for each page of docs/."""
    pages = {path.relative_to(DOCS) for path in DOCS.rglob("*.md")}
    assert len(pages) > 100
    assert {page.with_suffix(".html") for page in pages} <= set(site)


def test_no_link_is_dead(site: Site, built: Built):
    """Every link within the site leads to a file, and to an anchor in it where it names one."""
    assert sum(len(page.links) for page in site.values()) > 1000
    assert dead_links(site, built.folder) == []


def test_a_dead_link_would_be_found(tmp_path: Path):
    """A missing file, a missing anchor and a missing picture are found."""
    (tmp_path / "a.html").touch()
    text = '<h1 id="top"></h1><a href="a.html#top">'
    for wrong in ('<a href="b.html">', '<a href="a.html#bottom">', '<img src="c.png">'):
        page = {Path("a.html"): Parsed(text + wrong)}
        assert len(dead_links(page, tmp_path)) == 1
    assert dead_links({Path("a.html"): Parsed(text)}, tmp_path) == []


def test_nothing_comes_from_another_host(site: Site, built: Built):
    """Scripts, styles, fonts and pictures are all in the folder."""
    loaded = {link for page in site.values() for link in page.loaded}
    assert {link for link in loaded if urlsplit(link).netloc} == set()
    styles = "".join(path.read_text("utf-8") for path in built.folder.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//", styles) == []


def test_every_public_name_is_in_the_reference(site: Site):
    """The page of a public module has an anchor for each name that it exports."""
    module, missing, names = "", [], 0
    for line in PINNED.read_text("utf-8").splitlines():
        if line.startswith("# "):
            module = line.removeprefix("# ")
        elif found := re.match(r"(?:class |def |async def |enum |type )?(\w+)", line):
            page = site[Path("reference", "api", f"{module}.html")]
            names += 1
            if f"{module}.{found[1]}" not in page.anchors:
                missing.append(f"{module}.{found[1]}")
    assert names > 300
    assert missing == []


def test_llms_txt_lists_every_page(built: Built):
    """Each page is listed once, as Markdown, by a relative link."""
    listed = re.findall(r"\(<?([^)>]+)>?\)", (built.folder / "llms.txt").read_text("utf-8"))
    assert len(listed) == len(set(listed))
    assert [name for name in listed if not (built.folder / name).is_file()] == []
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages == set(listed)


@pytest.fixture(scope="module")
def served(built: Built) -> Iterator[str]:
    """Serve the site, and return its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_what: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built.folder)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser())
@pytest.mark.parametrize("way", ["served", "from a folder"])
def test_search_finds_a_page(way: str, built: Built, served: str, open_page: Callable[..., Page]):
    """What is typed is found, and a click leads there; also when the folder is opened as it is."""
    page = open_page(f"{served if way == 'served' else built.folder.as_uri()}/index.html")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("combobox").fill("leased batch excess")
    page.get_by_role("option").filter(has_text="Exact, leased, split").first.click()
    page.wait_for_url("**/pods/shared-limits-sharing.html*")


@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser())
def test_the_site_is_dark_at_night(served: str, open_page: Callable[..., Page]):
    """It follows the system, and has a switch of its own."""
    luminance = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] / 255"
    dark = open_page(f"{served}/index.html", color_scheme="dark")
    assert dark.evaluate(luminance) < 0.2
    light = open_page(f"{served}/index.html", color_scheme="light")
    assert light.evaluate(luminance) > 0.8
    for _ in range(2):  # from the system's mode to light, to dark
        light.locator("label[for^=__palette]:visible").click()
    assert light.evaluate(luminance) < 0.2
