"""Pydantic AI workspace backend over any sandbox.

Pass it to a run: agent.run(prompt, workspace=SmokeboxWorkspace(local(cwd="project"))). Tools find
it as `ctx.workspace`.
"""

from __future__ import annotations

import asyncio
import inspect
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from smokebox.errors import InvalidOption, PathError, PathNotFound, SandboxGone, SymlinkLoop
from smokebox.foundation.ids import new_global_id
from smokebox.integrations import missing_framework
from smokebox.integrations.command import Command, CommandOutcome, run_command
from smokebox.options import check_env
from smokebox.sandbox.api import SandboxApi

try:
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        SupportsCommands,
        SupportsFilesystem,
        SupportsRealpath,
        WorkspaceBackend,
        WorkspaceCommand,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
except ImportError as error:
    raise missing_framework("pydantic-ai-slim", extra="pydantic-ai") from error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

SandboxSource: TypeAlias = "SandboxApi | Callable[[], SandboxApi | Awaitable[SandboxApi]]"

MAX_OUTPUT = 10 * 1024 * 1024
_PREVIEW = 64 * 1024
_LOOP = 40

# The contract has no `realpath`, and not every system has `realpath -m`: bash follows each link
# itself. The `x` keeps newlines at the end of a target; `[` tests for a link, because
# `[[ -L ... ]]` is always true in bashkit 0.20.1.
_REALPATH = """(
rest=$SMOKEBOX_PATH real= links=0
while [[ -n $rest ]]; do
  name=${rest%%/*}
  if [[ $rest == */* ]]; then rest=${rest#*/}; else rest=; fi
  case $name in
    '' | .) ;;
    ..) real=${real%/*} ;;
    *)
      if [ -L "$real/$name" ]; then
        links=$((links + 1))
        if [[ $links -gt 40 ]]; then exit 40; fi
        target=$(readlink -n -- "$real/$name" && printf x) || exit 1
        target=${target%x}
        if [[ $target == /* ]]; then real=; fi
        rest=$target/$rest
      else
        real=$real/$name
      fi
      ;;
  esac
done
printf %s "${real:-/}"
)"""


@runtime_checkable
class _HasId(Protocol):
    """Sandbox that can be found again by its id."""

    @property
    def id(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenSandbox:
    """The sandbox of a workspace, and its working directory."""

    sandbox: SandboxApi
    root: str


class SmokeboxWorkspace(WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath):
    """A sandbox as the workspace of an agent run.

    The workspace never closes or destroys the sandbox: its creator does.

    Args:
        sandbox: A sandbox, or a function (async or not) that creates one, called once by the first
            operation.
        ref: Name of the environment for a run that continues later. By default it is derived from
            the kind of the sandbox and its id, or else its working directory.
    """

    def __init__(self, sandbox: SandboxSource, *, ref: WorkspaceRef | None = None) -> None:
        if not isinstance(sandbox, SandboxApi) and not callable(sandbox):
            raise InvalidOption(
                f"sandbox must be a sandbox or a function that creates one, not {sandbox!r}.",
                hint="Pass local(cwd='project') or lambda: local(cwd='project').",
                option="sandbox",
            )
        self._source = sandbox
        self._ref = ref
        self._opening: asyncio.Task[_OpenSandbox] | None = None

    @property
    def ref(self) -> WorkspaceRef | None:
        """Name of the environment; None until the first operation, unless it was passed."""
        return self._ref

    async def working_dir(self) -> str:
        """Return the directory where commands and relative paths start, with symlinks resolved."""
        return (await self._get()).root

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Run bash text (`shell=True`) or a program with its arguments, and wait for it."""
        if isinstance(command, str) is not shell:
            raise TypeError("a str needs shell=True, and a sequence of arguments shell=False")
        if isinstance(command, str):
            task = Command(text=command, env=check_env(env))
        else:
            task = Command.of_arguments(command, env)
        opened = await self._get()
        try:
            # Always start at the root: the shell of some sandboxes remembers the last `cd`.
            done = await run_command(
                opened.sandbox, task, cwd=opened.root, timeout=timeout, limit=MAX_OUTPUT
            )
        except SandboxGone as error:
            raise WorkspaceUnavailableError(str(error)) from error
        await _check_alive(opened)
        return _result(done, timeout)

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return await (await self._get()).sandbox.read_bytes(path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Create or replace a file and its parent directories."""
        await (await self._get()).sandbox.write_file(path, data)

    async def stat(self, path: str) -> FileEntry:
        """Return the metadata of `path`, following symlinks."""
        return await _entry((await self._get()).sandbox, path)

    async def list_dir(self, path: str) -> list[FileEntry]:
        """List a directory. A dangling symlink is listed as a file."""
        sandbox = (await self._get()).sandbox
        entries = []
        for name in await sandbox.readdir(path):
            child = posixpath.join(path, name)
            try:
                entries.append(await _entry(sandbox, child))
            except PathError:
                entries.append(FileEntry(name=name, path=child, is_dir=False, size=None))
        return entries

    async def make_dir(self, path: str) -> None:
        """Create a directory and its parents; an existing one is accepted."""
        await (await self._get()).sandbox.mkdir(path, recursive=True)

    async def remove(self, path: str) -> None:
        """Remove a file, a symlink or a directory tree, except the working directory."""
        opened = await self._get()
        info = await opened.sandbox.stat(path, follow_symlinks=False)
        if not info.is_symlink:
            real = await self.realpath(path)
            if f"{opened.root}/".startswith(f"{real.rstrip('/')}/"):
                raise ValueError(f"{path} is the working directory or contains it: not removed")
        await opened.sandbox.rm(path, recursive=True)

    async def exists(self, path: str) -> bool:
        """Return whether `path` leads to something."""
        return await (await self._get()).sandbox.exists(path)

    async def realpath(self, path: str) -> str:
        """Resolve every symlink of `path`; missing names are kept."""
        sandbox = (await self._get()).sandbox
        result = await sandbox.exec(_REALPATH, cwd="/", env={"SMOKEBOX_PATH": path}, timeout=30)
        if result.exit_code == _LOOP:
            raise SymlinkLoop(path)
        if not result.success:
            raise PathError(path, f"cannot be resolved: {path} ({result.stderr.strip()})")
        return result.stdout

    async def _get(self) -> _OpenSandbox:
        """Return the sandbox, which the first call creates and each call checks to be alive."""
        if self._opening is None or _failed(self._opening):
            self._opening = asyncio.create_task(self._open())
        # Shielded: a caller that is cancelled must not lose a sandbox that is being created.
        opened = await asyncio.shield(self._opening)
        await _check_alive(opened)
        return opened

    async def _open(self) -> _OpenSandbox:
        try:
            sandbox = await _create(self._source)
            if self._ref is None:
                self._ref = await _ref_of(sandbox)
            result = await sandbox.exec("pwd -P", timeout=30)
        except (SandboxGone, PathNotFound) as error:
            raise WorkspaceUnavailableError(str(error)) from error
        return _OpenSandbox(sandbox=sandbox, root=result.stdout.removesuffix("\n"))


def _failed(opening: asyncio.Task[_OpenSandbox]) -> bool:
    return opening.done() and (opening.cancelled() or opening.exception() is not None)


async def _create(source: SandboxSource) -> SandboxApi:
    if isinstance(source, SandboxApi):
        return source
    sandbox = source()
    return await sandbox if inspect.isawaitable(sandbox) else sandbox


async def _ref_of(sandbox: SandboxApi) -> WorkspaceRef:
    capabilities = await sandbox.capabilities()
    if isinstance(sandbox, _HasId):
        name = sandbox.id
    elif capabilities.persistence == "memory":
        # It cannot be found again by its path, and two of them must differ.
        name = new_global_id()
    else:
        name = sandbox.cwd
    return WorkspaceRef(provider="smokebox", id=f"{capabilities.sandbox}:{name}")


async def _check_alive(opened: _OpenSandbox) -> None:
    try:
        alive = await opened.sandbox.exists(opened.root)
    except SandboxGone as error:
        raise WorkspaceUnavailableError(str(error)) from error
    if not alive:
        raise WorkspaceUnavailableError(f"the working directory {opened.root} is gone")


async def _entry(sandbox: SandboxApi, path: str) -> FileEntry:
    info = await sandbox.stat(path)
    name = posixpath.basename(posixpath.normpath(path))
    size = info.size if info.is_file else None
    return FileEntry(name=name, path=path, is_dir=info.is_directory, size=size)


def _result(done: CommandOutcome, timeout: float | None) -> CommandResult:
    if done.exceeded:
        raise WorkspaceOutputLimitError(
            f"the command wrote more than {MAX_OUTPUT} bytes to {done.exceeded}: redirect it "
            "to a file and read part of that",
            limit=MAX_OUTPUT,
            stdout=done.stdout[:_PREVIEW],
            stderr=done.stderr[:_PREVIEW],
        )
    if done.timed_out:
        raise WorkspaceTimeoutError(
            f"the command took longer than {timeout:g} seconds and was killed",
            stdout=done.stdout,
            stderr=done.stderr,
        )
    return CommandResult(exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)
