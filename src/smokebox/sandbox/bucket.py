"""The bucket sandbox: a virtual shell whose working directory is an object store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from smokebox.egress.policy import moved_options
from smokebox.errors import MissingDependency
from smokebox.options import strict_options
from smokebox.sandbox.access import Access
from smokebox.sandbox.virtual import threads, virtual
from smokebox.sandbox.virtual.settings import make_settings
from smokebox.sandbox.virtual.thread_sandbox import ThreadSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import ObjectStore

    from smokebox.egress.policy import EgressOption
    from smokebox.sandbox.filesystems.bucket import BucketFilesystem
    from smokebox.sandbox.virtual import VirtualLimits, VirtualSandbox
    from smokebox.sandbox.virtual.command import Command
    from smokebox.sandbox.virtual.settings import ShellState, VirtualSettings
    from smokebox.sandbox.virtual.state import SandboxState
    from smokebox.types import Capabilities


class BucketOptions(TypedDict, total=False):
    """Options of `bucket()`."""

    prefix: str
    read_only: bool
    endpoint: str | None
    region: str | None
    access_key: str | None
    secret_key: str | None
    session_token: str | None
    allow_http: bool | None
    anonymous: bool
    cache_bytes: int
    prefetch: int
    cwd: str
    env: Mapping[str, str] | None
    limits: VirtualLimits | Mapping[str, float] | None
    egress: EgressOption | None
    commands: Mapping[str, Command] | None
    python: bool
    shell: ShellState


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketBinding:
    """Bucket that a project names, for `bucket()` and `get_virtual_sandbox()`."""

    name: str
    target: str
    options: BucketOptions = field(default_factory=BucketOptions, repr=False)

    @property
    def prefix(self) -> str:
        """Folder in the bucket; empty for the whole bucket."""
        return self.options.get("prefix", "").strip("/")

    @property
    def read_only(self) -> bool:
        """True if writes are refused."""
        return self.options.get("read_only", False)

    @property
    def access(self) -> Access:
        """Endpoint and credentials, for S3."""
        known = Access.__dataclass_fields__
        options: dict[str, Any] = {
            name: value for name, value in self.options.items() if name in known
        }
        return Access(**options)


class BucketSandbox(ThreadSandbox):
    """Bash in memory over an object store, created by `bucket()`.

    Each command and each file call sees the bucket as it is when it starts.
    """

    def __init__(
        self,
        settings: VirtualSettings,
        filesystem: BucketFilesystem,
        *,
        state: SandboxState | None = None,
    ) -> None:
        super().__init__(settings, state=state)
        self._bucket = filesystem

    async def capabilities(self) -> Capabilities:
        """Return the features and limits of this sandbox in its working directory."""
        return replace(
            await super().capabilities(),
            sandbox="bucket",
            persistence="bucket",
            read_only=self._bucket.read_only,
            symlinks=False,
            refused_in_names=self._bucket.refused_in_names,
            file_modes=False,
            max_file_size=None,
            # The objects of the bucket are not part of one.
            snapshots=False,
        )

    async def _fork(self) -> BucketSandbox:
        # The bucket is shared, and the files outside of it are copied.
        forked = await super()._fork()
        return BucketSandbox(self._settings, self._bucket, state=forked._state)

    async def aclose(self) -> None:
        """Stop running scripts and release all resources; the bucket is unchanged."""
        await super().aclose()
        self._bucket.close()

    async def check(self) -> None:
        """Check that the bucket exists and is accessible, as the first command does too."""
        await threads.run(self._bucket.refresh)


@strict_options(moved_options())
def bucket(
    target: str | ObjectStore,
    *,
    prefix: str = "",
    read_only: bool = False,
    endpoint: str | None = None,
    region: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    allow_http: bool | None = None,
    anonymous: bool = False,
    cache_bytes: int = 64 * 1024 * 1024,
    prefetch: int = 32,
    cwd: str = "/workspace",
    env: Mapping[str, str] | None = None,
    limits: VirtualLimits | Mapping[str, float] | None = None,
    egress: EgressOption | None = None,
    commands: Mapping[str, Command] | None = None,
    python: bool = False,
    shell: ShellState = "persistent",
) -> BucketSandbox:
    """Create a sandbox whose files at `cwd` are the objects of a bucket. Sends no request yet.

    `target` is a URL (`s3://name/folder`, `gs://`, `az://`, `file:///folder`, `memory:///`), the
    name of a bucket at `endpoint`, or an obstore store. Credentials are those passed here, or else
    those of this process's environment (`AWS_ACCESS_KEY_ID` and the rest); neither is visible
    inside.

    Args:
        prefix: Folder of the bucket to show.
        cache_bytes: Size of the cache of objects.
        prefetch: Number of small objects fetched ahead of a command that reads them in order.

    The other options are those of `virtual()`.
    """
    _require_obstore()
    from smokebox.sandbox.filesystems.bucket import BucketFilesystem
    from smokebox.sandbox.stores import open_target

    access = Access(
        endpoint=endpoint,
        region=region,
        access_key=access_key,
        secret_key=secret_key,
        session_token=session_token,
        allow_http=allow_http,
        anonymous=anonymous,
    )
    opened = open_target(target, prefix, access)
    filesystem = BucketFilesystem(
        opened.store,
        opened.prefix,
        read_only=read_only,
        cache_bytes=cache_bytes,
        prefetch=prefetch,
        label=opened.label,
    )
    settings = make_settings(
        files=None,
        mounts={cwd: filesystem},
        cwd=cwd,
        env=env,
        limits=limits,
        egress=egress,
        commands=commands,
        python=python,
        shell=shell,
        user="user",
    )
    return BucketSandbox(settings, filesystem)


async def get_virtual_sandbox(
    target: str | ObjectStore | BucketBinding | None = None, **options: Unpack[BucketOptions]
) -> VirtualSandbox:
    """Create a sandbox over a bucket, with the options of `bucket()`, and check the bucket.

    `env.KNOWLEDGE_BASE` is a bucket that the project names, with its options. Without a bucket,
    files are in memory and are lost with the sandbox.
    """
    if isinstance(target, BucketBinding):
        options = {**target.options, **options}
        target = target.target
    if target is None and not options:
        return virtual()
    sandbox = bucket("memory:///" if target is None else target, **options)
    await sandbox.check()
    return sandbox


def _require_obstore() -> None:
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "buckets need obstore, which is not installed.",
            hint="Run: pip install 'smokebox[bucket]'",
            package="obstore",
            extra="bucket",
        ) from error
