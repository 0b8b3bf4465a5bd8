"""An engine under load, to be killed: `workload.py HOME LAYERS POOL SEED ROUND [finish]`.

It tells what it finds, then works at random and says before and after each step what it
does; sometimes it breaks off and closes. With `finish` it only tells, destroys everything
and closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
import sys
from typing import TYPE_CHECKING

from smokebox.engine.context import tag_of
from smokebox.engine.host import Host
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.errors import NotFound, SandboxGone

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox
    from smokebox.runtime.stream import ExecStream

BOXES = ("box-0", "box-1", "box-2", "box-3")
SESSION = "memory"
MOST_PROCESSES = 3
HANG = "sleep 123456"
# Counts without a fork, and without an end.
COUNT = "exec 9<> <(:); i=0; while :; do echo $i; i=$((i+1)); read -t 0.03 -u 9; done"


def tell(**words: object) -> None:
    """One line for whoever watches."""
    data = json.dumps(words).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


class Worker:
    """Does one step after the other with one sandbox."""

    def __init__(self, host: Host, id: str, chance: random.Random, started: int) -> None:
        self.host = host
        self.id = id
        self.chance = chance
        self.serial = started
        self.running: list[str] = []
        self.hanging: list[ExecStream] = []

    async def work(self) -> None:
        """Work until killed."""
        steps = {
            self.write_file: 20,
            self.write_by_command: 20,
            self.set_variable: 20,
            self.label: 10,
            self.start_process: 15,
            self.end_process: 8,
            self.hang: 6,
            self.sleep: 6,
            self.destroy: 6,
        }
        while True:
            [step] = self.chance.choices(list(steps), list(steps.values()))
            self.serial += 1
            await step(self.host.sandbox(self.id), str(self.serial))
            await asyncio.sleep(self.chance.choice((0, 0, 0.01)))

    def will(self, *step: str) -> None:
        tell(will=[self.id, *step])

    def did(self, pid: int | None = None) -> None:
        tell(did=self.id, pid=pid)

    async def write_file(self, sandbox: Sandbox, serial: str) -> None:
        name = f"f{self.chance.randrange(4)}"
        self.will("write", name, serial)
        await sandbox.write_file(name, serial)
        self.did()

    async def write_by_command(self, sandbox: Sandbox, serial: str) -> None:
        name = f"f{self.chance.randrange(4)}"
        self.will("write", name, serial)
        result = await sandbox.exec(f"echo -n {serial} >.part && mv .part {name}")
        assert result.success, result
        self.did()

    async def set_variable(self, sandbox: Sandbox, serial: str) -> None:
        self.will("remember", serial)
        try:
            session = await sandbox.sessions.get(SESSION)
        except NotFound:
            session = await sandbox.create_session(SESSION)
        result = await session.exec(f"N={serial}")
        assert result.success, result
        await session.flush()
        self.did()

    async def label(self, sandbox: Sandbox, serial: str) -> None:
        self.will("label", serial)
        self.host.sandbox(self.id, labels={"serial": serial})
        await sandbox.wake()
        self.did()

    async def start_process(self, sandbox: Sandbox, serial: str) -> None:
        if len(self.running) == MOST_PROCESSES:
            await self.end_process(sandbox, serial)
            return
        name = f"p{serial}"
        self.will("start", name)
        process = await sandbox.start_process(COUNT, process_id=name)
        self.did(process.pid)
        self.running.append(name)

    async def end_process(self, sandbox: Sandbox, serial: str) -> None:
        if not self.running:
            return
        name = self.running.pop()
        self.will("end", name)
        await sandbox.processes.kill(name, "KILL")
        assert await (await sandbox.processes.get(name)).wait_for_exit() == 137
        self.did()

    async def hang(self, sandbox: Sandbox, serial: str) -> None:
        self.will("hang")
        stream = sandbox.exec_stream(f"echo on; exec {HANG}")
        assert (await anext(aiter(stream))).data == "on\n"
        self.hanging.append(stream)
        self.did()

    async def sleep(self, sandbox: Sandbox, serial: str) -> None:
        self.will("sleep")
        await sandbox.sleep()
        self.did()
        await self.forget()

    async def destroy(self, sandbox: Sandbox, serial: str) -> None:
        self.will("destroy")
        await sandbox.destroy()
        self.did()
        await self.forget()

    async def forget(self) -> None:
        """Nothing runs any more."""
        self.running.clear()
        while self.hanging:
            with contextlib.suppress(SandboxGone):
                await self.hanging.pop().aclose()


async def look(host: Host, id: str) -> list[str]:
    """Tell all there is of a sandbox; the processes that run in it."""
    sandbox = host.sandbox(id)
    info = await sandbox.info()
    assert info is not None
    processes = {
        process.id: {
            "status": process.status,
            "pid": process.pid,
            "log": (await process.logs()).stdout,
        }
        for process in await sandbox.processes.list()
    }
    files = {
        name: await sandbox.read_file(name)
        for name in await sandbox.readdir("/workspace")
        if name != ".part"
    }
    try:
        result = await sandbox.exec("echo -n $N", session=SESSION)
        remembered = result.stdout
    except NotFound:
        remembered = ""
    alive = await sandbox.exec("cd /proc; echo [0-9]*")
    commands = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    tell(
        saw=id,
        generation=info.generation,
        last_end=info.stop_reason,
        label=info.labels.get("serial"),
        processes=processes,
        files=files,
        remembered=remembered,
        alive=[int(word) for word in alive.stdout.split()],
        hanging=HANG in commands.stdout,
    )
    return [name for name, process in processes.items() if process["status"] == "running"]


def survey(home: str) -> None:
    """Tell what is on disk and in cgroups, and what the record knows of it."""
    with sqlite3.connect(f"{home}/record.db") as record:
        rows = record.execute("SELECT key, status FROM sandboxes").fetchall()
    record.close()
    hierarchy, prefix = detect(), f"{tag_of(home)}-"
    tell(
        boxes=os.listdir(f"{home}/boxes"),
        keys=[key for key, _ in rows],
        unsettled=[key for key, status in rows if status == "destroying"],
        active=[key for key, status in rows if status == "active"],
        cgroups=[
            name
            for directory in hierarchy.placement.directories
            if os.path.isdir(directory)
            for name in os.listdir(directory)
            if name.startswith(prefix)
        ],
    )


async def main(home: str, layers: str, pool: str, seed: str, number: str, *finish: str) -> None:
    tell(began=os.getpid())
    host = await Host.open(home, images=layers, pool=int(pool))
    survey(home)
    found = {info.id: await look(host, info.id) for info in await host.list()}
    tell(looked=sorted(found))
    if finish:
        for id in found:
            await host.sandbox(id).destroy()
        await host.aclose()
        return
    chance = random.Random(f"{seed}-{number}")
    work = []
    for id in BOXES:
        worker = Worker(host, id, random.Random(chance.random()), int(number) * 10_000)
        worker.running = found.get(id, [])
        work.append(asyncio.create_task(worker.work()))
    patience = chance.choice((None, None, chance.random()))
    ended, _ = await asyncio.wait(work, timeout=patience, return_when=asyncio.FIRST_EXCEPTION)
    for task in ended:
        task.result()
    await close(host, work, detach=chance.random() < 0.5)


async def close(host: Host, work: list[asyncio.Task[None]], *, detach: bool) -> None:
    """Break everything off and close, as upon a signal."""
    tell(closing=True, detach=detach)
    for task in work:
        task.cancel()
    await asyncio.wait(work)
    await host.aclose(detach=detach)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
