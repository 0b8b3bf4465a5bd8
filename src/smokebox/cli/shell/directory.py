"""Where a shell stands between two commands.

A sandbox whose shell is persistent remembers that by itself and is asked. The host has a
fresh bash for each command, so there the bash is asked as it leaves: a file that bash reads
first (`BASH_ENV`) sets an EXIT trap that writes the directory into a file beside it, and
sets `$?` to what it was. The command itself is passed on untouched.
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
trap "builtin printf '%%s\0%%s\0' \"\$PWD\" \"\${OLDPWD-}\" >| ${BASH_ENV@Q}.left" EXIT
unset BASH_ENV
(exit %d)
"""


class Directory(Protocol):
    """The directory in the prompt, and how the next command gets there."""

    place: str
    path: str

    def cwd(self) -> str | None:
        """The `cwd` for the next command, or None where the sandbox knows."""
        ...

    def env(self) -> Mapping[str, str]:
        """What the next command needs in its environment so that it can be followed."""
        ...

    async def follow(self, code: int) -> None:
        """Learn where the last command went; `code` is how it ended."""
        ...

    def close(self) -> None:
        """Remove what following needed."""
        ...


class PersistentDirectory:
    """The directory of a sandbox whose one shell keeps its state."""

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
    """The directory on the host, carried from one bash to the next, with `cd -`."""

    place = "local"

    def __init__(self, start: str) -> None:
        self.path = start
        self._previous = ""
        self._room = tempfile.TemporaryDirectory(prefix="smokebox-sh-", ignore_cleanup_errors=True)
        self._trap = Path(self._room.name, "trap")
        self._left = Path(self._room.name, "trap.left")
        self._trap.write_text(_TRAP % 0)

    def cwd(self) -> str | None:
        while not os.path.isdir(self.path):
            self.path = os.path.dirname(self.path)
        return self.path

    def env(self) -> Mapping[str, str]:
        went = {"PWD": self.path, "BASH_ENV": str(self._trap)}
        return went | {"OLDPWD": self._previous} if self._previous else went

    async def follow(self, code: int) -> None:
        try:
            path, previous, _ = self._left.read_bytes().split(b"\0")
            self.path, self._previous = path.decode(), previous.decode()
        except (OSError, ValueError):
            # Killed, replaced by `exec`, or in a directory no contract can name: stay.
            pass
        self._left.unlink(missing_ok=True)
        self._trap.write_text(_TRAP % code)

    def close(self) -> None:
        self._room.cleanup()
