"""The project itself: what it ships, what it pins, and what it must not say."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support import QUICK

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.in"))

# Written so that this file does not break its own rule: no pattern matches itself.
HOSTS = re.compile(r"py[p]i\.org|python[h]osted\.org|npm[j]s\.|debi[a]n\.org")  # in lower case
MACHINE_PATHS = re.compile(r"/(?<![\w.~)}-]/)(?:work|root|tmp|home|opt)/[\w.]")
# What imports an underscore module of a package may look like: most files need not be parsed.
IMPORT_OF_PRIVATE = re.compile(
    r"seawall\.\w[\w.]*\._[a-z]|from seawall[\w.]* import (?:\([^)]*|[^\n]*)\b_[a-z]"
)
TEST = re.compile(r"^ *(?:async )?def test_\w+\(.*?:\n\s+(\S+)", re.MULTILINE | re.DOTALL)
PIN = re.compile(r"([\w.-]+)==[\w.]+( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command at the root of the project, with only the environment that is given."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


# --- What it ships ---


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the pinned build backend, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check"]
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, ".")
    assert built.returncode == 0, built.stdout
    (path,) = folder.glob("seawall-*.whl")
    return path


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path):
    """The built wheel, installed alone, guards a def and an async def."""
    python = tmp_path / "empty" / "bin" / "python"
    for command in (
        [sys.executable, "-I", "-m", "venv", "--without-pip", tmp_path / "empty"],
        [sys.executable, "-I", "-m", "pip", "--python", python, "install", "--no-index", wheel],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stdout
    smoke = run(python, "-I", "-W", "error", ROOT / "tests" / "smoke.py")
    assert (smoke.returncode, smoke.stdout) == (0, "ok\n")


def test_wheel_holds_the_package_and_the_demo_and_nothing_else(wheel: Path):
    """The wheel has every source file, the typing marker and the licence, and no tests."""
    names = set(ZipFile(wheel).namelist())
    metadata = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    assert {name.split("/")[0] for name in names} == {"seawall", "seawall_demo", metadata}
    assert {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")} <= names
    assert {
        "seawall/py.typed",
        "seawall/audit/libraries.toml",
        f"{metadata}/licenses/LICENSE",
    } <= names


def modules_after(statement: str) -> set[str]:
    """Return the modules that `statement` loads where only the standard library is."""
    script = (
        "import sys; before = set(sys.modules); sys.path.append(sys.argv[1]);"
        f"{statement}; print(*sorted(set(sys.modules) - before))"
    )
    fresh = run(sys.executable, "-I", "-S", "-c", script, SOURCE)
    assert fresh.returncode == 0, fresh.stdout
    loaded = set(fresh.stdout.split())
    # From 3.15 on the second says which parts of the standard library a distribution leaves out.
    ours = {"seawall", "_missing_stdlib_info"}
    assert {name.split(".")[0] for name in loaded} <= ours | sys.stdlib_module_names
    return loaded


@pytest.mark.parametrize(
    "package", ["seawall", "seawall.dashboard", "seawall.durable", "seawall.events"]
)
def test_import_is_light_and_stays_within_the_standard_library(package: str):
    """Importing a package of lazy names loads none of them, and no heavy module."""
    loaded = modules_after(f"import {package}")
    assert {name for name in loaded if name.startswith("seawall")} <= {
        "seawall",
        "seawall._lazy",
        package,
    }
    assert not loaded & {"asyncio", "dataclasses", "inspect", "json", "logging", "random"}


def test_what_is_kept_in_a_database_needs_no_driver_and_no_web_framework():
    """All names of `seawall.durable` are there without any; the edge is loaded by who uses it."""
    modules_after("import seawall.durable as d; [getattr(d, name) for name in d.__all__]")
    used = "Database, Idempotency, Outbox, Dispatcher, Inbox, FifoReceiver, Jobs, DeferredCalls"
    loaded = modules_after(f"from seawall.durable import {used}")
    assert not any(name.startswith("seawall.web") for name in loaded)


def test_no_module_is_long():
    """One concept is one module; beyond 700 lines it is more than one concept."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for path in SOURCE.rglob("*.py")
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length > 700} == {}


def private_imports(path: Path) -> set[str]:
    """Return the underscore modules of other packages that a file imports."""
    own = path.relative_to(SOURCE / "seawall").parts[0]
    text = path.read_text("utf-8")
    named: set[str] = set()
    for node in ast.walk(ast.parse(text)) if IMPORT_OF_PRIVATE.search(text) else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            named |= {one.name for one in node.names}
    found = set()
    for name in named:
        package, *parts = name.removeprefix("seawall.").split(".")
        is_ours = name.startswith("seawall.") and package != own
        private = [place for place, part in enumerate(parts) if re.match("_[a-z]", part)]
        if is_ours and private:
            found.add(".".join(["seawall", package, *parts[: private[0] + 1]]))
    return found


def test_no_package_imports_an_underscore_module_of_another():
    """What others use is public: an underscore module belongs to its own package."""
    crossing = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*.py")
        if (names := private_imports(path))
    }
    assert crossing == {}


def test_a_crossing_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The rule is not empty: each form of an import counts."""
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    file = tmp_path / "seawall" / "web" / "edge.py"
    file.parent.mkdir(parents=True)
    for line in (
        "import seawall.jobs._codec",
        "from seawall.jobs._codec import read",
        "from seawall.jobs import _codec",
        "from seawall.jobs import LocalQueue\ndef f():\n    from seawall.jobs import _codec",
    ):
        file.write_text(line, "utf-8")
        assert private_imports(file) == {"seawall.jobs._codec"}
    file.write_text("from seawall import _checks\nfrom seawall.web._own import x", "utf-8")
    assert private_imports(file) == set()


# --- What it pins ---


@pytest.mark.parametrize("asked", REQUIREMENTS, ids=lambda path: path.stem)
def test_requirements_are_pinned_with_hashes(asked: Path):
    """Each requirement asked for is pinned to one version and the hashes of its files."""
    text = asked.with_suffix(".txt").read_text("utf-8").replace("\\\n", " ")
    pinned = set()
    for line in text.splitlines():
        match = PIN.fullmatch(line)
        assert match, f"not pinned with hashes: {line}"
        pinned.add(match[1])
    lines = (re.split("[#;<]", line)[0].strip() for line in asked.read_text("utf-8").splitlines())
    assert {line for line in lines if line and not line.startswith("-")} <= pinned


@pytest.mark.parametrize("asked", REQUIREMENTS, ids=lambda path: path.stem)
def test_requirements_name_no_place(asked: Path):
    """Where packages come from is each machine's own setting."""
    for path in (asked, asked.with_suffix(".txt")):
        assert not re.search(r"://|index-url|find-links|trusted-host|@ ", path.read_text("utf-8"))


# --- What it must not say ---


@pytest.mark.parametrize("pattern", [HOSTS, MACHINE_PATHS], ids=["hosts", "paths"])
def test_no_file_names_a_place_outside_the_project(pattern: re.Pattern[str]):
    """No file of the project names a package registry's host or a path of some machine."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    assert listed.returncode == 0, listed.stdout
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert Path(__file__).resolve() in files
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.is_file()
        for match in pattern.finditer(path.read_text("utf-8", errors="ignore").lower())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (HOSTS, "https://py_pi.org/simple"),
        (HOSTS, "files.python_hosted.org"),
        (MACHINE_PATHS, "cd /_work/main"),
        (MACHINE_PATHS, 'Path("/_root/.cache")'),
    ],
)
def test_patterns_find_what_they_are_for(pattern: re.Pattern[str], text: str):
    """The search above would find such a name (written here with a gap, to pass that search)."""
    assert not pattern.search(text)
    assert pattern.search(text.replace("_", ""))


# --- Its command line, and its tests' own rules ---


def test_dev_is_valid_shell_and_helps():
    """`./dev` parses as POSIX sh, and its help lists every command that it knows."""
    assert run("sh", "-n", "dev").returncode == 0
    helped = run("sh", "dev", "help")
    assert helped.returncode == 0
    script = (ROOT / "dev").read_text("utf-8")
    commands = re.findall(r"^([a-z]+)(?: \|.*)?\) ", script, re.MULTILINE)
    assert {"test", "lint", "format", "docs", "bench", "matrix", "help"} <= set(commands)
    assert set(re.findall(r"^  ([a-z]+)\b", helped.stdout, re.MULTILINE)) == set(commands)


def test_supported_pythons_are_the_same_everywhere():
    """The package's metadata, README, changelog and `./dev matrix` name the same versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    named = [f"3.{line.removeprefix(prefix)}" for line in project["classifiers"] if prefix in line]
    assert named == [f"3.{minor}" for minor in range(11, 11 + len(named))]
    assert project["requires-python"] == f">={named[0]}"
    assert f'VERSIONS="{" ".join(named)}"' in (ROOT / "dev").read_text("utf-8")
    for page in ("README.md", "CHANGELOG.md"):
        assert f"Python {named[0]} to {named[-1]}" in (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["dance"], 2, "there is no command 'dance'"),
        (["test", "--python"], 1, "--python needs a version"),
        (["test", "--python", "three"], 1, "such as --python 3.13"),
    ],
)
def test_dev_says_what_is_wrong(arguments: list[str], status: int, message: str):
    """A mistake on the command line fails with what to write instead."""
    told = run("sh", "dev", *arguments)
    assert told.returncode == status
    assert message in told.stdout


@pytest.fixture
def no_browser(tmp_path: Path) -> Path:
    """Return a folder of tools to be the whole PATH: no browser, no package manager, not root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("cat", "dirname", "grep", "sh", "uname"):
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    return folder


def script(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n", "utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_dev_finds_a_browser(no_browser: Path, name: str):
    """`./dev browser` has nothing to do where a browser is there, under any of its names."""
    script(no_browser / name)
    found = run("sh", "dev", "browser", PATH=str(no_browser))
    assert (found.returncode, found.stdout) == (0, f"{no_browser / name}\n")


def test_dev_says_how_to_get_a_browser(no_browser: Path):
    """Without a browser, and where it may not install one, `./dev browser` says who can."""
    told = run("sh", "dev", "browser", PATH=str(no_browser))
    assert told.returncode == 1
    assert "install chromium by this system's package manager" in told.stdout


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)], ids=["at home", "ci"])
def test_a_missing_browser_is_told_loudly(no_browser: Path, tmp_path: Path, ci: str, status: int):
    """Without a browser its tests are left out and the run says so, in CI it fails."""
    left_out = tmp_path / "left-out"
    environment = {"PATH": str(no_browser), "CI": ci, "SEAWALL_LEFT_OUT": str(left_out)}
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider"]
    ran = run(*command, "tests/browser", "-k", "test_loads_without_a_complaint", **environment)
    assert ran.returncode == status, ran.stdout
    told = "no browser: run ./dev browser, which finds or installs chromium"
    assert re.search(rf"== LEFT OUT ==+\n{told}: tests/browser/test_page.py \(1\)\n", ran.stdout)
    assert left_out.read_text("utf-8") == f"{told}: tests/browser/test_page.py (1)\n"


def test_ci_leaves_nothing_out():
    """What must pass before a change lands gets a browser, and allows no skip."""
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert "export CI=true" in lines
    assert "./dev browser || failed+=(browser)" in lines


def run_pytest(folder: Path, test: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a test under a copy of this project's conftest."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_one.py").write_text(test, "utf-8")
    options = ["-c", "/dev/null", "--rootdir", folder, "-s"]
    for plugin in ("cacheprovider", "faker", "langsmith_plugin", "valkey"):
        options += ["-p", f"no:{plugin}"]
    return run(sys.executable, "-B", "-m", "pytest", *options, folder, **environment)


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
@pytest.mark.parametrize("workers", [0] if QUICK else [0, 1])
def test_a_skip_fails_the_run_in_ci_only(tmp_path: Path, ci: str, status: int, workers: int):
    """A skipped test or file is a failure when CI=true, and every run says what and why."""
    (tmp_path / "test_all.py").write_text(
        "import pytest\npytest.importorskip('nowhere')\n", "utf-8"
    )
    test = "import pytest\ndef test(): pytest.skip('later')\ndef test_two(): pass\n"
    ran = run_pytest(tmp_path, test, CI=ci, PYTEST_ADDOPTS=f"-n{workers}")
    assert ran.returncode == status, ran.stdout
    assert ("skipped tests are failures" in ran.stdout) == bool(status)
    assert "later: test_one.py (1)" in ran.stdout
    assert "could not import 'nowhere': No module named 'nowhere': test_all.py (all)" in ran.stdout


def test_chance_follows_the_printed_seed(tmp_path: Path):
    """The same seed gives the same examples and numbers, another seed gives others."""
    test = (
        "from hypothesis import given, strategies as st\n"
        "@given(st.integers())\n"
        "def test_given(number): print('drawn', number)\n"
        "def test_rng(rng): print('drawn', rng.random())\n"
    )
    drawn = []
    for seed in ("1", "1", "2"):
        ran = run_pytest(tmp_path, test, SEAWALL_SEED=seed, CI="true")
        assert ran.returncode == 0, ran.stdout
        assert f"SEAWALL_SEED={seed}" in ran.stdout
        drawn.append(re.findall(r"drawn (\S+)", ran.stdout))
    assert len(drawn[0]) > 50
    assert drawn[0] == drawn[1] != drawn[2]


def may_be_silent(text: str) -> bool:
    """Return whether a file may have a test without a docstring; to parse all files takes long."""
    bodies = TEST.findall(text)
    return len(bodies) < len(re.findall(r"\bdef test_", text)) or not all(
        body.startswith(('"""', 'r"""')) for body in bodies
    )


def test_every_test_says_in_a_sentence_what_it_shows():
    """A test without a docstring is a test whose failure nobody understands."""
    silent = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if may_be_silent(path.read_text())
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert not silent


def test_checklist_is_as_long_as_it_says():
    """The checklist names the number of questions that its table has."""
    words = {12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen"}
    page = (ROOT / "docs" / "operate" / "checklist.md").read_text()
    word = words[sum(line.startswith("| **") for line in page.splitlines())]
    assert f"{word.capitalize()} questions" in page
