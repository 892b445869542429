"""The audit of source text and of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from seawall.audit.checks import bounds, lifetimes, retries, timeouts
from seawall.audit.findings import RULES, Finding, in_order
from seawall.audit.source import SourceFile, Unreadable

EXCLUDED: Final = (
    *("build", "dist", "node_modules", "site-packages", "venv", "env", "*.egg-info"),
    *("docs", "examples", "benchmarks", "contrib", "setup.py", "hatch_build.py"),
    *("versioneer.py", "_version.py", "*_pb2.py", "*_pb2_grpc.py"),
)
"""Names of files and folders that are no source of the service; hidden ones are left out too."""

TESTS: Final = (
    *("tests", "test", "testing", "*_tests", "tests.py", "test_*.py", "*_test.py"),
    *("conftest.py", "pytest", "pytest_*.py"),
)


CHECKS: Final[tuple[Callable[[SourceFile], Iterator[Finding]], ...]] = (
    timeouts.check,
    retries.check,
    bounds.check,
    timeouts.check_blocking,
    lifetimes.check,
)
"""The rules for source code, by family."""


def audit_source(text: str, path: str = "<string>") -> list[Finding]:
    """Return the findings in `text`, in order, without those that it suppresses with a reason."""
    try:
        source = SourceFile(path, text)
    except Unreadable as error:
        write = "code that this version of Python can parse, or --exclude the file"
        return [Finding(path, error.line, 1, RULES["SW900"], str(error), write)]
    found = [finding for check in CHECKS for finding in check(source)]
    return sorted(set(_kept(source, found)), key=in_order)


def _kept(source: SourceFile, found: Iterable[Finding]) -> Iterator[Finding]:
    marks = source.suppressions()
    for finding in found:
        if not any(marks.get(line) for line in range(finding.line, finding.end_line + 1)):
            yield finding
    for line, reason in marks.items():
        if not reason:
            message = "'# seawall: ok' has no reason, and suppresses nothing"
            write = "# seawall: ok the caller's deadline cancels it"
            yield Finding(source.path, line, 1, RULES["SW901"], message, write)


def audit_files(
    paths: Iterable[str | Path], *, exclude: Collection[str] = (), tests: bool = False
) -> Iterator[tuple[str, list[Finding]]]:
    """Yield each Python file under `paths` with its findings, in the order of their names.

    A path that does not exist raises FileNotFoundError. `exclude` has patterns of names or of
    whole paths; `tests` includes tests.
    """
    patterns = (*EXCLUDED, *exclude, *(() if tests else TESTS))
    for path in paths:
        for file in sorted(_files(Path(path), patterns)):
            yield file, audit_source_file(file)


def audit_source_file(path: str) -> list[Finding]:
    """Return the findings in a file; one that cannot be read is a finding itself."""
    shown = path.removeprefix("./").replace(os.sep, "/")
    try:
        text = _decoded(Path(path).read_bytes())
    except (OSError, UnicodeError, SyntaxError, LookupError) as error:
        reason = f"it cannot be read ({error})"
        return [Finding(shown, 1, 1, RULES["SW900"], reason, "a file of UTF-8 text")]
    return audit_source(text, shown)


def _decoded(content: bytes) -> str:
    """Decode a file as Python does: by its byte order mark or its coding comment."""
    import io
    import tokenize

    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def _files(path: Path, patterns: Collection[str]) -> Iterator[str]:
    """Yield the Python files at or below `path`; what is named itself is never excluded."""
    if path.is_file():
        yield str(path)
        return
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}")
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(one for one in folders if not _is_excluded(folder, one, patterns))
        for name in names:
            if name.endswith(".py") and not _is_excluded(folder, name, patterns):
                yield os.path.join(folder, name)  # noqa: PTH118 - os.walk gives texts


def _is_excluded(folder: str, name: str, patterns: Collection[str]) -> bool:
    if name.startswith(".") or name == "__pycache__":
        return True
    whole = f"{folder}/{name}".replace(os.sep, "/").removeprefix("./")
    return any(fnmatchcase(name, one) or fnmatchcase(whole, one.rstrip("/")) for one in patterns)
