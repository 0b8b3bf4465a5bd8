"""The contract: what every place where an agent works can do.

A connector implements `SandboxApi`; `smokebox.sandbox.conformance` tells whether it did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from smokebox.sandbox.running import Piece, Running
from smokebox.types import Capabilities, ExecResult, FileInfo, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping


class RunningCommand(Running[Piece, ExecResult]):
    """A running command: iterate for its output, then read `result`.

    Leaving early (`break` inside `async with`, `aclose()`, cancellation) kills the command.
    """

    def __init__(self, source: AsyncGenerator[Piece | ExecResult, None]) -> None:
        super().__init__(source, ExecResult)

    @property
    def result(self) -> ExecResult:
        """How the command ended, without its output; known after the last chunk."""
        if self._end is None:
            raise RuntimeError("the command has not ended: iterate over its output first")
        return self._end

    @property
    def exit_code(self) -> int:
        """Short for `result.exit_code`."""
        return self.result.exit_code


class ExecStream(RunningCommand[OutputChunk]):
    """A running command whose output is text, in pieces never cut inside a character."""


@runtime_checkable
class SandboxApi(Protocol):
    """A place with files and a shell.

    Paths are POSIX strings. A relative one starts at `cwd`; `.` and `..` collapse as
    text, and `..` at the root stays there. Everything raises the classes of
    `smokebox.errors`, and what raises has changed nothing.
    """

    @property
    def cwd(self) -> str:
        """The absolute directory where relative paths and commands start."""
        ...

    def resolve_path(self, path: str) -> str:
        """The absolute form of `path`, without looking at any file."""
        ...

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a bash command and wait for it.

        Completion is the exit of the command itself, not of what it left in the
        background. Without `stdin` it reads end-of-file. `cwd` must exist, and `env`
        adds to the sandbox's environment; both hold for this command only. After
        `timeout` seconds the whole process tree is killed, the output so far is kept
        and the exit code is 124. Cancelling kills at once.
        """
        ...

    def exec_stream(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecStream:
        """Run a bash command and give its output as it is written."""
        ...

    async def read_file(self, path: str) -> str:
        """The text of a file. Raises `NotText` where it is not UTF-8."""
        ...

    async def read_bytes(self, path: str) -> bytes:
        """The bytes of a file."""
        ...

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Make or replace a file, and its parent directories. All or nothing."""
        ...

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """What is at `path`. A symlink that leads nowhere is not found, unless not followed."""
        ...

    async def readdir(self, path: str) -> list[str]:
        """The names in a directory, dotfiles too, sorted."""
        ...

    async def exists(self, path: str) -> bool:
        """Whether `path` leads to something. Never raises for a path that can be held."""
        ...

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory; `recursive` makes parents and accepts one that is there."""
        ...

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory.

        `force` accepts absence, and nothing else.
        """
        ...

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Absolute paths that match, sorted.

        `**` crosses directories but not symlinks to them; `*`, `?` and `[...]` stay
        within a name and skip dotfiles unless `hidden` or written with the dot.
        """
        ...

    async def capabilities(self) -> Capabilities:
        """What this sandbox can and cannot do."""
        ...

    async def aclose(self) -> None:
        """Let go of what the handle holds (processes, threads, spilled output). Safe to repeat."""
        ...
