"""Sandboxes that still run while no engine holds their state directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from dataclasses import dataclass

from smokebox.engine.jail import kernfs
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.jail import boot_id, start_time
from smokebox.engine.record.rows import TABLES, SandboxRow, load
from smokebox.engine.record.schema import RECORD
from smokebox.errors import SmokeboxError


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A sandbox that runs without an engine: the start of its run, and its memory in bytes.

    `timeout` is the time after which it ends by itself, counted from when its engine left; None
    for never.
    """

    id: str
    since: float
    memory: int | None
    timeout: float | None


def find_orphans(home: str) -> list[Orphan]:
    """Return the sandboxes of a state directory that run without an engine, by id.

    Changes nothing. There are none while an engine holds the directory, or where there is none.

    Raises:
        OSError: The directory cannot be read.
        sqlite3.Error: The record cannot be read.
        Unsupported: The record is of a later version.
    """
    path = os.path.join(home, "record.db")
    if not os.path.exists(path) or _is_held(home):
        return []
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as record:
        RECORD.check_version(record, path)
        select = TABLES[SandboxRow].select + " WHERE status = 'active' AND jail IS NOT NULL"
        rows = [load(SandboxRow, row) for row in record.execute(f"{select} ORDER BY id")]
    # Written when the run started.
    return [
        Orphan(
            id=row.id,
            since=row.last_active_at,
            memory=_memory(row),
            timeout=row.settings.orphan_timeout,
        )
        for row in rows
        if _runs(row)
    ]


def _is_held(home: str) -> bool:
    """Return true if a process has locked the directory."""
    try:
        lock = os.open(os.path.join(home, "lock"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        # Also unlocks.
        os.close(lock)
    return False


def _runs(row: SandboxRow) -> bool:
    jail = row.jail
    return (
        jail is not None
        and jail.extra.get("boot") == boot_id()
        and start_time(jail.pid) == jail.started
    )


def _memory(row: SandboxRow) -> int | None:
    jail = row.jail
    assert jail is not None
    with contextlib.suppress(SmokeboxError, OSError):
        return detect().adopt(jail.key, jail.pid, jail.group).stats().memory
    return kernfs.resident(jail.pid)
