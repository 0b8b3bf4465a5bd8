"""Running attacks inside a sandbox, and checks for damage on the host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from smokebox.engine.jail.seccomp import numbers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox

# Precedes every program: system calls by name, and results as names of errnos.
PRELUDE = (
    f"NUMBERS = {numbers(os.uname().machine)}"
    + r"""
import ctypes, errno, json, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def argument(value):
    return ctypes.c_long(value) if isinstance(value, int) else value

def syscall(name, *args):
    "Make a system call, and return its result or the name of its errno."
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(NUMBERS[name]), *map(argument, args))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result

def attempt(call, *args, **options):
    "Call a function, and return the name of its errno, or done."
    try:
        call(*args, **options)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
    return "done"

def read(path):
    with open(path, "rb") as file:
        return file.read().decode(errors="replace")

def write(path, text):
    with open(path, "w") as file:
        file.write(text)

def pids():
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())

def output(value):
    print(json.dumps(value))

"""
)


async def run(sandbox: Sandbox, code: str, *args: str, user: str | None = None) -> Any:
    """Run Python code inside, and return what it passes to `output`."""
    command = ["python3", "-c", PRELUDE + code, *args]
    result = await sandbox.exec(command, user=user, timeout=15)
    assert result.exit_code == 0, f"exit code {result.exit_code}: {result.stderr[-2000:]}"
    return json.loads(result.stdout)


async def check_alive(sandbox: Sandbox, *, within: float = 10.0) -> None:
    """Check that a sandbox runs commands."""
    async with asyncio.timeout(within):
        result = await sandbox.exec(["echo", "alive"])
    assert (result.exit_code, result.stdout) == (0, "alive\n")


async def guest_init_pid(sandbox: Sandbox) -> int:
    """Return the pid of guest init on the host."""
    async with sandbox.lifecycle.use() as run:
        return run.jail.state.pid


@dataclass(frozen=True, slots=True)
class Canary:
    """Files of the host that must be neither read nor changed."""

    TEXT: ClassVar[str] = "the host's own"
    folder: Path

    @property
    def secret(self) -> str:
        """Path of a file that exists only on the host."""
        return str(self.folder / "secret")

    @property
    def unharmed(self) -> bool:
        """True if nothing was changed."""
        found = (self.folder / "secret").lstat()
        return (
            os.listdir(self.folder) == ["secret"]
            and (self.folder / "secret").read_text() == self.TEXT
            and stat.S_IMODE(found.st_mode) == 0o666
            and found.st_uid == os.geteuid()
            and found.st_nlink == 1
        )


def file_status(path: str) -> tuple[int, ...]:
    """Return the attributes of a file that any change affects."""
    found = os.stat(path)
    return found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextlib.asynccontextmanager
async def running_inside(sandbox: Sandbox, code: str, *args: str) -> AsyncIterator[None]:
    """Run an endless Python program inside for the duration of the block."""
    command = ["python3", "-c", PRELUDE + "print('started', flush=True)\n" + code, *args]
    stream = sandbox.exec_stream(command)
    try:
        async for chunk in stream:
            assert chunk.stream == "stdout", chunk.data
            break
        yield
    finally:
        await stream.aclose()


def for_seconds(seconds: float) -> Iterator[int]:
    """Yield numbers until the time is up."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        yield count
        count += 1
