"""An engine under load, to be killed: `workload.py HOME LAYERS POOL SEED ROUND [finish]`.

It reports the state that it finds, then does random steps and reports the start and end of each;
sometimes it cancels them and closes. With `finish` it only reports, destroys everything and
closes.
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

SANDBOXES = ("box-0", "box-1", "box-2", "box-3")
SESSION = "session"
MOST_PROCESSES = 3
HANG = "sleep 123456"
# Counts for ever, without forks.
COUNT = "exec 9<> <(:); i=0; while :; do echo $i; i=$((i+1)); read -t 0.03 -u 9; done"


def report(**fields: object) -> None:
    """Write a report to stdout."""
    data = json.dumps(fields).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


class Worker:
    """Does random steps with one sandbox."""

    def __init__(self, host: Host, id: str, rng: random.Random, started: int) -> None:
        self.host = host
        self.id = id
        self.rng = rng
        self.serial = started
        self.running: list[str] = []
        self.hanging: list[ExecStream] = []

    async def run(self) -> None:
        """Do steps until killed."""
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
            [step] = self.rng.choices(list(steps), list(steps.values()))
            self.serial += 1
            await step(self.host.sandbox(self.id), str(self.serial))
            await asyncio.sleep(self.rng.choice((0, 0, 0.01)))

    def start(self, *step: str) -> None:
        report(started=[self.id, *step])

    def finish(self, pid: int | None = None) -> None:
        report(finished=self.id, pid=pid)

    async def write_file(self, sandbox: Sandbox, serial: str) -> None:
        name = f"f{self.rng.randrange(4)}"
        self.start("write", name, serial)
        await sandbox.write_file(name, serial)
        self.finish()

    async def write_by_command(self, sandbox: Sandbox, serial: str) -> None:
        name = f"f{self.rng.randrange(4)}"
        self.start("write", name, serial)
        result = await sandbox.exec(f"echo -n {serial} >.part && mv .part {name}")
        assert result.success, result
        self.finish()

    async def set_variable(self, sandbox: Sandbox, serial: str) -> None:
        self.start("set", serial)
        try:
            session = await sandbox.sessions.get(SESSION)
        except NotFound:
            session = await sandbox.create_session(SESSION)
        result = await session.exec(f"N={serial}")
        assert result.success, result
        await session.flush()
        self.finish()

    async def label(self, sandbox: Sandbox, serial: str) -> None:
        self.start("label", serial)
        self.host.sandbox(self.id, labels={"serial": serial})
        await sandbox.wake()
        self.finish()

    async def start_process(self, sandbox: Sandbox, serial: str) -> None:
        if len(self.running) == MOST_PROCESSES:
            await self.end_process(sandbox, serial)
            return
        name = f"p{serial}"
        self.start("start", name)
        process = await sandbox.start_process(COUNT, process_id=name)
        self.finish(process.pid)
        self.running.append(name)

    async def end_process(self, sandbox: Sandbox, serial: str) -> None:
        if not self.running:
            return
        name = self.running.pop()
        self.start("end", name)
        await sandbox.processes.kill(name, "KILL")
        assert await (await sandbox.processes.get(name)).wait_for_exit() == 137
        self.finish()

    async def hang(self, sandbox: Sandbox, serial: str) -> None:
        self.start("hang")
        stream = sandbox.exec_stream(f"echo on; exec {HANG}")
        assert (await anext(aiter(stream))).data == "on\n"
        self.hanging.append(stream)
        self.finish()

    async def sleep(self, sandbox: Sandbox, serial: str) -> None:
        self.start("sleep")
        await sandbox.sleep()
        self.finish()
        await self.clear()

    async def destroy(self, sandbox: Sandbox, serial: str) -> None:
        self.start("destroy")
        await sandbox.destroy()
        self.finish()
        await self.clear()

    async def clear(self) -> None:
        """Forget processes and streams, which have ended."""
        self.running.clear()
        while self.hanging:
            with contextlib.suppress(SandboxGone):
                await self.hanging.pop().aclose()


async def inspect(host: Host, id: str) -> list[str]:
    """Report the state of a sandbox, and return its running processes."""
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
        variable = result.stdout
    except NotFound:
        variable = ""
    alive = await sandbox.exec("cd /proc; echo [0-9]*")
    commands = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    report(
        found=id,
        generation=info.generation,
        stop_reason=info.stop_reason,
        label=info.labels.get("serial"),
        processes=processes,
        files=files,
        variable=variable,
        alive=[int(word) for word in alive.stdout.split()],
        hanging=HANG in commands.stdout,
    )
    return [name for name, process in processes.items() if process["status"] == "running"]


def inspect_host(home: str) -> None:
    """Report directories, cgroups and the record."""
    with sqlite3.connect(f"{home}/record.db") as record:
        rows = record.execute("SELECT key, status FROM sandboxes").fetchall()
    record.close()
    hierarchy, prefix = detect(), f"{tag_of(home)}-"
    report(
        directories=os.listdir(f"{home}/boxes"),
        keys=[key for key, _ in rows],
        destroying=[key for key, status in rows if status == "destroying"],
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
    report(pid=os.getpid())
    host = await Host.open(home, images=layers, pool=int(pool))
    inspect_host(home)
    found = {info.id: await inspect(host, info.id) for info in await host.list()}
    report(inspected=sorted(found))
    if finish:
        for id in found:
            await host.sandbox(id).destroy()
        await host.aclose()
        return
    rng = random.Random(f"{seed}-{number}")
    tasks = []
    for id in SANDBOXES:
        worker = Worker(host, id, random.Random(rng.random()), int(number) * 10_000)
        worker.running = found.get(id, [])
        tasks.append(asyncio.create_task(worker.run()))
    timeout = rng.choice((None, None, rng.random()))
    ended, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
    for task in ended:
        task.result()
    await close(host, tasks, detach=rng.random() < 0.5)


async def close(host: Host, tasks: list[asyncio.Task[None]], *, detach: bool) -> None:
    """Cancel all steps and close, as after a signal."""
    report(closing=True, detach=detach)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await host.aclose(detach=detach)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
