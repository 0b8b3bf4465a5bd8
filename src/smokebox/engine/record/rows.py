"""The rows of the durable record, and changes to them."""

from __future__ import annotations

import base64
import functools
import json
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from smokebox.egress.layers import EgressLayers
from smokebox.engine.jail.spec import JailState
from smokebox.engine.mounts.request import MountRequest
from smokebox.engine.snapshots.checkpoint_rule import CheckpointRule
from smokebox.errors import InvalidOption
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.types import CodeLanguage, ProcessStatus, SandboxStatus, SnapshotOrigin

Value: TypeAlias = str | int | float | bytes | None

DEFAULT_CWD = "/workspace"

StopCause = Literal["disk"]
"""The run before used more disk than its limit."""


_NO_CHECKPOINTS = CheckpointRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a sandbox and its runs.

    `sleep_after` is idle seconds, and `lifetime` seconds from creation to destruction; None is
    never. The sandboxes of a `group` share the CPU weight of one; "" is no group.
    """

    sleep_after: float | None = 600.0
    keep_alive: bool = False
    lifetime: float | None = None
    ephemeral: bool = False
    cwd: str = DEFAULT_CWD
    user: str = "root"
    group: str = ""
    checkpoints: CheckpointRule = _NO_CHECKPOINTS

    @property
    def idle_timeout(self) -> float | None:
        """Seconds after which a sandbox without calls stops, or None."""
        return None if self.keep_alive else self.sleep_after

    @property
    def orphan_timeout(self) -> float | None:
        """Seconds after which a sandbox without an engine stops, or None.

        Once its lifetime is over it need not run, even if no engine is there to destroy it.
        """
        ends = [one for one in (self.idle_timeout, self.lifetime) if one is not None]
        return min(ends, default=None)


# Most sandboxes have this one.
_CLOSED = EgressLayers()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRow:
    """A sandbox. `generation` counts its runs, and `jail` identifies the current one.

    Times are in seconds since the epoch. `stop_reason` is the reason why the last run ended,
    in words; `stop_cause` is the cause if the next run depends on it. `layers` are ids of layers
    of snapshots between its image and its upper layer, the uppermost first, and `snapshot` the id
    of the one it was created from, if any. Before the next run, its upper layer is removed if
    `pending` is "discard", and if it is "adopt" moved to those of `layers` that do not exist.
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
    settings: RunSettings = field(default_factory=RunSettings)
    jail: JailState | None = None
    stop_reason: str | None = None
    stop_cause: StopCause | None = None
    egress: EgressLayers = _CLOSED
    layers: tuple[str, ...] = ()
    snapshot: str = ""
    pending: Literal["", "discard", "adopt"] = ""

    @property
    def expires_at(self) -> float | None:
        """Time at which the sandbox is destroyed, or None."""
        lifetime = self.settings.lifetime
        return None if lifetime is None else self.created_at + lifetime

    @property
    def expired(self) -> bool:
        """True once its lifetime is over."""
        return self.expires_at is not None and self.expires_at <= time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session of a sandbox. `state` is the state that its next shell starts with."""

    sandbox_id: str
    name: str
    cwd: str
    user: str
    created_at: float
    env: dict[str, str] = field(default_factory=dict)
    state: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """A background process of the run with number `generation`."""

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
    stdin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRow:
    """A port of a sandbox that is exposed to clients with the token.

    It is active in the run with number `generation`. A `private` one also needs a key of the
    server. `slug` is the random part of its host name, which is no secret: it gives a sandbox
    another origin than an earlier one with its id.
    """

    sandbox_id: str
    port: int
    token: str
    slug: str
    name: str | None = None
    generation: int = 0
    private: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRow:
    """A code context of the run with number `generation`.

    A `shared` one runs code that names no context. `reason` is set if it ended with its run.
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
    """A bucket that is mounted at a path of a sandbox, with its credentials.

    In the run with number `generation`, the process `pid`, which started at `started`, serves it.
    """

    sandbox_id: str
    path: str
    request: MountRequest
    generation: int
    pid: int | None = None
    started: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupRow:
    """A backup of a sandbox that may no longer exist. Users see it once it is "ready".

    `place` is the bucket that holds it, empty for the state directory. `disk` is the space that
    its files need when they are restored.
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
    """An unfinished restore of the directory `path`, whose files are unpacked in `staging`.

    While "unpacking" nothing is changed. A restore that is "clearing" or "placing" is completed,
    if need be by the next engine, and after "done" the former files are removed.
    """

    sandbox_id: str
    staging: str
    path: str
    state: Literal["unpacking", "clearing", "placing", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow:
    """An image that this host knows; `config` and `manifest` are JSON.

    `layers` are the ids of its layers in the store with their targets, the uppermost first.
    `base` is the name or digest of the image below its layers, empty if it is whole.
    """

    digest: str
    config: str
    layers: tuple[tuple[str, str], ...]
    base: str
    source: str
    manifest: str
    size: int
    created_at: float
    used_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStepRow:
    """A finished step of a build, which later builds of its scope take instead of running it.

    `stored` are the ids of its layers in the store with their targets, in JSON; a step may have
    none. `key` hashes all that the step depends on, and `result` is the key of the state after it.
    """

    scope: str
    key: str
    result: str
    stored: str
    created_at: float
    used_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageNameRow:
    """A name of an image for the sandboxes whose ids start with `scope`."""

    name: str
    scope: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGrantRow:
    """The permission of the sandboxes whose ids start with `scope` to start from an image."""

    digest: str
    scope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """A snapshot of a sandbox that may no longer exist. Users see it once it is "ready".

    Names are unique in a `scope`, a prefix of sandbox ids. `layers` are ids of layers, the
    uppermost first, on the image with the digest. `size` and `files` are those of the layer that
    was made for it. The fields from `limits` on are those of the sandbox at that time.
    """

    id: str
    sandbox_id: str
    scope: str
    name: str | None
    description: str
    status: Literal["making", "ready"]
    parent: str | None
    image: str
    digest: str
    tier: str
    layers: tuple[str, ...]
    created_at: float
    size: int = 0
    files: int = 0
    limits: Limits = field(default_factory=Limits)
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    settings: RunSettings = field(default_factory=RunSettings)
    egress: EgressLayers = _CLOSED
    sessions: tuple[SessionRow, ...] = ()
    origin: SnapshotOrigin = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLayerRow:
    """A layer of snapshots in the store, and the bytes that it takes from its sandbox.

    It is seen at `target`. One that was merged shows what the layers `merged` show, the uppermost
    first.
    """

    id: str
    sandbox_id: str
    target: str
    size: int
    files: int
    created_at: float
    merged: tuple[str, ...] = ()


Row: TypeAlias = (
    SandboxRow
    | SessionRow
    | ProcessRow
    | PortRow
    | ContextRow
    | MountRow
    | BackupRow
    | RestoreRow
    | ImageRow
    | ImageNameRow
    | ImageGrantRow
    | BuildStepRow
    | SnapshotRow
    | SnapshotLayerRow
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
    ImageRow,
    ImageNameRow,
    ImageGrantRow,
    BuildStepRow,
    SnapshotRow,
    SnapshotLayerRow,
)


class RowChange(NamedTuple):
    """A statement with its values for `Record.write`, made by `put`, `update` or `delete`."""

    sql: str
    values: tuple[Value, ...]


def put(row: Row) -> RowChange:
    """Insert a row, or replace the one with its key."""
    return RowChange(TABLES[type(row)].upsert, _values(row))


def insert(row: Row) -> RowChange:
    """Insert a row. The write raises `Conflict` if there is one with its key."""
    return RowChange(TABLES[type(row)].insert, _values(row))


def update(row: Row) -> RowChange:
    """Replace the row with the same key if there is one. Never inserts."""
    values = _values(row)
    keys = TABLES[type(row)].keys
    return RowChange(TABLES[type(row)].replace, (*values[len(keys) :], *values[: len(keys)]))


def delete(kind: type[Row], *key: Value) -> RowChange:
    """Delete the row with that key, and with a sandbox all its other rows.

    The first part of a key alone, a sandbox id, deletes all rows of that sandbox.
    """
    table = TABLES[kind]
    return RowChange(f"DELETE FROM {table.name}{where(table.keys[: len(key)])}", key)


def touch_image(digest: str, at: float) -> RowChange:
    """Record when an image was last used."""
    return RowChange("UPDATE images SET used_at = ? WHERE digest = ?", (at, digest))


def where(columns: tuple[str, ...]) -> str:
    """Build the condition that these columns equal the values of the statement."""
    if not columns:
        raise ValueError("a key has at least one part")
    return " WHERE " + " AND ".join(f"{one} = ?" for one in columns)


class Table:
    """The statements for one kind of row. Keys come first among the columns."""

    def __init__(self, name: str, kind: type[Row], keys: tuple[str, ...]) -> None:
        self.name = name
        self.keys = keys
        names = [one.name for one in fields(kind)]
        self.columns = (*keys, *(one for one in names if one not in keys))
        rest = self.columns[len(keys) :]
        listed, marks = ", ".join(self.columns), ", ".join("?" * len(names))
        assignments = ", ".join(f"{one} = excluded.{one}" for one in rest)
        # Not INSERT OR REPLACE, which deletes first, and with a sandbox all its rows.
        self.insert = f"INSERT INTO {name} ({listed}) VALUES ({marks})"
        action = f"UPDATE SET {assignments}" if rest else "NOTHING"
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(keys)}) DO {action}"
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
    ImageRow: Table("images", ImageRow, ("digest",)),
    ImageNameRow: Table("image_names", ImageNameRow, ("name", "scope")),
    ImageGrantRow: Table("image_grants", ImageGrantRow, ("digest", "scope")),
    BuildStepRow: Table("build_steps", BuildStepRow, ("scope", "key")),
    SnapshotRow: Table("snapshots", SnapshotRow, ("id",)),
    SnapshotLayerRow: Table("snapshot_layers", SnapshotLayerRow, ("id",)),
}


def load(kind: type[R], values: tuple[Any, ...]) -> R:
    """Build a row from the values of `Table.select`."""
    named = zip(TABLES[kind].columns, values, strict=True)
    return kind(**{name: _decode(name, value) for name, value in named})


def to_text(row: Row) -> dict[str, Value]:
    """Return the values of a row by name, each as the record stores it."""
    return dict(zip(TABLES[type(row)].columns, _values(row), strict=True))


def from_text(kind: type[R], values: dict[str, Any]) -> R:
    """Build a row from values of `to_text`. Raises KeyError, TypeError or ValueError."""
    return load(kind, tuple(values[name] for name in TABLES[kind].columns))


def _values(row: Row) -> tuple[Value, ...]:
    return tuple(_encode(name, getattr(row, name)) for name in TABLES[type(row)].columns)


def _encode(column: str, value: Any) -> Value:
    if isinstance(value, (Limits, RunSettings)):
        return _dump_shared(value)
    if isinstance(value, EgressLayers):
        return "{}" if value == _CLOSED else _dump(value.to_json())
    if isinstance(value, MountRequest):
        return _dump(asdict(value))
    if column == "sessions":
        return _dump([_dump_session(session) for session in value])
    if isinstance(value, (dict, tuple, JailState)):
        return _dump(value)
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidOption(
                f"{column} is not valid UTF-8: {value!a:.80}.",
                hint="Remove the characters that UTF-8 cannot encode.",
                option=column,
                value=value,
            ) from None
    return value  # type: ignore[no-any-return]


def _decode(column: str, value: Any) -> Any:
    loader = _LOADERS.get(column)
    return value if loader is None or value is None else loader(value)


def _dump(value: Any) -> str:
    data = asdict(value) if isinstance(value, (Limits, RunSettings, JailState)) else value
    # In ASCII, so that lone surrogates in an environment are preserved.
    return json.dumps(data, separators=(",", ":"))


def _dump_session(session: SessionRow) -> dict[str, Any]:
    state = None if session.state is None else base64.b64encode(session.state).decode()
    return {**asdict(session), "state": state}


def _load_session(fields: dict[str, Any]) -> SessionRow:
    state = fields["state"]
    return SessionRow(**{**fields, "state": None if state is None else base64.b64decode(state)})


# These are immutable, and most sandboxes have the same ones.
_dump_shared = functools.lru_cache(256)(_dump)


@functools.lru_cache(256)
def _load_limits(text: str) -> Limits:
    return Limits.from_json(json.loads(text))


@functools.lru_cache(256)
def _load_settings(text: str) -> RunSettings:
    known = {one.name for one in fields(RunSettings)}
    values = {name: value for name, value in json.loads(text).items() if name in known}
    rule = CheckpointRule(**values.pop("checkpoints", {}))
    return RunSettings(**values, checkpoints=rule)


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
    "layers": lambda text: tuple(json.loads(text)),
    "merged": lambda text: tuple(json.loads(text)),
    "sessions": lambda text: tuple(map(_load_session, json.loads(text))),
    "request": lambda text: MountRequest.from_dict(json.loads(text)),
}
