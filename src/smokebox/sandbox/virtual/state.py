"""State of a virtual sandbox: its files and the shell over them. Blocking."""

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
from smokebox.sandbox.filesystems.bashkit_adapter import as_bashkit
from smokebox.sandbox.filesystems.host import HostFilesystem
from smokebox.sandbox.filesystems.lazy import LazyFilesystem
from smokebox.sandbox.filesystems.memory import DeviceFilesystem, MemoryFilesystem
from smokebox.sandbox.filesystems.native import NativeFilesystem
from smokebox.sandbox.filesystems.tree import Tree
from smokebox.sandbox.stack import deepen_engine_threads
from smokebox.sandbox.virtual.command import split_commands
from smokebox.sandbox.virtual.commands import own_commands
from smokebox.sandbox.virtual.shell import VirtualShell
from smokebox.sandbox.virtual.snapshot import Snapshot, read_nodes, write_nodes

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping

    from smokebox.sandbox.filesystems.filesystem import Filesystem
    from smokebox.sandbox.virtual.output import OutputSink
    from smokebox.sandbox.virtual.settings import FileSource, VirtualSettings
    from smokebox.sandbox.virtual.shell import Script, ScriptOutcome, ScriptStop

HOSTNAME = "smokebox"
# Longest environment value that Linux passes to a program.
_MAX_VALUE = 131_072

# bashkit requires these before it runs Python and SQLite in the process, checks once, and leaves
# them visible to `env`.
_SWITCHES = {"BASHKIT_ALLOW_INPROCESS_PYTHON": "1", "BASHKIT_ALLOW_INPROCESS_SQLITE": "1"}


_MEMORY_FILESYSTEMS = (NativeFilesystem, MemoryFilesystem, DeviceFilesystem)


class SandboxState:
    """Files and a shell, created from settings and an optional snapshot."""

    def __init__(self, settings: VirtualSettings, snapshot: Snapshot | None = None) -> None:
        self._settings = settings
        self.root = _make_root(settings, snapshot)
        builtin_commands = own_commands(settings.egress)
        if isinstance(self.root, NativeFilesystem) and not settings.mounts:
            # bashkit's `touch` sets any time in its own filesystem, and fails in others.
            del builtin_commands["touch"]
        commands = {**builtin_commands, **settings.commands}
        self._host_mounts = {
            point: HostFilesystem(mount)
            for point, mount in settings.mounts.items()
            if isinstance(mount, str)
        }
        mounts = {**_devices(self.root), **settings.mounts, **self._host_mounts}
        self.tree = Tree(self.root, mounts)  # type: ignore[arg-type]
        self._check_cwd()
        self._engine_mounts = {
            "/": _for_engine(self.root),
            **{point: _for_engine(filesystem) for point, filesystem in self.tree.mounts.items()},
        }
        self._commands = split_commands(commands, self.tree)
        self._shell_lock = threading.Lock()
        self._shell: VirtualShell | None = None
        if snapshot is not None:
            self._restore_shell(snapshot)
        _add_programs(self.root, commands.keys() - engine_commands(settings.python))

    @property
    def in_memory(self) -> bool:
        """True if every file is in memory, so that no file call blocks."""
        filesystems = (self.root, *self.tree.mounts.values())
        return all(isinstance(one, _MEMORY_FILESYSTEMS) for one in filesystems)

    def run(self, script: Script, sink: OutputSink, stop: ScriptStop) -> ScriptOutcome:
        """Run a script in the shell, creating it if there is none."""
        return self._get_shell().run(script, sink, stop)

    def refresh(self) -> None:
        """Refresh the mounted filesystems."""
        for filesystem in self.tree.mounts.values():
            filesystem.refresh()

    def prepare(self) -> None:
        """Create the shell for the next script in advance."""
        with self._shell_lock:
            if self._shell is None:
                self._shell = self._make_shell(self._settings.cwd, {})

    def restart_shell(self) -> None:
        """Replace the shell by another in the same directory and environment."""
        cwd, env = self.cwd_and_env
        self.resume(cwd, {name: env[name] for name in env if len(env[name]) < _MAX_VALUE})

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run `async` file loaders in this loop."""
        if isinstance(self.root, LazyFilesystem):
            self.root.loop = loop

    def snapshot(self, *, whole: bool) -> Snapshot:
        """Return a snapshot. With `whole`, unloaded files are loaded first."""
        shell = b""
        if self._settings.shell == "persistent" and self._shell is not None:
            shell = self._shell.snapshot()
        unloaded = {} if whole else self.unloaded
        image = read_nodes(self.root, without=unloaded)
        return Snapshot(image=image, shell=shell, unloaded=unloaded)

    @property
    def unloaded(self) -> dict[str, str]:
        """Files whose loader has not run yet, with the loader's name."""
        return dict(self.root.unloaded) if isinstance(self.root, LazyFilesystem) else {}

    @property
    def cwd_and_env(self) -> tuple[str, dict[str, str]]:
        """Directory and environment after the last script."""
        if self._shell is None:
            return self._settings.cwd, {}
        return self._shell.state.cwd, dict(self._shell.state.env)

    def resume(self, cwd: str, env: Mapping[str, str]) -> None:
        """Start a shell in this directory and environment."""
        if self._settings.shell == "persistent":
            self._shell = self._make_shell(cwd, env)

    def close(self) -> None:
        """Close the host folders. Safe to repeat."""
        for mount in self._host_mounts.values():
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
                hint="Restore it into a sandbox with the same options as the original.",
            ) from error

    def _get_shell(self) -> VirtualShell:
        # A shell that is being prepared is ready sooner than another.
        with self._shell_lock:
            shell = self._shell or self._make_shell(self._settings.cwd, {})
            self._shell = shell if self._settings.shell == "persistent" else None
        return shell

    def _make_shell(self, cwd: str, env: Mapping[str, str]) -> VirtualShell:
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
        return VirtualShell(
            bash,
            wall_time=limits.wall_time,
            persistent=settings.shell == "persistent",
            streaming=self._streaming_names,
        )

    @property
    def _streaming_names(self) -> set[str]:
        """Commands whose output is streamed while they run, and that may meet in a pipeline."""
        network = {"curl", "wget"} if self._settings.egress is not None else set()
        return self._commands.streaming.keys() & (self._settings.commands.keys() | network)


def _environment(settings: VirtualSettings) -> dict[str, str]:
    variables = {
        "HOME": settings.home,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "SHELL": "/bin/bash",
    }
    return {**variables, **settings.env}


def _make_root(settings: VirtualSettings, snapshot: Snapshot | None) -> Filesystem:
    limits = settings.limits
    root: Filesystem = NativeFilesystem()
    if not limits.native_files:
        root = MemoryFilesystem(
            quota=limits.storage, max_file_size=limits.file_size, max_files=limits.files
        )
    for directory in ("/dev", "/tmp", settings.home, settings.cwd):
        root.makedirs(directory)
    loaders = {path: one for path, one in settings.files.items() if callable(one)}
    unloaded: Mapping[str, str] = {path: path for path in loaders}
    if snapshot is None:
        _write_files(root, {**_etc(settings), **settings.files})
    else:
        _put_files(root, snapshot)
        unloaded = snapshot.unloaded
    if not unloaded:
        return root
    return LazyFilesystem(root, loaders, unloaded, timeout=limits.wall_time)


def _devices(root: Filesystem) -> dict[str, Filesystem]:
    """Return the device filesystem; bashkit adds devices to its own filesystem only."""
    return {} if isinstance(root, NativeFilesystem) else {"/dev": DeviceFilesystem()}


def _write_files(root: Filesystem, files: Mapping[str, FileSource]) -> None:
    for path, content in files.items():
        if isinstance(content, (str, bytes)):
            root.makedirs(path.rpartition("/")[0] or "/")
            root.write(path, content.encode() if isinstance(content, str) else content)


def _put_files(root: Filesystem, snapshot: Snapshot) -> None:
    try:
        write_nodes(root, snapshot.image)
    except (PathNotFound, PathExists, PathNotDirectory, PathIsDirectory, InvalidPath) as error:
        raise BadSnapshot(
            f"the files of the snapshot are inconsistent: {error}",
            hint="Take another snapshot.",
        ) from error


def _etc(settings: VirtualSettings) -> dict[str, str]:
    user, home = settings.user, settings.home
    return {
        "/etc/hostname": f"{HOSTNAME}\n",
        "/etc/hosts": f"127.0.0.1 localhost {HOSTNAME}\n",
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/bash\n{user}:x:1000:1000::{home}:/bin/bash\n",
        "/etc/group": f"root:x:0:\n{user}:x:1000:\n",
    }


def _add_programs(root: Filesystem, names: Iterable[str]) -> None:
    """Create files for commands known only by name, for `command -v` and `#!` lines."""
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
    """Return the names of bashkit's own commands."""
    return frozenset(Bash(python=python, sqlite=True).capabilities().builtins)
