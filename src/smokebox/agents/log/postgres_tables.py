"""Tables and statements of the Postgres store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smokebox.agents.log.records import too_new

if TYPE_CHECKING:
    from collections.abc import Sequence

# Advisory lock that is held during a migration.
_MIGRATION_LOCK = 0x534D4B41

# One tuple of statements for each version. Released ones never change.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE smokebox_sessions (
            number serial PRIMARY KEY,
            agent text NOT NULL, id text NOT NULL, session text NOT NULL,
            parent text, forked_from text,
            head bigint NOT NULL DEFAULT 0, unfinished integer NOT NULL DEFAULT 0,
            created_at double precision NOT NULL, updated_at double precision NOT NULL,
            epoch bigint NOT NULL DEFAULT 0, owner text NOT NULL DEFAULT '',
            UNIQUE (agent, id, session)
        )
        """,
        "CREATE INDEX ON smokebox_sessions (updated_at)",
        """
        CREATE TABLE smokebox_records (
            session integer NOT NULL REFERENCES smokebox_sessions ON DELETE CASCADE,
            place bigint NOT NULL, at double precision NOT NULL, version integer NOT NULL,
            data text NOT NULL,
            PRIMARY KEY (session, place)
        )
        """,
        """
        CREATE TABLE smokebox_blobs (
            name text PRIMARY KEY, at double precision NOT NULL, data bytea NOT NULL
        )
        """,
        """
        CREATE TABLE smokebox_uses (
            session integer NOT NULL REFERENCES smokebox_sessions ON DELETE CASCADE,
            blob text NOT NULL,
            PRIMARY KEY (session, blob)
        )
        """,
        "CREATE INDEX ON smokebox_uses (blob)",
    ),
)

CHANNEL = "smokebox_records"

_KEY = "agent = $1 AND id = $2 AND session = $3"
_LOCK_SPACE = "'smokebox_sessions'::regclass::oid::integer"

CREATE = (
    "INSERT INTO smokebox_sessions (agent, id, session, created_at, updated_at) "
    "VALUES ($1, $2, $3, $4, $4) ON CONFLICT DO NOTHING"
)
OWNER = f"SELECT number, owner FROM smokebox_sessions WHERE {_KEY}"
LOCK = f"SELECT pg_try_advisory_lock({_LOCK_SPACE}, $1)"
UNLOCK = f"SELECT pg_advisory_unlock({_LOCK_SPACE}, $1)"
TAKE_OVER = (
    "UPDATE smokebox_sessions SET epoch = epoch + 1, owner = $2 WHERE number = $1 "
    "RETURNING epoch, head"
)
DELETE_EMPTY = "DELETE FROM smokebox_sessions WHERE number = $1 AND epoch = $2 AND head = 0"

# One round trip. Does nothing unless epoch and head are the writer's.
APPEND = """
    WITH owned AS (
        UPDATE smokebox_sessions
        SET head = head + cardinality($4::text[]), updated_at = $5,
            unfinished = unfinished + $6,
            parent = coalesce($7, parent), forked_from = coalesce($8, forked_from)
        WHERE number = $1 AND epoch = $2 AND head = $3
        RETURNING number, head
    ), added AS (
        INSERT INTO smokebox_records (session, place, at, version, data)
        SELECT number, $3 + place, $5, $9, data
        FROM owned, unnest($4::text[]) WITH ORDINALITY AS appended (data, place)
    ), used AS (
        INSERT INTO smokebox_uses (session, blob)
        SELECT number, blob FROM owned, unnest($10::text[]) AS named (blob)
        ON CONFLICT DO NOTHING
    ), dropped AS (
        DELETE FROM smokebox_uses USING owned
        WHERE session = number AND blob = ANY($13::text[])
    )
    SELECT head, pg_notify($11, $12) FROM owned
"""
HEAD = "SELECT head FROM smokebox_sessions WHERE number = $1 AND epoch = $2"

FIND = f"SELECT number, head FROM smokebox_sessions WHERE {_KEY}"
READ = (
    "SELECT place, at, version, data FROM smokebox_records "
    f"WHERE session = (SELECT number FROM smokebox_sessions WHERE {_KEY}) AND place > $4 "
    "ORDER BY place LIMIT $5"
)
LIST = (
    "SELECT agent, id, session, created_at, updated_at, head, unfinished, parent "
    "FROM smokebox_sessions "
    "WHERE head > 0 AND ($1::text IS NULL OR agent = $1) AND ($2::text IS NULL OR id = $2) "
    "AND starts_with(id, $3) ORDER BY updated_at DESC, number DESC LIMIT $4"
)

FAMILY = f"""
    WITH RECURSIVE family AS (
        SELECT number, session, agent, id FROM smokebox_sessions WHERE {_KEY}
        UNION
        SELECT child.number, child.session, child.agent, child.id
        FROM family JOIN smokebox_sessions AS child
            ON child.agent = family.agent AND child.id = family.id
            AND child.parent = family.session
    )
    SELECT number, session FROM family
"""
FORKS = (
    "SELECT session FROM smokebox_sessions WHERE agent = $1 AND id = $2 "
    "AND forked_from = ANY($3::text[]) AND NOT number = ANY($4::integer[])"
)
DELETE = "DELETE FROM smokebox_sessions WHERE number = ANY($1::integer[])"
NOTIFY = "SELECT pg_notify($1, token) FROM unnest($2::text[]) AS token"

PUT_BLOB = (
    "INSERT INTO smokebox_blobs (name, at, data) VALUES ($1, $2, $3) "
    "ON CONFLICT (name) DO UPDATE SET at = excluded.at"
)
GET_BLOB = "SELECT data FROM smokebox_blobs WHERE name = $1"
DELETE_UNUSED_BLOBS = (
    "DELETE FROM smokebox_blobs WHERE at < $1 "
    "AND NOT EXISTS (SELECT 1 FROM smokebox_uses WHERE blob = name)"
)


async def migrate(connection: Any, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
    """Migrate the tables to the latest version in one transaction. Raises `StoreTooNew`."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
        await connection.execute("CREATE TABLE IF NOT EXISTS smokebox_version (version integer)")
        version = await connection.fetchval("SELECT max(version) FROM smokebox_version") or 0
        if version > len(migrations):
            raise too_new("the store in Postgres", version, len(migrations))
        if version == len(migrations):
            return
        for statements in migrations[version:]:
            for statement in statements:
                await connection.execute(statement)
        await connection.execute("DELETE FROM smokebox_version")
        await connection.execute("INSERT INTO smokebox_version VALUES ($1)", len(migrations))
