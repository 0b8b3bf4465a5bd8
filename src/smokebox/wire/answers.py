"""What the server answers with, where it is not one of the values of `smokebox.types`."""

from __future__ import annotations

from typing import Any

import msgspec

from smokebox.types import (
    Backup,
    BackupProgress,
    CodeContextInfo,
    ExposedPort,
    FileInfo,
    Mount,
    NetworkEvent,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
    TerminalInfo,
)


class Sandboxes(msgspec.Struct):
    """Sandboxes by id."""

    sandboxes: list[SandboxInfo]


class Sessions(msgspec.Struct):
    """Sessions in the order in which they were made."""

    sessions: list[SessionInfo]


class Processes(msgspec.Struct):
    """Processes in the order in which they were started."""

    processes: list[ProcessInfo]


class Terminals(msgspec.Struct):
    """Terminals in the order in which they were opened."""

    terminals: list[TerminalInfo]


class CodeContexts(msgspec.Struct):
    """Code contexts in the order in which they were made."""

    contexts: list[CodeContextInfo]


class Ports(msgspec.Struct):
    """Ports in the order in which they were exposed."""

    ports: list[ExposedPort]


class Mounts(msgspec.Struct):
    """Mounts in the order in which they were made."""

    mounts: list[Mount]


class Backups(msgspec.Struct):
    """Backups, the oldest first."""

    backups: list[Backup]


class BackupsUnderWay(msgspec.Struct):
    """Backups that are being made or restored, in the order in which they were asked for."""

    progress: list[BackupProgress]


class PreviewUrl(msgspec.Struct):
    """Where a port is seen; until `expires_at`, in seconds since the epoch, if that is given."""

    url: str
    expires_at: float | None = None


class TokenCheck(msgspec.Struct):
    """Whether a token opens a port."""

    valid: bool


class Names(msgspec.Struct):
    """The names in a directory."""

    names: list[str]


class FileList(msgspec.Struct):
    """What is in a directory."""

    files: list[FileInfo]


class Paths(msgspec.Struct):
    """Paths that match."""

    paths: list[str]


class PathAnswer(msgspec.Struct):
    """Where something is."""

    path: str


class Exists(msgspec.Struct):
    """Whether a path leads to something."""

    exists: bool


class Watching(msgspec.Struct):
    """A watch is live; `cursor` takes it up again from its beginning."""

    cursor: str


class Written(msgspec.Struct):
    """How many bytes were written."""

    bytes: int


class Count(msgspec.Struct):
    """How many there were."""

    count: int


class ExitCode(msgspec.Struct):
    """How a process ended."""

    exit_code: int


class KeyInfo(msgspec.Struct, kw_only=True):
    """An API key, without the secret. Times are seconds since the epoch."""

    id: str
    name: str
    prefix: str
    admin: bool
    created_at: float
    expires_at: float | None
    last_used_at: float | None


class Keys(msgspec.Struct):
    """API keys in the order in which they were made."""

    keys: list[KeyInfo]


class NewKey(KeyInfo, kw_only=True):
    """An API key with its secret, which nobody can read again."""

    key: str


class Health(msgspec.Struct, kw_only=True):
    """Whether the server can work."""

    ok: bool
    version: str
    sandboxes: int | None = None
    draining: bool = False


class EgressInForce(msgspec.Struct, kw_only=True):
    """The policy that is held to: settings with the changes over them.

    `opened_hosts` are those that were allowed at run time.
    """

    internet: bool
    allowed_hosts: list[str] | None
    opened_hosts: list[str]
    denied_hosts: list[str]
    outbound_by_host: dict[str, str]
    outbound: str | None
    tcp: list[str]
    pass_through: list[str]
    hosts: dict[str, str]
    scrub: bool
    max_requests: int | None
    max_bytes: int | None
    requests_per_second: float | None


class EgressInfo(msgspec.Struct, kw_only=True):
    """What a sandbox may reach: in force, as it was set, and what was changed since.

    `served` are the entries of `outbound_by_host` that a connected client runs; an empty
    one is `outbound`.
    """

    in_force: EgressInForce
    settings: dict[str, Any]
    changes: dict[str, Any]
    served: list[str]


class NetworkEvents(msgspec.Struct):
    """What a sandbox asked of the network, the oldest first."""

    events: list[NetworkEvent]
