"""`touch`: the shell's own where it works, ours on mounts, both as GNU touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox import VirtualLimits, bucket, virtual
from smokebox.sandbox.filesystems import MemoryFilesystem

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.sandbox.virtual import VirtualSandbox

FACTORIES: list[Callable[[], VirtualSandbox]] = [
    virtual,
    lambda: virtual(limits=VirtualLimits(file_size=64_000_000)),
    lambda: virtual(mounts={"/workspace": MemoryFilesystem()}),
    lambda: virtual(files={"lazy": lambda: "x"}),
    lambda: bucket("memory:///"),
]


@pytest.mark.parametrize("create", FACTORIES)
async def test_touch_creates_missing_files(create: Callable[[], VirtualSandbox]) -> None:
    async with create() as sandbox:
        result = await sandbox.exec("touch a 'b c'; echo $?; touch -c d; ls a 'b c' d")
        assert result.stdout == "0\na\nb c\n"
        assert (await sandbox.exec("touch no/where; echo $?")).stdout == "1\n"


@pytest.mark.parametrize("create", FACTORIES)
async def test_touch_keeps_content(create: Callable[[], VirtualSandbox]) -> None:
    async with create() as sandbox:
        result = await sandbox.exec("echo kept > a; touch a; cat a")
        assert (result.stdout, result.stderr) == ("kept\n", "")


@pytest.mark.parametrize("create", FACTORIES[:3])
@pytest.mark.parametrize(
    "options", ["-d '2020-01-02 03:04:05'", "-t 202001020304.05", "--date=2020-01-02T03:04:05"]
)
async def test_touch_sets_the_time(create: Callable[[], VirtualSandbox], options: str) -> None:
    async with create() as sandbox:
        result = await sandbox.exec(f"touch {options} a; touch -r a b; stat -c %Y a b")
        assert result.stdout == "1577934245\n1577934245\n"


@pytest.mark.parametrize("arguments", ["", "-d nonsense a", "-t 99 a", "-r nope a"])
async def test_touch_errors_match_gnu(arguments: str) -> None:
    async with FACTORIES[1]() as sandbox:
        result = await sandbox.exec(f"touch {arguments}")
        assert result.exit_code == 1
        assert result.stderr.startswith("touch: ")


async def test_devices_exist_on_any_root() -> None:
    async with FACTORIES[1]() as sandbox:
        script = "cat /dev/null; head -c 3 /dev/zero | xxd -p; echo x > /dev/null; echo $?"
        assert (await sandbox.exec(script)).stdout == "000000\n0\n"
