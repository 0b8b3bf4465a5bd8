"""A sandbox seen from one of its directories, and its files for the program around an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.sandbox.paths import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.sandbox.api import ExecStream, SandboxApi
    from smokebox.types import Capabilities, ExecResult, FileInfo


class View:
    """A sandbox whose relative paths and commands start at another directory."""

    def __init__(self, sandbox: SandboxApi, cwd: str) -> None:
        self._sandbox = sandbox
        self._cwd = cwd

    @property
    def cwd(self) -> str:
        """Where relative paths and commands start."""
        return self._cwd

    def resolve_path(self, path: str) -> str:
        """The absolute form of `path`."""
        return self._sandbox.resolve_path(resolve(path, self._cwd))

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a bash command and wait for it."""
        return await self._sandbox.exec(
            command, cwd=self._at(cwd), env=env, timeout=timeout, stdin=stdin
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
        """Run a bash command and give its output as it is written."""
        return self._sandbox.exec_stream(
            command, cwd=self._at(cwd), env=env, timeout=timeout, stdin=stdin
        )

    async def read_file(self, path: str) -> str:
        """The text of a file."""
        return await self._sandbox.read_file(self.resolve_path(path))

    async def read_bytes(self, path: str) -> bytes:
        """The bytes of a file."""
        return await self._sandbox.read_bytes(self.resolve_path(path))

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Make or replace a file."""
        await self._sandbox.write_file(self.resolve_path(path), data)

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """What is at `path`."""
        return await self._sandbox.stat(self.resolve_path(path), follow_symlinks=follow_symlinks)

    async def readdir(self, path: str) -> list[str]:
        """The names in a directory."""
        return await self._sandbox.readdir(self.resolve_path(path))

    async def exists(self, path: str) -> bool:
        """Whether `path` leads to something."""
        return await self._sandbox.exists(self.resolve_path(path))

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory."""
        await self._sandbox.mkdir(self.resolve_path(path), recursive=recursive)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file, or with `recursive` a directory."""
        await self._sandbox.rm(self.resolve_path(path), recursive=recursive, force=force)

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Absolute paths that match."""
        return await self._sandbox.glob(
            pattern, cwd=self._at(cwd), hidden=hidden, files_only=files_only
        )

    async def capabilities(self) -> Capabilities:
        """What the sandbox can and cannot do."""
        return await self._sandbox.capabilities()

    async def aclose(self) -> None:
        """Nothing: the sandbox is closed by whoever opened it."""

    def _at(self, cwd: str | None) -> str:
        return self._cwd if cwd is None else self.resolve_path(cwd)


class Files:
    """The files of an agent's workspace, for the program around it.

    Relative paths start at the agent's `cwd`. Nothing of it is recorded, or told to the model.
    """

    def __init__(self, workspace: SandboxApi) -> None:
        self.read_file = workspace.read_file
        self.read_bytes = workspace.read_bytes
        self.write_file = workspace.write_file
        self.stat = workspace.stat
        self.readdir = workspace.readdir
        self.exists = workspace.exists
        self.mkdir = workspace.mkdir
        self.rm = workspace.rm
        self.glob = workspace.glob
