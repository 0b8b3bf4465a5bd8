"""Bodies of responses that are not values of `smokebox.types`."""

from __future__ import annotations

from typing import Any

import msgspec

from smokebox.types import (
    Backup,
    BackupProgress,
    CodeContextInfo,
    ExposedPort,
    FileInfo,
    ImageInfo,
    Mount,
    NetworkEvent,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
    Snapshot,
    TerminalInfo,
)


class Sandboxes(msgspec.Struct):
    """Sandboxes, sorted by id."""

    sandboxes: list[SandboxInfo]


class MissingContents(msgspec.Struct):
    """Digests of files that have to be uploaded before a build or an image is loaded."""

    digests: list[str]


class Sessions(msgspec.Struct):
    """Sessions in order of creation."""

    sessions: list[SessionInfo]


class Processes(msgspec.Struct):
    """Processes in order of their start."""

    processes: list[ProcessInfo]


class Terminals(msgspec.Struct):
    """Terminals in order of creation."""

    terminals: list[TerminalInfo]


class CodeContexts(msgspec.Struct):
    """Code contexts in order of creation."""

    contexts: list[CodeContextInfo]


class Ports(msgspec.Struct):
    """Ports in the order in which they were exposed."""

    ports: list[ExposedPort]


class Mounts(msgspec.Struct):
    """Mounts in the order in which they were mounted."""

    mounts: list[Mount]


class Backups(msgspec.Struct):
    """Backups, oldest first."""

    backups: list[Backup]


class BackupsUnderWay(msgspec.Struct):
    """Backups that are being made or restored, in order of their requests."""

    progress: list[BackupProgress]


class Images(msgspec.Struct):
    """Images, the oldest first."""

    images: list[ImageInfo]


class Snapshots(msgspec.Struct):
    """Snapshots, oldest first."""

    snapshots: list[Snapshot]


class PreviewUrl(msgspec.Struct):
    """The URL of a port. `expires_at` is seconds since the epoch; null if it does not expire."""

    url: str
    expires_at: float | None = None


class TokenCheck(msgspec.Struct):
    """The result of checking the token of a port."""

    valid: bool


class Names(msgspec.Struct):
    """The names in a directory."""

    names: list[str]


class FileList(msgspec.Struct):
    """The files in a directory."""

    files: list[FileInfo]


class Paths(msgspec.Struct):
    """Paths that match."""

    paths: list[str]


class PathResponse(msgspec.Struct):
    """A path in the sandbox."""

    path: str


class Exists(msgspec.Struct):
    """True if a path exists."""

    exists: bool


class Watching(msgspec.Struct):
    """The watch has started; `cursor` resumes it from its start."""

    cursor: str


class Written(msgspec.Struct):
    """Number of bytes written."""

    bytes: int


class Count(msgspec.Struct):
    """Number of processes."""

    count: int


class ExitCode(msgspec.Struct):
    """Exit code of a process."""

    exit_code: int


class KeyInfo(msgspec.Struct, kw_only=True):
    """An API key without its secret. Times are seconds since the epoch.

    `profile` names its ceilings; null for an administrator's, which has none.
    """

    id: str
    name: str
    prefix: str
    admin: bool
    profile: str | None
    scopes: list[str]
    created_at: float
    expires_at: float | None
    last_used_at: float | None


class QuotaUse(msgspec.Struct, kw_only=True):
    """Use of a quota by a key. `ceiling` is null if there is none."""

    name: str
    used: float
    ceiling: float | None


class KeyDetails(KeyInfo, kw_only=True):
    """An API key with the ceilings of its profile, and what its sandboxes and backups use."""

    ceilings: dict[str, Any]
    quotas: list[QuotaUse]


class Keys(msgspec.Struct):
    """API keys in order of creation."""

    keys: list[KeyInfo]


class NewKey(KeyInfo, kw_only=True):
    """An API key with its secret, which is returned only once."""

    key: str


class Health(msgspec.Struct, kw_only=True):
    """State of the server. `draining` means that it is about to stop."""

    ok: bool
    version: str
    sandboxes: int | None = None
    draining: bool = False


class EgressInfo(msgspec.Struct, kw_only=True):
    """The policy in force, the settings it is based on, and the changes made at run time.

    `in_force` has every field of the policy, and in `opened_hosts` the hosts allowed at run
    time. `served` lists the entries of `outbound_by_host` that a connected client handles; an
    empty string is `outbound`.
    """

    in_force: dict[str, Any]
    settings: dict[str, Any]
    changes: dict[str, Any]
    served: list[str]


class NetworkEvents(msgspec.Struct):
    """Network events of a sandbox, oldest first."""

    events: list[NetworkEvent]
