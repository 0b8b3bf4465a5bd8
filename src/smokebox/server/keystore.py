"""The file that API keys are in."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from smokebox.errors import PathError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    hash BLOB NOT NULL,
    prefix TEXT NOT NULL,
    admin INTEGER NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    last_used_at REAL
)
"""


@dataclass(slots=True, kw_only=True)
class StoredKey:
    """A key without its secret. Times are seconds since the epoch."""

    id: str
    name: str
    hash: bytes
    prefix: str
    admin: bool
    created_at: float
    expires_at: float | None
    last_used_at: float | None


class Keystore:
    """Keys in SQLite. A revoked key is a row that is gone."""

    def __init__(self, path: str) -> None:
        # The state directory may be looked into by others; hashes are nobody's business.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise PathError(
                path,
                f"the keys in {path} cannot be read: {error}",
                hint="Put the file of a backup there, or move it away and make new keys.",
            ) from error

    def load(self) -> list[StoredKey]:
        """Every key, in the order in which they were made."""
        rows = self._connection.execute(
            "SELECT id, name, hash, prefix, admin, created_at, expires_at, last_used_at "
            "FROM keys ORDER BY rowid"
        )
        return [
            StoredKey(
                id=row[0],
                name=row[1],
                hash=row[2],
                prefix=row[3],
                admin=bool(row[4]),
                created_at=row[5],
                expires_at=row[6],
                last_used_at=row[7],
            )
            for row in rows
        ]

    def add(self, key: StoredKey) -> None:
        """Keep a key."""
        self._connection.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(key))

    def remove(self, id: str) -> None:
        """Forget a key."""
        self._connection.execute("DELETE FROM keys WHERE id = ?", (id,))

    def touch(self, id: str, used: float) -> None:
        """Note when a key was last used."""
        self.touch_all([(id, used)])

    def touch_all(self, used: Iterable[tuple[str, float]]) -> None:
        """Note when keys were last used."""
        with self._connection:
            self._connection.executemany(
                "UPDATE keys SET last_used_at = ? WHERE id = ?",
                [(at, id) for id, at in used],
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
