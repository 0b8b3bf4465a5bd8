"""The state directory: its location, its owner, and the lock of the process that uses it."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
import time
import weakref
from typing import Self

from smokebox.errors import (
    AccessDenied,
    Conflict,
    InvalidOption,
    PathError,
    PathNotDirectory,
    from_os_error,
)
from smokebox.foundation.endpoint import default_home

# How long children of a killed owner may take to release the lock.
DEAD_OWNER_SECONDS = 2.0

_ANOTHER_HOME = "Set SMOKEBOX_HOME to another directory"


def open_home(path: str | os.PathLike[str] | None = None) -> Home:
    """Create the state directory if needed, and lock it for this process.

    The default is `$SMOKEBOX_HOME`, else `smokebox` in the user's data directory. Raises
    `Conflict` while another process holds it.
    """
    home = default_home() if path is None else _check_path(path)
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        _check_owner(home)
        os.makedirs(os.path.join(home, "boxes"), mode=0o700, exist_ok=True)
        lock = _lock(home)
    except PathError:
        raise
    except OSError as error:
        raise _unusable(error, home) from error
    return Home(home, lock)


class Home:
    """A state directory, locked by this process until it is closed or the process ends."""

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        _OPEN.add(self)

    @property
    def sandboxes(self) -> str:
        """The directory that holds one directory per sandbox."""
        return os.path.join(self.path, "boxes")

    @property
    def record(self) -> str:
        """The file of the durable record."""
        return os.path.join(self.path, "record.db")

    def close(self) -> None:
        """Release the lock. Safe to repeat."""
        lock, self._lock = self._lock, None
        if lock is not None:
            # A child between fork and exec shares the lock: closing alone would leave it held.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def close_after_fork(self) -> None:
        """Close the lock in a forked copy of this process; the original keeps it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_OPEN: weakref.WeakSet[Home] = weakref.WeakSet()


def _close_after_fork() -> None:
    for home in list(_OPEN):
        home.close_after_fork()


# A fork without exec would hold the lock for as long as it lives.
os.register_at_fork(after_in_child=_close_after_fork)


def _check_path(path: object) -> str:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidOption(
            f"home must be the path of a directory, not {text!r}.",
            hint="Pass a str, or None for the default.",
            option="home",
            value=path,
        )
    return os.path.abspath(os.path.expanduser(text))


def _check_owner(home: str) -> None:
    found = os.stat(home)
    if found.st_uid != os.geteuid():
        raise AccessDenied(
            home,
            f"the state directory {home} belongs to uid {found.st_uid}, not to "
            f"uid {os.geteuid()} of this process",
            hint=f"{_ANOTHER_HOME}, or run this as its owner.",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AccessDenied(
            home,
            f"the state directory {home} is writable by others "
            f"(mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"Run `chmod go-w {shlex.quote(home)}` after checking what is in it.",
        )


def _lock(home: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(os.path.join(home, "lock"), flags, 0o600)
    try:
        if not _try_lock(lock):
            raise _locked(home, _owner(lock))
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _try_lock(lock: int) -> bool:
    deadline = time.monotonic() + DEAD_OWNER_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            # The owner has not written its pid yet, or was killed with a child in fork or exec.
            if _is_running(_owner(lock)) or time.monotonic() > deadline:
                return False
        time.sleep(0.01)


def _owner(lock: int) -> int | None:
    text = os.pread(lock, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _is_running(pid: int | None) -> bool:
    return pid is not None and os.path.exists(f"/proc/{pid}")


def _locked(home: str, pid: int | None) -> Conflict:
    if pid == os.getpid():
        owner, hint = "this process already", "Share the open engine, or close it first."
    else:
        owner = "another process" if pid is None else f"process {pid}"
        hint = f"Use that process, stop it, or set SMOKEBOX_HOME to a directory other than {home}."
    return Conflict(
        f"{owner} uses the state directory {home}.", hint=hint, kind="home", name=home, pid=pid
    )


def _unusable(error: OSError, home: str) -> PathError:
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return PathNotDirectory(
            home, f"the state directory {home} is not a directory", hint=f"{_ANOTHER_HOME}."
        )
    unusable = from_os_error(error, error.filename or home)
    unusable.message = f"cannot use the state directory {home}: {unusable.message}"
    unusable.hint = unusable.hint or f"{_ANOTHER_HOME}."
    return unusable
