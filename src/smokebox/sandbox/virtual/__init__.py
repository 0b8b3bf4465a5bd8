"""The virtual sandbox: bash and its files in memory, inside this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.egress.policy import moved_options
from smokebox.options import strict_options
from smokebox.sandbox.virtual.limits import VirtualLimits
from smokebox.sandbox.virtual.sandbox import VirtualSandbox
from smokebox.sandbox.virtual.settings import check_isolation, make_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.egress.policy import EgressOption
    from smokebox.sandbox.virtual.command import Command
    from smokebox.sandbox.virtual.settings import (
        FileSource,
        Isolation,
        Mount,
        ShellState,
    )

__all__ = ["VirtualLimits", "VirtualSandbox", "virtual"]


@strict_options(moved_options())
def virtual(
    *,
    files: Mapping[str, FileSource] | None = None,
    mounts: Mapping[str, Mount] | None = None,
    cwd: str = "/workspace",
    env: Mapping[str, str] | None = None,
    limits: VirtualLimits | Mapping[str, float] | None = None,
    egress: EgressOption | None = None,
    commands: Mapping[str, Command] | None = None,
    python: bool = False,
    shell: ShellState = "persistent",
    isolation: Isolation = "thread",
    user: str = "user",
) -> VirtualSandbox:
    """Create a sandbox that runs bash in memory. Nothing starts until the first call.

    Args:
        files: Initial files by path: text, bytes, or a function called on the first read.
        mounts: Host folders (read-only) or any `Filesystem`, by absolute path.
        cwd: Initial directory and base of relative paths.
        env: Environment variables.
        limits: Bounds on time, memory, output and files.
        egress: Policy for `curl` and `wget`, or a list of hosts. Default: no network.
        commands: Python functions by command name.
        python: Add a small Python interpreter as `python3`.
        shell: `"persistent"` keeps variables between calls, `"fresh"` only files.
        isolation: `"thread"` of this process, or a separate worker `"process"`.
        user: User name; the home directory is `/home/<user>`.

    Raises:
        InvalidOption: An option is unknown or has an invalid value.
        PathNotFound: A folder in `mounts` does not exist.
    """
    check_isolation(isolation)
    settings = make_settings(
        files=files,
        mounts=mounts,
        cwd=cwd,
        env=env,
        limits=limits,
        egress=egress,
        commands=commands,
        python=python,
        shell=shell,
        user=user,
    )
    if isolation == "process":
        from smokebox.sandbox.virtual.process_sandbox import ProcessSandbox

        return ProcessSandbox(settings)
    from smokebox.sandbox.virtual.thread_sandbox import ThreadSandbox

    return ThreadSandbox(settings)
