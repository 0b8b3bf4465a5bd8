"""Linux sandboxes compared with a bare fork and exec, and with other runtimes.

    python bench/engine.py [--repeats 40] [--live 1 10 100 200] [--tier namespaces]

Every job alternates with the one that it is compared to; `bare` is posix_spawn of /bin/true and
waiting for it. Figures are medians with the 10th and 90th percentile. crun, podman and docker run
the same program if they are installed and work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine import Host, Sandbox
from table import Table, Work, bare, in_turns

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMED = 100_000_000
AT_ONCE = 100


class Sandboxes:
    """Creates sandboxes with numbered ids."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.created: list[Sandbox] = []

    async def create(self) -> None:
        """Create a sandbox and run its first command."""
        sandbox = self.host.sandbox(f"bench-{len(self.created)}")
        self.created.append(sandbox)
        await sandbox.exec(["/bin/true"])

    async def destroy(self) -> None:
        """Destroy the last one."""
        await self.created.pop().destroy()


async def creation(table: Table, home: Path, options: argparse.Namespace) -> None:
    """Measure creation to the first command, without and with a pool."""
    for name, pool in (("create to first exec", 0), ("create to first exec, pool of 4", 4)):
        async with await Host.open(home, pool=pool, tier=options.tier) as host:
            sandboxes = Sandboxes(host)
            await sandboxes.create()
            ours: list[float] = []
            theirs: list[float] = []
            jobs: list[tuple[Work, list[float]]] = [(sandboxes.create, ours), (bare, theirs)]
            for _ in range(options.repeats // 2):
                for job, times in jobs:
                    # Let the pool fill. Both wait, since an idle machine takes longer.
                    await asyncio.sleep(0.15 if pool else 0)
                    ((seconds,),) = await in_turns(job, repeats=1)
                    times.append(seconds)
            table.line(name, ours, to="bare", other=theirs)
            if not pool:
                (destroyed, bare_again) = await in_turns(
                    sandboxes.destroy, bare, repeats=options.repeats // 2
                )
                table.line("destroy", destroyed, to="bare", other=bare_again)
                for label, work in runtimes():
                    (others, ours_again) = await in_turns(work, sandboxes.create, repeats=7)
                    table.line(label, others, to="create to first exec", other=ours_again)
            for sandbox in sandboxes.created:
                await sandbox.destroy()


def runtimes() -> Iterator[tuple[str, Work]]:
    """Yield other runtimes that work here, each running /bin/true in a new container."""
    with tempfile.TemporaryDirectory() as folder:
        root = _root(Path(folder, "rootfs"))
        for name in ("podman", "docker", "crun", "runc"):
            program = shutil.which(name)
            if program is None:
                sys.stdout.write(f"{name} run: not installed\n")
                continue
            for command in _commands(name, program, root):
                if not subprocess.run(command, capture_output=True).returncode:
                    yield f"{name} run", functools.partial(_run, command)
                    break
            else:
                sys.stdout.write(f"{name} run: does not run here\n")


async def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _commands(name: str, program: str, root: Path) -> Iterator[list[str]]:
    """Yield command lines of a runtime, the simplest first."""
    if name in ("podman", "docker"):
        packed = subprocess.run(["tar", "-C", root, "-c", "."], capture_output=True, check=True)
        image = "smokebox-bench:latest"
        subprocess.run([program, "import", "-", image], input=packed.stdout, capture_output=True)
        once = ["run", "--rm", "--network", "none"]
        # A caller that may not raise limits cannot have its defaults.
        limits = ["--ulimit", "nofile=10000:10000", "--ulimit", "nproc=4096:4096"]
        for before in ([program], [program, "--runtime", "runc"]):
            for options in (once, [*once, *limits]):
                yield [*before, *options, image, "/bin/true"]
        return
    bundle = root.parent
    subprocess.run([program, "spec"], cwd=bundle, capture_output=True)
    config = bundle / "config.json"
    spec = json.loads(config.read_text())
    spec["process"].update(args=["/bin/true"], terminal=False, rlimits=[])
    spec["mounts"] = [mount for mount in spec["mounts"] if mount["type"] != "cgroup"]
    config.write_text(json.dumps(spec))
    yield [program, "run", "-b", str(bundle), f"bench-{name}"]
    # crun refuses a host with both cgroup versions, unless one is hidden.
    hide = 'umount /sys/fs/cgroup/unified && exec "$@"'
    namespace = ["unshare", "-m", "--propagation", "private", "sh", "-c", hide, "sh"]
    yield [*namespace, program, "run", "-b", str(bundle), f"bench-{name}"]


def _root(folder: Path) -> Path:
    """Create a root filesystem with /bin/true and its libraries."""
    listed = subprocess.run(["ldd", "/bin/true"], capture_output=True, text=True).stdout
    for path in ("/bin/true", *(word for word in listed.split() if word.startswith("/"))):
        target = folder / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder


async def warm(table: Table, host: Host, repeats: int) -> None:
    """Measure commands in a running sandbox."""
    sandbox = host.sandbox("warm")
    session = await sandbox.create_session()
    await sandbox.exec(["/bin/true"])

    async def by_arguments() -> None:
        await sandbox.exec(["/bin/true"])

    async def by_bash() -> None:
        await sandbox.exec("true")

    async def in_session() -> None:
        await sandbox.exec("true", session=session)

    await in_session()
    times = await in_turns(bare, by_arguments, by_bash, in_session, repeats=repeats * 5)
    table.line("warm exec of /bin/true", times[1], to="bare", other=times[0])
    table.line("warm exec of bash -c true", times[2], to="bare", other=times[0])
    table.line("warm exec in a session", times[3], to="bare", other=times[0])


async def crowds(table: Table, host: Host, options: argparse.Namespace) -> None:
    """Measure commands beside many sandboxes, and the memory of an idle one."""
    sandboxes = Sandboxes(host)
    alone: list[float] = []
    for count in options.live:
        before, started = memory(os.getpid()), len(sandboxes.created)
        while len(sandboxes.created) < count:
            await sandboxes.create()
        first = sandboxes.created[0]

        async def one(sandbox: Sandbox = first) -> None:
            await sandbox.exec(["/bin/true"])

        (times,) = await in_turns(one, repeats=options.repeats * 2)
        alone = alone or times
        table.line(f"warm exec beside {count - 1} others", times, to="alone", other=alone)
        if count - started >= 50:
            # Idle supervisors exit after ten seconds.
            await asyncio.sleep(12)
            grown = memory(os.getpid()) - before
            jails = sum(memory(pid) for pid in guest_inits())
            each = (grown / (count - started) + jails / count) / 1e6
            table.text(f"{'memory of an idle sandbox, engine included':42} {each:9.2f} MB")
    for sandbox in sandboxes.created:
        await sandbox.destroy()


def guest_inits() -> list[int]:
    """Return the pids of the first processes of sandboxes."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and Path(f"/proc/{entry}/comm").read_text() == "smokebox-init\n":
                found.append(int(entry))
    return found


def memory(pid: int) -> int:
    """Return the memory of a process in bytes, with its share of shared pages."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


async def burst(table: Table, host: Host) -> None:
    """Measure many sandboxes created at once."""
    sandboxes = [host.sandbox(f"burst-{number}") for number in range(AT_ONCE)]
    started = time.perf_counter()
    await asyncio.gather(*(one.exec(["/bin/true"]) for one in sandboxes))
    seconds = time.perf_counter() - started
    (base,) = await in_turns(bare, repeats=40)
    table.line(f"{AT_ONCE} created at once, each", [seconds / AT_ONCE], to="bare", other=base)
    started = time.perf_counter()
    await asyncio.gather(*(one.destroy() for one in sandboxes))
    seconds = time.perf_counter() - started
    table.line(f"{AT_ONCE} destroyed at once, each", [seconds / AT_ONCE], to="bare", other=base)


async def streams(table: Table, host: Host) -> None:
    """Measure 100 MB of output, compared with a plain pipe."""
    sandbox = host.sandbox("stream")
    command = ["head", "-c", str(STREAMED), "/dev/zero"]

    async def ours() -> None:
        async for _ in sandbox.exec_stream(command):
            pass

    async def pipe() -> None:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while os.read(process.stdout.fileno(), 1 << 18):
                pass

    await ours()
    times = await in_turns(ours, pipe, repeats=7)
    table.line("100 MB streamed", times[0], to="plain pipe", other=times[1])


async def files(table: Table, host: Host, folder: Path, repeats: int) -> None:
    """Measure writing and reading a small and a large file."""
    sandbox = host.sandbox("files")
    await sandbox.wake()
    for name, size in (("1 KB", 1_000), ("1 MB", 1_000_000)):
        data = os.urandom(size)
        plain = folder / "plain"

        async def write(data: bytes = data) -> None:
            await sandbox.write_file("file", data)

        async def read() -> None:
            await sandbox.read_bytes("file")

        async def write_host(data: bytes = data, plain: Path = plain) -> None:
            plain.with_suffix(".new").write_bytes(data)
            plain.with_suffix(".new").replace(plain)

        async def read_host(plain: Path = plain) -> None:
            plain.read_bytes()

        times = await in_turns(write, write_host, read, read_host, repeats=repeats * 2)
        table.line(f"write {name}", times[0], to="write and rename", other=times[1])
        table.line(f"read {name}", times[2], to="read", other=times[3])


async def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 10, 100, 200])
    parser.add_argument("--tier", choices=["namespaces", "gvisor"], default="namespaces")
    options = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        await creation(table, home, options)
        async with await Host.open(home, pool=0, tier=options.tier) as host:
            await warm(table, host, options.repeats)
            await streams(table, host)
            await files(table, host, Path(folder), options.repeats)
            await burst(table, host)
            await crowds(table, host, options)


if __name__ == "__main__":
    asyncio.run(main())
