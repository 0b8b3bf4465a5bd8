"""Cases on symlinks: when they are followed, and when not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.errors import PathNotFound, SymlinkLoop
from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities


async def link(sandbox: SandboxApi, able: Capabilities, place: str, target: str, name: str) -> bool:
    """Create a symlink by command; if unsupported, assert the refusal and return False."""
    result = await sandbox.exec(
        'ln -s -- "$TARGET" "$NAME"', cwd=place, env={"TARGET": target, "NAME": name}
    )
    if able.symlinks:
        assert result.exit_code == 0, result.stderr
        return True
    assert result.exit_code != 0
    assert name not in await sandbox.readdir(place)
    return False


class SymlinkCases(Cases):
    """Links to files, to directories, to missing paths and to each other."""

    async def test_reading_through_a_link(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/real", "content")
        for target, name in (("real", "relative"), (f"{place}/real", "absolute")):
            if await link(sandbox, able, place, target, name):
                assert await sandbox.read_file(f"{place}/{name}") == "content"

    async def test_writing_through_a_link_keeps_the_link(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/real", "old")
        if await link(sandbox, able, place, "real", "link"):
            await sandbox.write_file(f"{place}/link", "fresh")
            assert await sandbox.read_file(f"{place}/real") == "fresh"
            assert (await sandbox.stat(f"{place}/link")).is_symlink

    async def test_writing_through_a_dangling_link_makes_its_target(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        if await link(sandbox, able, place, "later", "link"):
            await sandbox.write_file(f"{place}/link", "made")
            assert await sandbox.read_file(f"{place}/later") == "made"

    async def test_stat_follows(self, sandbox: SandboxApi, able: Capabilities, place: str) -> None:
        await sandbox.write_file(f"{place}/real", "12345")
        if await link(sandbox, able, place, "real", "link"):
            info = await sandbox.stat(f"{place}/link")
            assert (info.type, info.is_symlink) == ("file", True)
            assert info.size in (5, None)

    async def test_stat_without_following(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.mkdir(f"{place}/d")
        if await link(sandbox, able, place, "d", "link"):
            info = await sandbox.stat(f"{place}/link", follow_symlinks=False)
            assert (info.type, info.is_symlink) == ("symlink", True)

    async def test_a_dangling_link_is_not_found(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        if await link(sandbox, able, place, "nowhere", "link"):
            assert await sandbox.exists(f"{place}/link") is False
            with pytest.raises(PathNotFound):
                await sandbox.stat(f"{place}/link")
            with pytest.raises(PathNotFound):
                await sandbox.read_file(f"{place}/link")
            assert await sandbox.readdir(place) == ["link"]
            assert (await sandbox.stat(f"{place}/link", follow_symlinks=False)).is_symlink

    async def test_a_loop_is_an_error_and_not_a_hang(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        if await link(sandbox, able, place, "two", "one"):
            await link(sandbox, able, place, "one", "two")
            assert await sandbox.exists(f"{place}/one") is False
            with pytest.raises(SymlinkLoop):
                await sandbox.read_file(f"{place}/one")

    async def test_a_link_to_a_directory_is_a_directory(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/d/inner", "x")
        if await link(sandbox, able, place, "d", "link"):
            assert await sandbox.readdir(f"{place}/link") == ["inner"]
            assert await sandbox.read_file(f"{place}/link/inner") == "x"
            assert (await sandbox.stat(f"{place}/link")).is_directory
            await sandbox.write_file(f"{place}/link/more", "y")
            assert await sandbox.readdir(f"{place}/d") == ["inner", "more"]

    @pytest.mark.parametrize("recursive", [False, True])
    async def test_rm_removes_the_link_and_not_the_target(
        self, sandbox: SandboxApi, able: Capabilities, place: str, recursive: bool
    ) -> None:
        await sandbox.write_file(f"{place}/d/kept", "x")
        if await link(sandbox, able, place, "d", "link"):
            await sandbox.rm(f"{place}/link", recursive=recursive)
            assert await sandbox.readdir(place) == ["d"]
            assert await sandbox.readdir(f"{place}/d") == ["kept"]

    async def test_rm_removes_a_dangling_link(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        if await link(sandbox, able, place, "nowhere", "link"):
            await sandbox.rm(f"{place}/link")
            assert await sandbox.readdir(place) == []

    async def test_rm_recursive_does_not_follow_links_below(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/precious/kept", "x")
        await sandbox.mkdir(f"{place}/d")
        if await link(sandbox, able, f"{place}/d", "../precious", "link"):
            await sandbox.rm(f"{place}/d", recursive=True)
            assert await sandbox.readdir(f"{place}/precious") == ["kept"]
