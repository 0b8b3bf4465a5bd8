"""The file of API keys in a state directory, which several processes read and change.

A key is stored as a hash. The server, apps and `smokebox keys` have one file for each user.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import msgspec

from smokebox.errors import Conflict, InvalidOption, NotFound
from smokebox.foundation.storage import DatabaseFormat
from smokebox.options import nearest_hint
from smokebox.tenancy.profile import DEFAULT_PROFILE
from smokebox.tenancy.scopes import SCOPES, parse_scopes
from smokebox.wire.responses import KeyInfo

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from smokebox.wire.requests import CreateKey

FILE = "keys.db"

# Ids of sandboxes that begin with "xn--" are refused: browsers show them in another script.
_PREFIX = re.compile(r"(?!xn--)([a-z0-9][a-z0-9-]*)?")
# Leaves room for a hyphen and a random id in the 63 characters of a sandbox id.
_LONGEST_PREFIX = 46
_LONGEST_NAME = 128

KEY_STORE = DatabaseFormat(
    label="key store",
    # "SMKK"
    application_id=0x534D4B4B,
    migrations=(
        (
            """
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
            """,
        ),
        (
            # NULL: the default profile, and all scopes.
            "ALTER TABLE keys ADD COLUMN profile TEXT",
            "ALTER TABLE keys ADD COLUMN scopes TEXT",
        ),
    ),
    unmarked_table="keys",
    synchronous="FULL",
    busy_seconds=5.0,
    repair_hint=lambda _: "Restore it from a backup, or move it away and create keys again.",
    make_directory=True,
)


def check_new_key(options: CreateKey) -> CreateKey:
    """Return the options of a key in normal form. Raises `InvalidOption`."""
    if not 1 <= len(options.name) <= _LONGEST_NAME or not options.name.isprintable():
        raise InvalidOption(
            f"the name of a key has 1 to {_LONGEST_NAME} printable characters.",
            hint="Name the person or program that uses it.",
            option="name",
            value=options.name,
        )
    long = len(options.prefix.removesuffix("-")) > _LONGEST_PREFIX
    if long or not _PREFIX.fullmatch(options.prefix):
        raise InvalidOption(
            f"{options.prefix!r} cannot be a prefix of sandbox ids.",
            hint=f"Use at most {_LONGEST_PREFIX} of a-z, 0-9 and hyphens, without one in front.",
            option="prefix",
            value=options.prefix,
        )
    if options.admin and options.prefix:
        raise InvalidOption(
            "an administrator's key has no prefix: it is for all sandboxes.",
            hint="Leave out one of the two.",
            option="prefix",
            value=options.prefix,
        )
    if options.admin and (options.profile is not None or options.scopes is not None):
        raise InvalidOption(
            "an administrator's key has no profile and no scopes: it may do everything.",
            hint="Leave out --admin, or the other option.",
            option="profile" if options.profile is not None else "scopes",
            value=options.profile or options.scopes,
        )
    parse_scopes(options.scopes)
    prefix, profile = options.prefix, options.profile
    if prefix and not prefix.endswith("-"):
        # Otherwise a key for "team" would be one for "teammate" too.
        prefix += "-"
    if not options.admin:
        profile = profile or DEFAULT_PROFILE
    return msgspec.structs.replace(options, prefix=prefix, profile=profile)


def check_profile(name: str | None, profiles: Iterable[str]) -> None:
    """Raise `InvalidOption` for the name of a profile that is not configured."""
    if name is not None and name not in profiles:
        raise InvalidOption(
            f"this server has no profile {name!r:.80}.",
            hint=f"{nearest_hint(name, profiles)} The operator adds [profiles.NAME] to the "
            "server's server.toml and restarts the server.",
            option="profile",
            value=name,
        )


def select_keys(connection: sqlite3.Connection) -> list[tuple[KeyInfo, bytes]]:
    """Return all keys with their hashes, in order of creation."""
    rows = connection.execute(
        "SELECT id, name, prefix, admin, created_at, expires_at, last_used_at, profile, scopes, "
        "hash FROM keys ORDER BY rowid"
    )
    return [
        (
            KeyInfo(
                id=id,
                name=name,
                prefix=prefix,
                admin=bool(admin),
                profile=None if admin else profile or DEFAULT_PROFILE,
                scopes=list(SCOPES) if scopes is None else scopes.split(),
                created_at=created_at,
                expires_at=expires_at,
                last_used_at=last_used_at,
            ),
            hash,
        )
        for (
            id,
            name,
            prefix,
            admin,
            created_at,
            expires_at,
            last_used_at,
            profile,
            scopes,
            hash,
        ) in rows
    ]


def insert_key(
    info: KeyInfo, hash: bytes, *, overlap: bool, connection: sqlite3.Connection
) -> None:
    """Store a key. Raises `Conflict` if its prefix overlaps with that of another tenant's."""
    if not overlap:
        _check_overlap(info, [known for known, _ in select_keys(connection)])
    connection.execute(
        "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            info.id,
            info.name,
            hash,
            info.prefix,
            info.admin,
            info.created_at,
            info.expires_at,
            info.last_used_at,
            info.profile,
            " ".join(info.scopes),
        ),
    )


def delete_key(id: str, connection: sqlite3.Connection) -> None:
    """Delete a key. Raises `NotFound`."""
    if not connection.execute("DELETE FROM keys WHERE id = ?", (id,)).rowcount:
        raise no_such_key(id)


def store_use(keys: list[KeyInfo], connection: sqlite3.Connection) -> None:
    """Store when keys were last used."""
    connection.executemany(
        "UPDATE keys SET last_used_at = ? WHERE id = ?",
        [(key.last_used_at, key.id) for key in keys],
    )


def no_such_key(id: str) -> NotFound:
    """Return the error for an id that no key has."""
    return NotFound(
        f"there is no key {id!r}.",
        hint="List the keys with `smokebox keys ls`.",
        kind="key",
        name=id,
    )


def _check_overlap(new: KeyInfo, known: Iterable[KeyInfo]) -> None:
    """Raise `Conflict` if a key shares sandboxes with one of another tenant.

    Keys with the same prefix and profile are of one tenant. A key without a prefix is for all.
    """
    now = time.time()
    for key in known:
        if not key.prefix or not new.prefix or (key.expires_at or now + 1) <= now:
            continue
        same = (key.prefix, key.profile) == (new.prefix, new.profile)
        longer, shorter = sorted((key.prefix, new.prefix), key=len, reverse=True)
        if not same and longer.startswith(shorter):
            raise Conflict(
                f"the prefix {new.prefix!r} overlaps with {key.prefix!r}, of the key "
                f"{key.name!r} ({key.id}), with the profile {key.profile!r}.",
                hint="Use another prefix, or pass --overlap if both keys may use the same "
                "sandboxes.",
                kind="key",
                name=new.prefix,
            )
