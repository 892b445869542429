"""The user's database: connections, transactions, statements, migrations and cleanup."""

from seawall.durable.database.database import Database
from seawall.durable.database.migrations import amigrate, migrate
from seawall.durable.database.sqlite import Sqlite

__all__ = ["Database", "Sqlite", "amigrate", "migrate"]
