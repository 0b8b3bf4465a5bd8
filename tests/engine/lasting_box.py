"""A jail of this host's programs with lasting processes, without the rest of an engine."""

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
from smokebox.engine.jail.api import JailSpec, JailState
from smokebox.engine.jail.namespaces import NamespaceJailer
from smokebox.engine.processes.processes import Processes
from smokebox.engine.record.record import Record
from smokebox.engine.record.rows import ProcessRow, SandboxRow, put
from smokebox.engine.run import Run
from smokebox.errors import PathNotFound
from smokebox.limits import Limits
from smokebox.runtime.spill import SpillFolder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smokebox.engine.jail.api import Jail

PASSWD = b"root:x:0:0::/root:/bin/bash\nalice:x:1000:1000::/home/alice:/bin/bash\n"


class Box:
    """One sandbox that is awake, with its record."""

    def __init__(self, home: Path, key: str) -> None:
        self.key = key
        self.home = str(home)
        self.directory = f"{home}/box"
        self.jailer = NamespaceJailer()
        self.generation = 1
        self.limits = Limits()
        self.uses = 0
        self.jail: Jail
        self.record: Record
        self.processes: Processes

    @property
    def spec(self) -> JailSpec:
        layers = (Layer(path=f"{self.home}/skeleton"), Layer(path="/usr", target="/usr"))
        return JailSpec(key=self.key, directory=self.directory, layers=layers, limits=Limits())

    @property
    def run(self) -> Run:
        options: dict[str, Any] = {
            "id": "box",
            "jail": self.jail,
            "generation": self.generation,
            "directory": self.directory,
            "image": Image(name="host", digest="", layers=self.spec.layers),
            "env": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            "cwd": "/workspace",
            "shell": "/bin/bash",
            "read": self.read,
            "limits": self.limits,
            "default_user": "root",
            "spills": SpillFolder(),
        }
        return Run(**{one.name: options[one.name] for one in fields(Run)})

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

    async def locate(self) -> str:
        return self.directory

    async def open(self) -> None:
        """The record, and what reads it."""
        self.record = await Record.open(f"{self.home}/record.db")
        self.processes = Processes(id="box", locate=self.locate, record=self.record, use=self.use)

    async def wake(self) -> None:
        self.jail = await self.jailer.make(self.spec)
        await self.jail.enter("box", Limits())

    async def create(self) -> None:
        await self.open()
        await self.record.write(
            put(
                SandboxRow(
                    id="box",
                    key=self.key,
                    image="host",
                    digest="",
                    tier="namespaces",
                    created_at=time.time(),
                    last_active_at=time.time(),
                )
            )
        )
        await self.wake()

    async def adopt(self, state: JailState) -> None:
        """Be another engine, after one that was killed."""
        jail = await self.jailer.adopt(self.spec, state)
        assert jail is not None
        self.jail = jail
        await self.open()
        await self.processes.adopt(self.run)

    async def crash(self) -> None:
        """Forget everything as a killed engine does, and start again on what is left."""
        state = self.jail.state
        for process in await self.processes.list():
            process.close()
        self.jail.close()
        await self.record.aclose()
        await self.adopt(state)

    async def sleep(self, reason: str = "it fell asleep") -> None:
        await self.jail.kill()
        await self.processes.ended(reason)
        self.generation += 1

    async def aclose(self) -> None:
        await self.jail.kill()
        await self.processes.ended("the test is over", destroyed=True)
        await self.processes.aclose()
        await self.record.aclose()
        await self.jailer.aclose()


@contextlib.asynccontextmanager
async def open_box(home: Path) -> AsyncIterator[Box]:
    """A sandbox in a directory of its own, gone afterwards."""
    lay_skeleton(home)
    box = Box(home, f"t{secrets.token_hex(6)}")
    await box.create()
    try:
        yield box
    finally:
        await box.aclose()


def lay_skeleton(home: Path) -> None:
    """The directories that a jail of this host needs besides /usr."""
    os.chmod(home, 0o755)
    for name in ("usr", "etc", "proc", "dev", "sys", "run/smokebox", "tmp", "workspace", "root"):
        os.makedirs(home / "skeleton" / name)
    for name in ("bin", "lib", "lib64", "sbin"):
        os.symlink(f"usr/{name}", home / "skeleton" / name)


async def rows(box: Box) -> list[ProcessRow]:
    """What the record has of the sandbox's processes."""
    return await box.record.rows(ProcessRow, "box")


def files(box: Box) -> set[str]:
    """The files of its processes."""
    return set(os.listdir(f"{box.directory}/run")) - {"init.sock", "io"}


def commands(box: Box) -> list[str]:
    """What runs in the sandbox besides its agent and minders, zombies not counted."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            same = os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(
                f"/proc/{box.jail.state.pid}/ns/pid"
            )
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if same and "State:\tZ" not in status and "smokebox" not in name:
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "))
    return [line.decode().strip() for line in found if line.startswith((b"sleep", b"/bin", b"cat"))]


async def eventually(condition: Callable[[], bool]) -> None:
    """Return when it is so, which it has to be soon."""
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
