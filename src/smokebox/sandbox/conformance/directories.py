"""Cases on directories and removal, with the exact meaning of each flag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.errors import (
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SmokeboxError,
)
from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi


class DirectoryCases(Cases):
    """`readdir`, `mkdir` and `rm`."""

    async def test_readdir_gives_sorted_names_with_dotfiles(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        for name in ("b", ".a", "c/inner", "A"):
            await sandbox.write_file(f"{place}/{name}", "")
        assert await sandbox.readdir(place) == [".a", "A", "b", "c"]

    async def test_readdir_of_an_empty_directory(self, sandbox: SandboxApi, place: str) -> None:
        assert await sandbox.readdir(place) == []

    async def test_readdir_of_what_is_missing(self, sandbox: SandboxApi, place: str) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.readdir(f"{place}/nope")

    async def test_readdir_of_a_file(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "")
        with pytest.raises(PathNotDirectory):
            await sandbox.readdir(f"{place}/f")

    async def test_readdir_of_a_thousand_files(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.exec("for i in $(seq 1000 1999); do : > f$i; done", cwd=place)
        names = await sandbox.readdir(place)
        assert (len(names), names[0], names[-1]) == (1000, "f1000", "f1999")

    async def test_mkdir_makes_one(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.mkdir(f"{place}/d")
        assert (await sandbox.stat(f"{place}/d")).is_directory
        assert (await sandbox.exec("cd d && pwd", cwd=place)).stdout.strip().endswith("/d")

    async def test_mkdir_of_what_is_there(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.mkdir(f"{place}/d")
        with pytest.raises(PathExists):
            await sandbox.mkdir(f"{place}/d")

    async def test_mkdir_below_nothing(self, sandbox: SandboxApi, place: str) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.mkdir(f"{place}/a/b")
        assert await sandbox.readdir(place) == []

    async def test_mkdir_recursive_makes_parents(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.mkdir(f"{place}/a/b/c", recursive=True)
        assert (await sandbox.stat(f"{place}/a/b/c")).is_directory

    async def test_mkdir_recursive_accepts_a_directory(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/d/kept", "x")
        await sandbox.mkdir(f"{place}/d", recursive=True)
        assert await sandbox.readdir(f"{place}/d") == ["kept"]

    @pytest.mark.parametrize("recursive", [False, True])
    async def test_mkdir_over_a_file(
        self, sandbox: SandboxApi, place: str, recursive: bool
    ) -> None:
        await sandbox.write_file(f"{place}/f", "kept")
        with pytest.raises(PathExists):
            await sandbox.mkdir(f"{place}/f", recursive=recursive)
        assert await sandbox.read_file(f"{place}/f") == "kept"

    async def test_mkdir_below_a_file(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "kept")
        with pytest.raises(PathNotDirectory):
            await sandbox.mkdir(f"{place}/f/d", recursive=True)

    async def test_rm_removes_a_file(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "")
        await sandbox.rm(f"{place}/f")
        assert not await sandbox.exists(f"{place}/f")

    async def test_rm_of_what_is_missing(self, sandbox: SandboxApi, place: str) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.rm(f"{place}/nope")
        with pytest.raises(PathNotFound):
            await sandbox.rm(f"{place}/nope", recursive=True)

    async def test_rm_force_accepts_absence(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.rm(f"{place}/nope", force=True)
        await sandbox.rm(f"{place}/nope/below", recursive=True, force=True)

    @pytest.mark.parametrize("force", [False, True])
    async def test_rm_without_recursive_keeps_a_directory(
        self, sandbox: SandboxApi, place: str, force: bool
    ) -> None:
        await sandbox.write_file(f"{place}/d/kept", "x")
        with pytest.raises(PathIsDirectory) as caught:
            await sandbox.rm(f"{place}/d", force=force)
        assert "recursive" in caught.value.hint
        assert await sandbox.readdir(f"{place}/d") == ["kept"]

    async def test_rm_without_recursive_keeps_an_empty_directory(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        await sandbox.mkdir(f"{place}/d")
        with pytest.raises(PathIsDirectory):
            await sandbox.rm(f"{place}/d")
        assert await sandbox.exists(f"{place}/d")

    async def test_rm_recursive_removes_everything_below(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        for name in ("d/a", "d/.b", "d/e/f", "kept"):
            await sandbox.write_file(f"{place}/{name}", "")
        await sandbox.rm(f"{place}/d", recursive=True)
        assert await sandbox.readdir(place) == ["kept"]

    async def test_rm_recursive_removes_a_file_too(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "")
        await sandbox.rm(f"{place}/f", recursive=True)
        assert await sandbox.readdir(place) == []

    async def test_rm_below_a_file(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "kept")
        with pytest.raises(PathNotDirectory):
            await sandbox.rm(f"{place}/f/below")
        assert await sandbox.read_file(f"{place}/f") == "kept"

    async def test_rm_never_removes_the_root(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/kept", "x")
        with pytest.raises(SmokeboxError):
            await sandbox.rm("/", recursive=True, force=True)
        assert await sandbox.read_file(f"{place}/kept") == "x"
