"""A jail of this host's programs with sessions, without the rest of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smokebox.engine.images.image import Image, Layer
from smokebox.engine.jail.api import JailSpec
from smokebox.engine.jail.namespaces import NamespaceJailer
from smokebox.engine.record.record import Record
from smokebox.engine.record.rows import SandboxRow, put
from smokebox.engine.run import Run
from smokebox.engine.sessions.sessions import Sessions
from smokebox.errors import PathNotFound
from smokebox.limits import Limits
from smokebox.runtime.spill import SpillFolder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smokebox.engine.jail.api import Jail
    from smokebox.types import ExecResult

PASSWD = b"root:x:0:0::/root:/bin/bash\nalice:x:1000:1000::/tmp:/bin/bash\n"


class Box:
    """One sandbox that is awake, with its record and its sessions."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.directory = f"{home}/box"
        self.jailer = NamespaceJailer()
        self.shell = "/bin/bash"
        self.generation = 0
        self.uses = 0
        self.run: Run
        self.jail: Jail
        self.record: Record
        self.sessions: Sessions
        self.spills = SpillFolder()

    async def open(self) -> None:
        """Be an engine: open the record, and what reads it."""
        self.record = await Record.open(f"{self.home}/record.db")
        self.sessions = Sessions(id="box", record=self.record, use=self.use)

    async def wake(self) -> None:
        """Begin another run."""
        layers = (Layer(path=f"{self.home}/skeleton"), Layer(path="/usr", target="/usr"))
        key = f"t{secrets.token_hex(6)}"
        spec = JailSpec(key=key, directory=self.directory, layers=layers, limits=Limits())
        self.jail = await self.jailer.make(spec)
        await self.jail.enter("box", Limits())
        self.generation += 1
        options: dict[str, Any] = {
            "id": "box",
            "jail": self.jail,
            "generation": self.generation,
            "directory": self.directory,
            "image": Image(name="host", digest="", layers=layers),
            "env": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            "cwd": "/workspace",
            "shell": self.shell,
            "read": self.read,
            "limits": Limits(),
            "default_user": "root",
            "spills": self.spills,
        }
        self.run = Run(**{one.name: options[one.name] for one in fields(Run)})

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

    async def exec(self, command: str) -> ExecResult:
        """A command without a session."""
        program = await self.run.program(command)
        return await self.run.execute(program, spills=self.spills, max_output=1 << 20)

    async def sleep(self) -> None:
        """End the run, as an idle sandbox does, and begin another."""
        await self.sessions.saved()
        await self.jail.kill()
        await self.sessions.ended("it fell asleep")
        await self.wake()

    async def restart_engine(self) -> None:
        """Let another engine open the record and take over the jail's directory."""
        await self.sessions.saved()
        await self.sessions.ended("the engine was stopped")
        await self.record.aclose()
        await self.open()

    async def aclose(self) -> None:
        await self.jail.kill()
        await self.sessions.ended("the test is over")
        await self.sessions.saved()
        await self.record.aclose()
        await self.jailer.aclose()
        await asyncio.to_thread(self.spills.close)


@contextlib.asynccontextmanager
async def open_box(home: Path) -> AsyncIterator[Box]:
    """A sandbox in a directory of its own, gone afterwards."""
    os.chmod(home, 0o755)
    for name in ("usr", "etc", "proc", "dev", "sys", "run/smokebox", "tmp", "workspace", "root"):
        os.makedirs(home / "skeleton" / name)
    os.chmod(home / "skeleton" / "tmp", 0o1777)
    for name in ("bin", "lib", "lib64", "sbin"):
        os.symlink(f"usr/{name}", home / "skeleton" / name)
    box = Box(home)
    await box.open()
    at = time.time()
    row = SandboxRow(
        id="box", key="k", image="host", digest="", tier="namespaces", created_at=at,
        last_active_at=at,
    )  # fmt: skip
    await box.record.write(put(row))
    await box.wake()
    try:
        yield box
    finally:
        await box.aclose()


def processes(box: Box) -> list[str]:
    """The command lines in the sandbox, without its agent, its minders, and zombies."""
    pids = f"/proc/{box.jail.state.pid}/ns/pid"
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            name = Path(f"/proc/{pid}/comm").read_text()
            if os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(pids) and "smokebox" not in name:
                found.append(line)
    return [line for line in found if line]


async def eventually(condition: Callable[[], bool]) -> None:
    """Return when it is so, which it has to be soon."""
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
