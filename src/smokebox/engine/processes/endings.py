"""The file in which the minder of a lasting process tells its beginning and its end.

The engine locks the file before it hands it over, and the lock is the minder's from then on:
it is held for as long as the minder lives, whatever anybody writes, kills or restarts. So
another engine needs neither a pid nor an answer to know what runs. What the file says comes
from inside the sandbox, and is checked.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

from smokebox.engine.jail import agent

# The exit codes of a process whose time was up, and of one that was killed with its minder.
TIMED_OUT = 124
KILLED = 137
# For a wait status that no process can have.
NONSENSE = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: bash's code, and whether a signal or its lifetime did it."""

    code: int
    killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a minder has told: who it is, the process once it runs, the exit once it ended."""

    leader: int | None = None
    minder: int | None = None
    exit: Exit | None = None


def read(path: str) -> Told:
    """What is in the file so far; nothing for a file that is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return Told()
    try:
        return parse(os.pread(fd, agent.BEGUN.size + agent.EXIT.size, 0))
    finally:
        os.close(fd)


def parse(data: bytes) -> Told:
    """What bytes from inside the sandbox mean, or nothing where they mean nothing."""
    if len(data) < agent.BEGUN.size:
        return Told()
    kind, leader, minder = agent.BEGUN.unpack_from(data)
    # To the kernel's calls 1 and less are not one process, but many.
    if kind != agent.STARTED or minder <= 1:
        return Told()
    if leader <= 1:
        return Told(minder=minder)
    return Told(leader=leader, minder=minder, exit=_exit(data[agent.BEGUN.size :]))


def is_held(path: str) -> bool:
    """Whether the minder that was given the file is alive."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _exit(data: bytes) -> Exit | None:
    if len(data) < agent.EXIT.size:
        return None
    kind, status = agent.EXIT.unpack_from(data)
    if kind == agent.LATE:
        return Exit(code=TIMED_OUT, killed=True)
    try:
        code = os.waitstatus_to_exitcode(status)
    except ValueError:
        code = NONSENSE
    if kind != agent.ENDED or not -64 <= code <= 255:
        return Exit(code=NONSENSE, killed=False)
    return Exit(code=128 - code if code < 0 else code, killed=code < 0)
