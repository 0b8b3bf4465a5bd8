"""A Linux sandbox by its id: commands, files, processes and sessions in one handle.

It satisfies the contract of `smokebox.sandbox.api`, and more. Nothing starts until the
first call; a sandbox that sleeps is woken by the next one.
"""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING, Self

from smokebox.egress.clients import Clients
from smokebox.engine import commands
from smokebox.engine.backups.box import BoxBackups
from smokebox.engine.egress.door import Door
from smokebox.engine.egress.network import Network
from smokebox.engine.files.files import Files
from smokebox.engine.git.repository import (
    check_branch,
    check_depth,
    default_target,
    parse_repository,
)
from smokebox.engine.interpreter.contexts import Contexts
from smokebox.engine.jail.api import JailStats
from smokebox.engine.lifecycle import STOPPED, Lifecycle, Part
from smokebox.engine.limits import parse_process_limits
from smokebox.engine.mounts.mounts import Mounts
from smokebox.engine.ports import Ports
from smokebox.engine.processes.processes import Processes
from smokebox.engine.record.rows import DEFAULT_CWD
from smokebox.engine.run import DESTROYED
from smokebox.engine.sessions.sessions import Session, Sessions
from smokebox.engine.terminals.terminals import Terminals
from smokebox.errors import InvalidOption
from smokebox.options import check_timeout
from smokebox.sandbox.api import ExecStream
from smokebox.sandbox.capture import ByteStream, decoded
from smokebox.sandbox.output import MAX_OUTPUT
from smokebox.types import (
    Capabilities,
    ExecResult,
    FileInfo,
    GitCheckout,
    SandboxInfo,
    SandboxStats,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from smokebox.engine.jail.api import Owner
    from smokebox.engine.limits import ProcessLimits
    from smokebox.engine.options import Options
    from smokebox.engine.processes.lasting import LastingProcess
    from smokebox.engine.record.rows import SandboxRow
    from smokebox.engine.run import Command
    from smokebox.engine.workshop import Workshop
    from smokebox.sandbox.pipes import Chunk


def info_of(row: SandboxRow, used_at: float = 0.0) -> SandboxInfo:
    """A row of the record, as its users see it; `used_at` is what it cannot know."""
    return SandboxInfo(
        id=row.id,
        status=row.status,
        image=row.image,
        tier=row.tier,
        limits=row.limits.to_json(),
        enforcement=row.jail.enforcement if row.jail is not None else None,
        labels=row.labels,
        generation=row.generation,
        created_at=row.created_at,
        last_active_at=max(row.last_active_at, used_at),
        sleep_after=row.settings.sleep_after,
        keep_alive=row.settings.keep_alive,
        ephemeral=row.settings.ephemeral,
        cwd=row.settings.cwd,
        user=row.settings.user,
        stop_reason=row.stop_reason,
    )


class Sandbox:
    """One sandbox of a host. Made by `Host.sandbox`; every handle of an id is the same one."""

    def __init__(self, id: str, shop: Workshop) -> None:
        self.id = id
        self._shop = shop
        self._life = Lifecycle(id, shop, self._renew)
        self._checkouts: set[str] = set()
        self._furnish()

    @property
    def cwd(self) -> str:
        """The absolute directory where relative paths and commands start.

        One that its image names is known once the sandbox was woken.
        """
        return self._shop.cwds.get(self.id, DEFAULT_CWD)

    @property
    def life(self) -> Lifecycle:
        """Its sleep and waking, for the host that owns it."""
        return self._life

    def ask(self, options: Options) -> None:
        """Have it be so from its next call on."""
        if options.cwd is not None:
            self._shop.cwds[self.id] = options.cwd
        if options.handlers:
            self.network.serve(options.handlers)
        self._life.ask(options)

    def resolve_path(self, path: str) -> str:
        """The absolute form of `path`, without looking at any file."""
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
        session: Session | str | None = None,
    ) -> ExecResult:
        """Run a command and wait for it: a string by bash, or words as they are.

        See `SandboxApi.exec`. With `session`, the command runs in that session's shell, and
        what it does to the shell stays; without, nothing stays but files. `user` is one of
        the sandbox's own, by default root, who is nobody outside.
        """
        if session is not None:
            refuse_in_session(user=user, limits=limits)
            shell = await self._session(session)
            text = in_shell(command)
            return await shell.exec(text, cwd=cwd, env=env, timeout=timeout, stdin=stdin)
        async with self._life.use() as run:
            program = await run.program(
                command, cwd=cwd, env=env, user=user, limits=_process_limits(limits)
            )
            return await commands.execute(
                run,
                program,
                spills=run.spills,
                max_output=MAX_OUTPUT,
                timeout=timeout,
                stdin=stdin,
                rate=run.limits.output_rate,
            )

    def exec_stream(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        session: Session | str | None = None,
    ) -> ExecStream:
        """Run a command and give its output as it is written; the options are `exec`'s."""
        if session is not None:
            refuse_in_session(user=user, limits=limits)
            source = self._session_stream(session, in_shell(command), cwd, env, timeout, stdin)
        else:
            source = self._stream(command, cwd, env, timeout, stdin, user, limits)
        return ExecStream(decoded(source))

    def exec_bytes(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        session: Session | str | None = None,
    ) -> ByteStream:
        """As `exec_stream`, with the bytes themselves: what is not text stays what it is."""
        if session is not None:
            refuse_in_session(user=user, limits=limits)
            text = in_shell(command)
            return ByteStream(self._session_stream(session, text, cwd, env, timeout, stdin))
        return ByteStream(self._stream(command, cwd, env, timeout, stdin, user, limits))

    async def start_process(
        self,
        command: Command,
        *,
        process_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        stdin: bool = False,
        timeout: float | None = None,
    ) -> LastingProcess:
        """Start a command that runs on by itself, until it ends, is killed, or all sleeps."""
        return await self.processes.start(
            command,
            process_id=process_id,
            cwd=cwd,
            env=env,
            user=user,
            limits=_process_limits(limits),
            stdin=stdin,
            timeout=timeout,
        )

    async def create_session(
        self,
        name: str | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """A shell that remembers from one command to the next."""
        async with self._life.use():
            return await self.sessions.create(name, cwd=cwd, env=env, user=user)

    async def read_file(self, path: str) -> str:
        """The text of a file. Raises `NotText` where it is not UTF-8."""
        return await self.files.read_file(path)

    async def read_bytes(self, path: str) -> bytes:
        """The bytes of a file."""
        return await self.files.read_bytes(path)

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Make or replace a file, and its parent directories. All or nothing."""
        await self.files.write_file(path, data)

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """What is at `path`. A symlink that leads nowhere is not found, unless not followed."""
        return await self.files.stat(path, follow_symlinks=follow_symlinks)

    async def readdir(self, path: str) -> list[str]:
        """The names in a directory, dotfiles too, sorted."""
        return await self.files.readdir(path)

    async def exists(self, path: str) -> bool:
        """Whether `path` leads to something."""
        return await self.files.exists(path)

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory; `recursive` makes parents and accepts one that is there."""
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
        """Absolute paths that match, sorted. See `SandboxApi.glob`."""
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
        allow_private: bool = False,
    ) -> GitCheckout:
        """Clone a repository from an https or http URL, by the git of the sandbox's image.

        `target` is by default a directory of the repository's name in /workspace, and holds
        nothing afterwards when this fails. `depth` is how many commits are wanted, by default
        all; submodules and LFS files are not fetched. `password` is a token as well, and
        neither it nor `username` ever gets into the sandbox: the engine asks the host. It
        asks public addresses only, unless `allow_private`. Raises `GitError`.
        """
        # It takes an HTTP client and server with it.
        from smokebox.engine.git.checkout import Checkout

        repository = parse_repository(url, username=username, password=password)
        checkout = Checkout(
            life=self._life,
            files=self.files,
            repository=repository,
            target=target if target is not None else default_target(repository),
            branch=None if branch is None else check_branch(branch),
            depth=None if depth is None else check_depth(depth),
            allow_private=allow_private,
            targets=self._checkouts,
        )
        return await checkout.make(check_timeout(timeout))

    async def capabilities(self) -> Capabilities:
        """What this sandbox can and cannot do; wakes it."""
        async with self._life.use() as run:
            return Capabilities(
                sandbox="linux",
                isolation=run.jail.state.tier,
                network="guarded" if self.door.open else "off",
                persistence="host",
            )

    async def wake(self) -> None:
        """Start it if it does not run. Any other call does that too."""
        async with self._life.use():
            pass

    async def sleep(self) -> None:
        """End its processes and keep its files, as after a long time without a call."""
        await self._life.sleep()

    async def destroy(self) -> None:
        """Remove every trace of it. Safe to repeat; the next call makes another, empty."""
        await self._life.destroy()

    async def info(self) -> SandboxInfo | None:
        """What is known of it without waking it; None before it was ever woken."""
        row = await self._life.row()
        return None if row is None else info_of(row, self._life.used_at)

    async def stats(self) -> SandboxStats:
        """What it uses at this moment, without waking it."""
        run = self._life.run
        used = await run.jail.stats() if run is not None else JailStats()
        row = await self._life.row()
        disk = await self._shop.measure(row.key) if row is not None else None
        return SandboxStats(
            cpu_seconds=used.cpu_seconds,
            memory=used.memory,
            memory_peak=used.memory_peak,
            pids=used.pids,
            oom_kills=used.oom_kills,
            disk=disk,
        )

    async def aclose(self) -> None:
        """Nothing: a sandbox lives by its id, until it is destroyed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _renew(self) -> None:
        """Be as a sandbox that was never there."""
        self._shop.cwds.pop(self.id, None)
        self._shop.clients.pop(self.id, None)
        self.door.journal.end()
        self._furnish()

    def _furnish(self) -> None:
        life, record = self._life, self._shop.record
        self.files = Files(self._root, workers=self._shop.workers, cwd=lambda: self.cwd)
        self.processes = Processes(id=self.id, locate=life.directory, record=record, use=life.use)
        self.sessions = Sessions(id=self.id, record=record, use=life.use)
        self.contexts = Contexts(id=self.id, locate=life.directory, record=record, use=life.use)
        self.terminals = Terminals(id=self.id, record=record, use=life.use)
        self.ports = Ports(id=self.id, record=record, use=life.use, run=lambda: life.run)
        self.mounts = mounts = Mounts(
            id=self.id,
            record=record,
            use=life.use,
            run=lambda: life.run,
            workers=self._shop.workers,
            cwd=lambda: self.cwd,
        )
        self.backups = backups = BoxBackups(
            life,
            self._shop.backups,
            cwd=lambda: self.cwd,
            measure=lambda run: self._shop.measure(run.jail.state.key),
        )
        clients = self._shop.clients.get(self.id) or Clients()
        self.door = Door(
            self.id,
            layers=lambda: life.layers,
            clients=clients,
            workers=self._shop.workers,
            traffic=self._shop.traffic,
        )
        self.network = Network(
            self.door, life.amend, keep=self._keep_handlers, directory=life.directory
        )
        door = self.door
        files, processes, sessions = self.files, self.processes, self.sessions
        contexts, terminals, ports = self.contexts, self.terminals, self.ports
        life.parts = (
            # First, as it may have to let the rest go on.
            Part(
                ended=lambda reason: backups.ended(),
                begin=backups.resume,
                adopt=backups.adopt,
                busy=lambda: backups.busy,
            ),
            Part(
                ended=mounts.ended,
                begin=mounts.begin,
                settle=mounts.settle,
                adopt=mounts.adopt,
                close=mounts.close,
            ),
            Part(ended=lambda reason: files.release(), busy=lambda: files.busy),
            Part(
                ended=lambda reason: processes.ended(reason, destroyed=reason == DESTROYED),
                adopt=processes.adopt,
                close=processes.aclose,
            ),
            Part(
                ended=lambda reason: contexts.ended(reason, destroyed=reason == DESTROYED),
                adopt=contexts.adopt,
                busy=lambda: contexts.busy,
                close=contexts.aclose,
            ),
            Part(
                ended=sessions.ended,
                settle=sessions.saved,
                busy=lambda: sessions.busy,
                close=lambda: sessions.ended(STOPPED),
            ),
            Part(
                ended=terminals.ended,
                settle=terminals.part,
                close=lambda: terminals.ended(STOPPED),
            ),
            Part(ended=door.ended, begin=door.begin, adopt=door.adopt, close=door.leave),
            Part(
                ended=ports.ended,
                busy=lambda: ports.busy,
                close=lambda: ports.ended(STOPPED),
            ),
        )

    def _keep_handlers(self) -> None:
        """Have its handlers outlive this object, of which another is made when it is asked for."""
        self._shop.clients[self.id] = self.door.clients

    async def _root(self) -> tuple[int, Owner]:
        async with self._life.use() as run:
            return run.jail.root, run.jail.owner

    async def _stream(
        self,
        command: Command,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,
        stdin: str | bytes | None,
        user: str | None,
        limits: ProcessLimits | Mapping[str, object] | None,
    ) -> AsyncGenerator[Chunk | ExecResult, None]:
        async with self._life.use() as run:
            program = await run.program(
                command, cwd=cwd, env=env, user=user, limits=_process_limits(limits)
            )
            rate = run.limits.output_rate
            source = commands.stream(run, program, timeout=timeout, stdin=stdin, rate=rate)
            async with contextlib.aclosing(source):
                async for item in source:
                    yield item

    async def _session(self, session: Session | str) -> Session:
        return session if isinstance(session, Session) else await self.sessions.get(session)

    async def _session_stream(
        self,
        session: Session | str,
        command: str,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,
        stdin: str | bytes | None,
    ) -> AsyncGenerator[Chunk | ExecResult, None]:
        shell = await self._session(session)
        async with shell.exec_bytes(
            command, cwd=cwd, env=env, timeout=timeout, stdin=stdin
        ) as stream:
            async for chunk in stream:
                yield chunk
            yield stream.result


def _process_limits(
    limits: ProcessLimits | Mapping[str, object] | None,
) -> ProcessLimits | None:
    # None is the quick way: a program without limits of its own is spawned, not forked.
    return None if limits is None else parse_process_limits(limits)


def in_shell(command: Command) -> str:
    """A command for the shell of a session, where words are quoted to stay themselves."""
    return command if isinstance(command, str) else shlex.join(command)


def refuse_in_session(**options: object) -> None:
    """Raise for what a session has for all its commands."""
    for name, value in options.items():
        if value is not None:
            raise InvalidOption(
                f"{name} cannot change within a session.",
                hint=f"Pass {name} to create_session() where it takes one, or leave session out.",
                option=name,
                value=value,
            )
