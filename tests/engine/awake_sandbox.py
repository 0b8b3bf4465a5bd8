"""A running jail of this host's programs, with processes and sessions but no engine around it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine.images.image import Image, Layer
from smokebox.engine.jail.namespaces import NamespaceJailer
from smokebox.engine.jail.spec import JailSpec
from smokebox.engine.processes.processes import Processes
from smokebox.engine.record.record import Record
from smokebox.engine.record.rows import ProcessRow, SandboxRow, put
from smokebox.engine.run import DESTROYED, Run
from smokebox.engine.sessions.sessions import Sessions
from smokebox.errors import PathNotFound
from smokebox.limits import Limits
from smokebox.runtime.spill import SpillFolder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smokebox.engine.jail.jail import Jail
    from smokebox.engine.jail.spec import JailState
    from smokebox.types import ExecResult

PASSWD = b"root:x:0:0::/root:/bin/bash\nalice:x:1000:1000::/tmp:/bin/bash\n"


class AwakeSandbox:
    """A sandbox named "box" that is awake, with its record. `uses` counts the current calls."""

    def __init__(self, home: Path, key: str) -> None:
        self.key = key
        self.home = str(home)
        self.id = "box"
        self.path = f"{home}/box"
        self.jailer = NamespaceJailer()
        self.shell = "/bin/bash"
        self.generation = 1
        self.limits = Limits()
        self.spills = SpillFolder()
        self.uses = 0
        self.jail: Jail
        self.record: Record
        self.processes: Processes
        self.sessions: Sessions

    @property
    def spec(self) -> JailSpec:
        layers = (Layer(path=f"{self.home}/skeleton"), Layer(path="/usr", target="/usr"))
        return JailSpec(key=self.key, directory=self.path, layers=layers, limits=Limits())

    @property
    def run(self) -> Run:
        return Run(
            id="box",
            jail=self.jail,
            generation=self.generation,
            directory=self.path,
            image=Image(name="host", digest="", layers=self.spec.layers),
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            cwd="/workspace",
            default_user="root",
            shell=self.shell,
            limits=self.limits,
            spills=self.spills,
            read=self.read,
        )

    async def read(self, path: str) -> bytes:
        if path == "/etc/passwd":
            return PASSWD
        raise PathNotFound(path)

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Run]:
        self.uses += 1
        try:
            yield self.run
        finally:
            self.uses -= 1

    async def directory(self) -> str:
        return self.path

    async def run_command(self, command: str) -> ExecResult:
        """Run a command without a session."""
        return await self.run.execute(await self.run.program(command))

    async def open(self) -> None:
        """Open the record, processes and sessions, as an engine does."""
        self.record = await Record.open(f"{self.home}/record.db")
        self.processes = Processes(self, self.record)
        self.sessions = Sessions(self, self.record)

    async def wake(self) -> None:
        self.jail = await self.jailer.make(self.spec)
        await self.jail.enter("box", Limits())

    async def create(self) -> None:
        await self.open()
        row = SandboxRow(
            id="box",
            key=self.key,
            image="host",
            digest="",
            tier="namespaces",
            created_at=time.time(),
            last_active_at=time.time(),
        )
        await self.record.write(put(row))
        await self.wake()

    async def sleep(self, reason: str = "it fell asleep") -> None:
        await self.sessions.before_end()
        await self.jail.kill()
        await self.processes.ended(reason)
        await self.sessions.ended(reason)
        self.generation += 1

    async def restart(self) -> None:
        """End the run, as an idle sandbox does, and start another."""
        await self.sleep()
        await self.wake()

    async def adopt(self, state: JailState) -> None:
        """Take over the jail as a new engine."""
        jail = await self.jailer.adopt(self.spec, state)
        assert jail is not None
        self.jail = jail
        await self.open()
        await self.processes.adopt(self.run)

    async def crash(self) -> None:
        """Drop all state as if the engine was killed, and adopt the jail."""
        state = self.jail.state
        for process in await self.processes.list():
            process.close()
        self.jail.close()
        await self.record.aclose()
        await self.adopt(state)

    async def restart_engine(self) -> None:
        """Stop the engine, and open the record as another one while the jail runs."""
        await self.sessions.before_end()
        await self.sessions.aclose()
        await self.processes.aclose()
        await self.record.aclose()
        await self.open()

    async def aclose(self) -> None:
        await self.jail.kill()
        await self.processes.ended(DESTROYED)
        await self.processes.aclose()
        await self.sessions.ended(DESTROYED)
        await self.sessions.before_end()
        await self.record.aclose()
        await self.jailer.aclose()
        await asyncio.to_thread(self.spills.close)


@contextlib.asynccontextmanager
async def open_sandbox(home: Path) -> AsyncIterator[AwakeSandbox]:
    """Create a sandbox in an empty directory, and kill it at the end."""
    create_skeleton(home)
    sandbox = AwakeSandbox(home, f"t{secrets.token_hex(6)}")
    await sandbox.create()
    try:
        yield sandbox
    finally:
        await sandbox.aclose()


def create_skeleton(home: Path) -> None:
    """Create the directories that a jail of this host needs besides /usr."""
    os.chmod(home, 0o755)
    for name in ("usr", "etc", "proc", "dev", "sys", "run/smokebox", "tmp", "workspace", "root"):
        os.makedirs(home / "skeleton" / name)
    os.chmod(home / "skeleton" / "tmp", 0o1777)
    for name in ("bin", "lib", "lib64", "sbin"):
        os.symlink(f"usr/{name}", home / "skeleton" / name)


async def process_rows(sandbox: AwakeSandbox) -> list[ProcessRow]:
    """Return the rows of the sandbox's processes in the record."""
    return await sandbox.record.rows(ProcessRow, "box")


def process_files(sandbox: AwakeSandbox) -> set[str]:
    """Return the names of the files of the sandbox's processes."""
    return set(os.listdir(f"{sandbox.path}/run")) - {"init.sock", "io"}


def command_lines(sandbox: AwakeSandbox) -> list[str]:
    """Return the command lines in the sandbox, without guest init, supervisors and zombies."""
    namespace = os.readlink(f"/proc/{sandbox.jail.state.pid}/ns/pid")
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            name = Path(f"/proc/{pid}/comm").read_text()
            if os.readlink(f"/proc/{pid}/ns/pid") == namespace and "smokebox" not in name:
                found.append(line)
    return [line for line in found if line]


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, for a bounded time."""
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
