"""`local()`: the host itself as a sandbox, without isolation.

Commands run as the current user and can access every file, process and network that this user can.
Only the environment is filtered: a command sees the variables in `KEPT` and those that the caller
passes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from smokebox.errors import InvalidOption, PathNotDirectory, SandboxGone, from_os_error
from smokebox.foundation.paths import check_path, resolve
from smokebox.foundation.text import decode_file, encode_option
from smokebox.options import check_env, check_timeout, strict_options
from smokebox.runtime.capture import collect, decode_stream, stream
from smokebox.runtime.output import MAX_OUTPUT
from smokebox.runtime.process import SupervisedProcess, cannot_start
from smokebox.runtime.spill import SpillFolder
from smokebox.runtime.stream import ExecStream
from smokebox.runtime.supervisor_client import RunningCommands
from smokebox.sandbox import local_files
from smokebox.sandbox.glob import glob_paths
from smokebox.types import Capabilities, ExecResult, FileInfo

if TYPE_CHECKING:
    from types import TracebackType

KEPT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "HOSTNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TERM",
    "TMPDIR",
    "TMP",
    "TEMP",
)
"""Variables of the host's environment that commands see."""

_COMMON_COMMANDS = (
    "awk base64 bash bunzip2 bzip2 cargo cat cc chmod chown clang cmake comm cp curl cut date "
    "dd df diff dirname docker du env expr file find gcc gh git go grep gunzip gzip head "
    "hostname id java jq kill ln ls make mkdir mktemp mv nc node npm npx openssl patch perl "
    "php pip pip3 pnpm ps psql python python3 readlink realpath rg rm rmdir rsync ruby rustc "
    "sed seq sh sha256sum sleep sort sqlite3 ssh stat sudo tail tar tee timeout touch tr tree "
    "uname uniq unzip uv vim wc wget which xargs xz yarn zip zstd "
)


@strict_options()
def local(
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str | None] | None = None,
    max_output: int = MAX_OUTPUT,
) -> LocalSandbox:
    """Create a sandbox on the host.

    Args:
        cwd: Directory of commands and relative paths, by default the current one.
        env: Variables to add to those in `KEPT`; None removes a variable.
        max_output: Bytes of each output stream that are kept in memory; the rest is spilled
            to a file.

    Raises:
        InvalidOption: An option is unknown or has a wrong value.
        PathNotFound: There is no such directory as `cwd`.
        PathNotDirectory: `cwd` is not a directory.
    """
    if isinstance(max_output, bool) or not isinstance(max_output, int) or max_output < 1:
        raise InvalidOption(
            f"max_output must be a positive number of bytes, not {max_output!r}.",
            hint="Pass max_output=1_000_000, for example.",
            option="max_output",
            value=max_output,
        )
    return LocalSandbox(_directory(cwd), _environment(env), max_output)


class LocalSandbox:
    """The host as a sandbox, created by `local()`.

    Commands share no shell state. Processes that a command leaves in the background run until
    `aclose`, or until the Python process ends.
    """

    def __init__(self, cwd: str, env: dict[str, str], max_output: int) -> None:
        self._cwd = cwd
        self._env = env
        self._max_output = max_output
        self._commands: RunningCommands | None = None
        self._spills = SpillFolder()
        self._closed = False

    @property
    def cwd(self) -> str:
        """Absolute directory where relative paths and commands start."""
        return self._cwd

    def resolve_path(self, path: str) -> str:
        """Return the absolute form of `path`, without accessing any file."""
        return resolve(path, self._cwd)

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a bash command and wait for it. See `SandboxApi.exec`."""
        return await collect(
            functools.partial(self._start, command, cwd, env, timeout, stdin),
            spills=self._spills,
            max_output=self._max_output,
            timeout=timeout,
        )

    def exec_stream(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecStream:
        """Run a bash command and stream its output as it is written.

        A slow consumer makes the command wait: only the pipes buffer output.
        """
        start = functools.partial(self._start, command, cwd, env, timeout, stdin)
        return ExecStream(decode_stream(stream(start, timeout=timeout)))

    async def read_file(self, path: str) -> str:
        """Return the text of a file. Raises `NotText` if it is not UTF-8."""
        return decode_file(self.resolve_path(path), await self.read_bytes(path))

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return await asyncio.to_thread(local_files.read, self.resolve_path(path))

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Create or replace a file and its parent directories atomically."""
        await asyncio.to_thread(
            local_files.write, self.resolve_path(path), encode_option("data", data)
        )

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return the metadata of `path`. A dangling symlink is found only if not followed."""
        return await asyncio.to_thread(
            local_files.stat, self.resolve_path(path), follow_symlinks=follow_symlinks
        )

    async def readdir(self, path: str) -> list[str]:
        """Return the sorted names in a directory, with dotfiles; non-UTF-8 bytes as `\\xNN`."""
        return await asyncio.to_thread(local_files.readdir, self.resolve_path(path))

    async def exists(self, path: str) -> bool:
        """Return whether `path` exists, following symlinks."""
        return await asyncio.to_thread(local_files.exists, self.resolve_path(path))

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Create a directory; `recursive` creates parents and accepts an existing one."""
        await asyncio.to_thread(local_files.mkdir, self.resolve_path(path), recursive=recursive)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory. Never the root."""
        await asyncio.to_thread(
            local_files.remove, self.resolve_path(path), recursive=recursive, force=force
        )

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Return the sorted absolute paths that match. See `SandboxApi.glob`."""
        return await asyncio.to_thread(
            glob_paths,
            pattern,
            self.resolve_path(cwd or "."),
            local_files.scan,
            hidden=hidden,
            files_only=files_only,
        )

    async def capabilities(self) -> Capabilities:
        """Return the features of the host: no isolation, its network and its files.

        `commands` lists `bash` only if commands run in it.
        """
        return Capabilities(
            sandbox="local",
            isolation="none",
            network="open",
            persistence="host",
            commands=await asyncio.to_thread(_commands, self._env.get("PATH")),
        )

    async def aclose(self) -> None:
        """Kill running commands and remove spilled output. Safe to repeat."""
        self._closed = True
        commands, self._commands = self._commands, None
        if commands is not None:
            await commands.aclose()
        await asyncio.to_thread(self._spills.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _start(
        self,
        command: str,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,
        stdin: str | bytes | None,
    ) -> SupervisedProcess:
        if not isinstance(command, str):
            raise InvalidOption(
                f"command must be a str, not {type(command).__name__}.",
                hint="For a list of arguments, pass shlex.join(arguments).",
                option="command",
            )
        directory = self.resolve_path(cwd) if cwd is not None else self._cwd
        return await SupervisedProcess.start(
            [_shell(), "-c", command],
            # With PWD set, `pwd` shows the path as passed, including symlinks.
            env={**self._env, "PWD": directory, **check_env(env)},
            cwd=directory,
            commands=self._command_group(),
            timeout=check_timeout(timeout),
            stdin=None if stdin is None else encode_option("stdin", stdin),
        )

    def _command_group(self) -> RunningCommands:
        if self._closed:
            raise SandboxGone(
                "this local sandbox is closed.",
                hint="Create another with local().",
                reason="closed",
            )
        if self._commands is None or self._commands.closed:
            try:
                self._commands = RunningCommands()
            except OSError as error:
                raise cannot_start(error) from error
            weakref.finalize(self, self._commands.close)
        return self._commands


def _directory(cwd: str | os.PathLike[str] | None) -> str:
    if cwd is None:
        try:
            return os.getcwd()
        except OSError as error:
            raise from_os_error(error, ".") from error
    if not isinstance(cwd, (str, os.PathLike)):
        raise InvalidOption(
            f"cwd must be a path, not {type(cwd).__name__}.", hint="Pass a str.", option="cwd"
        )
    path = resolve(check_path(os.fspath(cwd)), os.getcwd())
    if not local_files.stat(path).is_directory:
        raise PathNotDirectory(path, hint="Pass the directory to start in as cwd.")
    return path


def _environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    if not isinstance(env, Mapping):
        return kept | check_env(env)
    dropped = {name for name, value in env.items() if value is None}
    kept |= check_env({name: "" if value is None else value for name, value in env.items()})
    return {name: value for name, value in kept.items() if name not in dropped}


@functools.cache
def _shell() -> str:
    """Return the absolute path of bash, or of the system's shell if there is no bash."""
    found = shutil.which("bash") or shutil.which("bash", path=os.defpath)
    return os.path.abspath(found) if found else "/bin/sh"


def _commands(path: str | None) -> frozenset[str]:
    found = {
        name for name in _COMMON_COMMANDS.split() if shutil.which(name, path=path or os.defpath)
    }
    shell = os.path.basename(_shell())
    return frozenset(found - {"bash"} | {shell})
