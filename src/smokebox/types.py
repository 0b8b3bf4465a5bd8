"""Frozen dataclasses shared by several rooms: results, files and infos."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Stream = Literal["stdout", "stderr"]
FileType = Literal["file", "directory", "symlink", "other"]
SandboxStatus = Literal["idle", "active", "destroying"]
# Made by a call, by the option `checkpoints` of a sandbox, or by that of an agent.
SnapshotOrigin = Literal["user", "interval", "turn"]
ProcessStatus = Literal["starting", "running", "exited", "killed", "lost"]
CodeLanguage = Literal["python", "javascript", "typescript"]
LayerState = Literal[
    "waiting", "downloading", "unpacking", "verifying", "packing", "uploading", "present", "done"
]
ChangeKind = Literal["create", "modify", "delete", "move_from", "move_to", "attrib", "resync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of a finished command. A non-zero exit code is a result, not an error.

    Exit codes are those of bash: 127 for a missing program, 126 for one stopped by a limit,
    124 for a timeout, 128+n for death by signal n. `timed_out` distinguishes our timeout from a
    command that exits with 124 by itself. When `truncated`, the middle of `stdout` or
    `stderr` is replaced by a marker, and `stdout_file` and `stderr_file` are the paths of the
    whole streams if the sandbox kept them. `session_ended` means that the shell of the session
    ended with this command; the next command gets a fresh one.
    """

    exit_code: int
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    timed_out: bool = False
    duration: float = 0.0
    stdout_file: str | None = None
    stderr_file: str | None = None
    session_ended: bool = False

    @property
    def success(self) -> bool:
        """True if the command exited with 0."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of output. Text, never split inside a character."""

    stream: Stream
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """Metadata of a path. A field that a sandbox does not know is None.

    `type`, `size`, `mtime` and `mode` describe the target of a symlink; `is_symlink`
    describes the path itself.
    """

    path: str
    type: FileType
    is_symlink: bool = False
    size: int | None = None
    mtime: float | None = None
    mode: int | None = None

    @property
    def is_file(self) -> bool:
        """True for a regular file, also behind a symlink."""
        return self.type == "file"

    @property
    def is_directory(self) -> bool:
        """True for a directory, also behind a symlink."""
        return self.type == "directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a sandbox, for programs and, through `describe`, for models.

    `commands` lists the available programs; None if they are not known in advance.
    `max_output` limits one stream, also of `exec_stream`; a limit of None is no limit.
    `refused_in_names` has the characters that file names cannot contain. With `snapshots`, it has
    the methods of `SnapshotApi`. The conformance
    suite reads the fields from `processes` on.
    """

    sandbox: str
    isolation: Literal["none", "interpreter", "process", "namespaces", "gvisor", "remote"]
    network: Literal["off", "guarded", "open"]
    persistence: Literal["memory", "host", "bucket", "remote"]
    shell_state: Literal["fresh", "persistent"] = "fresh"
    commands: frozenset[str] | None = None
    read_only: bool = False
    processes: bool = True
    symlinks: bool = True
    refused_in_names: str = ""
    file_modes: bool = True
    max_file_size: int | None = None
    max_output: int | None = None
    snapshots: bool = False

    def describe(self) -> str:
        """Return two lines that describe the sandbox and its commands to a model."""
        place = f"{self.sandbox} sandbox (isolation: {self.isolation}, files: {self.persistence}"
        place += ", read-only)" if self.read_only else ")"
        place += f"; network: {self.network}; shell state: {self.shell_state} between commands."
        if self.commands is None:
            return f"{place}\nCommands: whatever `command -v` finds."
        return f"{place}\nCommands: {' '.join(sorted(self.commands))}."


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """State of a Linux sandbox. Times are seconds since the epoch.

    `limits` has every limit by name; None is no limit. `stop_reason` is why its last run ended.
    `expires_at` is when its lifetime is over and it is destroyed; None for never.
    `disk_enforcement` is "quota" or "pool" where the kernel enforces the disk limit, "measured"
    where the engine does. `snapshot` is the id of the snapshot that it was created from.
    `checkpoints` has `every`, `keep_last` and `keep_for` of its automatic checkpoints, if it has
    any, and `checkpoint_error` is why the last attempt failed.
    """

    id: str
    status: SandboxStatus
    image: str
    tier: str
    limits: dict[str, float | None]
    enforcement: str | None
    disk_enforcement: str | None = None
    labels: dict[str, str]
    generation: int
    created_at: float
    last_active_at: float
    sleep_after: float | None
    keep_alive: bool
    ephemeral: bool
    cwd: str
    user: str
    stop_reason: str | None
    expires_at: float | None = None
    snapshot: str | None = None
    checkpoints: dict[str, float | None] | None = None
    checkpoint_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStats:
    """Resource usage of a sandbox; None for a value that is not measured, or while asleep."""

    cpu_seconds: float | None
    memory: int | None
    memory_peak: int | None
    pids: int | None
    oom_kills: int | None
    disk: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session of a sandbox; `cwd` is empty if it is that of the sandbox."""

    id: str
    cwd: str
    user: str
    created_at: float
    busy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A background process. It `exited` by itself, was `killed` by a signal, or is `lost`.

    `exit_code` is that of bash; None while it runs. `generation` is the run of the sandbox.
    """

    id: str
    command: str
    status: ProcessStatus
    pid: int | None
    exit_code: int | None
    started_at: float
    ended_at: float | None
    generation: int
    stdin: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """A piece of a log. Text, never split inside a character; `cursor` resumes right after it.

    If the log grew too long before it was read, `dropped` counts the missing bytes, and `data`
    is a line that says so.
    """

    stream: Stream
    data: str
    cursor: str
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLogs:
    """Output of a process; the end of it if the log is very long."""

    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMatch:
    """Match of `wait_for_log`: the line, the matching part of it, and the groups."""

    stream: Stream
    line: str
    text: str
    groups: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """A change of a path.

    `cursor` resumes a watch after it. `resync` means that events were lost: read the files
    again.
    """

    kind: ChangeKind
    path: str
    is_directory: bool
    time: float
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalInfo:
    """A terminal of a sandbox. `exit_code` is None while its program runs."""

    id: str
    command: str
    cols: int
    rows: int
    created_at: float
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A bucket, or with `prefix` a folder of one, mounted as a directory of a sandbox.

    It is `active` while the sandbox is awake, and is mounted again when the sandbox wakes.
    """

    path: str
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    read_only: bool = False
    active: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedPort:
    """A port of a sandbox that is exposed at `url`. The URL alone grants access.

    `label` is the first label of its host name, for an app that serves it with
    `proxy_to_sandbox`; `token` is the secret in the URL.

    It is "active" in the run in which it was exposed, and "stale" in others. A `private` port
    also needs an API key of the server, or a URL that expires.
    """

    port: int
    url: str
    label: str
    token: str
    name: str | None
    private: bool
    status: Literal["active", "stale"]


@dataclass(slots=True, kw_only=True)
class Extracted:
    """Counts of what was unpacked from an archive."""

    files: int = 0
    directories: int = 0
    links: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Disk usage of a directory tree. A file with several hard links counts once."""

    bytes: int
    files: int
    directories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GitCheckout:
    """A cloned repository. `url` has no credentials in it.

    `branch` is None if a tag was checked out, `commit` if the repository is empty.
    """

    url: str
    target: str
    branch: str | None
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeContextInfo:
    """A code context, which keeps state between runs. Times are seconds since the epoch.

    `timeout` is the default for runs in it. A `default` context was created for code that
    named none.
    """

    id: str
    language: CodeLanguage
    cwd: str
    timeout: float | None
    created_at: float
    used_at: float
    default: bool
    busy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeResult:
    """A value that code displayed, in all of its formats.

    `data` has the formats without a field, by MIME type; `chart` has the data of a figure.
    The value of the last expression is `main`.
    """

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    latex: str | None = None
    javascript: str | None = None
    png: bytes | None = None
    jpeg: bytes | None = None
    pdf: bytes | None = None
    json: Any = None
    chart: dict[str, Any] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    main: bool = False

    def formats(self) -> tuple[str, ...]:
        """Return the names of the formats that are set, and the MIME types in `data`."""
        names = [name for name in self.__slots__ if name not in ("data", "main")]
        return (*(name for name in names if getattr(self, name) is not None), *self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeError:
    """Exception that ended the code. `line` is the line in the code, if known."""

    name: str
    message: str
    traceback: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeExecution:
    """Result of running code. An exception in the code is a result, in `error`.

    `count` numbers the runs of the context; None if the code did not end by itself. Code that
    reaches its timeout is interrupted, and `timed_out`; if that does not stop it, its context
    is ended, and `context_ended` is true. When `truncated`, some output or results are left
    out; `stdout_file` and `stderr_file` are the paths of whole streams that the sandbox kept.
    """

    context: str
    language: CodeLanguage
    stdout: str = ""
    stderr: str = ""
    results: tuple[CodeResult, ...] = ()
    error: CodeError | None = None
    count: int | None = None
    duration: float = 0.0
    truncated: bool = False
    timed_out: bool = False
    context_ended: bool = False
    stdout_file: str | None = None
    stderr_file: str | None = None

    @property
    def success(self) -> bool:
        """True if the code ended without an error."""
        return self.error is None

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return next((one.text for one in self.results if one.main), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A copy of a directory of a sandbox, kept until it is deleted or expires.

    It is of the directory `path` of the sandbox `sandbox_id`, which may be destroyed. `size`
    is the size of the archive in bytes, and `checksum` its SHA-256; `bytes` is the size of the
    `files` in it. Times are seconds since the epoch; with `expires_at` None it does not expire.
    """

    id: str
    sandbox_id: str
    path: str
    name: str | None
    size: int
    bytes: int
    files: int
    checksum: str
    created_at: float
    expires_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredBackup:
    """A restored backup: its path, and the number and size of its files."""

    id: str
    path: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupProgress:
    """Progress of a backup that is being made or restored, in bytes of files.

    `total` is None until it is known. `begun` is false while it waits for another backup.
    """

    id: str
    operation: Literal["create", "restore"]
    path: str
    bytes: int
    total: int | None
    begun: bool


NetworkVerdict = Literal["forwarded", "answered", "tunnelled", "resolved", "refused", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a whole sandbox at one moment. Times are seconds since the epoch.

    `size` and `files` are those that changed since the snapshot `parent`, or since the image was
    started. Snapshots of the origins "interval" and "turn" are checkpoints.
    """

    id: str
    sandbox_id: str
    name: str | None
    description: str
    parent: str | None
    image: str
    labels: dict[str, str]
    size: int
    files: int
    created_at: float
    origin: SnapshotOrigin = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDiff:
    """Paths of files that differ between two states of a sandbox, sorted.

    A changed file has another content, type, mode or owner; `texts` has unified diffs of changed
    text files by path, if they were requested. Diffs with more paths than are listed are not
    `complete`.
    """

    added: list[str]
    changed: list[str]
    removed: list[str]
    texts: dict[str, str]
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEvent:
    """A request or connection that a sandbox made, and its outcome.

    `cursor` resumes right after it; `at` is seconds since the epoch. `host` is the requested
    name, or the address; what is not HTTP has no method, path and status. `sent` and `received`
    count bytes, as seen from the sandbox. `rule` is the entry of the policy that decided, and
    `handler` the name of the handler that ran. `reason` is why it was refused or failed.
    """

    cursor: int
    at: float
    verdict: NetworkVerdict
    host: str
    port: int
    rule: str
    protocol: Literal["http", "https", "tcp", "dns"] = "https"
    method: str | None = None
    path: str | None = None
    status: int | None = None
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    handler: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """An image that sandboxes start from. Times are seconds since the epoch.

    `digest` is that of its configuration, as `docker images` shows it. `size` is bytes on disk
    of its own layers, also of those that it shares with others.
    """

    digest: str
    names: list[str]
    source: str
    size: int
    layers: int
    created_at: float
    used_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDetails(ImageInfo):
    """An image with its configuration, as the OCI image specification writes it."""

    config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledImage:
    """An image that can be used. `reference` is pinned to the digest of its manifest.

    `pulled` is False if it was known. `note` tells why its tag was not resolved, if it was not.
    """

    image: ImageInfo
    reference: str
    pulled: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedImage:
    """An image that was pushed. `digest` is that of its manifest."""

    reference: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedImages:
    """Layers that were removed, and the bytes that they occupied."""

    layers: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProgress:
    """Progress of one layer of a pull or push. `done` and `total` are bytes of its blob."""

    digest: str
    done: int
    total: int
    state: LayerState
