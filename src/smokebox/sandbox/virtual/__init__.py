"""The virtual sandbox: a bash and its files inside this process, with nothing to install."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.options import strict_options
from smokebox.sandbox.virtual.limits import Limits
from smokebox.sandbox.virtual.sandbox import VirtualSandbox
from smokebox.sandbox.virtual.settings import check_isolation, make_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.sandbox.virtual.command import Command
    from smokebox.sandbox.virtual.settings import (
        FileSource,
        Isolation,
        Mount,
        NetworkOption,
        ShellState,
    )

__all__ = ["Limits", "VirtualSandbox", "virtual"]


@strict_options
def virtual(
    *,
    files: Mapping[str, FileSource] | None = None,
    mounts: Mapping[str, Mount] | None = None,
    cwd: str = "/workspace",
    env: Mapping[str, str] | None = None,
    limits: Limits | Mapping[str, float] | None = None,
    network: NetworkOption = None,
    commands: Mapping[str, Command] | None = None,
    python: bool = False,
    shell: ShellState = "persistent",
    isolation: Isolation = "thread",
    user: str = "user",
) -> VirtualSandbox:
    """A sandbox that is a bash in memory. Nothing starts until the first call.

    `files` are text, bytes, or functions that are called when the file is first read.
    `mounts` are folders of the host, to be looked at only, or any `Filesystem`. `network`
    is an allow-list, or an `Egress` as Linux sandboxes have it; without it there is none.
    `commands` are functions by the name that scripts call them by. `python` adds a small
    interpreter as `python3`. With `shell="fresh"` no variable outlives its script, only files
    do. With `isolation="process"` all of it runs in a process of its own.
    """
    check_isolation(isolation)
    settings = make_settings(
        files=files,
        mounts=mounts,
        cwd=cwd,
        env=env,
        limits=limits,
        network=network,
        commands=commands,
        python=python,
        shell=shell,
        user=user,
    )
    if isolation == "process":
        from smokebox.sandbox.virtual.isolated import IsolatedSandbox

        return IsolatedSandbox(settings)
    from smokebox.sandbox.virtual.threaded import ThreadSandbox

    return ThreadSandbox(settings)
