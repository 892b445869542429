"""Django in the process of the tests, whose databases the tests add."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def configured() -> Iterator[None]:
    """Configure Django, unless a page of the docs has done so in this process; undo it."""
    import django
    from django.conf import settings
    from django.utils.functional import empty

    if settings.configured:
        yield
        return
    settings.configure(DATABASES={}, INSTALLED_APPS=[], MIDDLEWARE=[], USE_TZ=True)
    django.setup()
    try:
        yield
    finally:
        settings._wrapped = empty


@contextmanager
def database_alias(alias: str, **settings: Any) -> Iterator[str]:
    """Add a database to Django's."""
    from django.db import connections

    known = connections.configure_settings({"default": {}, alias: settings})
    connections.settings[alias] = known[alias]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


def sqlite_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a file."""
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "django.db")}


def postgres_settings(url: str) -> dict[str, Any]:
    """Return the settings of a PostgreSQL server, for psycopg."""
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts["dbname"],
        "USER": parts["user"],
        "PASSWORD": parts.get("password", ""),
        "HOST": parts["host"],
        "PORT": parts["port"],
    }
