"""A Linux sandbox by its id: commands, files, processes and sessions in one handle.

It implements the contract of `smokebox.sandbox.api`, and more. Nothing starts until the
first call; a call to a sleeping sandbox wakes it.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Self, Unpack

from smokebox.egress.handler import HandlerRegistry
from smokebox.engine.backups.sandbox_backups import SandboxBackups
from smokebox.engine.egress.config import EgressConfig
from smokebox.engine.egress.proxy import EgressProxy
from smokebox.engine.files.files import Files
from smokebox.engine.git.repository import (
    check_branch,
    check_depth,
    default_target,
    parse_repository,
)
from smokebox.engine.interpreter.contexts import Contexts
from smokebox.engine.jail.spec import JailStats
from smokebox.engine.lifecycle import Lifecycle
from smokebox.engine.mounts.mounts import Mounts
from smokebox.engine.ports import Ports
from smokebox.engine.processes.processes import Processes, ProcessOptions
from smokebox.engine.record.rows import DEFAULT_CWD
from smokebox.engine.sessions.command import CommandOptions
from smokebox.engine.sessions.session import ShellSession
from smokebox.engine.sessions.sessions import SessionOptions, Sessions
from smokebox.engine.snapshots.checkpoints import Checkpoints
from smokebox.engine.snapshots.sandbox_snapshots import SandboxSnapshots
from smokebox.engine.terminals.terminals import Terminals
from smokebox.errors import InvalidOption
from smokebox.options import check_timeout
from smokebox.runtime.capture import decode_stream
from smokebox.runtime.stream import ByteStream, ExecStream
from smokebox.types import (
    Capabilities,
    ExecResult,
    FileInfo,
    GitCheckout,
    SandboxInfo,
    SandboxStats,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from smokebox.egress.address_guard import PrivateAccess
    from smokebox.engine.context import EngineContext
    from smokebox.engine.disk_ledger import DiskBudget
    from smokebox.engine.jail.spec import Owner
    from smokebox.engine.options import CheckedOptions
    from smokebox.engine.processes.background_process import BackgroundProcess
    from smokebox.engine.record.rows import SandboxRow
    from smokebox.engine.run import Command
    from smokebox.engine.sandbox_storage import DiskEnforcement
    from smokebox.foundation.loop_shares import LoopShare
    from smokebox.limits import ProcessLimits
    from smokebox.runtime.stream import Chunk


def info_of(
    row: SandboxRow,
    used_at: float = 0.0,
    disk: DiskEnforcement | None = None,
    checkpoint_error: str | None = None,
) -> SandboxInfo:
    """Convert a row of the record for users. `used_at` is the last use, if more recent."""
    return SandboxInfo(
        id=row.id,
        status=row.status,
        image=row.image,
        tier=row.tier,
        limits=row.limits.to_json(),
        enforcement=row.jail.enforcement if row.jail is not None else None,
        disk_enforcement=disk,
        labels=row.labels,
        generation=row.generation,
        created_at=row.created_at,
        last_active_at=max(row.last_active_at, used_at),
        sleep_after=row.settings.sleep_after,
        keep_alive=row.settings.keep_alive,
        expires_at=row.expires_at,
        ephemeral=row.settings.ephemeral,
        cwd=row.settings.cwd,
        user=row.settings.user,
        stop_reason=row.stop_reason,
        snapshot=row.snapshot or None,
        checkpoints=row.settings.checkpoints.describe(),
        checkpoint_error=checkpoint_error,
    )


class ExecOptions(CommandOptions, total=False):
    """The options of `Sandbox.exec`."""

    user: str | None
    limits: ProcessLimits | Mapping[str, object] | None
    session: ShellSession | str | None


class Sandbox:
    """One sandbox of a host. Made by `Host.sandbox`; all handles of an id are one object."""

    def __init__(self, id: str, context: EngineContext) -> None:
        self.id = id
        self._context = context
        self.lifecycle = Lifecycle(id, context, self._reset)
        self._checkouts: set[str] = set()
        self._build_parts()

    @property
    def share(self) -> LoopShare | None:
        """The share of the event loop that its tenant has; None while the record is not read."""
        return self.lifecycle.share

    @property
    def cwd(self) -> str:
        """The absolute directory where relative paths and commands start.

        A directory set by the image is known after the first wake.
        """
        return self._context.cwds.get(self.id, DEFAULT_CWD)

    def set_options(self, options: CheckedOptions) -> None:
        """Apply options from the next call on."""
        if options.cwd is not None:
            self._context.cwds[self.id] = options.cwd
        if options.egress is not None:
            self.network.serve(options.egress.handlers)
        self.lifecycle.set_options(options)

    def resolve_path(self, path: str) -> str:
        """Return the absolute form of `path`, without looking at any file."""
        return self.files.resolve_path(path)

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        session: ShellSession | str | None = None,
    ) -> ExecResult:
        """Run a command and wait for it. A non-zero exit code is a result, not an error.

        Args:
            command: A string for bash, or a list of literal words.
            cwd: Working directory; by default that of the sandbox.
            env: Environment variables to add.
            timeout: Seconds before the whole process tree is killed; the exit code is then 124.
            stdin: Data for standard input.
            user: A user of the sandbox; by default root, who is unprivileged on the host.
            limits: Limits of this command alone.
            session: Run the command in the shell of this session, which keeps its state.

        Raises:
            SandboxGone: The sandbox stopped while the command was running.
            InvalidOption: An option is not valid, or not allowed within a session.
        """
        if session is not None:
            _check_session_options(user=user, limits=limits)
            shell = await self._get_session(session)
            text = _quote(command)
            return await shell.exec(text, cwd=cwd, env=env, timeout=timeout, stdin=stdin)
        async with self.lifecycle.use() as run:
            program = await run.program(command, cwd=cwd, env=env, user=user, limits=limits)
            return await run.execute(program, timeout=timeout, stdin=stdin)

    def exec_stream(self, command: Command, **options: Unpack[ExecOptions]) -> ExecStream:
        """Run a command and stream its output as text. Takes the options of `exec`."""
        return ExecStream(decode_stream(self._stream(command, **options)))

    def exec_bytes(self, command: Command, **options: Unpack[ExecOptions]) -> ByteStream:
        """Run a command and stream its output as raw bytes. Takes the options of `exec`."""
        return ByteStream(self._stream(command, **options))

    async def start_process(
        self, command: Command, **options: Unpack[ProcessOptions]
    ) -> BackgroundProcess:
        """Start a command in the background. Takes the options of `Processes.start`."""
        return await self.processes.start(command, **options)

    async def create_session(
        self, name: str | None = None, **options: Unpack[SessionOptions]
    ) -> ShellSession:
        """Create a shell that keeps its state between commands. See `Sessions.create`."""
        async with self.lifecycle.use():
            return await self.sessions.create(name, **options)

    async def read_file(self, path: str) -> str:
        """Return the text of a file. Raises `NotText` if it is not UTF-8."""
        return await self.files.read_file(path)

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return await self.files.read_bytes(path)

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Create or replace a file atomically, with its parent directories."""
        await self.files.write_file(path, data)

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return information about a path. A dangling symlink is not found when followed."""
        return await self.files.stat(path, follow_symlinks=follow_symlinks)

    async def readdir(self, path: str) -> list[str]:
        """Return the names in a directory, dotfiles included, sorted."""
        return await self.files.readdir(path)

    async def exists(self, path: str) -> bool:
        """Return whether `path` exists."""
        return await self.files.exists(path)

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory. `recursive` makes parents and accepts an existing directory."""
        await self.files.mkdir(path, recursive=recursive)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory."""
        await self.files.rm(path, recursive=recursive, force=force)

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Return absolute paths that match, sorted. See `SandboxApi.glob`."""
        return await self.files.glob(pattern, cwd=cwd, hidden=hidden, files_only=files_only)

    async def git_checkout(
        self,
        url: str,
        target: str | None = None,
        *,
        branch: str | None = None,
        depth: int | None = None,
        timeout: float | None = 600.0,
        username: str | None = None,
        password: str | None = None,
        allow_private: PrivateAccess = False,
    ) -> GitCheckout:
        """Clone a repository from an https or http URL, with the git of the sandbox's image.

        Submodules and LFS files are not fetched. Credentials never enter the sandbox: the engine
        sends the requests to the git server.

        Args:
            url: Address of the repository.
            target: Directory of the clone, by default named after the repository in /workspace.
                Left empty when the clone fails.
            branch: Branch or tag to check out.
            depth: Number of commits to fetch; by default all.
            timeout: Seconds before the clone is cancelled.
            username: User name for the git server.
            password: Password or token for the git server.
            allow_private: Allow private addresses, or only those in these networks.

        Raises:
            GitError: The clone failed.
        """
        # Imported late: it needs an HTTP client and server.
        from smokebox.engine.git.checkout import CheckoutJob

        repository = parse_repository(url, username=username, password=password)
        checkout = CheckoutJob(
            lifecycle=self.lifecycle,
            files=self.files,
            repository=repository,
            target=target if target is not None else default_target(repository),
            branch=None if branch is None else check_branch(branch),
            depth=None if depth is None else check_depth(depth),
            allow_private=allow_private,
            targets=self._checkouts,
        )
        return await checkout.run(check_timeout(timeout))

    async def capabilities(self) -> Capabilities:
        """Return what this sandbox can and cannot do. Wakes it."""
        async with self.lifecycle.use() as run:
            return Capabilities(
                sandbox="linux",
                isolation=run.jail.state.tier,
                network="guarded" if self.egress_proxy.open else "off",
                persistence="host",
                snapshots=True,
            )

    async def wake(self) -> None:
        """Start the sandbox if it does not run. Any other call does this too."""
        async with self.lifecycle.use():
            pass

    async def sleep(self) -> None:
        """End all processes and keep the files, as the idle timer does."""
        await self.lifecycle.sleep()

    async def destroy(self) -> None:
        """Remove every trace. Safe to repeat; the next call makes an empty sandbox."""
        await self.lifecycle.destroy()

    async def info(self) -> SandboxInfo | None:
        """Return its description without waking it; None before it was ever woken."""
        row = await self.lifecycle.row()
        if row is None:
            return None
        disk = await self._context.storage.enforcements([row.key])
        return info_of(row, self.lifecycle.used_at, disk[row.key], self.checkpoints.error)

    async def stats(self) -> SandboxStats:
        """Return current resource usage, without waking it."""
        run = self.lifecycle.run
        used = await run.jail.stats() if run is not None else JailStats()
        row = await self.lifecycle.row()
        disk = await self._context.measure(row.key) if row is not None else None
        return SandboxStats(**asdict(used), disk=disk)

    async def aclose(self) -> None:
        """Do nothing: a sandbox lives until it is destroyed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _reset(self) -> None:
        """Reset this object to the state of a sandbox that never existed."""
        self._context.cwds.pop(self.id, None)
        self._context.handlers.pop(self.id, None)
        self.egress_proxy.audit_log.end()
        self._build_parts()

    def _build_parts(self) -> None:
        lifecycle, context = self.lifecycle, self._context
        self.files = Files(
            self._root, workers=context.workers, cwd=lambda: self.cwd, budget=self._disk_budget
        )
        self.processes = Processes(lifecycle, context.record)
        self.sessions = Sessions(lifecycle, context.record)
        self.contexts = Contexts(lifecycle, context.record)
        self.terminals = Terminals(lifecycle, context.record)
        self.ports = Ports(lifecycle, context.record)
        self.mounts = Mounts(
            id=self.id,
            record=context.record,
            use=lifecycle.use,
            run=lambda: lifecycle.run,
            workers=context.workers,
            cwd=lambda: self.cwd,
        )
        self.backups = SandboxBackups(
            lifecycle,
            context.backups,
            cwd=lambda: self.cwd,
            measure=lambda run: context.measure(run.jail.state.key),
        )
        self.snapshots = SandboxSnapshots(
            lifecycle, context, quiet=self.backups.replacing, flush=self.sessions.before_end
        )
        self.checkpoints = Checkpoints(lifecycle, context, self.snapshots)
        self.egress_proxy = EgressProxy(
            self.id,
            layers=lambda: lifecycle.layers,
            share=lambda: lifecycle.share,
            handlers=context.handlers.get(self.id) or HandlerRegistry(context.load_handler),
            workers=context.workers,
            traffic=context.traffic,
        )
        self.network = EgressConfig(
            self.egress_proxy,
            lifecycle.update,
            keep=self._keep_handlers,
            directory=lifecycle.directory,
        )
        lifecycle.parts = (
            # First: it may have an interrupted restore to finish before the other parts resume.
            self.backups,
            self.snapshots,
            self.mounts,
            self.files,
            self.processes,
            self.contexts,
            self.sessions,
            self.terminals,
            self.egress_proxy,
            self.ports,
            self.checkpoints,
        )

    def _keep_handlers(self) -> None:
        """Keep the handlers beyond this object, which is replaced when it is garbage-collected."""
        self._context.handlers[self.id] = self.egress_proxy.handlers

    async def _root(self) -> tuple[int, Owner]:
        async with self.lifecycle.use() as run:
            return run.jail.root, run.jail.owner

    @contextlib.asynccontextmanager
    async def _disk_budget(self) -> AsyncIterator[DiskBudget]:
        async with self.lifecycle.use() as run:
            budget = self._context.guard.budget(run)
        with contextlib.closing(budget):
            await budget.prepare()
            yield budget

    def _stream(
        self,
        command: Command,
        *,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        session: ShellSession | str | None = None,
        **options: Unpack[CommandOptions],
    ) -> AsyncGenerator[Chunk | ExecResult, None]:
        if session is None:
            return self._stream_program(command, user, limits, **options)
        _check_session_options(user=user, limits=limits)
        return self._stream_in_session(session, _quote(command), options)

    async def _stream_program(
        self,
        command: Command,
        user: str | None,
        limits: ProcessLimits | Mapping[str, object] | None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> AsyncGenerator[Chunk | ExecResult, None]:
        async with self.lifecycle.use() as run:
            program = await run.program(command, cwd=cwd, env=env, user=user, limits=limits)
            source = run.stream(program, timeout=timeout, stdin=stdin)
            async with contextlib.aclosing(source):
                async for item in source:
                    yield item

    async def _stream_in_session(
        self, session: ShellSession | str, command: str, options: CommandOptions
    ) -> AsyncGenerator[Chunk | ExecResult, None]:
        shell = await self._get_session(session)
        async with shell.exec_bytes(command, **options) as stream:
            async for chunk in stream:
                yield chunk
            yield stream.result

    async def _get_session(self, session: ShellSession | str) -> ShellSession:
        return session if isinstance(session, ShellSession) else await self.sessions.get(session)


def _quote(command: Command) -> str:
    """Quote a list of words for the shell of a session. A string stays as it is."""
    return command if isinstance(command, str) else shlex.join(command)


def _check_session_options(**options: object) -> None:
    """Raise for options that are fixed for a whole session."""
    for name, value in options.items():
        if value is not None:
            raise InvalidOption(
                f"{name} cannot be changed within a session.",
                hint=f"Pass {name} to create_session() if it accepts it, or leave session out.",
                option=name,
                value=value,
            )
