"""The rows of the durable record, and the changes that can be made to them."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from smokebox.egress.layers import EgressLayers
from smokebox.engine.jail.api import JailState
from smokebox.engine.mounts.request import MountRequest
from smokebox.errors import InvalidOption
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.types import CodeLanguage, ProcessStatus, SandboxStatus

Value: TypeAlias = str | int | float | bytes | None

DEFAULT_CWD = "/workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a sandbox behaves; `sleep_after` is seconds without a call, None for never."""

    sleep_after: float | None = 600.0
    keep_alive: bool = False
    ephemeral: bool = False
    cwd: str = DEFAULT_CWD
    user: str = "root"


# What most have, so that it is made once.
_CLOSED = EgressLayers()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRow:
    """One sandbox. `generation` counts its runs, `jail` finds the one that runs.

    Times are seconds since the epoch. `stop_reason` says why the last run ended.
    """

    id: str
    key: str
    image: str
    digest: str
    tier: str
    created_at: float
    last_active_at: float
    status: SandboxStatus = "idle"
    generation: int = 0
    limits: Limits = field(default_factory=Limits)
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    jail: JailState | None = None
    stop_reason: str | None = None
    egress: EgressLayers = _CLOSED


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """One session of a sandbox; `state` is what its shell begins with."""

    sandbox_id: str
    name: str
    cwd: str
    user: str
    created_at: float
    env: dict[str, str] = field(default_factory=dict)
    state: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One long-running process, of the run that `generation` says."""

    sandbox_id: str
    process_id: str
    generation: int
    command: str
    argv: tuple[str, ...]
    cwd: str
    user: str
    started_at: float
    status: ProcessStatus = "starting"
    pid: int | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    session: str | None = None
    stdin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRow:
    """One port of a sandbox that may be reached from outside, by whoever has the token.

    It is reached in the run that `generation` says. A `private` one is for who has a key of
    the server, too.
    """

    sandbox_id: str
    port: int
    token: str
    name: str | None = None
    generation: int = 0
    private: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRow:
    """One code context, of the run that `generation` says; `shared` is one that nobody named.

    `reason` says why it ended, where that was not its own doing.
    """

    sandbox_id: str
    context_id: str
    generation: int
    language: CodeLanguage
    cwd: str
    created_at: float
    timeout: float | None = None
    shared: bool = False
    exit_code: int | None = None
    ended_at: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRow:
    """One bucket that is mounted at a path of a sandbox, with the credentials for it.

    In the run that `generation` says, the process `pid`, which started at `started`, serves it.
    """

    sandbox_id: str
    path: str
    request: MountRequest
    generation: int
    pid: int | None = None
    started: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupRow:
    """One backup, of a sandbox that may be gone. It is there for users once it is "ready".

    `place` is the bucket that holds it, empty for the state directory. `disk` is what its
    files take when they are restored.
    """

    id: str
    sandbox_id: str
    path: str
    name: str | None
    status: Literal["making", "ready", "deleting"]
    place: str
    created_at: float
    expires_at: float | None
    size: int = 0
    bytes: int = 0
    files: int = 0
    disk: int = 0
    checksum: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRow:
    """A restore under way: of which directory, and where inside its files are unpacked.

    Up to "unpacking" nothing was changed. What is "clearing" or "placing" goes on to its end,
    also by another engine, and "done" leaves the former files to be removed.
    """

    sandbox_id: str
    staging: str
    path: str
    state: Literal["unpacking", "clearing", "placing", "done"]


Row: TypeAlias = (
    SandboxRow | SessionRow | ProcessRow | PortRow | ContextRow | MountRow | BackupRow | RestoreRow
)
R = TypeVar(
    "R",
    SandboxRow,
    SessionRow,
    ProcessRow,
    PortRow,
    ContextRow,
    MountRow,
    BackupRow,
    RestoreRow,
)


class RowChange(NamedTuple):
    """A statement with its values, made by `put`, `update` or `delete`, for `Record.write`."""

    sql: str
    values: tuple[Value, ...]


def put(row: Row) -> RowChange:
    """Add a row, or replace the one with its key."""
    return RowChange(table(type(row)).upsert, _values(row))


def update(row: Row) -> RowChange:
    """Replace the row with this one's key if it is there: never brings back a deleted one."""
    values = _values(row)
    keys = table(type(row)).keys
    return RowChange(table(type(row)).replace, (*values[len(keys) :], *values[: len(keys)]))


def delete(kind: type[Row], *key: Value) -> RowChange:
    """Remove the row with that key; with a sandbox everything that is of it.

    The first part of a key alone, the sandbox's id, removes all rows of that sandbox.
    """
    of = table(kind)
    return RowChange(f"DELETE FROM {of.name}{where(of.keys[: len(key)])}", key)


def where(columns: tuple[str, ...]) -> str:
    """The condition that all these columns have the values to come."""
    if not columns:
        raise ValueError("a key has at least one part")
    return " WHERE " + " AND ".join(f"{one} = ?" for one in columns)


class Table:
    """How the rows of one kind are written. Keys come first among the columns."""

    def __init__(self, name: str, kind: type[Row], keys: tuple[str, ...]) -> None:
        self.name = name
        self.keys = keys
        names = [one.name for one in fields(kind)]
        self.columns = (*keys, *(one for one in names if one not in keys))
        rest = self.columns[len(keys) :]
        listed, marks = ", ".join(self.columns), ", ".join("?" * len(names))
        taken = ", ".join(f"{one} = excluded.{one}" for one in rest)
        # Not INSERT OR REPLACE, which deletes first and takes the rows of a sandbox along.
        self.upsert = (
            f"INSERT INTO {name} ({listed}) VALUES ({marks}) "
            f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {taken}"
        )
        self.replace = f"UPDATE {name} SET {', '.join(f'{one} = ?' for one in rest)}{where(keys)}"
        self.select = f"SELECT {listed} FROM {name}"


TABLES: dict[type[Row], Table] = {
    SandboxRow: Table("sandboxes", SandboxRow, ("id",)),
    SessionRow: Table("sessions", SessionRow, ("sandbox_id", "name")),
    ProcessRow: Table("processes", ProcessRow, ("sandbox_id", "process_id")),
    PortRow: Table("ports", PortRow, ("sandbox_id", "port")),
    ContextRow: Table("contexts", ContextRow, ("sandbox_id", "context_id")),
    MountRow: Table("mounts", MountRow, ("sandbox_id", "path")),
    BackupRow: Table("backups", BackupRow, ("id",)),
    RestoreRow: Table("restores", RestoreRow, ("sandbox_id", "staging")),
}


def table(kind: type[Row]) -> Table:
    """The table of a kind of rows."""
    return TABLES[kind]


def load(kind: type[R], values: tuple[Any, ...]) -> R:
    """The row that `select` found."""
    named = zip(table(kind).columns, values, strict=True)
    return kind(**{name: _decode(name, value) for name, value in named})


def _values(row: Row) -> tuple[Value, ...]:
    return tuple(_encode(name, getattr(row, name)) for name in table(type(row)).columns)


def _encode(column: str, value: Any) -> Value:
    if isinstance(value, (Limits, Settings)):
        return _dump_shared(value)
    if isinstance(value, EgressLayers):
        return "{}" if value == _CLOSED else _dump(value.to_json())
    if isinstance(value, MountRequest):
        return _dump(value.words())
    if isinstance(value, (dict, tuple, JailState)):
        return _dump(value)
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidOption(
                f"{column} is not valid UTF-8: {value!a:.80}.",
                hint="Leave out what cannot be encoded.",
                option=column,
                value=value,
            ) from None
    return value  # type: ignore[no-any-return]


def _decode(column: str, value: Any) -> Any:
    loader = _LOADERS.get(column)
    return value if loader is None or value is None else loader(value)


def _dump(value: Any) -> str:
    data = asdict(value) if isinstance(value, (Limits, Settings, JailState)) else value
    # ASCII, so that even half of a surrogate pair in an environment comes back as it was.
    return json.dumps(data, separators=(",", ":"))


# Most sandboxes have the same of these, which cannot change: made once, shared by all rows.
_dump_shared = functools.lru_cache(256)(_dump)


@functools.lru_cache(256)
def _load_limits(text: str) -> Limits:
    return Limits.from_json(json.loads(text))


@functools.lru_cache(256)
def _load_settings(text: str) -> Settings:
    known = {one.name for one in fields(Settings)}
    return Settings(**{name: value for name, value in json.loads(text).items() if name in known})


@functools.lru_cache(256)
def _load_egress(text: str) -> EgressLayers:
    return _CLOSED if text == "{}" else EgressLayers.from_json(json.loads(text))


_LOADERS: dict[str, Callable[[Any], object]] = {
    "limits": _load_limits,
    "env": json.loads,
    "labels": json.loads,
    "settings": _load_settings,
    "jail": lambda text: JailState(**json.loads(text)),
    "argv": lambda text: tuple(json.loads(text)),
    "stdin": bool,
    "private": bool,
    "shared": bool,
    "egress": _load_egress,
    "request": lambda text: MountRequest.of(json.loads(text)),
}
