"""What runs inside a sandbox to break out of it, and how the host looks for the damage."""

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
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox

# Before every program: system calls by name, and answers as errno names.
PRELUDE = (
    f"NUMBERS = {numbers(os.uname().machine)}"
    + r"""
import ctypes, errno, json, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def word(value):
    return ctypes.c_long(value) if isinstance(value, int) else value

def ask(name, *args):
    "What the kernel answers: the name of an errno, or what the call returns."
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(NUMBERS[name]), *map(word, args))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result

def attempt(call, *args, **options):
    "The name of the errno that a call of Python's ends with, or done."
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

def tell(answer):
    print(json.dumps(answer))

"""
)


async def run(sandbox: Sandbox, code: str, *args: str, user: str | None = None) -> Any:
    """Run Python inside, as root or as `user`, and give what it tells."""
    words = ["python3", "-c", PRELUDE + code, *args]
    result = await sandbox.exec(words, user=user, timeout=15)
    assert result.exit_code == 0, f"exit code {result.exit_code}: {result.stderr[-2000:]}"
    return json.loads(result.stdout)


async def alive(sandbox: Sandbox, *, within: float = 10.0) -> None:
    """Assert that a sandbox answers."""
    async with asyncio.timeout(within):
        result = await sandbox.exec(["echo", "alive"])
    assert (result.exit_code, result.stdout) == (0, "alive\n")


async def first_process(sandbox: Sandbox) -> int:
    """The pid of a sandbox's first process, as the host has it."""
    async with sandbox.life.use() as running:
        return running.jail.state.pid


@dataclass(frozen=True, slots=True)
class Canary:
    """Files of the host that must neither be seen nor changed."""

    TEXT: ClassVar[str] = "the host's own"
    folder: Path

    @property
    def secret(self) -> str:
        """The path of a file that only the host has."""
        return str(self.folder / "secret")

    @property
    def unharmed(self) -> bool:
        """Whether everything is as it was."""
        found = (self.folder / "secret").lstat()
        return (
            os.listdir(self.folder) == ["secret"]
            and (self.folder / "secret").read_text() == self.TEXT
            and stat.S_IMODE(found.st_mode) == 0o666
            and found.st_uid == os.geteuid()
            and found.st_nlink == 1
        )


def state_of(path: str) -> tuple[int, ...]:
    """What changes when somebody changes a file."""
    found = os.stat(path)
    return found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextlib.asynccontextmanager
async def meanwhile(sandbox: Sandbox, code: str, *args: str) -> AsyncIterator[None]:
    """Have a Python program run inside while the block does; it never ends by itself."""
    words = ["python3", "-c", PRELUDE + "print('begun', flush=True)\n" + code, *args]
    stream = sandbox.exec_stream(words)
    try:
        async for chunk in stream:
            assert chunk.stream == "stdout", chunk.data
            break
        yield
    finally:
        await stream.aclose()


def for_seconds(seconds: float) -> Any:
    """Count, until the time is up."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        yield count
        count += 1
