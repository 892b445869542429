"""Chance is reproducible, names are free, and nothing is left out in continuous integration."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import settings

from seawall import guards

SEED = int(os.environ.get("SEAWALL_SEED", "20261115"))
PROFILE = os.environ.get("SEAWALL_PROFILE", "default")

# Examples come from the seed alone: neither from the test's source (derandomize) nor from earlier
# runs (database), so that the printed seed is all one needs to see a failure again.
_REPLAYABLE = settings(deadline=None, derandomize=False, database=None, print_blob=True)
settings.register_profile("default", _REPLAYABLE, max_examples=100)
settings.register_profile("slow", _REPLAYABLE, max_examples=2000)
settings.load_profile(PROFILE)


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


def pytest_collection_finish() -> None:
    """Keep what the tests import out of the collector: a pass over it stops a test for long."""
    gc.collect()
    gc.freeze()


def _forbidden_skips(config: pytest.Config) -> int:
    """Count the skipped tests where none is allowed: in continuous integration."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return 0
    return len(reporter.stats.get("skipped", []))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a test was skipped where none may be."""
    if _forbidden_skips(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say why such a run failed."""
    skips = _forbidden_skips(config)
    if skips:
        terminalreporter.section("skipped tests are failures when CI=true", red=True)
        terminalreporter.line(f"{skips} skipped: make them run, or remove them")


@pytest.fixture(autouse=True)
def _free_names() -> Iterator[None]:
    """Free the names of all guards at the end, also of those that a failed test keeps alive."""
    yield
    for guard in guards():
        guard.close()


@pytest.fixture
def seed() -> int:
    """Return the seed of this run, as printed in its header."""
    return SEED


@pytest.fixture
def rng(seed: int) -> Random:
    """Return a source of chance that gives each test the same numbers in each run."""
    return Random(seed)
