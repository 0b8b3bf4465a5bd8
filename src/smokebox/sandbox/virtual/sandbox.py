"""The virtual sandbox as its callers see it, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from smokebox.egress.policy import Egress
from smokebox.errors import InvalidOption, SandboxGone
from smokebox.options import check_env, check_timeout
from smokebox.sandbox.api import ExecStream
from smokebox.sandbox.paths import resolve
from smokebox.sandbox.text import decode_file, encode_option
from smokebox.sandbox.virtual.commands import absent_commands, own_commands
from smokebox.sandbox.virtual.machine import engine_commands
from smokebox.sandbox.virtual.shell import MAX_STDIN, Script
from smokebox.types import Capabilities

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from types import TracebackType

    from smokebox.sandbox.network import Network
    from smokebox.sandbox.virtual.settings import Settings
    from smokebox.types import ExecResult, FileInfo, OutputChunk

FileOperation: TypeAlias = Literal[
    "read", "write", "stat", "readdir", "exists", "mkdir", "remove", "glob"
]

# They need a terminal.
_UNUSABLE = frozenset({"vi", "nano"})


class VirtualSandbox(ABC):
    """A bash and its files in memory, made by `virtual()`.

    Scripts run one after another; the others queue. Calls on files never wait for a script.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._closed = False

    @property
    def cwd(self) -> str:
        """The absolute directory where relative paths start, and the shell at first."""
        return self._settings.cwd

    def resolve_path(self, path: str) -> str:
        """The absolute form of `path`, without looking at any file."""
        return resolve(path, self.cwd)

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a script and wait for it.

        Without `cwd` it starts where the last one left the shell. It ends after `timeout`
        seconds or after `Limits.wall_time`, whichever comes first, with exit code 124.
        """
        return await self._exec(self._script(command, cwd, env, stdin), check_timeout(timeout))

    def exec_stream(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecStream:
        """Run a script and give its output as it is written. It starts with the first read."""
        script = self._script(command, cwd, env, stdin)
        return ExecStream(self._stream(script, check_timeout(timeout)))

    async def read_file(self, path: str) -> str:
        """The text of a file. Raises `NotText` where it is not UTF-8."""
        return decode_file(self.resolve_path(path), await self.read_bytes(path))

    async def read_bytes(self, path: str) -> bytes:
        """The bytes of a file."""
        data: bytes = await self._on_files("read", self.resolve_path(path))
        return data

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Make or replace a file, and its parent directories. All or nothing."""
        place = self.resolve_path(path)
        await self._on_files("write", place, encode_option("data", data))

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """What is at `path`. A symlink that leads nowhere is not found, unless not followed."""
        place = self.resolve_path(path)
        info: FileInfo = await self._on_files("stat", place, follow_symlinks=follow_symlinks)
        return info

    async def readdir(self, path: str) -> list[str]:
        """The names in a directory, dotfiles too, sorted."""
        names: list[str] = await self._on_files("readdir", self.resolve_path(path))
        return names

    async def exists(self, path: str) -> bool:
        """Whether `path` leads to something."""
        there: bool = await self._on_files("exists", self.resolve_path(path))
        return there

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory; `recursive` makes parents and accepts one that is there."""
        await self._on_files("mkdir", self.resolve_path(path), recursive=recursive)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory."""
        place = self.resolve_path(path)
        await self._on_files("remove", place, recursive=recursive, force=force)

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Absolute paths that match, sorted."""
        place = self.cwd if cwd is None else self.resolve_path(cwd)
        options = {"cwd": place, "hidden": hidden, "files_only": files_only}
        paths: list[str] = await self._on_files("glob", pattern, **options)
        return paths

    async def capabilities(self) -> Capabilities:
        """What this sandbox can and cannot do."""
        settings, limits = self._settings, self._settings.limits
        network = settings.network
        commands = engine_commands(settings.python) | own_commands(network).keys()
        commands -= absent_commands(network) | _UNUSABLE
        return Capabilities(
            sandbox="virtual",
            isolation=self._isolation,
            network=_reach(network),
            persistence="memory",
            shell_state=settings.shell,
            commands=commands | settings.commands.keys(),
            processes=False,
            refused_in_names="\n",
            max_file_size=limits.file_size,
            max_output=limits.output,
        )

    @abstractmethod
    async def snapshot(self) -> bytes:
        """Files and shell as bytes, for `restore`. What is mounted is no part of it."""

    @abstractmethod
    async def restore(self, snapshot: bytes) -> None:
        """Become what the snapshot was taken of. All or nothing."""

    @abstractmethod
    async def fork(self) -> VirtualSandbox:
        """Another sandbox with the same options, files and shell. Mounts are shared."""

    @abstractmethod
    async def aclose(self) -> None:
        """End what runs and let go of everything. Safe to repeat."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    @abstractmethod
    def _isolation(self) -> Literal["interpreter", "process"]: ...

    @abstractmethod
    async def _exec(self, script: Script, timeout: float | None) -> ExecResult: ...

    @abstractmethod
    def _stream(
        self, script: Script, timeout: float | None
    ) -> AsyncGenerator[OutputChunk | ExecResult, None]: ...

    @abstractmethod
    async def _on_files(
        self, operation: FileOperation, *arguments: object, **options: object
    ) -> Any: ...

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxGone(
                "the sandbox is closed, and its files with it.",
                hint="Make another with virtual(), or keep a snapshot() before closing.",
                reason="closed",
            )

    def _script(
        self,
        command: str,
        cwd: str | None,
        env: Mapping[str, str] | None,
        stdin: str | bytes | None,
    ) -> Script:
        _check_text("command", command)
        given = check_env(env) if env else {}
        for name, value in given.items():
            _check_text(f"the environment variable {name}", value)
        return Script(
            command=command,
            cwd=None if cwd is None else self.resolve_path(cwd),
            env=given,
            stdin=None if stdin is None else _checked_stdin(stdin),
        )


def _reach(network: Network | Egress | None) -> Literal["off", "guarded", "allowlist", "open"]:
    if network is None:
        return "off"
    if isinstance(network, Egress):
        return "off" if network.closed else "guarded"
    return "open" if network.is_open else "allowlist"


def _check_text(what: str, text: str) -> None:
    good = isinstance(text, str) and "\0" not in text
    if good and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            good = False
    if not good:
        raise InvalidOption(
            f"{what} must be a str that UTF-8 can hold, without NUL.",
            hint="Pass binary data through stdin= or a file.",
            option="command" if what == "command" else "env",
        )


def _checked_stdin(stdin: str | bytes) -> bytes:
    data = encode_option("stdin", stdin)
    if len(data) > MAX_STDIN:
        raise InvalidOption(
            f"stdin has {len(data)} bytes; the shell takes {MAX_STDIN}.",
            hint="Write it to files with write_file() and read those.",
            option="stdin",
        )
    return data
