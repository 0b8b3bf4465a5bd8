"""`local()`: the host itself as a sandbox, with no isolation whatever.

Commands run as the user who runs Python, and see every file, process and network that
this user sees. What is kept out is the environment: only the names in `KEPT` and those
that the caller gives reach a command.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from smokebox.errors import InvalidOption, PathNotDirectory, SandboxGone
from smokebox.options import check_env, check_timeout, strict_options
from smokebox.sandbox import hostfiles
from smokebox.sandbox.api import ExecStream
from smokebox.sandbox.capture import collect, decoded, stream
from smokebox.sandbox.filesystems.filesystem import from_os_error
from smokebox.sandbox.globbing import glob_paths
from smokebox.sandbox.lifeline import Lifeline
from smokebox.sandbox.output import MAX_OUTPUT
from smokebox.sandbox.paths import check_path, resolve
from smokebox.sandbox.process import Process, cannot_start
from smokebox.sandbox.spill import SpillFolder
from smokebox.sandbox.text import decode_file, encode_option
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
"""The names of the host's environment that a command gets to see."""

_USUAL = (
    "awk base64 bash bunzip2 bzip2 cargo cat cc chmod chown clang cmake comm cp curl cut date "
    "dd df diff dirname docker du env expr file find gcc gh git go grep gunzip gzip head "
    "hostname id java jq kill ln ls make mkdir mktemp mv nc node npm npx openssl patch perl "
    "php pip pip3 pnpm ps psql python python3 readlink realpath rg rm rmdir rsync ruby rustc "
    "sed seq sh sha256sum sleep sort sqlite3 ssh stat sudo tail tar tee timeout touch tr tree "
    "uname uniq unzip uv vim wc wget which xargs xz yarn zip zstd "
)


@strict_options
def local(
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str | None] | None = None,
    max_output: int = MAX_OUTPUT,
) -> LocalSandbox:
    """The host as a sandbox, starting at `cwd` (by default where Python is).

    `env` adds to the few variables that are passed on, and a value of None takes one of
    those away. Of each stream at most `max_output` bytes are kept in memory.
    """
    if isinstance(max_output, bool) or not isinstance(max_output, int) or max_output < 1:
        raise InvalidOption(
            f"max_output is a positive number of bytes, not {max_output!r}.",
            hint="Pass for example max_output=1_000_000.",
            option="max_output",
            value=max_output,
        )
    return LocalSandbox(_directory(cwd), _environment(env), max_output)


class LocalSandbox:
    """The host, as `SandboxApi` spells it. Made by `local()`.

    Commands keep no shell state between them. What one leaves in the background runs on
    until `aclose`, or until the Python process ends.
    """

    def __init__(self, cwd: str, env: dict[str, str], max_output: int) -> None:
        self._cwd = cwd
        self._env = env
        self._max_output = max_output
        self._lifeline: Lifeline | None = None
        self._spills = SpillFolder()
        self._closed = False

    @property
    def cwd(self) -> str:
        """The absolute directory where relative paths and commands start."""
        return self._cwd

    def resolve_path(self, path: str) -> str:
        """The absolute form of `path`, without looking at any file."""
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
        """Run a bash command and give its output as it is written.

        A consumer that takes its time makes the command wait: at most what the pipes hold
        is ahead of it.
        """
        start = functools.partial(self._start, command, cwd, env, timeout, stdin)
        return ExecStream(decoded(stream(start, timeout=timeout)))

    async def read_file(self, path: str) -> str:
        """The text of a file. Raises `NotText` where it is not UTF-8."""
        return decode_file(self.resolve_path(path), await self.read_bytes(path))

    async def read_bytes(self, path: str) -> bytes:
        """The bytes of a file."""
        return await asyncio.to_thread(hostfiles.read, self.resolve_path(path))

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Make or replace a file, and its parent directories. All or nothing."""
        await asyncio.to_thread(
            hostfiles.write, self.resolve_path(path), encode_option("data", data)
        )

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """What is at `path`. A symlink that leads nowhere is not found, unless not followed."""
        return await asyncio.to_thread(
            hostfiles.info, self.resolve_path(path), follow_symlinks=follow_symlinks
        )

    async def readdir(self, path: str) -> list[str]:
        """The names in a directory, dotfiles too, sorted; non-UTF-8 bytes as `\\xNN`."""
        return await asyncio.to_thread(hostfiles.names, self.resolve_path(path))

    async def exists(self, path: str) -> bool:
        """Whether `path` leads to something."""
        return await asyncio.to_thread(hostfiles.exists, self.resolve_path(path))

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory; `recursive` makes parents and accepts one that is there."""
        await asyncio.to_thread(
            hostfiles.make_directory, self.resolve_path(path), recursive=recursive
        )

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory. Never the root."""
        await asyncio.to_thread(
            hostfiles.remove, self.resolve_path(path), recursive=recursive, force=force
        )

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Absolute paths that match, sorted. See `SandboxApi.glob`."""
        return await asyncio.to_thread(
            glob_paths,
            pattern,
            self.resolve_path(cwd or "."),
            hostfiles.listing,
            hidden=hidden,
            files_only=files_only,
        )

    async def capabilities(self) -> Capabilities:
        """No isolation, the host's network and files; `bash` is in `commands` if it runs them."""
        return Capabilities(
            sandbox="local",
            isolation="none",
            network="open",
            persistence="host",
            commands=await asyncio.to_thread(_commands, self._env.get("PATH")),
        )

    async def aclose(self) -> None:
        """Kill what still runs and remove spilled output. Safe to repeat."""
        self._closed = True
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            await lifeline.aclose()
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
    ) -> Process:
        if not isinstance(command, str):
            raise InvalidOption(
                f"a command is a str, not {type(command).__name__}.",
                hint="For a list of words, pass shlex.join(words).",
                option="command",
            )
        directory = self.resolve_path(cwd) if cwd is not None else self._cwd
        return await Process.start(
            [_shell(), "-c", command],
            # With PWD given, `pwd` shows the path as it was written, symlinks and all.
            env={**self._env, "PWD": directory, **check_env(env)},
            cwd=directory,
            lifeline=self._hold(),
            timeout=check_timeout(timeout),
            stdin=None if stdin is None else encode_option("stdin", stdin),
        )

    def _hold(self) -> Lifeline:
        if self._closed:
            raise SandboxGone(
                "this local sandbox was closed.",
                hint="Make another one with local().",
                reason="closed",
            )
        if self._lifeline is None or self._lifeline.closed:
            try:
                self._lifeline = Lifeline()
            except OSError as error:
                raise cannot_start(error) from error
            weakref.finalize(self, self._lifeline.close)
        return self._lifeline


def _directory(cwd: str | os.PathLike[str] | None) -> str:
    if cwd is None:
        try:
            return os.getcwd()
        except OSError as error:
            raise from_os_error(error, ".") from error
    if not isinstance(cwd, (str, os.PathLike)):
        raise InvalidOption(
            f"cwd is a path, not {type(cwd).__name__}.", hint="Pass a str.", option="cwd"
        )
    path = resolve(check_path(os.fspath(cwd)), os.getcwd())
    if not hostfiles.info(path).is_directory:
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
    """The absolute path of bash, or of the system's own shell where there is no bash."""
    found = shutil.which("bash") or shutil.which("bash", path=os.defpath)
    return os.path.abspath(found) if found else "/bin/sh"


def _commands(path: str | None) -> frozenset[str]:
    found = {name for name in _USUAL.split() if shutil.which(name, path=path or os.defpath)}
    shell = os.path.basename(_shell())
    return frozenset(found - {"bash"} | {shell})
