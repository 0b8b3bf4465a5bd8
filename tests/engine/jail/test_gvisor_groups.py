"""Groups of cgroups with jails that have a gVisor kernel."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.host import Host
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.options import CheckedOptions

PARENT = Path(detect().placement.parents.get("cpu", ""))
pytestmark = [
    pytest.mark.gvisor,
    pytest.mark.skipif(not PARENT.name, reason=f"no weights here: {detect().describe()}"),
]


@contextlib.asynccontextmanager
async def admit(id: str, options: CheckedOptions) -> AsyncIterator[CheckedOptions]:
    yield replace(options, group="tenant")


async def test_all_processes_of_a_pooled_jail_join_a_group(tmp_path: Path, layers: Path) -> None:
    """Its gVisor kernel runs already, in several processes."""
    home = tmp_path / "home"
    async with await Host.open(home, tier="gvisor", pool=1, images=layers, admit=admit) as host:
        await host.prime()
        sandbox = await host.create("box", limits=Limits(pids=50))
        run = sandbox.lifecycle.run
        assert run is not None
        (cgroup,) = PARENT.rglob(run.jail.state.key)
        assert cgroup.parent.parent == PARENT
        inside = set(map(int, (cgroup / "cgroup.procs").read_text().split()))
        assert len(inside) > 1
        assert set(run.jail.pids()) <= inside
        assert (await sandbox.exec("echo works")).stdout == "works\n"
        await sandbox.destroy()
        assert not cgroup.parent.exists()
