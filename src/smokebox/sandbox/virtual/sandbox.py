"""Public interface of the virtual sandbox, in a thread or a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from smokebox.errors import InvalidOption, SandboxGone
from smokebox.foundation.paths import check_path, resolve
from smokebox.foundation.text import decode_file, encode_option
from smokebox.options import check_env, check_timeout
from smokebox.runtime.stream import ExecStream
from smokebox.sandbox.virtual.commands import absent_commands, own_commands
from smokebox.sandbox.virtual.shell import MAX_STDIN, Script
from smokebox.sandbox.virtual.state import engine_commands
from smokebox.types import Capabilities

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from types import TracebackType

    from smokebox.sandbox.virtual.settings import VirtualSettings
    from smokebox.types import ExecResult, FileInfo, OutputChunk

FileOperation: TypeAlias = Literal[
    "read", "write", "stat", "readdir", "exists", "mkdir", "remove", "glob"
]

# Commands that need a terminal.
_UNUSABLE = frozenset({"vi", "nano"})


class VirtualSandbox(ABC):
    """Bash and its files in memory, created by `virtual()`.

    Scripts run one at a time, in order. File calls never wait for a script.
    """

    def __init__(self, settings: VirtualSettings) -> None:
        self._settings = settings
        self._closed = False

    @property
    def cwd(self) -> str:
        """Absolute directory for relative paths, and the shell's initial directory."""
        return self._settings.cwd

    def resolve_path(self, path: str) -> str:
        """Return the absolute form of `path`, without accessing any file."""
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
        seconds or after `VirtualLimits.wall_time`, whichever comes first, with exit code 124.
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
        """Run a script and stream its output. It starts with the first read."""
        script = self._script(command, cwd, env, stdin)
        return ExecStream(self._stream(script, check_timeout(timeout)))

    async def read_file(self, path: str) -> str:
        """Return the text of a file. Raises `NotText` if it is not UTF-8."""
        return decode_file(self.resolve_path(path), await self.read_bytes(path))

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file."""
        data: bytes = await self._call_files("read", self.resolve_path(path))
        return data

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Create or replace a file and its parent directories atomically."""
        absolute = self.resolve_path(path)
        await self._call_files("write", absolute, encode_option("data", data))

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return the metadata of `path`. A dangling symlink is found only if not followed."""
        absolute = self.resolve_path(path)
        info: FileInfo = await self._call_files("stat", absolute, follow_symlinks=follow_symlinks)
        return info

    async def readdir(self, path: str) -> list[str]:
        """Return the sorted names in a directory, including dotfiles."""
        names: list[str] = await self._call_files("readdir", self.resolve_path(path))
        return names

    async def exists(self, path: str) -> bool:
        """Return whether `path` exists, following symlinks."""
        found: bool = await self._call_files("exists", self.resolve_path(path))
        return found

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Create a directory; `recursive` creates parents and accepts an existing one."""
        await self._call_files("mkdir", self.resolve_path(path), recursive=recursive)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory."""
        absolute = self.resolve_path(path)
        await self._call_files("remove", absolute, recursive=recursive, force=force)

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Return the sorted absolute paths that match."""
        absolute = self.cwd if cwd is None else self.resolve_path(cwd)
        options = {"cwd": absolute, "hidden": hidden, "files_only": files_only}
        paths: list[str] = await self._call_files("glob", check_path(pattern), **options)
        return paths

    async def capabilities(self) -> Capabilities:
        """Return the features and limits of this sandbox."""
        settings, limits = self._settings, self._settings.limits
        egress = settings.egress
        commands = engine_commands(settings.python) | own_commands(egress).keys()
        commands -= absent_commands(egress) | _UNUSABLE
        return Capabilities(
            sandbox="virtual",
            isolation=self._isolation,
            network="off" if egress is None or egress.closed else "guarded",
            persistence="memory",
            shell_state=settings.shell,
            commands=commands | settings.commands.keys(),
            processes=False,
            refused_in_names="\n",
            max_file_size=limits.file_size,
            max_output=limits.output,
            snapshots=True,
        )

    @abstractmethod
    async def snapshot(self) -> bytes:
        """Return files and shell state as bytes for `restore`. Mounts are not included."""

    @abstractmethod
    async def restore(self, snapshot: bytes) -> None:
        """Replace files and shell state with those of a snapshot, all or nothing."""

    async def fork(self, count: int = 1) -> list[VirtualSandbox]:
        """Create sandboxes with the same options, files and shell state. Mounts are shared.

        Args:
            count: Number of forks.
        """
        return [await self._fork() for _ in range(count)]

    @abstractmethod
    async def _fork(self) -> VirtualSandbox: ...

    @abstractmethod
    async def aclose(self) -> None:
        """Stop running scripts and release all resources. Safe to repeat."""

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
    async def _call_files(
        self, operation: FileOperation, *arguments: object, **options: object
    ) -> Any: ...

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxGone(
                "the sandbox is closed, and its files with it.",
                hint="Create another with virtual(), or take a snapshot() before closing.",
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
        checked = check_env(env) if env else {}
        for name, value in checked.items():
            _check_text(f"the environment variable {name}", value)
        return Script(
            command=command,
            cwd=None if cwd is None else self.resolve_path(cwd),
            env=checked,
            stdin=None if stdin is None else _checked_stdin(stdin),
        )


def _check_text(what: str, text: str) -> None:
    valid = isinstance(text, str) and "\0" not in text
    if valid and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            valid = False
    if not valid:
        raise InvalidOption(
            f"{what} must be a str without NUL that UTF-8 can encode.",
            hint="Pass binary data through stdin= or a file.",
            option="command" if what == "command" else "env",
        )


def _checked_stdin(stdin: str | bytes) -> bytes:
    data = encode_option("stdin", stdin)
    if len(data) > MAX_STDIN:
        raise InvalidOption(
            f"stdin has {len(data)} bytes; the limit is {MAX_STDIN}.",
            hint="Write it to files with write_file() and read those.",
            option="stdin",
        )
    return data
