"""The bucket sandbox: a virtual shell whose working directory is an object store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from smokebox.errors import MissingDependency
from smokebox.options import strict_options
from smokebox.sandbox.access import Access
from smokebox.sandbox.virtual import threads, virtual
from smokebox.sandbox.virtual.settings import make_settings
from smokebox.sandbox.virtual.threaded import ThreadSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import ObjectStore

    from smokebox.sandbox.filesystems.bucket import BucketFilesystem
    from smokebox.sandbox.virtual import Limits, VirtualSandbox
    from smokebox.sandbox.virtual.command import Command
    from smokebox.sandbox.virtual.machine import Machine
    from smokebox.sandbox.virtual.settings import NetworkOption, Settings, ShellState
    from smokebox.types import Capabilities


class BucketOptions(TypedDict, total=False):
    """The options of `bucket()`."""

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
    limits: Limits | Mapping[str, float] | None
    network: NetworkOption
    commands: Mapping[str, Command] | None
    python: bool
    shell: ShellState


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketBinding:
    """A bucket that a project names, for `bucket()` and `get_virtual_sandbox()`."""

    name: str
    target: str
    options: BucketOptions = field(default_factory=BucketOptions, repr=False)

    @property
    def prefix(self) -> str:
        """The folder that it is, empty for all of the bucket."""
        return self.options.get("prefix", "").strip("/")

    @property
    def read_only(self) -> bool:
        """Whether nothing in it is to be changed."""
        return self.options.get("read_only", False)

    @property
    def access(self) -> Access:
        """How it is reached and opened, where it speaks S3."""
        known = Access.__dataclass_fields__
        given: dict[str, Any] = {name: one for name, one in self.options.items() if name in known}
        return Access(**given)


class BucketSandbox(ThreadSandbox):
    """A bash in memory over an object store, made by `bucket()`.

    Each command and each call on files sees the bucket as it is when it starts.
    """

    def __init__(
        self, settings: Settings, filesystem: BucketFilesystem, *, machine: Machine | None = None
    ) -> None:
        super().__init__(settings, machine=machine)
        self._bucket = filesystem

    async def capabilities(self) -> Capabilities:
        """What this sandbox can and cannot do, in its working directory."""
        return replace(
            await super().capabilities(),
            sandbox="bucket",
            persistence="bucket",
            read_only=self._bucket.read_only,
            symlinks=False,
            refused_in_names=self._bucket.refused_in_names,
            file_modes=False,
            max_file_size=None,
        )

    async def fork(self) -> BucketSandbox:
        """Another shell over the same bucket, with the same files outside of it."""
        forked = await super().fork()
        return BucketSandbox(self._settings, self._bucket, machine=forked._made)

    async def aclose(self) -> None:
        """End what runs and let go of everything; the bucket keeps what is in it."""
        await super().aclose()
        self._bucket.close()

    async def check(self) -> None:
        """See that the bucket is there and opens; the first command does so too."""
        await threads.run(self._bucket.refresh)


@strict_options
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
    limits: Limits | Mapping[str, float] | None = None,
    network: NetworkOption = None,
    commands: Mapping[str, Command] | None = None,
    python: bool = False,
    shell: ShellState = "persistent",
) -> BucketSandbox:
    """A sandbox whose files at `cwd` are the objects of a bucket. Nothing is asked of it yet.

    `target` is a URL (`s3://name/folder`, `gs://`, `az://`, `file:///folder`, `memory:///`),
    the name of a bucket at `endpoint`, or an obstore store. Credentials are those given
    here, or else those of this process's environment (`AWS_ACCESS_KEY_ID` and the rest);
    neither is visible inside. `prefix` is the folder that is shown. `cache_bytes` bounds
    what is kept of bodies, and `prefetch` how many small objects are fetched ahead of a
    command that reads them in order. The other options are those of `virtual()`.
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
        place=opened.place,
    )
    settings = make_settings(
        files=None,
        mounts={cwd: filesystem},
        cwd=cwd,
        env=env,
        limits=limits,
        network=network,
        commands=commands,
        python=python,
        shell=shell,
        user="user",
    )
    return BucketSandbox(settings, filesystem)


async def get_virtual_sandbox(
    target: str | ObjectStore | BucketBinding | None = None, **options: Unpack[BucketOptions]
) -> VirtualSandbox:
    """A sandbox over a bucket, once it is seen to be there. Takes what `bucket()` takes.

    `env.KNOWLEDGE_BASE` is one that the project names, with its options. Without a bucket
    its files are in memory, and are gone with it.
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
