"""Django's databases: a real PostgreSQL and a file of SQLite, with our tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from seawall.durable import Database, DjangoAlias, migrate
from tests.django.settings_support import (
    configured,
    database_alias,
    postgres_settings,
    sqlite_settings,
)
from tests.durable.conftest import postgres

__all__ = ["postgres"]


@pytest.fixture(scope="module", autouse=True)
def django_settings() -> Iterator[None]:
    """Have Django configured."""
    with configured():
        yield


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Return a migrated database of Django's."""
    number = token_hex(4)
    if request.param == "sqlite":
        settings, schema = sqlite_settings(tmp_path), None
    else:
        settings = postgres_settings(request.getfixturevalue("postgres").url)
        schema = f"django {number}"
    with database_alias(f"alias {number}", **settings) as alias:
        made = Database(DjangoAlias(alias), name=f"django {number}", schema=schema)
        migrate(made)
        with made.transaction() as connection, connection.cursor() as cursor:
            cursor.execute(f'CREATE TABLE "orders {number}" (id integer)')
        yield made
        made.close()
