"""What clients ask for: the bodies and the queries of requests to the API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Command = str | list[str]
Limits = str | dict[str, Any]
Positive = Annotated[float, msgspec.Meta(gt=0)]
# Seconds since the epoch, as far as any filesystem counts.
Moment = Annotated[float, msgspec.Meta(ge=-(2**40), le=2**40)]


class Body(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What all bodies are: fields by name, and none that nobody knows."""


class Query(Body):
    """What all queries are."""


class Egress(Body):
    """What a sandbox may reach; what is left out stays, and null is the default again.

    Hosts are names, addresses or globs. A handler is `package.module:name` of one that the
    server imports, for keys of administrators, or `@client` for one that a client runs.
    """

    internet: bool | UnsetType | None = UNSET
    allowed_hosts: list[str] | UnsetType | None = UNSET
    denied_hosts: list[str] | UnsetType | None = UNSET
    outbound_by_host: dict[str, str] | UnsetType | None = UNSET
    outbound: str | UnsetType | None = UNSET
    tcp: list[str] | UnsetType | None = UNSET
    pass_through: list[str] | UnsetType | None = UNSET
    hosts: dict[str, str] | UnsetType | None = UNSET
    scrub: bool | UnsetType | None = UNSET
    max_requests: int | UnsetType | None = UNSET
    max_bytes: int | UnsetType | None = UNSET
    requests_per_second: float | UnsetType | None = UNSET


class Settings(Egress):
    """How a sandbox is to be; what is left out stays, or has its default."""

    image: str | None = None
    tier: str | None = None
    limits: Limits | None = None
    env: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    sleep_after: float | str | None = None
    keep_alive: bool | None = None
    ephemeral: bool | None = None
    cwd: str | None = None
    user: str | None = None


class CreateSandbox(Settings):
    """A sandbox to be made, under a random id unless one is given."""

    id: str | None = None


class ListSandboxes(Query):
    """Which sandboxes to list; `label` is NAME=VALUE, and all that are given must hold."""

    status: Literal["idle", "active"] | None = None
    prefix: str = ""
    label: list[str] = []


class Exec(Body):
    """A command: text for bash, or words as they are. Of the two stdins one at most."""

    command: Command
    cwd: str | None = None
    env: dict[str, str] | None = None
    timeout: float | None = None
    stdin: str | None = None
    stdin_base64: bytes | None = None
    user: str | None = None
    limits: dict[str, Any] | None = None
    session: str | None = None


class CreateSession(Body):
    """A shell that remembers."""

    id: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None


class SetEnv(Body):
    """Variables to export in a session; null unsets one."""

    env: dict[str, str | None]


class StartProcess(Body):
    """A command that runs on by itself."""

    command: Command
    id: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    limits: dict[str, Any] | None = None
    stdin: bool = False
    timeout: float | None = None


class Kill(Body):
    """How to end a process: by default SIGTERM, then SIGKILL after `grace` seconds."""

    signal: str | int | None = None
    grace: float | None = None


class Wait(Query):
    """How long to wait, in seconds."""

    timeout: float | None = None


class WaitForLog(Body):
    """Text, or with `regex` a regular expression with these flags, to wait for in a log."""

    pattern: str
    regex: bool = False
    flags: int = 0
    timeout: float | None = None


class WaitForPort(Body):
    """A port that is to answer."""

    port: int
    mode: Literal["http", "tcp"] = "http"
    path: str = "/"
    status: int | tuple[int, int] = (200, 399)
    timeout: float | None = None
    interval: float = 0.1


class MountBucket(Body):
    """A bucket that is to be a directory; without credentials, one that the server offers."""

    bucket: str
    path: str
    prefix: str = ""
    read_only: bool = False
    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    allow_http: bool | None = None
    anonymous: bool = False


class Unmount(Query):
    """A mount that is to end, with `force` although somebody uses it."""

    path: str
    force: bool = False


class FollowLogs(Query):
    """From where on a log is given; the header Last-Event-ID is a `cursor` too."""

    cursor: str | None = None
    replay: bool = True
    follow: bool = True


class Path(Query):
    """A path in the sandbox."""

    path: str


class Stat(Path):
    """A path, and whether a symlink there is followed."""

    follow_symlinks: bool = True


class ListFiles(Path):
    """A directory to list."""

    recursive: bool = False
    hidden: bool = False


class Remove(Path):
    """What to remove."""

    recursive: bool = False
    force: bool = False


class WriteFile(Path):
    """Where to write; with `append`, to the end of what is there."""

    append: bool = False


class MakeDirectory(Body):
    """A directory to make."""

    path: str
    recursive: bool = False


class Rename(Body):
    """From one path to another."""

    source: str
    target: str


class Transfer(Rename):
    """As `Rename`, for what may be a directory with `recursive` only."""

    recursive: bool = False


class Symlink(Body):
    """A link at `path` that leads to `target`."""

    target: str
    path: str


class SetMode(Body):
    """Permission bits, as a number."""

    path: str
    mode: int


class SetOwner(Body):
    """A user and a group of the sandbox, by number."""

    path: str
    uid: int
    gid: int | None = None


class Touch(Body):
    """A time of the last change, by default this moment."""

    path: str
    mtime: Moment | None = None


class Glob(Query):
    """A pattern for paths."""

    pattern: str
    cwd: str | None = None
    hidden: bool = False
    files_only: bool = False


class ReadArchive(Path):
    """A directory to pack; `exclude` may be repeated."""

    compress: bool = False
    exclude: list[str] = []


class WriteArchive(Path):
    """A directory to unpack into."""

    keep_owner: bool = False


class Watch(Path):
    """What to watch; the header Last-Event-ID is a `cursor` too."""

    recursive: bool = True
    include: list[str] = []
    exclude: list[str] | None = None
    cursor: str | None = None


class GitCheckout(Body):
    """A repository to clone, by http or https."""

    url: str
    target: str | None = None
    branch: str | None = None
    depth: int | None = None
    timeout: float | None = None
    username: str | None = None
    password: str | None = None


class CreateCodeContext(Body):
    """A context for code; `timeout` is for each piece of it that names no other."""

    id: str | None = None
    language: str = "python"
    cwd: str | None = None
    env: dict[str, str] | None = None
    timeout: float | None = None


class RunCode(Body):
    """Code, in the context of that id, or in the default one of a language (Python)."""

    code: str
    context: str | None = None
    language: str | None = None
    env: dict[str, str] | None = None
    timeout: float | None = None


class CreateBackup(Body):
    """A directory to keep; `ttl` is seconds, and `compression` a level of zstd, 1 to 19.

    Without a `ttl` it is kept until it is deleted. With `freeze` the processes of the sandbox
    stand still meanwhile.
    """

    path: str = "/workspace"
    name: str | None = None
    ttl: Positive | None = None
    excludes: list[str] = []
    gitignore: bool = False
    compression: int | None = None
    freeze: bool = False
    timeout: float | None = None


class RestoreBackup(Body):
    """Where a backup is to be restored; by default where it was made."""

    path: str | None = None
    timeout: float | None = None


class ListBackups(Query):
    """Backups of one sandbox, or of those whose ids begin with a prefix."""

    sandbox: str | None = None
    prefix: str = ""


class CreateTerminal(Body):
    """A terminal, by default with an interactive shell."""

    id: str | None = None
    command: Command | None = None
    cols: int = 80
    rows: int = 24
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    session: str | None = None


class OpenTerminal(Query):
    """A terminal for one WebSocket; `command` is one word."""

    command: str | None = None
    cols: int = 80
    rows: int = 24
    cwd: str | None = None
    session: str | None = None


class ResizeTerminal(Body):
    """The size of a terminal in characters."""

    cols: int
    rows: int


class CreateKey(Body):
    """An API key: for sandboxes whose ids begin with a prefix, or for everything."""

    name: str
    prefix: str = ""
    admin: bool = False
    expires_in: Positive | None = None


class Shutdown(Body):
    """What becomes of the sandboxes of a server that ends."""

    sandboxes: Literal["sleep", "keep"] = "sleep"


class ExposePort(Body):
    """A port to be seen from outside; what is left out stays, or has its default."""

    port: int
    name: str | None = None
    token: str | None = None
    private: bool | None = None


class MakePreviewUrl(Body):
    """For how many seconds a URL is to be good; None for as long as the port is exposed."""

    expires_in: Positive | None = None


class CheckToken(Body):
    """A token to be tried."""

    token: str


class ChangeEgress(Body):
    """Changes at run time, which go before the settings and are made all at once.

    `allow` and `deny` open and close hosts, `remove_allowed` and `remove_denied` end entries
    of those very names. A handler that is null is taken away, as is what `internet` says.
    """

    allow: list[str] = []
    deny: list[str] = []
    remove_allowed: list[str] = []
    remove_denied: list[str] = []
    outbound_by_host: dict[str, str | None] = {}
    outbound: str | UnsetType | None = UNSET
    internet: bool | UnsetType | None = UNSET


class NetworkLog(Query):
    """Of the audit log what came after a cursor, the oldest first."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class FollowNetworkLog(Query):
    """From where on the audit log is followed; without a cursor, from here on.

    The header Last-Event-ID is a `cursor` too.
    """

    cursor: Annotated[int, msgspec.Meta(ge=0)] | None = None
