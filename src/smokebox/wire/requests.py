"""Bodies and queries of requests to the API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Command = str | list[str]
Limits = str | dict[str, Any]
Positive = Annotated[float, msgspec.Meta(gt=0)]
# Seconds since the epoch, in the range that filesystems can store.
Moment = Annotated[float, msgspec.Meta(ge=-(2**40), le=2**40)]


class Body(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all bodies: fields by name; unknown ones are refused."""


class Query(Body):
    """Base of all queries."""


class Settings(Body):
    """Settings of a sandbox; fields left out keep their value, or get their default.

    `egress` is the body of `PUT /sandboxes/{id}/egress`, or a list of allowed hosts.
    """

    image: str | None = None
    tier: str | None = None
    limits: Limits | None = None
    env: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    sleep_after: float | str | None = None
    keep_alive: bool | None = None
    lifetime: float | str | None = None
    ephemeral: bool | None = None
    cwd: str | None = None
    user: str | None = None
    egress: dict[str, Any] | list[str] | None = None
    snapshot: str | None = None
    checkpoints: bool | float | str | dict[str, Any] | None = None


class CreateSandbox(Settings):
    """A sandbox to create. Without `id` it gets a random one."""

    id: str | None = None


class ListSandboxes(Query):
    """Filters of a list of sandboxes; `label` is NAME=VALUE, and every label must match."""

    status: Literal["idle", "active"] | None = None
    prefix: str = ""
    label: list[str] = []


class Exec(Body):
    """A command: text for bash, or a list of arguments. Set at most one of the two stdins."""

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
    """A session to create: a shell that keeps its state between commands."""

    id: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None


class SetEnv(Body):
    """Variables to export in a session; null unsets one."""

    env: dict[str, str | None]


class StartProcess(Body):
    """A process to start in the background."""

    command: Command
    id: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    limits: dict[str, Any] | None = None
    stdin: bool = False
    timeout: float | None = None


class Kill(Body):
    """A signal to send. By default SIGTERM, then SIGKILL after `grace` seconds."""

    signal: str | int | None = None
    grace: float | None = None


class Wait(Query):
    """Seconds to wait at most."""

    timeout: float | None = None


class WaitForLog(Body):
    """Text to wait for in a log; with `regex`, a regular expression with these flags."""

    pattern: str
    regex: bool = False
    flags: int = 0
    timeout: float | None = None


class WaitForPort(Body):
    """A port to wait for until it responds."""

    port: int
    mode: Literal["http", "tcp"] = "http"
    path: str = "/"
    status: int | tuple[int, int] = (200, 399)
    timeout: float | None = None
    interval: float = 0.1


class MountBucket(Body):
    """A bucket to mount as a directory; without credentials, one that the server offers."""

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
    """A mount to remove, with `force` even if it is in use."""

    path: str
    force: bool = False


class FollowLogs(Query):
    """The position at which a log starts; the header Last-Event-ID overrides `cursor`."""

    cursor: str | None = None
    replay: bool = True
    follow: bool = True


class Path(Query):
    """A path in the sandbox."""

    path: str


class Stat(Path):
    """A path. With `follow_symlinks`, a symlink there is followed."""

    follow_symlinks: bool = True


class ListFiles(Path):
    """A directory to list."""

    recursive: bool = False
    hidden: bool = False


class Remove(Path):
    """A path to remove."""

    recursive: bool = False
    force: bool = False


class WriteFile(Path):
    """A file to write; with `append`, at its end."""

    append: bool = False


class MakeDirectory(Body):
    """A directory to create."""

    path: str
    recursive: bool = False


class Rename(Body):
    """A path to move to another."""

    source: str
    target: str


class Transfer(Rename):
    """A path to copy to another. A directory needs `recursive`."""

    recursive: bool = False


class Symlink(Body):
    """A symlink at `path` that points to `target`."""

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
    """A file, and its modification time, by default the current time."""

    path: str
    mtime: Moment | None = None


class Glob(Query):
    """A pattern for paths."""

    pattern: str
    cwd: str | None = None
    hidden: bool = False
    files_only: bool = False


class ReadArchive(Path):
    """A path to pack; `exclude` may be repeated."""

    compress: bool = False
    exclude: list[str] = []


class WriteArchive(Path):
    """A directory to unpack into."""

    keep_owner: bool = False


class Watch(Path):
    """A path to watch; the header Last-Event-ID overrides `cursor`."""

    recursive: bool = True
    include: list[str] = []
    exclude: list[str] | None = None
    cursor: str | None = None


class CheckOutRepository(Body):
    """A repository to clone, from an http or https URL."""

    url: str
    target: str | None = None
    branch: str | None = None
    depth: int | None = None
    timeout: float | None = None
    username: str | None = None
    password: str | None = None


class CreateCodeContext(Body):
    """A code context to create; `timeout` is the default for each run."""

    id: str | None = None
    language: str = "python"
    cwd: str | None = None
    env: dict[str, str] | None = None
    timeout: float | None = None


class RunCode(Body):
    """Code to run in a context, or in the default one of a language (Python)."""

    code: str
    context: str | None = None
    language: str | None = None
    env: dict[str, str] | None = None
    timeout: float | None = None


class CreateBackup(Body):
    """A directory to back up; `ttl` is seconds, and `compression` a zstd level, 1 to 19.

    Without a `ttl` the backup is kept until it is deleted. With `freeze` the processes of the
    sandbox are paused while it is made.
    """

    path: str = "/workspace"
    name: str | None = None
    ttl: Positive | None = None
    excludes: list[str] = []
    gitignore: bool = False
    compression: int | None = None
    freeze: bool = False
    timeout: float | None = None


class CreateSnapshot(Body):
    """A snapshot of all files of a sandbox. `labels` are added to those of the sandbox.

    Then earlier ones without a name and of the same origin are removed, but the last `keep_last`
    and those that are not older than `keep_for`, seconds or text such as "7d". With `if_changed`
    the response is the latest snapshot of that origin if it shows the present state.
    """

    name: str | None = None
    description: str | None = None
    labels: dict[str, str] = {}
    keep_last: int | None = None
    keep_for: float | str | None = None
    origin: Literal["user", "turn"] = "user"
    if_changed: bool = False


class PruneSnapshots(Query):
    """The snapshots of a sandbox to keep, as in `CreateSnapshot`."""

    keep_last: int | None = None
    keep_for: str | None = None


class ImportSnapshot(Body):
    """The id of a snapshot in the bucket, and its name, by default the one that it had."""

    id: str
    name: str | None = None


class RestoreSnapshot(Body):
    """A return to a snapshot, after one of the present state with the name `save_as`."""

    save_as: str | None = None


class Fork(Body):
    """Sandboxes to create from the present state of one; `ids` has one for each."""

    count: int = 1
    ids: list[str] | None = None
    memory: bool = False


class ListSnapshots(Query):
    """Filters of a list of snapshots: one sandbox, or a prefix of sandbox ids."""

    sandbox: str | None = None
    prefix: str = ""


class DiffToPresent(Query):
    """A comparison with the present state; `texts` adds the changed lines of text files."""

    texts: bool = False


class DiffToSnapshot(Query):
    """A comparison with a later snapshot; `texts` adds the changed lines of text files."""

    to: str | None = None
    texts: bool = False


class RestoreBackup(Body):
    """The path to restore a backup to, by default the one it was made of."""

    path: str | None = None
    timeout: float | None = None


class ListBackups(Query):
    """Filters of a list of backups: one sandbox, or a prefix of sandbox ids."""

    sandbox: str | None = None
    prefix: str = ""


class CreateTerminal(Body):
    """A terminal to open, by default with an interactive shell."""

    id: str | None = None
    command: Command | None = None
    cols: int = 80
    rows: int = 24
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    session: str | None = None


class OpenTerminal(Query):
    """A terminal for one WebSocket; `command` is a program without arguments."""

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
    """An API key to create, for the sandboxes whose ids begin with `prefix`, or for all.

    `profile` names its ceilings. `scopes` are `sandboxes:read`, `sandboxes:write` and the same of
    `agents`, `runs` and `approvals`; all by default.
    """

    name: str
    prefix: str = ""
    admin: bool = False
    profile: str | None = None
    scopes: list[str] | None = None
    overlap: bool = False
    expires_in: Positive | None = None


class Shutdown(Body):
    """Put the sandboxes to sleep, or keep them running for the next server."""

    sandboxes: Literal["sleep", "keep"] = "sleep"


class RegistryCredentials(Body):
    """Credentials for one container registry: a password, an identity token or a bearer token.

    They are used for one request and never stored.
    """

    registry: str
    username: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""

    def __repr__(self) -> str:
        return f"RegistryCredentials({self.registry!r})"


class PullImage(Body):
    """An image to pull. `missing` does not contact the registry if the image can be used already.

    `share` lets every key use it, and needs an administrator's key.
    """

    image: str
    policy: Literal["missing", "always"] = "always"
    credentials: RegistryCredentials | None = None
    share: bool = False
    timeout: Positive | None = None


class LoadImage(Body):
    """An image of the client's own files: an OCI layout, or what `docker save` wrote.

    `image` is its place there, for errors. `documents` are the index, manifests and configurations
    by their names in the layout, as bytes in Base64, and `contents` the SHA-256 digests of the
    layers by theirs. `reference` selects one of several images. By default it gets the `names` that
    it has there. `share` lets every key use it, and
    needs an administrator's key.
    """

    image: str
    documents: dict[str, bytes]
    contents: dict[str, str] = {}
    reference: str | None = None
    names: list[str] | None = None
    share: bool = False


class PushImage(Body):
    """An image to push, to a reference that is by default its name."""

    image: str
    target: str | None = None
    credentials: RegistryCredentials | None = None
    timeout: Positive | None = None


class ImageName(Query):
    """The name or digest of an image."""

    image: str


class PruneImages(Body):
    """Keep images that were added or used within this number of seconds."""

    unused_for: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class ExposePort(Body):
    """A port to expose; fields left out keep their value, or get their default."""

    port: int
    name: str | None = None
    token: str | None = None
    private: bool | None = None


class MakePreviewUrl(Body):
    """Seconds until the URL expires; null for as long as the port is exposed."""

    expires_in: Positive | None = None


class CheckToken(Body):
    """A token to check."""

    token: str


class ChangeEgress(Body):
    """Changes at run time, which override the settings and apply all at once.

    `allow` and `deny` add hosts; `remove_allowed` and `remove_denied` remove the entries of
    exactly these names. Null removes a handler, and null for `internet` removes its override.
    """

    allow: list[str] = []
    deny: list[str] = []
    remove_allowed: list[str] = []
    remove_denied: list[str] = []
    outbound_by_host: dict[str, str | None] = {}
    outbound: str | UnsetType | None = UNSET
    internet: bool | UnsetType | None = UNSET


class NetworkLog(Query):
    """A page of the audit log: the events after a cursor, oldest first."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class FollowNetworkLog(Query):
    """The position at which to follow the audit log; without a cursor, only later events.

    The header Last-Event-ID overrides `cursor`.
    """

    cursor: Annotated[int, msgspec.Meta(ge=0)] | None = None
