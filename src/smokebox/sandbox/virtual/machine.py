"""What a sandbox's state lives in: its files, and the shell over them. Blocking."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import bashkit
from bashkit import Bash, ExecutionProfile

from smokebox.errors import (
    BadSnapshot,
    InvalidPath,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
)
from smokebox.sandbox.filesystems.capsule import as_bashkit
from smokebox.sandbox.filesystems.devices import DeviceFilesystem
from smokebox.sandbox.filesystems.host import HostFilesystem
from smokebox.sandbox.filesystems.memory import MemoryFilesystem
from smokebox.sandbox.filesystems.native import NativeFilesystem
from smokebox.sandbox.filesystems.tree import Tree
from smokebox.sandbox.stack import deepen_engine_threads
from smokebox.sandbox.virtual.command import split_commands
from smokebox.sandbox.virtual.commands import own_commands
from smokebox.sandbox.virtual.image import put, take
from smokebox.sandbox.virtual.lazy import LazyFilesystem
from smokebox.sandbox.virtual.shell import Shell
from smokebox.sandbox.virtual.snapshot import Snapshot

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping

    from smokebox.sandbox.filesystems.filesystem import Filesystem
    from smokebox.sandbox.virtual.ending import Ending
    from smokebox.sandbox.virtual.settings import FileSource, Settings
    from smokebox.sandbox.virtual.shell import Script, Stop
    from smokebox.sandbox.virtual.transcript import Listener

HOSTNAME = "smokebox"
# The longest value that Linux would hand on to a program.
_MAX_VALUE = 131_072

# The engine asks for these before it lets Python and SQLite run in the process, looks once,
# and leaves them where every `env` would show them.
_SWITCHES = {"BASHKIT_ALLOW_INPROCESS_PYTHON": "1", "BASHKIT_ALLOW_INPROCESS_SQLITE": "1"}


_IN_MEMORY = (NativeFilesystem, MemoryFilesystem, DeviceFilesystem)


class Machine:
    """Files and a shell, made from settings, and from a snapshot where there is one."""

    def __init__(self, settings: Settings, snapshot: Snapshot | None = None) -> None:
        self._settings = settings
        self.root = _make_root(settings, snapshot)
        own = own_commands(settings.network)
        if isinstance(self.root, NativeFilesystem) and not settings.mounts:
            # The engine's own sets any time in its own filesystem, and fails in others.
            del own["touch"]
        commands = {**own, **settings.commands}
        self._made_mounts = {
            point: HostFilesystem(mount)
            for point, mount in settings.mounts.items()
            if isinstance(mount, str)
        }
        mounts = {**_devices(self.root), **settings.mounts, **self._made_mounts}
        self.tree = Tree(self.root, mounts)  # type: ignore[arg-type]
        self._check_cwd()
        self._engine_mounts = {
            "/": _for_engine(self.root),
            **{point: _for_engine(filesystem) for point, filesystem in self.tree.mounts.items()},
        }
        self._commands = split_commands(commands, self.tree)
        self._making = threading.Lock()
        self._shell: Shell | None = None
        if snapshot is not None:
            self._restore_shell(snapshot)
        _add_programs(self.root, commands.keys() - engine_commands(settings.python))

    @property
    def quick(self) -> bool:
        """Whether every file is in memory, so that no call on the tree waits for anything."""
        kept = (self.root, *self.tree.mounts.values())
        return all(isinstance(one, _IN_MEMORY) for one in kept)

    def run(self, script: Script, listener: Listener, stop: Stop) -> Ending:
        """Run a script in the shell, which is made if there is none."""
        return self._take_shell().run(script, listener, stop)

    def refresh(self) -> None:
        """See what is mounted as it is at this moment."""
        for filesystem in self.tree.mounts.values():
            filesystem.refresh()

    def prepare(self) -> None:
        """Have a shell ready for the next script."""
        with self._making:
            if self._shell is None:
                self._shell = self._make_shell(self._settings.cwd, {})

    def restart_shell(self) -> None:
        """Go on with another shell, in the directory and the environment of this one."""
        cwd, env = self.place
        self.resume(cwd, {name: env[name] for name in env if len(env[name]) < _MAX_VALUE})

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let files that are loaded by `async` functions be loaded in this loop."""
        if isinstance(self.root, LazyFilesystem):
            self.root.loop = loop

    def snapshot(self, *, whole: bool) -> Snapshot:
        """Everything in it, as data. With `whole`, files that are waiting are loaded."""
        shell = b""
        if self._settings.shell == "persistent" and self._shell is not None:
            shell = self._shell.snapshot()
        waiting = {} if whole else self.waiting
        return Snapshot(image=take(self.root, without=waiting), shell=shell, waiting=waiting)

    @property
    def waiting(self) -> dict[str, str]:
        """The files that nobody has read yet, by the names they had at first."""
        return dict(self.root.waiting) if isinstance(self.root, LazyFilesystem) else {}

    @property
    def place(self) -> tuple[str, dict[str, str]]:
        """The directory and the environment that the last script left behind."""
        if self._shell is None:
            return self._settings.cwd, {}
        return self._shell.state.cwd, dict(self._shell.state.env)

    def resume(self, cwd: str, env: Mapping[str, str]) -> None:
        """Start with a shell in this directory and this environment."""
        if self._settings.shell == "persistent":
            self._shell = self._make_shell(cwd, env)

    def close(self) -> None:
        """Let go of the folders of the host. Safe to repeat."""
        for mount in self._made_mounts.values():
            mount.close()

    def _check_cwd(self) -> None:
        cwd = self._settings.cwd
        filesystem, inner = self.tree.filesystem_at(cwd)
        if filesystem is not self.root and inner != "/" and not self.tree.exists(cwd):
            raise PathNotFound(cwd, hint="cwd= lies in a mount that has no such directory.")

    def _restore_shell(self, snapshot: Snapshot) -> None:
        if not snapshot.shell:
            return
        self.prepare()
        assert self._shell is not None
        try:
            self._shell.restore(snapshot.shell)
        except Exception as error:
            raise BadSnapshot(
                f"the shell of the snapshot cannot be restored here: {error}",
                hint="Restore it into a sandbox with the options of the one it was taken of.",
            ) from error

    def _take_shell(self) -> Shell:
        # One that is being prepared is sooner ready than another.
        with self._making:
            shell = self._shell or self._make_shell(self._settings.cwd, {})
            self._shell = shell if self._settings.shell == "persistent" else None
        return shell

    def _make_shell(self, cwd: str, env: Mapping[str, str]) -> Shell:
        deepen_engine_threads()
        settings, limits = self._settings, self._settings.limits
        bash = Bash(
            username=settings.user,
            hostname=HOSTNAME,
            cwd=cwd,
            env={**_environment(settings), **env, **_SWITCHES},
            max_commands=limits.commands,
            max_loop_iterations=limits.loop_iterations,
            max_memory=limits.memory,
            timeout_seconds=float(limits.wall_time),
            python=settings.python,
            sqlite=True,
            custom_builtins=self._commands.builtins,
            # The other profiles stop a shell for good after a number of scripts.
            profile=ExecutionProfile.Interactive,
        )
        for point, filesystem in self._engine_mounts.items():
            bash.mount(point, filesystem)
        for name, command in self._commands.streaming.items():
            bash.add_command(name, command)
        bash.execute_sync(f"unset -v {' '.join(_SWITCHES)}")
        return Shell(
            bash,
            wall_time=limits.wall_time,
            lasting=settings.shell == "persistent",
            live=self._live,
        )

    @property
    def _live(self) -> set[str]:
        """The commands whose output is wanted while they run, and that may meet in a pipeline."""
        own = {"curl", "wget"} if self._settings.network is not None else set()
        return self._commands.streaming.keys() & (self._settings.commands.keys() | own)


def _environment(settings: Settings) -> dict[str, str]:
    own = {
        "HOME": settings.home,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "SHELL": "/bin/bash",
    }
    return {**own, **settings.env}


def _make_root(settings: Settings, snapshot: Snapshot | None) -> Filesystem:
    limits = settings.limits
    root: Filesystem = NativeFilesystem()
    if not limits.native_files:
        root = MemoryFilesystem(
            quota=limits.storage, max_file_size=limits.file_size, max_files=limits.files
        )
    for directory in ("/dev", "/tmp", settings.home, settings.cwd):
        root.makedirs(directory)
    loaders = {path: one for path, one in settings.files.items() if callable(one)}
    waiting: Mapping[str, str] = {path: path for path in loaders}
    if snapshot is None:
        _write_files(root, {**_etc(settings), **settings.files})
    else:
        _put_files(root, snapshot)
        waiting = snapshot.waiting
    if not waiting:
        return root
    return LazyFilesystem(root, loaders, waiting, timeout=limits.wall_time)


def _devices(root: Filesystem) -> dict[str, Filesystem]:
    """The engine puts devices into its own filesystem, and into no other."""
    return {} if isinstance(root, NativeFilesystem) else {"/dev": DeviceFilesystem()}


def _write_files(root: Filesystem, files: Mapping[str, FileSource]) -> None:
    for path, content in files.items():
        if isinstance(content, (str, bytes)):
            root.makedirs(path.rpartition("/")[0] or "/")
            root.write(path, content.encode() if isinstance(content, str) else content)


def _put_files(root: Filesystem, snapshot: Snapshot) -> None:
    try:
        put(root, snapshot.image)
    except (PathNotFound, PathExists, PathNotDirectory, PathIsDirectory, InvalidPath) as error:
        raise BadSnapshot(
            f"the files of the snapshot do not fit together: {error}",
            hint="Take another snapshot.",
        ) from error


def _etc(settings: Settings) -> dict[str, str]:
    user, home = settings.user, settings.home
    return {
        "/etc/hostname": f"{HOSTNAME}\n",
        "/etc/hosts": f"127.0.0.1 localhost {HOSTNAME}\n",
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/bash\n{user}:x:1000:1000::{home}:/bin/bash\n",
        "/etc/group": f"root:x:0:\n{user}:x:1000:\n",
    }


def _add_programs(root: Filesystem, names: Iterable[str]) -> None:
    """Give what the engine knows by name only a path, for `command -v` and for `#!` lines."""
    for path in ("/bin/bash", "/bin/sh", "/usr/bin/env", *(f"/usr/bin/{name}" for name in names)):
        directory, _, name = path.rpartition("/")
        root.makedirs(directory)
        if root.peek(path) is None:
            root.write(path, f'#!/bin/bash\n{name} "$@"\n'.encode())
            root.chmod(path, 0o755)


def _for_engine(filesystem: Filesystem) -> bashkit.FileSystem:
    if isinstance(filesystem, NativeFilesystem):
        return filesystem.native
    return as_bashkit(filesystem)


@functools.cache
def engine_commands(python: bool) -> frozenset[str]:
    """The names of the commands that the engine itself has."""
    return frozenset(Bash(python=python, sqlite=True).capabilities().builtins)
