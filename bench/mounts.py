"""A bucket mounted in a sandbox, compared with s3fs and rclone.

    python bench/mounts.py [--objects 1000] [--megabytes 100] [--rounds 3]

The server is SeaweedFS on the loopback interface. The jobs are the same shell commands: in a
sandbox for ours, on the host for the others, mounted as their manuals say. rclone has
`--vfs-cache-mode writes`, without which most programs cannot write; it uploads a file seconds after
it was closed, so its write times do not include the upload. "first" is on a new mount with empty
caches. Each figure is the best of the rounds in milliseconds; a ratio is theirs divided by ours.
s3fs and rclone are those of Debian; without them, only ours is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import obstore

from smokebox.engine.host import Host
from smokebox.engine.mounts.request import parse_request
from smokebox.sandbox.access import Access
from smokebox.sandbox.stores import open_target
from smokebox.testing import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.sandbox import Sandbox

NAME = "bench-mounts"
TEXT = b"".join(b"line %d of a document with some words in it\n" % n for n in range(40))
TIMEOUT = 20.0


class Mounted(Protocol):
    """A bucket mounted as a directory."""

    async def mount(self) -> None: ...
    async def unmount(self) -> None: ...
    async def run(self, command: str) -> None: ...


class Ours:
    """Mounted in a sandbox."""

    def __init__(self, sandbox: Sandbox, access: Access) -> None:
        self._sandbox = sandbox
        self._access = access

    async def mount(self) -> None:
        request = parse_request(NAME, "/bucket", cwd="/", access=self._access, private=True)
        await self._sandbox.mounts.mount(request)

    async def unmount(self) -> None:
        await self._sandbox.mounts.unmount("/bucket")

    async def run(self, command: str) -> None:
        result = await self._sandbox.exec(command, cwd="/bucket", env={"NAME": "ours"})
        assert result.exit_code == 0, result


class Theirs:
    """Mounted on the host by a program that runs until the unmount."""

    def __init__(self, directory: str, *command: str, env: dict[str, str]) -> None:
        self._directory = directory
        self._command = command
        self._env = {"PATH": os.environ["PATH"], "HOME": "/tmp", **env}
        self._process: subprocess.Popen[bytes] | None = None

    async def mount(self) -> None:
        os.makedirs(self._directory, exist_ok=True)
        self._process = subprocess.Popen(
            self._command, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + TIMEOUT
        while not os.path.ismount(self._directory):
            assert time.monotonic() < deadline, f"{self._command[0]} does not mount"
            await asyncio.sleep(0.001)

    async def unmount(self) -> None:
        subprocess.run(["umount", self._directory], check=True)
        assert self._process is not None
        self._process.wait()

    async def run(self, command: str) -> None:
        words, name = ["bash", "-c", command], os.path.basename(self._directory)
        env = {**os.environ, "NAME": name}
        subprocess.run(words, cwd=self._directory, env=env, check=True, capture_output=True)


def fill(access: Access, objects: int) -> None:
    store = open_target(NAME, "", access).store

    def put(number: int) -> None:
        obstore.put(store, f"docs/{number % 20:02}/{number:05}.md", TEXT)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(objects)))


@contextlib.contextmanager
def others(access: Access, folder: Path) -> Iterator[dict[str, Mounted]]:
    """Yield the other programs that are installed."""
    found: dict[str, Mounted] = {}
    keys = {
        "AWS_ACCESS_KEY_ID": str(access.access_key),
        "AWS_SECRET_ACCESS_KEY": str(access.secret_key),
    }
    if shutil.which("s3fs"):
        directory = str(folder / "s3fs")
        options = f"url={access.endpoint},use_path_request_style"
        found["s3fs"] = Theirs(directory, "s3fs", NAME, directory, "-f", "-o", options, env=keys)
    if shutil.which("rclone"):
        directory = str(folder / "rclone")
        keys |= {
            "RCLONE_CONFIG_S_TYPE": "s3",
            "RCLONE_CONFIG_S_PROVIDER": "Other",
            "RCLONE_CONFIG_S_ENV_AUTH": "true",
            "RCLONE_CONFIG_S_ENDPOINT": str(access.endpoint),
        }
        flags = ["--vfs-cache-mode", "writes", "--cache-dir", str(folder / "cache")]
        found["rclone"] = Theirs(
            directory, "rclone", "mount", f"s:{NAME}", directory, *flags, env=keys
        )
    try:
        yield found
    finally:
        for name in found:
            subprocess.run(["umount", "-l", str(folder / name)], capture_output=True)


def jobs(objects: int, megabytes: int) -> list[tuple[str, bool, str]]:
    """Return the name of each job, True if it needs a new mount, and its command."""
    return [
        ("first list of all", True, "find . -type f | wc -l"),
        (f"first grep of {objects} objects", True, "grep -rl no-such-word docs || true"),
        ("again", False, "grep -rl no-such-word docs || true"),
        ("ls -l of a folder", False, "ls -l docs/03"),
        ("write and remove 100 small files", False, _SMALL),
        (
            f"write {megabytes} MB",
            False,
            f"dd if=/dev/zero of=large-$NAME bs=1M count={megabytes} status=none",
        ),
        (f"first read of {megabytes} MB", True, "cat large-$NAME > /dev/null"),
        ("read 4 KB at 20 places of it", True, _READ_AT),
    ]


_SMALL = "mkdir w-$NAME && for n in {1..100}; do echo x > w-$NAME/$n; done && rm -r w-$NAME"
_READ_AT = """python3 -c '
import os
fd = os.open("large-" + os.environ["NAME"], os.O_RDONLY)
for n in range(20):
    os.pread(fd, 4096, n * 4 << 20)
'"""


async def measure(mounted: Mounted, fresh: bool, command: str) -> float:
    if fresh:
        await mounted.unmount()
        await mounted.mount()
    started = time.perf_counter()
    await mounted.run(command)
    return time.perf_counter() - started


async def compare(mounts: dict[str, Mounted], options: argparse.Namespace) -> None:
    out = sys.stdout
    out.write(f"{'job':34}" + "".join(f"{name:>10}" for name in mounts))
    out.write("".join(f"{name + '/ours':>14}" for name in list(mounts)[1:]) + "\n")

    def line(name: str, best: dict[str, float]) -> None:
        out.write(f"{name:34}" + "".join(f"{best[one] * 1e3:10.1f}" for one in best))
        out.write("".join(f"{best[one] / best['ours']:14.2f}" for one in list(best)[1:]) + "\n")
        out.flush()

    times: dict[str, list[float]] = {name: [] for name in mounts}
    for turn in range(options.rounds):
        for name, one in mounts.items():
            if turn:
                await one.unmount()
            started = time.perf_counter()
            await one.mount()
            times[name].append(time.perf_counter() - started)
    line("mount", {name: min(found) for name, found in times.items()})
    for job, fresh, command in jobs(options.objects, options.megabytes):
        best = dict.fromkeys(mounts, float("inf"))
        for _ in range(options.rounds):
            for name, one in mounts.items():
                best[name] = min(best[name], await measure(one, fresh, command))
        line(job, best)
    for one in mounts.values():
        await one.unmount()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Compare mounts of a bucket.")
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with SeaweedServer() as seaweed, tempfile.TemporaryDirectory() as folder:
        seaweed.create_bucket(NAME)
        access = Access(
            endpoint=seaweed.endpoint,
            region=seaweed.region,
            access_key=seaweed.access_key,
            secret_key=seaweed.secret_key,
        )
        fill(access, options.objects)
        async with await Host.open(f"{folder}/home") as host:
            sandbox = await host.create("bench")
            with others(access, Path(folder)) as found:
                await compare({"ours": Ours(sandbox, access), **found}, options)
            await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main())
