"""Effects that happen once: what is kept in a database (PostgreSQL, or SQLite on one machine)."""

from seawall.durable.database import Database
from seawall.durable.migrations import amigrate, migrate
from seawall.durable.sqlite import Sqlite

__all__ = ["Database", "Sqlite", "amigrate", "migrate"]
