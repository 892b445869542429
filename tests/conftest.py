"""Chance is reproducible, names are free, and nothing is left out in continuous integration."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from seawall.testing import empty_registry

SEED = int(os.environ.get("SEAWALL_SEED", "20261115"))
PROFILE = os.environ.get("SEAWALL_PROFILE", "default")

# Examples come from the seed alone: neither from the test's source (derandomize) nor from earlier
# runs (database), so that the printed seed is all one needs to see a failure again.
_REPLAYABLE = settings(deadline=None, derandomize=False, database=None, print_blob=True)
settings.register_profile("quick", _REPLAYABLE, max_examples=20)
settings.register_profile("default", _REPLAYABLE, max_examples=100)
settings.register_profile("slow", _REPLAYABLE, max_examples=1000)
settings.load_profile(PROFILE)

_CI = os.environ.get("CI") == "true"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give Hypothesis the seed, unless the command line gave it one, before it looks."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = SEED
    # What a shell runs in the background ignores Ctrl-C, and so would all that is started here.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    """Print what it takes to run the same examples again."""
    return (
        f"chance: SEAWALL_SEED={SEED}, --hypothesis-seed={config.option.hypothesis_seed}, "
        f"SEAWALL_PROFILE={PROFILE} ({settings.get_profile(PROFILE).max_examples} examples)"
    )


@settings(max_examples=1, phases=[Phase.generate])
@given(st.none())
def _first_example(_: None) -> None:
    """Do nothing."""


def pytest_collection_finish() -> None:
    """Keep what the tests import out of the collector: a pass over it stops a test for long."""
    # At its first example Hypothesis asks the collector who refers to its source of chance. From
    # Python 3.14 on that is something frozen below, which the collector does not see any more.
    _first_example()
    gc.collect()
    gc.freeze()


def _skips(config: pytest.Config) -> list[pytest.TestReport | pytest.CollectReport]:
    """Return the reports of what was skipped: tests, and whole files."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None else reporter.stats.get("skipped", [])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if something was skipped in continuous integration."""
    passed = session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    if passed and _CI and _skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say loudly what was left out and why, here and in the file that ./dev shows at the end."""
    places: dict[str, Counter[str]] = {}
    for report in _skips(config):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        file, inside, _ = report.nodeid.partition("::")
        places.setdefault(reason.removeprefix("Skipped: "), Counter())[file] += bool(inside)
    lines = [
        f"{reason}: "
        + ", ".join(f"{file} ({count or 'all'})" for file, count in sorted(files.items()))
        for reason, files in places.items()
    ]
    if not lines:
        return
    terminalreporter.section("LEFT OUT", red=True, bold=True)
    for line in lines:
        terminalreporter.line(line, yellow=True, bold=True)
    if _CI:
        terminalreporter.line("skipped tests are failures when CI=true", red=True)
    if kept := os.environ.get("SEAWALL_LEFT_OUT"):
        with Path(kept).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


@pytest.fixture(autouse=True)
def _free_names() -> Iterator[None]:
    """Begin without guards, and close at the end those that the test has made."""
    with empty_registry():
        yield


@pytest.fixture
def seed() -> int:
    """Return the seed of this run, as printed in its header."""
    return SEED


@pytest.fixture
def rng(seed: int) -> Random:
    """Return a source of chance that gives each test the same numbers in each run."""
    return Random(seed)
