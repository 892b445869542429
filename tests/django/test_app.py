"""The Django app: its checks, the edge from its settings, and its management commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.test import override_settings

from seawall import Bulkhead
from seawall.web import Edge
from seawall.web.django import protect
from seawall.web.django.apps import check_settings
from seawall.web.wsgi import Edge as WsgiEdge
from seawall.web.wsgi import QueueAdmission

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = {"MIDDLEWARE": ["seawall.web.django.ErrorMiddleware"]}


@pytest.mark.parametrize(
    ("given", "code", "said", "hint"),
    [
        ([], "E001", "SEAWALL is [], not a dict.", "Write SEAWALL = "),
        ({"TIMEOT": 3.0}, "E002", "SEAWALL has no setting 'TIMEOT'.", 'Did you mean "TIMEOUT"?'),
        ({"COLOUR": 3.0}, "E002", "SEAWALL has no setting 'COLOUR'.", "Known are CLASSIFY, CONC"),
        ({"TIMEOUT": -1}, "E003", "SEAWALL: timeout=-1: ", ""),
        ({"LIMITS": ["600/min"]}, "E003", "SEAWALL: ", ""),
        ({"CONCURRENCY": 5}, "E003", "SEAWALL: concurrency=5: write ", ""),
        ({"QUEUE_ADMISSION": 5}, "E003", "SEAWALL: queue_admission=5: write ", ""),
        ({"LOOP_ADMISSION": 5}, "E003", "SEAWALL: loop_admission=5: write ", ""),
    ],
)
def test_wrong_settings_are_told_by_the_checks(given: Any, code: str, said: str, hint: str) -> None:
    """Each once, with what to write."""
    with override_settings(SEAWALL=given, **INSTALLED):
        (found,) = check_settings()
    assert found.id == f"seawall.{code}"
    assert found.msg.startswith(said)
    assert (found.hint or "").startswith(hint)


def test_right_settings_pass_the_checks() -> None:
    """Again and again: the check leaves no edge of that name behind."""
    with override_settings(SEAWALL={"NAME": "shop checks", "TIMEOUT": 3.0}, **INSTALLED):
        assert check_settings() == []
        edge = protect(get_asgi_application())
        assert check_settings() == []
        edge.close()


def test_a_missing_middleware_is_told() -> None:
    """Without it, errors are 500."""
    with override_settings(MIDDLEWARE=[]):
        (found,) = check_settings()
    assert found.id == "seawall.W001"


def test_the_edge_has_the_parts_in_the_settings() -> None:
    """Those of the other kind of server are left out."""
    settings = {
        "NAME": "shop parts",
        "CONCURRENCY": Bulkhead(7),
        "QUEUE_ADMISSION": QueueAdmission(),
        "STALL": 3.0,
    }
    with override_settings(SEAWALL=settings, ROOT_URLCONF=__name__, **INSTALLED):
        for application, kind in (
            (get_asgi_application(), Edge),
            (get_wsgi_application(), WsgiEdge),
        ):
            edge = protect(application)
            assert type(edge) is kind
            assert edge.guard.name == "shop parts"
            assert any(shown.get("limit") == 7 for shown in edge.snapshot()["policies"])
            edge.close()
    with pytest.raises(TypeError, match="application"):
        protect("shop.asgi:application")


def manage(database: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the project."""
    return subprocess.run(  # noqa: S603 - our own program
        command(*arguments),
        env=environment(database),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "django", *arguments]


def environment(database: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "DJANGO_SETTINGS_MODULE": "tests.django.shop.settings",
        "SHOP_DATABASE": str(database),
    }


@pytest.mark.alone
def test_the_commands_of_a_project(tmp_path: Path) -> None:
    """Check, migrate, and run its worker and dispatcher until SIGTERM."""
    database = tmp_path / "shop.db"
    checked = manage(database, "check", "--tag", "seawall", "--fail-level", "WARNING")
    assert (checked.returncode, checked.stdout) == (0, _IDENTIFIED)
    unknown = manage(database, "seawall_migrate", "--database", "other")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "other" in unknown.stderr.splitlines()[-1]
    assert manage(database, "seawall_migrate").stdout.startswith(
        "DjangoAlias('default'): applied 1"
    )
    assert manage(database, "seawall_migrate").stdout == "DjangoAlias('default'): up to date\n"
    placed = manage(
        database,
        "shell",
        "-c",
        "from tests.django.shop.orders import place; place(1); place(2, fail=True)",
    )
    assert placed.stderr.endswith("LookupError: no stock\n")
    targets = [f"tests.django.shop.orders:{name}" for name in ("worker", "dispatcher")]
    process = subprocess.Popen(  # noqa: S603 - our own program
        command("seawall_worker", *targets, "--drain", "5"),
        env=environment(database),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"event 1\n", "invoice 1\n"}
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
        assert (process.returncode, rest) == (0, "")
    finally:
        process.kill()
        process.communicate()


_IDENTIFIED = "System check identified no issues (0 silenced).\n"
urlpatterns: list[Any] = []
