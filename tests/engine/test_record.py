"""The durable record: round trips, atomic and durable writes, migrations and damage."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import stat
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest
import pytest_asyncio

from smokebox.engine.jail.spec import JailState
from smokebox.engine.mounts.request import MountRequest
from smokebox.engine.record.record import Record
from smokebox.engine.record.rows import (
    TABLES,
    BackupRow,
    ContextRow,
    MountRow,
    PortRow,
    ProcessRow,
    RestoreRow,
    Row,
    RunSettings,
    SandboxRow,
    SessionRow,
    delete,
    put,
    update,
)
from smokebox.engine.record.schema import MIGRATIONS, RECORD
from smokebox.errors import Conflict, InvalidOption, NotFound, PathError, SandboxGone, Unsupported
from smokebox.limits import Limits
from smokebox.sandbox.access import Access
from smokebox.types import ProcessStatus, SandboxStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "record.db")


@pytest_asyncio.fixture
async def record(path: str) -> AsyncIterator[Record]:
    async with await Record.open(path) as opened:
        yield opened


def sandbox(
    id: str = "box", *, status: SandboxStatus = "idle", labels: dict[str, str] | None = None
) -> SandboxRow:
    return SandboxRow(
        id=id,
        key=f"key-of-{id}",
        image="host",
        digest="sha256:0",
        tier="namespaces",
        created_at=1.5,
        last_active_at=2.5,
        status=status,
        labels=labels or {},
    )


def process(process_id: str = "web", *, status: ProcessStatus = "running") -> ProcessRow:
    return ProcessRow(
        sandbox_id="box",
        process_id=process_id,
        generation=3,
        command="sleep 9",
        argv=("sleep", "9"),
        cwd="/workspace",
        user="root",
        started_at=1.0,
        status=status,
    )


SESSION = SessionRow(sandbox_id="box", name="main", cwd="/", user="root", created_at=1.0)
PORT = PortRow(sandbox_id="box", port=8080, token="t0ken", slug="sl0g")
CONTEXT = ContextRow(
    sandbox_id="box", context_id="c", generation=1, language="python", cwd="/", created_at=1.0
)
MOUNT = MountRow(
    sandbox_id="box",
    path="/data",
    request=MountRequest(
        path="/data",
        bucket="data",
        prefix="a/b",
        read_only=True,
        access=Access(endpoint="http://127.0.0.1:1", access_key="k", secret_key="s"),
    ),
    generation=7,
    pid=43,
    started=1 << 40,
)

FULL: list[Row] = [
    replace(
        sandbox(status="active", labels={"team": "red"}),
        generation=7,
        limits=Limits(cpu=0.25, pids=None),
        env={"A": "1", "ODD": "\udcff\n\u00e9"},
        settings=RunSettings(sleep_after=None, keep_alive=True, cwd="/src", user="1000"),
        jail=JailState(
            tier="namespaces",
            key="key-of-box",
            pid=42,
            started=1 << 40,
            first_uid=0x50000000,
            uids=65536,
            enforcement="cgroup-v2",
            extra={"cgroup": "/x"},
        ),
        stop_reason="oom",
        stop_cause="disk",
    ),
    replace(SESSION, env={"B": "2"}, state=b"\0\xffdeclare -- x=1"),
    replace(
        process(status="killed"),
        pid=7,
        exit_code=-9,
        ended_at=2.0,
        stdin=True,
        argv=("printf", "", "a b", "\udc80"),
        command="printf '' 'a b' \0 \u00e9",
    ),
    replace(PORT, name="site", generation=7, private=True),
    replace(CONTEXT, timeout=1.5, shared=True, exit_code=3, ended_at=2.0, reason="it fell asleep"),
    MOUNT,
    RestoreRow(sandbox_id="box", staging="/.smokebox-c", path="/workspace", state="placing"),
    BackupRow(
        id="b-1",
        sandbox_id="box",
        path="/workspace/é",
        name="all",
        status="ready",
        place="s3://bucket",
        created_at=1.5,
        expires_at=2.5,
        size=1 << 40,
        bytes=1 << 41,
        files=3,
        disk=1 << 42,
        checksum="00",
    ),
]
KEYS: dict[type[Row], tuple[str | int, ...]] = {
    SandboxRow: ("box",),
    SessionRow: ("box", "main"),
    ProcessRow: ("box", "web"),
    PortRow: ("box", 8080),
    MountRow: ("box", "/data"),
}


async def test_full_rows_round_trip_through_the_file(path: str) -> None:
    async with await Record.open(path) as record:
        assert await record.write(*map(put, FULL)) == 8
    async with await Record.open(path) as record:
        assert await record.get(SandboxRow, "box") == FULL[0]
        assert await record.get(SessionRow, "box", "main") == FULL[1]
        assert await record.get(ProcessRow, "box", "web") == FULL[2]
        assert await record.get(PortRow, "box", 8080) == FULL[3]
        assert await record.get(ContextRow, "box", "c") == FULL[4]
        assert await record.get(MountRow, "box", "/data") == FULL[5]
        assert await record.restores() == [FULL[6]]
        assert await record.get(BackupRow, "b-1") == FULL[7]
        assert await record.backups() == await record.backups(sandbox_id="box") == [FULL[7]]
        assert await record.backups(sandbox_id="other") == []


async def test_minimal_rows_round_trip(record: Record) -> None:
    minimal: list[Row] = [sandbox(), SESSION, process(), PORT, CONTEXT]
    await record.write(*map(put, minimal))
    assert [await record.get(SandboxRow, "box")] == minimal[:1]
    assert await record.rows(SessionRow, "box") == minimal[1:2]
    assert await record.rows(ProcessRow, "box") == minimal[2:3]
    assert await record.rows(PortRow, "box") == minimal[3:4]
    assert await record.rows(ContextRow, "box") == minimal[4:]


async def test_missing_rows_are_none_or_empty(record: Record) -> None:
    assert await record.get(SandboxRow, "box") is None
    assert await record.rows(SessionRow, "box") == []
    assert await record.sandboxes() == []
    assert await record.all_active() == []


async def test_put_replaces_a_row_and_keeps_dependent_rows(record: Record) -> None:
    await record.write(*map(put, FULL))
    await record.write(put(sandbox(status="destroying")))
    assert await record.sandboxes() == [sandbox(status="destroying")]
    assert await record.rows(SessionRow, "box") == [FULL[1]]


async def test_update_never_inserts(record: Record) -> None:
    await record.write(put(sandbox()))
    assert await record.write(update(sandbox(status="active"))) == 1
    assert await record.sandboxes() == [sandbox(status="active")]
    await record.write(delete(SandboxRow, "box"))
    assert await record.write(update(sandbox())) == 0
    assert await record.sandboxes() == []


async def test_deleting_a_sandbox_deletes_only_its_rows(record: Record, path: str) -> None:
    other = replace(SESSION, sandbox_id="other")
    await record.write(*map(put, FULL), put(sandbox("other")), put(other))
    assert await record.write(delete(SandboxRow, "box")) == 1
    assert await record.write(delete(SandboxRow, "box")) == 0
    left = {table.name: count(path, table.name) for table in TABLES.values()}
    # Backups outlive their sandbox.
    assert {name: rows for name, rows in left.items() if rows} == {
        "sandboxes": 1,
        "sessions": 1,
        "backups": 1,
    }


@pytest.mark.parametrize("kind", [SessionRow, ProcessRow, PortRow, MountRow])
async def test_delete_by_key_and_by_sandbox_id(record: Record, path: str, kind: type[Row]) -> None:
    await record.write(*map(put, FULL))
    assert await record.write(delete(kind, "box", "unknown")) == 0
    assert await record.write(delete(kind, *KEYS[kind])) == 1
    await record.write(*map(put, FULL))
    assert await record.write(delete(kind, "box")) == 1
    assert count(path, TABLES[kind].name) == 0


def test_delete_without_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="key"):
        delete(SandboxRow)


async def test_rows_are_in_insertion_order(record: Record) -> None:
    added = [process(name) for name in ("z", "a", "m")]
    await record.write(put(sandbox()), *map(put, added))
    await record.write(put(replace(added[0], status="exited")))
    assert [row.process_id for row in await record.rows(ProcessRow, "box")] == ["z", "a", "m"]


async def test_sandboxes_are_listed_by_status_label_and_prefix(record: Record) -> None:
    rows = [
        sandbox("a-1", status="active", labels={"team": "red", "tier": "1"}),
        sandbox("a-2", labels={"team": "blue"}),
        sandbox("ab", status="destroying", labels={"team": "red"}),
        sandbox("b", status="active"),
    ]
    await record.write(*map(put, reversed(rows)))

    async def ids(**filters: object) -> list[str]:
        return [row.id for row in await record.sandboxes(**filters)]  # type: ignore[arg-type]

    assert await ids() == ["a-1", "a-2", "ab", "b"]
    assert await ids(status="active") == ["a-1", "b"]
    assert await ids(labels={"team": "red"}) == ["a-1", "ab"]
    assert await ids(labels={"team": "red", "tier": "1"}) == ["a-1"]
    assert await ids(labels={"team": "re"}) == []
    assert await ids(prefix="a-") == ["a-1", "a-2"]
    assert await ids(prefix="a", status="active", labels={"team": "red"}) == ["a-1"]
    assert sorted(row.id for row in await record.all_active()) == ["a-1", "ab", "b"]


@pytest.mark.parametrize("text", ["' OR 1=1 --", "%", "*", "_", '"', "$.team", "\0"])
async def test_filters_are_not_interpreted_as_sql_or_patterns(record: Record, text: str) -> None:
    await record.write(put(sandbox(labels={"team": "red"})))
    assert await record.sandboxes(prefix=text) == []
    assert await record.sandboxes(labels={text: text}) == []
    assert await record.sandboxes(labels={"team": text}) == []
    assert await record.get(SandboxRow, text) is None


async def test_write_is_atomic(record: Record) -> None:
    orphan = replace(SESSION, sandbox_id="unknown")
    with pytest.raises(NotFound) as caught:
        await record.write(put(sandbox()), put(orphan))
    assert caught.value.fields["kind"] == "sandbox"
    assert await record.sandboxes() == []


async def test_keys_are_unique(record: Record) -> None:
    await record.write(put(sandbox()))
    with pytest.raises(Conflict, match=r"sandboxes\.key"):
        await record.write(put(replace(sandbox("other"), key="key-of-box")))


async def test_failed_write_does_not_fail_others_of_the_same_commit(record: Record) -> None:
    orphan = put(replace(SESSION, sandbox_id="unknown"))
    writes = [record.write(orphan if n == 50 else put(sandbox(f"box-{n}"))) for n in range(100)]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [n for n, result in enumerate(results) if result != 1] == [50]
    assert isinstance(results[50], NotFound)
    assert len(await record.sandboxes()) == 99


async def test_values_that_sqlite_cannot_hold_are_refused(record: Record) -> None:
    with pytest.raises(InvalidOption, match="stop_reason"):
        put(replace(sandbox(), stop_reason="\ud800"))
    with pytest.raises(OverflowError):
        await record.write(put(replace(sandbox(), generation=1 << 64)))
    assert await record.write(put(sandbox())) == 1


async def test_concurrent_writes_share_commits(record: Record, path: str) -> None:
    await record.write(put(sandbox()))
    before = commits(path)
    rows = [process(f"p{n}") for n in range(1000)]
    assert await asyncio.gather(*(record.write(put(row)) for row in rows)) == [1] * 1000
    assert await record.rows(ProcessRow, "box") == rows
    assert commits(path) - before < 100


async def test_writes_take_effect_in_order(record: Record) -> None:
    statuses = [random.choice(get_args(SandboxStatus)) for _ in range(300)]
    await asyncio.gather(*(record.write(put(sandbox(status=status))) for status in statuses))
    assert await record.sandboxes() == [sandbox(status=statuses[-1])]


async def test_cancelled_write_does_not_affect_others(record: Record) -> None:
    tasks = [asyncio.ensure_future(record.write(put(sandbox(f"box-{n}")))) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ids = {row.id for row in await record.sandboxes()}
    assert ids >= {f"box-{n}" for n in range(1, 20, 2)}


async def test_close_commits_pending_writes_and_may_be_repeated(path: str) -> None:
    record = await Record.open(path)
    writes = [asyncio.ensure_future(record.write(put(sandbox(f"box-{n}")))) for n in range(50)]
    await asyncio.sleep(0)
    await record.aclose()
    await record.aclose()
    assert await asyncio.gather(*writes) == [1] * 50
    for call in (record.write(put(sandbox())), record.sandboxes()):
        with pytest.raises(SandboxGone, match="was closed"):
            await call
    async with await Record.open(path) as again:
        assert len(await again.sandboxes()) == 50


WRITER = """
import asyncio, sys
from smokebox.engine.record.record import Record
from smokebox.engine.record.rows import SandboxRow, put

async def write(record, worker):
    for n in range(100_000):
        id = f"box-{worker}-{n}"
        row = SandboxRow(id=id, key=id, image="host", digest="", tier="namespaces",
                         created_at=0, last_active_at=0, env={"PAD": "x" * 500})
        await record.write(put(row))
        print(id, flush=True)

async def main():
    record = await Record.open(sys.argv[1])
    await asyncio.gather(*(write(record, worker) for worker in range(8)))

asyncio.run(main())
"""


def run_killed_writer(path: str) -> set[str]:
    """Kill a writing process at a random moment, and return the writes that it acknowledged."""
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(random.uniform(0, 0.15))
        child.kill()
        printed = first + child.stdout.read()
    # The last line may be incomplete.
    return set(printed.decode().split("\n")[:-1])


@pytest.mark.parametrize("round", range(10))
async def test_acknowledged_writes_survive_kill_9(path: str, round: int) -> None:
    acknowledged = run_killed_writer(path)
    async with await Record.open(path) as record:
        found = {row.id for row in await record.sandboxes()}
    assert acknowledged
    assert acknowledged <= found
    # Each of the eight workers had at most one unacknowledged write.
    assert len(found - acknowledged) <= 8


async def test_files_are_readable_only_by_the_owner(record: Record, path: str) -> None:
    await record.write(put(sandbox()))
    for file in (path, f"{path}-wal", f"{path}-shm"):
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


async def test_another_reader_does_not_block_writes(record: Record, path: str) -> None:
    await record.write(put(sandbox()))
    other = sqlite3.connect(path)
    other.execute("BEGIN")
    assert other.execute("SELECT count(*) FROM sandboxes").fetchone() == (1,)
    await record.write(put(sandbox("second")))
    assert len(await record.sandboxes()) == 2
    other.close()


async def test_write_waits_for_another_writer(record: Record, path: str) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    written = asyncio.ensure_future(record.write(put(sandbox())))
    assert await record.sandboxes() == []
    assert not written.done()
    other.execute("ROLLBACK")
    other.close()
    assert await written == 1


@pytest.mark.parametrize("size", [10, 5000])
async def test_file_that_is_not_a_database_is_refused_with_a_command_to_move_it(
    path: str, size: int
) -> None:
    overwrite(path, 0, b"not a database " * size)
    with pytest.raises(PathError, match=rf"{path} is not usable.*mv {path}") as caught:
        await Record.open(path)
    assert caught.value.path == path
    run(caught.value.hint.split("`")[1])
    async with await Record.open(path) as record:
        assert await record.sandboxes() == []


async def test_damaged_database_is_refused(path: str) -> None:
    async with await Record.open(path) as record:
        await record.write(*(put(sandbox(f"box-{n}")) for n in range(200)))
    overwrite(path, 4096, b"\xff" * 12288)
    with pytest.raises(PathError, match="is not usable"):
        await Record.open(path)


async def test_database_of_another_program_is_refused_and_unchanged(path: str) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE sandboxes (mine)")
    other.close()
    with pytest.raises(PathError, match="another program"):
        await Record.open(path)
    assert tables(path) == {"sandboxes"}


async def test_record_of_a_later_version_is_refused_and_unchanged(path: str) -> None:
    later = (*MIGRATIONS, ("CREATE TABLE wonders (x)",))
    replace(RECORD, migrations=later).open(path).close()
    before = tables(path)
    with pytest.raises(Unsupported, match=rf"version {len(later)}.*Upgrade Smokebox"):
        await Record.open(path)
    assert tables(path) == before


def test_fields_in_json_change_only_with_a_version() -> None:
    """If this fails, add a version to `MIGRATIONS`: earlier ones would misread the record."""
    settings = "sleep_after keep_alive lifetime ephemeral cwd user group checkpoints"
    jail = "tier key pid started first_uid uids enforcement group extra"
    assert [one.name for one in fields(RunSettings)] == settings.split()
    assert [one.name for one in fields(JailState)] == jail.split()
    assert [one.name for one in fields(Limits)] == [
        "memory",
        "cpu",
        "pids",
        "disk",
        "open_files",
        "output_rate",
    ]


async def test_record_of_an_earlier_version_is_migrated_with_its_rows(
    path: str,
) -> None:
    async with await Record.open(path) as record:
        await record.write(put(sandbox()))
    added = ("ALTER TABLE sandboxes ADD COLUMN colour TEXT DEFAULT 'red'",)
    later = (*MIGRATIONS, added, ("CREATE TABLE wonders (x)",))
    connection = replace(RECORD, migrations=later).open(path)
    assert connection.execute("SELECT id, colour FROM sandboxes").fetchall() == [("box", "red")]
    connection.close()
    assert "wonders" in tables(path)


async def test_sandbox_that_was_stopped_for_its_disk_is_known_after_the_migration(
    path: str,
) -> None:
    """Earlier versions told it by the start of the reason alone."""
    before = next(n for n, one in enumerate(MIGRATIONS) if "stop_cause" in one[0])
    connection = replace(RECORD, migrations=MIGRATIONS[:before]).open(path)
    reasons = {"full": "its files take 9.00 GB of disk, above 8 GB", "idle": "it fell asleep"}
    for id, reason in reasons.items():
        connection.execute(
            "INSERT INTO sandboxes VALUES (?, ?, 'host', '', 'namespaces', 0, 0, 'idle', 1, "
            "'{}', '{}', '{}', '{}', NULL, ?, '{}')",
            (id, id, reason),
        )
    connection.commit()
    connection.close()
    async with await Record.open(path) as record:
        causes = {row.id: row.stop_cause for row in await record.sandboxes()}
    assert causes == {"full": "disk", "idle": None}


async def test_failed_migration_changes_nothing(path: str) -> None:
    async with await Record.open(path) as record:
        await record.write(put(sandbox()))
    broken = (*MIGRATIONS, ("CREATE TABLE wonders (x)",), ("DROP TABLE sandboxes", "NONSENSE"))
    before = tables(path)
    with pytest.raises(PathError, match="NONSENSE"):
        replace(RECORD, migrations=broken).open(path)
    assert tables(path) == before
    async with await Record.open(path) as record:
        assert await record.sandboxes() == [sandbox()]


async def test_missing_directory_is_a_path_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await Record.open(str(tmp_path / "none" / "record.db"))
    assert isinstance(caught.value, PathError)


async def test_full_disk_fails_only_the_write(record: Record) -> None:
    limit = "PRAGMA max_page_count = {}"
    connection = record._writer._connection
    [(pages,)] = connection.execute("PRAGMA page_count").fetchall()
    connection.execute(limit.format(pages))
    with pytest.raises(PathError, match="no space left"):
        await record.write(put(replace(sandbox(), env={"X": "x" * 100_000})))
    connection.execute(limit.format(1 << 30))
    assert await record.write(put(sandbox())) == 1


def count(path: str, table: str) -> int:
    connection = sqlite3.connect(path)
    [(number,)] = connection.execute(f"SELECT count(*) FROM {table}")
    connection.close()
    return int(number)


def tables(path: str) -> set[str]:
    connection = sqlite3.connect(path)
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    connection.close()
    return {name for (name,) in names}


def commits(path: str) -> int:
    """Return the counter of commits in the header of SQLite's WAL index."""
    return int.from_bytes(Path(f"{path}-shm").read_bytes()[8:12], sys.byteorder)


def overwrite(path: str, offset: int, data: bytes) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(file, data, offset)
    os.close(file)


def run(command: str) -> None:
    subprocess.run(["sh", "-c", command], check=True)
