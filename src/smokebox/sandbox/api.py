"""The contract of all sandboxes.

A connector implements `SandboxApi`; `smokebox.sandbox.conformance` tests it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.runtime.stream import ExecStream
    from smokebox.types import Capabilities, ExecResult, FileInfo


T = TypeVar("T")


@runtime_checkable
class SandboxApi(Protocol):
    """Files and a shell.

    Paths are POSIX strings. A relative path starts at `cwd`; `.` and `..` collapse as text, and
    `..` at the root stays there. Methods raise the classes of `smokebox.errors`, and a method that
    raises has changed nothing.
    """

    @property
    def cwd(self) -> str:
        """Absolute directory where relative paths and commands start."""
        ...

    def resolve_path(self, path: str) -> str:
        """Return the absolute form of `path`, without accessing any file."""
        ...

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a bash command and wait for it.

        The call ends when the command itself exits, even if it left processes in the background.
        Cancelling kills the command at once.

        Args:
            command: Text for bash.
            cwd: Existing directory to start in, for this command only.
            env: Variables to add to the sandbox's environment, for this command only.
            stdin: Standard input; without it, the command reads end-of-file.
            timeout: Seconds after which the whole process tree is killed. The output so far is kept
                and the exit code is 124.
        """
        ...

    def exec_stream(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecStream:
        """Run a bash command and stream its output as it is written."""
        ...

    async def read_file(self, path: str) -> str:
        """Return the text of a file. Raises `NotText` if it is not UTF-8."""
        ...

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file."""
        ...

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Create or replace a file and its parent directories atomically."""
        ...

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return the metadata of `path`. A dangling symlink is found only if not followed."""
        ...

    async def readdir(self, path: str) -> list[str]:
        """Return the sorted names in a directory, including dotfiles."""
        ...

    async def exists(self, path: str) -> bool:
        """Return whether `path` exists, following symlinks. Never raises for a valid path."""
        ...

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Create a directory; `recursive` creates parents and accepts an existing one."""
        ...

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory.

        `force` accepts a missing path, and nothing else.
        """
        ...

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Return the sorted absolute paths that match.

        `**` crosses directories but not symlinks to them; `*`, `?` and `[...]` stay within a name
        and skip dotfiles unless `hidden` is set or the pattern has the dot.
        """
        ...

    async def capabilities(self) -> Capabilities:
        """Return the features and limits of this sandbox."""
        ...

    async def aclose(self) -> None:
        """Release processes, threads and spilled output of this handle. Safe to repeat."""
        ...


class SnapshotApi(SandboxApi, Protocol[T]):
    """A sandbox whose `capabilities()` has `snapshots`: it can return to a state, and fork.

    `T` is what stands for a state: bytes of a virtual sandbox, a `Snapshot` of a Linux one.
    """

    async def snapshot(self) -> T:
        """Keep the present state of all files."""
        ...

    async def restore(self, snapshot: T) -> object:
        """Replace all files by those of a snapshot, or none if that fails."""
        ...

    async def fork(self, count: int = 1) -> Sequence[SandboxApi]:
        """Create sandboxes that go on from the present state, independent of this one."""
        ...
