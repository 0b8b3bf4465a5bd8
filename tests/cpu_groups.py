"""Engines whose sandboxes share the CPU in groups, also in user-mode Linux, and their cgroups."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import user_mode_linux
from quota_file_systems import make_file_system, make_image, unmount
from smokebox.engine.context import no_group_limit
from smokebox.engine.host import Host
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from smokebox.engine.context import Admission
    from smokebox.engine.options import CheckedOptions
    from smokebox.engine.sandbox import Sandbox

PARENTS = detect().placement.parents
NO_WEIGHTS = "" if "cpu" in PARENTS else f"no weights: {detect().describe()}"


@contextlib.contextmanager
def directory_for_layers(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory that layers can be in, with the image `dir:small` for `open_host`."""
    inside = user_mode_linux.MARK in os.environ
    base = make_file_system(tmp_path, "plain") if inside else tmp_path
    (base / "images").mkdir()
    make_image(base / "images" / "small")
    yield base
    if inside:
        unmount(base)


@contextlib.asynccontextmanager
async def admit(id: str, options: CheckedOptions) -> AsyncIterator[CheckedOptions]:
    """Take the first word of an id as its group."""
    group, dash, _ = id.partition("-")
    yield replace(options, group=group if dash else None)


@contextlib.asynccontextmanager
async def open_host(
    base: Path,
    *,
    pool: int = 0,
    admit: Admission = admit,
    group_cpu: Callable[[str], float | None] = no_group_limit,
) -> AsyncIterator[Host]:
    """Open an engine in a directory of `directory_for_layers`."""
    async with await Host.open(
        base / "home",
        pool=pool,
        images=base / "images" / "layers",
        directories={"small": str(base / "images" / "small")},
        admit=admit,
        group_cpu=group_cpu,
    ) as host:
        yield host


async def create(host: Host, id: str, limits: Limits | None = None) -> Sandbox:
    """Create a sandbox of the small image, which has a shell."""
    return await host.create(id, image="dir:small", limits=limits or Limits())


def cgroup(sandbox: Sandbox) -> Path:
    """Return the only cgroup of a sandbox that divides the CPU, with all its processes in it."""
    run = sandbox.lifecycle.run
    assert run is not None
    key, parent = run.jail.state.key, Path(PARENTS["cpu"])
    (found,) = [*parent.glob(key), *parent.glob(f"*/{key}")]
    assert set(run.jail.pids()) <= set(map(int, (found / "cgroup.procs").read_text().split()))
    return found
