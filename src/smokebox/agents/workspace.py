"""The sandbox that an agent works in, seen from the agent's working directory."""

from __future__ import annotations

import inspect
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from smokebox.agents.options import OMITTED, is_sandbox
from smokebox.errors import InvalidOption, PathNotFound, Unsupported
from smokebox.foundation.paths import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.agents.agent import AgentContext
    from smokebox.agents.options import AgentSettings
    from smokebox.runtime.stream import ExecStream
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities, ExecResult, FileInfo


def directories(sandbox: SandboxApi, cwd: str, root: str | None = None) -> list[str]:
    """Return the directories from `root` down to `cwd`, absolute; only `cwd` if it is outside.

    `root` is by default the sandbox's working directory.
    """
    here = sandbox.resolve_path(cwd)
    top = sandbox.resolve_path(root if root is not None else sandbox.cwd)
    if not f"{here.rstrip('/')}/".startswith(f"{top.rstrip('/')}/"):
        return [here]
    found = [here]
    while found[-1] != top:
        found.append(posixpath.dirname(found[-1]))
    return found[::-1]


class WorkspaceView:
    """A sandbox whose relative paths and commands start at another directory."""

    def __init__(self, sandbox: SandboxApi, cwd: str) -> None:
        self._sandbox = sandbox
        self._cwd = cwd

    @property
    def cwd(self) -> str:
        """Directory in which relative paths and commands start."""
        return self._cwd

    def resolve_path(self, path: str) -> str:
        """Return the absolute form of `path`."""
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
        """Run a bash command and stream its output."""
        return self._sandbox.exec_stream(
            command, cwd=self._at(cwd), env=env, timeout=timeout, stdin=stdin
        )

    async def read_file(self, path: str) -> str:
        """Return the text of a file."""
        return await self._sandbox.read_file(self.resolve_path(path))

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return await self._sandbox.read_bytes(self.resolve_path(path))

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Create or replace a file."""
        await self._sandbox.write_file(self.resolve_path(path), data)

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return the metadata of `path`."""
        return await self._sandbox.stat(self.resolve_path(path), follow_symlinks=follow_symlinks)

    async def readdir(self, path: str) -> list[str]:
        """Return the names in a directory."""
        return await self._sandbox.readdir(self.resolve_path(path))

    async def exists(self, path: str) -> bool:
        """Return True if `path` exists."""
        return await self._sandbox.exists(self.resolve_path(path))

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Create a directory."""
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
        """Return the absolute paths that match a pattern."""
        return await self._sandbox.glob(
            pattern, cwd=self._at(cwd), hidden=hidden, files_only=files_only
        )

    async def capabilities(self) -> Capabilities:
        """Return the capabilities of the sandbox."""
        return await self._sandbox.capabilities()

    async def aclose(self) -> None:
        """Do nothing: the owner of the sandbox closes it."""

    def _at(self, cwd: str | None) -> str:
        return self._cwd if cwd is None else self.resolve_path(cwd)


class WorkspaceFiles:
    """Files of an agent's workspace, for the calling program.

    Relative paths start at the agent's `cwd`. Access is not recorded or shown to the model.
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


@dataclass(frozen=True, slots=True)
class OpenSandbox:
    """A sandbox, and the view of it from the agent's `cwd`. If `owned`, the harness closes it."""

    sandbox: SandboxApi
    workspace: SandboxApi
    owned: bool


async def open_sandbox(
    options: AgentSettings, cwd: str | None, ctx: AgentContext
) -> OpenSandbox | None:
    """Open the sandbox that an agent's options name, with `cwd` as its directory."""
    choice: Any = options.sandbox
    if choice is None:
        return None
    if choice is OMITTED:
        from smokebox.sandbox.virtual import virtual

        empty: SandboxApi = virtual() if cwd is None else virtual(cwd=resolve(cwd, "/workspace"))
        return OpenSandbox(empty, empty, owned=True)
    if is_sandbox(choice):
        return OpenSandbox(choice, await with_cwd(choice, cwd), owned=options.owns_sandbox)
    sandbox = await _call(choice, ctx)
    return OpenSandbox(sandbox, await with_cwd(sandbox, cwd), owned=True)


async def with_cwd(sandbox: SandboxApi, cwd: str | None) -> SandboxApi:
    """Return `sandbox` with `cwd` as its directory, created unless it is on the host itself."""
    if cwd is None or sandbox.resolve_path(cwd) == sandbox.cwd:
        return sandbox
    path = sandbox.resolve_path(cwd)
    if not await sandbox.exists(path):
        if (await sandbox.capabilities()).isolation == "none":
            message = f"cwd: there is no directory {path}."
            raise PathNotFound(path, message, hint="Create it first.")
        await sandbox.mkdir(path, recursive=True)
    return WorkspaceView(sandbox, path)


def no_workspace(operation: str) -> Unsupported:
    """Return the error of an agent without a sandbox."""
    return Unsupported(
        f"{operation}: the agent has sandbox=None, so there is no workspace.",
        hint="Leave sandbox= out for a virtual one, or pass one.",
        operation=operation,
        sandbox=None,
    )


async def _call(factory: Any, ctx: AgentContext) -> SandboxApi:
    sandbox = factory(ctx) if _takes_context(factory) else factory()
    if inspect.isawaitable(sandbox):
        sandbox = await sandbox
    if not is_sandbox(sandbox):
        raise InvalidOption(
            f"sandbox: {factory!r} returned {sandbox!r}, which is not a sandbox.",
            hint="Return virtual(), local(), bucket(...) or get_sandbox(...).",
            option="sandbox",
            value=sandbox,
        )
    return cast("SandboxApi", sandbox)


def _takes_context(factory: Any) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in positional and each.default is each.empty for each in parameters)
