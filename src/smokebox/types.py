"""The frozen values that cross rooms: results, files, and what a sandbox can do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Stream = Literal["stdout", "stderr"]
FileType = Literal["file", "directory", "symlink", "other"]
SandboxStatus = Literal["idle", "active", "destroying"]
ProcessStatus = Literal["starting", "running", "exited", "killed", "lost"]
CodeLanguage = Literal["python", "javascript", "typescript"]
ChangeKind = Literal["create", "modify", "delete", "move_from", "move_to", "attrib", "resync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a finished command left behind. A non-zero exit is a result, not an error.

    Exit codes are bash's: 127 for a missing program, 126 for one stopped by a limit,
    124 for a timeout, 128+n for death by signal n. `timed_out` tells our timeout from a
    command that answers 124 by itself. When `truncated`, `stdout` and `stderr` are not
    whole: where the middle is left out a marker says so, and `stdout_file` and
    `stderr_file` name the whole streams where the sandbox kept them. `session_ended` says
    that the shell of a session ended with this command, and the next one gets a fresh one.
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
        """True when the command exited with 0."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of output as it was written. Text, never cut inside a character."""

    stream: Stream
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What `stat` knows of a path. What a sandbox cannot tell is None, never made up.

    `type`, `size`, `mtime` and `mode` describe what the path leads to; `is_symlink`
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
    """What a sandbox can and cannot do, for programs and, through `describe`, for models.

    `commands` lists the programs a script can call, or is None where nobody knows
    without looking. `max_output` is the most of one stream that even `exec_stream`
    gives; a limit is None where there is none. `refused_in_names` holds characters that
    no file name can have. What is from `processes` on the conformance suite goes by.
    """

    sandbox: str
    isolation: Literal["none", "interpreter", "process", "namespaces", "gvisor", "remote"]
    network: Literal["off", "guarded", "allowlist", "open"]
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

    def describe(self) -> str:
        """Two lines that tell a model where it is and what it has."""
        place = f"{self.sandbox} sandbox (isolation: {self.isolation}, files: {self.persistence}"
        place += ", read-only)" if self.read_only else ")"
        place += f"; network: {self.network}; shell state: {self.shell_state} between commands."
        if self.commands is None:
            return f"{place}\nCommands: whatever `command -v` finds."
        return f"{place}\nCommands: {' '.join(sorted(self.commands))}."


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """What is known of a Linux sandbox without waking it. Times are seconds since the epoch.

    `limits` has every limit by name, None for what is not limited. `stop_reason` says why
    its last run ended.
    """

    id: str
    status: SandboxStatus
    image: str
    tier: str
    limits: dict[str, float | None]
    enforcement: str | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStats:
    """What a sandbox uses; None for what nobody counts, and for what sleeps."""

    cpu_seconds: float | None
    memory: int | None
    memory_peak: int | None
    pids: int | None
    oom_kills: int | None
    disk: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session of a sandbox; `cwd` is empty where it is the sandbox's own."""

    id: str
    cwd: str
    user: str
    created_at: float
    busy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A long-running process: `exited` by itself, `killed` by a signal, or `lost`.

    `exit_code` is bash's, None while it runs. `generation` is the run of the sandbox.
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
    """A piece of a log. Text, never cut inside a character; `cursor` goes on right after it.

    Where bytes are missing, because the log grew too long before they were read, `dropped`
    counts them and `data` is a line that says so.
    """

    stream: Stream
    data: str
    cursor: str
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLogs:
    """What a process has written; of a very long log the end."""

    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMatch:
    """What `wait_for_log` found: the line, the part of it that fits, and the groups."""

    stream: Stream
    line: str
    text: str
    groups: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """Something that happened to a path.

    `cursor` is where a later watch goes on after it. `resync` means that some events are
    lost, and that what is remembered of the files should be read again.
    """

    kind: ChangeKind
    path: str
    is_directory: bool
    time: float
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalInfo:
    """A terminal of a sandbox; `exit_code` is None while its program runs."""

    id: str
    command: str
    cols: int
    rows: int
    created_at: float
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A bucket, or with `prefix` a folder of one, as a directory of a sandbox.

    It is `active` while the sandbox is awake, and comes back when that wakes again.
    """

    path: str
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    read_only: bool = False
    active: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedPort:
    """A port of a sandbox that may be reached at `url`, by whoever has that.

    It is "active" in the run in which it was exposed, and "stale" in others. One that is
    `private` is for who has a key of the server as well, or a URL that expires.
    """

    port: int
    url: str
    token: str
    name: str | None
    private: bool
    status: Literal["active", "stale"]


@dataclass(slots=True, kw_only=True)
class Extracted:
    """How much of an archive was unpacked."""

    files: int = 0
    directories: int = 0
    links: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """What a tree takes of the disk; a file with several names counts once."""

    bytes: int
    files: int
    directories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GitCheckout:
    """A repository that was cloned. `url` has no credentials in it.

    `branch` is None where a tag was checked out, `commit` where the repository is empty.
    """

    url: str
    target: str
    branch: str | None
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeContextInfo:
    """A place where code runs and leaves its state. Times are seconds since the epoch.

    `timeout` is how long its code may run where nothing else is asked for. One that is
    `default` was made for code that named none.
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
    """Something that code showed, in all formats that it has.

    `data` has those formats by their MIME types that are no field, `chart` what a figure was
    drawn from. The value of the last expression is `main`.
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
        """The names of the fields that it has, and the MIME types in `data`."""
        names = [name for name in self.__slots__ if name not in ("data", "main")]
        return (*(name for name in names if getattr(self, name) is not None), *self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeError:
    """What code ended with. `line` is that of the code itself, where one is known."""

    name: str
    message: str
    traceback: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeExecution:
    """What code left behind. An exception in it is a result, in `error`.

    `count` is the how-manieth of its context it was, None where it did not end by itself.
    Code whose time was up is interrupted, and `timed_out`; where that did not help its
    context was ended, which `context_ended` says. When `truncated`, not all that it wrote or
    showed is here; `stdout_file` and `stderr_file` name whole streams that the sandbox kept.
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
        """True when the code ended without an error."""
        return self.error is None

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return next((one.text for one in self.results if one.main), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A directory of a sandbox as it was, kept until it is deleted or expires.

    `sandbox_id` is the sandbox that it is of, which may be gone by now, and `path` the
    directory. `size` is the bytes that it takes where it is kept, `bytes` those of its `files`.
    `checksum` is the SHA-256 of the archive. Times are seconds since the epoch; `expires_at`
    is None for one that is kept until it is deleted.
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
    """A backup that was restored: where, and how much of it there is."""

    id: str
    path: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupProgress:
    """A backup that is being made, or restored: how many bytes of files it has come to.

    `total` is None where nobody knows yet. One that waits for another has not begun.
    """

    id: str
    operation: Literal["create", "restore"]
    path: str
    bytes: int
    total: int | None
    begun: bool


NetworkVerdict = Literal["forwarded", "answered", "tunnelled", "resolved", "refused", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEvent:
    """One thing that a sandbox asked of the network, and what became of it.

    `cursor` goes on right after it; `at` is seconds since the epoch. `host` is the name that
    was asked for, or the address; what is not HTTP has no method, path and status. `sent` and
    `received` are bytes of the sandbox. `rule` is the entry of the policy that spoke, and
    `handler` the name of what it led to. `reason` says why something was refused or failed.
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
