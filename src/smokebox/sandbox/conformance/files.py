"""Cases on files and directories: contents, names, metadata, removal and errors."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import (
    FileTooLarge,
    InvalidPath,
    NotText,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SmokeboxError,
)
from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities

FIFTY_MB = 50_000_000
EVERY_BYTE = bytes(range(256)) * 4

NAMES = [
    "with space.txt",
    "it's.txt",
    'say "hi".txt',
    "dollar$HOME.txt",
    "back\\slash.txt",
    "star*[a]?.txt",
    "-rf",
    "semi;colon & more",
    "ünï-код-名前-🦊.txt",
    ".hidden",
    "...",
    "n" * 200,
    "two\nlines",
]


class FileCases(Cases):
    """Reading, writing and metadata."""

    async def test_text_round_trips(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/a.txt", "héllo\r\nwörld\n")
        assert await sandbox.read_file(f"{directory}/a.txt") == "héllo\r\nwörld\n"

    async def test_text_is_stored_as_utf8(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/a.txt", "é")
        assert await sandbox.read_bytes(f"{directory}/a.txt") == b"\xc3\xa9"

    async def test_every_byte_round_trips(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/a.bin", EVERY_BYTE)
        assert await sandbox.read_bytes(f"{directory}/a.bin") == EVERY_BYTE

    async def test_bytes_reach_commands_and_come_back(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/a.bin", EVERY_BYTE)
        result = await sandbox.exec("cp a.bin b.bin && wc -c < b.bin", cwd=directory)
        assert result.stdout.strip() == str(len(EVERY_BYTE))
        assert await sandbox.read_bytes(f"{directory}/b.bin") == EVERY_BYTE

    async def test_binary_read_as_text_is_refused(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/a.bin", b"ok\xff\xfe")
        with pytest.raises(NotText) as caught:
            await sandbox.read_file(f"{directory}/a.bin")
        assert "read_bytes" in caught.value.hint

    async def test_empty_file(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/empty", "")
        assert await sandbox.read_bytes(f"{directory}/empty") == b""
        assert (await sandbox.stat(f"{directory}/empty")).is_file

    async def test_50_mb_file_round_trips(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        size = min(FIFTY_MB, capabilities.max_file_size or FIFTY_MB)
        data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
        await sandbox.write_file(f"{directory}/big", data)
        assert await sandbox.read_bytes(f"{directory}/big") == data

    async def test_file_over_the_limit_is_refused(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/big", "before")
        if capabilities.max_file_size is None:
            await sandbox.write_file(f"{directory}/big", b"x" * FIFTY_MB)
            assert (await sandbox.stat(f"{directory}/big")).size in (FIFTY_MB, None)
            return
        with pytest.raises(FileTooLarge) as caught:
            await sandbox.write_file(f"{directory}/big", b"x" * (capabilities.max_file_size + 1))
        assert caught.value.hint
        assert await sandbox.read_file(f"{directory}/big") == "before"

    async def test_write_creates_parents(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/x/y/z.txt", "deep")
        assert await sandbox.read_file(f"{directory}/x/y/z.txt") == "deep"

    async def test_write_replaces_all_of_a_longer_file(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/a", "a long content")
        await sandbox.write_file(f"{directory}/a", "short")
        assert await sandbox.read_file(f"{directory}/a") == "short"

    async def test_write_leaves_no_other_file_behind(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/a", "1")
        await sandbox.write_file(f"{directory}/a", "2")
        assert await sandbox.readdir(directory) == ["a"]

    @pytest.mark.parametrize("name", NAMES)
    async def test_odd_names_round_trip_or_are_refused(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str, name: str
    ) -> None:
        if set(name) & set(capabilities.refused_in_names):
            with pytest.raises(InvalidPath):
                await sandbox.write_file(f"{directory}/{name}", name)
            assert await sandbox.readdir(directory) == []
            return
        await sandbox.write_file(f"{directory}/{name}", name)
        assert await sandbox.readdir(directory) == [name]
        assert await sandbox.read_file(f"{directory}/{name}") == name
        result = await sandbox.exec('cat -- "$NAME"', cwd=directory, env={"NAME": name})
        assert result.stdout == name
        await sandbox.rm(f"{directory}/{name}")
        assert await sandbox.readdir(directory) == []

    async def test_commands_see_written_files(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/in.txt", "one\ntwo\n")
        result = await sandbox.exec("wc -l < in.txt", cwd=directory)
        assert result.stdout.strip() == "2"

    async def test_files_of_commands_are_visible(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.exec("printf made > out.txt", cwd=directory)
        assert await sandbox.read_file(f"{directory}/out.txt") == "made"

    async def test_commands_append(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/log", "a\n")
        await sandbox.exec("echo b >> log; echo c >> log", cwd=directory)
        assert await sandbox.read_file(f"{directory}/log") == "a\nb\nc\n"

    async def test_concurrent_writes_of_many_files(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(50):
                group.create_task(sandbox.write_file(f"{directory}/{n:02}", str(n)))
        assert await sandbox.readdir(directory) == [f"{n:02}" for n in range(50)]
        assert await sandbox.read_file(f"{directory}/37") == "37"

    async def test_concurrent_writes_of_one_file_do_not_mix(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for letter in "abcdefgh":
                group.create_task(sandbox.write_file(f"{directory}/one", letter * 100_000))
        content = await sandbox.read_file(f"{directory}/one")
        assert len(content) == 100_000
        assert len(set(content)) == 1

    async def test_reading_a_missing_file(self, sandbox: SandboxApi, directory: str) -> None:
        with pytest.raises(PathNotFound) as caught:
            await sandbox.read_file(f"{directory}/nope")
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.path == f"{directory}/nope"

    async def test_reading_a_directory(self, sandbox: SandboxApi, directory: str) -> None:
        with pytest.raises(PathIsDirectory):
            await sandbox.read_bytes(directory)

    async def test_writing_over_a_directory(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/d/kept", "x")
        with pytest.raises(PathIsDirectory):
            await sandbox.write_file(f"{directory}/d", "x")
        assert await sandbox.readdir(f"{directory}/d") == ["kept"]

    async def test_path_below_a_file_is_refused(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f", "kept")
        with pytest.raises(PathNotDirectory):
            await sandbox.write_file(f"{directory}/f/below", "x")
        with pytest.raises(PathNotDirectory):
            await sandbox.read_file(f"{directory}/f/below")
        assert await sandbox.read_file(f"{directory}/f") == "kept"

    async def test_stat_of_a_file(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f", "12345")
        info = await sandbox.stat(f"{directory}/f")
        assert (info.path, info.type, info.is_symlink) == (f"{directory}/f", "file", False)
        assert info.size in (5, None)
        assert info.mtime is None or abs(info.mtime - time.time()) < 3600

    async def test_stat_of_a_directory(self, sandbox: SandboxApi, directory: str) -> None:
        info = await sandbox.stat(directory)
        assert (info.type, info.is_directory, info.is_file) == ("directory", True, False)

    async def test_stat_of_the_root(self, sandbox: SandboxApi) -> None:
        assert (await sandbox.stat("/")).is_directory

    async def test_stat_of_a_missing_path(self, sandbox: SandboxApi, directory: str) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.stat(f"{directory}/nope")

    async def test_exists_never_raises(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f", "")
        assert await sandbox.exists(f"{directory}/f") is True
        assert await sandbox.exists(directory) is True
        assert await sandbox.exists(f"{directory}/nope") is False
        assert await sandbox.exists(f"{directory}/f/below") is False

    async def test_write_keeps_the_mode(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/run.sh", "#!/bin/bash\necho ran\n")
        await sandbox.exec("chmod 755 run.sh", cwd=directory)
        await sandbox.write_file(f"{directory}/run.sh", "#!/bin/bash\necho ran again\n")
        mode = (await sandbox.stat(f"{directory}/run.sh")).mode
        if capabilities.file_modes:
            assert mode is not None and mode & 0o777 == 0o755
        assert await sandbox.read_file(f"{directory}/run.sh") == "#!/bin/bash\necho ran again\n"


class DirectoryCases(Cases):
    """`readdir`, `mkdir` and `rm`."""

    async def test_readdir_returns_sorted_names_with_dotfiles(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        for name in ("b", ".a", "c/inner", "A"):
            await sandbox.write_file(f"{directory}/{name}", "")
        assert await sandbox.readdir(directory) == [".a", "A", "b", "c"]

    async def test_readdir_of_an_empty_directory(self, sandbox: SandboxApi, directory: str) -> None:
        assert await sandbox.readdir(directory) == []

    async def test_readdir_of_a_missing_path(self, sandbox: SandboxApi, directory: str) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.readdir(f"{directory}/nope")

    async def test_readdir_of_a_file(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f", "")
        with pytest.raises(PathNotDirectory):
            await sandbox.readdir(f"{directory}/f")

    async def test_readdir_of_a_thousand_files(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.exec("for i in $(seq 1000 1999); do : > f$i; done", cwd=directory)
        names = await sandbox.readdir(directory)
        assert (len(names), names[0], names[-1]) == (1000, "f1000", "f1999")

    async def test_mkdir_creates_a_directory(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.mkdir(f"{directory}/d")
        assert (await sandbox.stat(f"{directory}/d")).is_directory
        assert (await sandbox.exec("cd d && pwd", cwd=directory)).stdout.strip().endswith("/d")

    async def test_mkdir_of_an_existing_directory(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.mkdir(f"{directory}/d")
        with pytest.raises(PathExists):
            await sandbox.mkdir(f"{directory}/d")

    async def test_mkdir_without_a_parent(self, sandbox: SandboxApi, directory: str) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.mkdir(f"{directory}/a/b")
        assert await sandbox.readdir(directory) == []

    async def test_mkdir_recursive_creates_parents(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.mkdir(f"{directory}/a/b/c", recursive=True)
        assert (await sandbox.stat(f"{directory}/a/b/c")).is_directory

    async def test_mkdir_recursive_accepts_a_directory(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/d/kept", "x")
        await sandbox.mkdir(f"{directory}/d", recursive=True)
        assert await sandbox.readdir(f"{directory}/d") == ["kept"]

    @pytest.mark.parametrize("recursive", [False, True])
    async def test_mkdir_over_a_file(
        self, sandbox: SandboxApi, directory: str, recursive: bool
    ) -> None:
        await sandbox.write_file(f"{directory}/f", "kept")
        with pytest.raises(PathExists):
            await sandbox.mkdir(f"{directory}/f", recursive=recursive)
        assert await sandbox.read_file(f"{directory}/f") == "kept"

    async def test_mkdir_below_a_file(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f", "kept")
        with pytest.raises(PathNotDirectory):
            await sandbox.mkdir(f"{directory}/f/d", recursive=True)

    async def test_rm_removes_a_file(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f", "")
        await sandbox.rm(f"{directory}/f")
        assert not await sandbox.exists(f"{directory}/f")

    async def test_rm_of_a_missing_path(self, sandbox: SandboxApi, directory: str) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.rm(f"{directory}/nope")
        with pytest.raises(PathNotFound):
            await sandbox.rm(f"{directory}/nope", recursive=True)

    async def test_rm_force_accepts_a_missing_path(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.rm(f"{directory}/nope", force=True)
        await sandbox.rm(f"{directory}/nope/below", recursive=True, force=True)

    @pytest.mark.parametrize("force", [False, True])
    async def test_rm_without_recursive_keeps_a_directory(
        self, sandbox: SandboxApi, directory: str, force: bool
    ) -> None:
        await sandbox.write_file(f"{directory}/d/kept", "x")
        with pytest.raises(PathIsDirectory) as caught:
            await sandbox.rm(f"{directory}/d", force=force)
        assert "recursive" in caught.value.hint
        assert await sandbox.readdir(f"{directory}/d") == ["kept"]

    async def test_rm_without_recursive_keeps_an_empty_directory(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.mkdir(f"{directory}/d")
        with pytest.raises(PathIsDirectory):
            await sandbox.rm(f"{directory}/d")
        assert await sandbox.exists(f"{directory}/d")

    async def test_rm_recursive_removes_everything_below(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        for name in ("d/a", "d/.b", "d/e/f", "kept"):
            await sandbox.write_file(f"{directory}/{name}", "")
        await sandbox.rm(f"{directory}/d", recursive=True)
        assert await sandbox.readdir(directory) == ["kept"]

    async def test_rm_recursive_removes_a_file_too(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/f", "")
        await sandbox.rm(f"{directory}/f", recursive=True)
        assert await sandbox.readdir(directory) == []

    async def test_rm_below_a_file(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f", "kept")
        with pytest.raises(PathNotDirectory):
            await sandbox.rm(f"{directory}/f/below")
        assert await sandbox.read_file(f"{directory}/f") == "kept"

    async def test_rm_never_removes_the_root(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/kept", "x")
        with pytest.raises(SmokeboxError):
            await sandbox.rm("/", recursive=True, force=True)
        assert await sandbox.read_file(f"{directory}/kept") == "x"
