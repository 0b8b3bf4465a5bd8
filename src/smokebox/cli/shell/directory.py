"""Working directory of an interactive shell between two commands.

A sandbox with a persistent shell reports it. On the host each command is a new bash,
which reports its directory as it exits: a file that bash reads first (`BASH_ENV`) sets an
EXIT trap that writes the directory into a file beside it, and sets `$?` to its last value.
The command itself is passed on unchanged.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.sandbox.api import SandboxApi

_TRAP = r"""
trap "builtin printf '%%s\0%%s\0' \"\$PWD\" \"\${OLDPWD-}\" >| ${BASH_ENV@Q}.report" EXIT
unset BASH_ENV
(exit %d)
"""


class Directory(Protocol):
    """Directory shown in the prompt, and how the next command gets there."""

    place: str
    path: str

    def cwd(self) -> str | None:
        """Return the `cwd` of the next command, or None if the sandbox knows it."""
        ...

    def env(self) -> Mapping[str, str]:
        """Return variables that the next command needs to report its directory."""
        ...

    async def follow(self, code: int) -> None:
        """Read the directory after the last command, which exited with `code`."""
        ...

    def close(self) -> None:
        """Remove temporary files."""
        ...


class PersistentDirectory:
    """Directory of a sandbox whose shell keeps its state."""

    def __init__(self, place: str, sandbox: SandboxApi) -> None:
        self.place = place
        self.path = sandbox.cwd
        self._sandbox = sandbox

    def cwd(self) -> str | None:
        return None

    def env(self) -> Mapping[str, str]:
        return {}

    async def follow(self, code: int) -> None:
        result = await self._sandbox.exec("pwd", timeout=10)
        if result.stdout.startswith("/"):
            self.path = result.stdout.removesuffix("\n")

    def close(self) -> None:
        pass


class HostDirectory:
    """Directory on the host, carried from one bash to the next, with `cd -`."""

    place = "local"

    def __init__(self, start: str) -> None:
        self.path = start
        self._previous = ""
        self._folder = tempfile.TemporaryDirectory(
            prefix="smokebox-sh-", ignore_cleanup_errors=True
        )
        self._trap = Path(self._folder.name, "trap")
        self._report = Path(self._folder.name, "trap.report")
        self._trap.write_text(_TRAP % 0)

    def cwd(self) -> str | None:
        while not os.path.isdir(self.path):
            self.path = os.path.dirname(self.path)
        return self.path

    def env(self) -> Mapping[str, str]:
        variables = {"PWD": self.path, "BASH_ENV": str(self._trap)}
        return variables | {"OLDPWD": self._previous} if self._previous else variables

    async def follow(self, code: int) -> None:
        try:
            path, previous, _ = self._report.read_bytes().split(b"\0")
            self.path, self._previous = path.decode(), previous.decode()
        except (OSError, ValueError):
            # Killed, replaced by `exec`, or in a directory that is not UTF-8: keep the last.
            pass
        self._report.unlink(missing_ok=True)
        self._trap.write_text(_TRAP % code)

    def close(self) -> None:
        self._folder.cleanup()
