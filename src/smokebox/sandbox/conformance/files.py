"""Cases on files: contents, names and errors."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import (
    FileTooLarge,
    InvalidPath,
    NotText,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
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

    async def test_text_round_trips(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/a.txt", "héllo\r\nwörld\n")
        assert await sandbox.read_file(f"{place}/a.txt") == "héllo\r\nwörld\n"

    async def test_text_is_stored_as_utf8(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/a.txt", "é")
        assert await sandbox.read_bytes(f"{place}/a.txt") == b"\xc3\xa9"

    async def test_every_byte_round_trips(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/a.bin", EVERY_BYTE)
        assert await sandbox.read_bytes(f"{place}/a.bin") == EVERY_BYTE

    async def test_bytes_reach_commands_and_come_back(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/a.bin", EVERY_BYTE)
        result = await sandbox.exec("cp a.bin b.bin && wc -c < b.bin", cwd=place)
        assert result.stdout.strip() == str(len(EVERY_BYTE))
        assert await sandbox.read_bytes(f"{place}/b.bin") == EVERY_BYTE

    async def test_binary_read_as_text_is_refused(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/a.bin", b"ok\xff\xfe")
        with pytest.raises(NotText) as caught:
            await sandbox.read_file(f"{place}/a.bin")
        assert "read_bytes" in caught.value.hint

    async def test_an_empty_file_is_a_file(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/empty", "")
        assert await sandbox.read_bytes(f"{place}/empty") == b""
        assert (await sandbox.stat(f"{place}/empty")).is_file

    async def test_a_50_mb_file_round_trips(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        size = min(FIFTY_MB, able.max_file_size or FIFTY_MB)
        data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
        await sandbox.write_file(f"{place}/big", data)
        assert await sandbox.read_bytes(f"{place}/big") == data

    async def test_a_file_over_the_limit_is_refused_whole(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/big", "before")
        if able.max_file_size is None:
            await sandbox.write_file(f"{place}/big", b"x" * FIFTY_MB)
            assert (await sandbox.stat(f"{place}/big")).size in (FIFTY_MB, None)
            return
        with pytest.raises(FileTooLarge) as caught:
            await sandbox.write_file(f"{place}/big", b"x" * (able.max_file_size + 1))
        assert caught.value.hint
        assert await sandbox.read_file(f"{place}/big") == "before"

    async def test_write_makes_parents(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/x/y/z.txt", "deep")
        assert await sandbox.read_file(f"{place}/x/y/z.txt") == "deep"

    async def test_write_replaces_all_of_a_longer_file(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/a", "a long content")
        await sandbox.write_file(f"{place}/a", "short")
        assert await sandbox.read_file(f"{place}/a") == "short"

    async def test_write_leaves_no_other_file_behind(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/a", "1")
        await sandbox.write_file(f"{place}/a", "2")
        assert await sandbox.readdir(place) == ["a"]

    @pytest.mark.parametrize("name", NAMES)
    async def test_odd_names_round_trip_or_are_refused(
        self, sandbox: SandboxApi, able: Capabilities, place: str, name: str
    ) -> None:
        if set(name) & set(able.refused_in_names):
            with pytest.raises(InvalidPath):
                await sandbox.write_file(f"{place}/{name}", name)
            assert await sandbox.readdir(place) == []
            return
        await sandbox.write_file(f"{place}/{name}", name)
        assert await sandbox.readdir(place) == [name]
        assert await sandbox.read_file(f"{place}/{name}") == name
        result = await sandbox.exec('cat -- "$NAME"', cwd=place, env={"NAME": name})
        assert result.stdout == name
        await sandbox.rm(f"{place}/{name}")
        assert await sandbox.readdir(place) == []

    async def test_commands_see_what_was_written(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/in.txt", "one\ntwo\n")
        result = await sandbox.exec("wc -l < in.txt", cwd=place)
        assert result.stdout.strip() == "2"

    async def test_what_commands_write_is_seen(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.exec("printf made > out.txt", cwd=place)
        assert await sandbox.read_file(f"{place}/out.txt") == "made"

    async def test_commands_append(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/log", "a\n")
        await sandbox.exec("echo b >> log; echo c >> log", cwd=place)
        assert await sandbox.read_file(f"{place}/log") == "a\nb\nc\n"

    async def test_many_files_at_once(self, sandbox: SandboxApi, place: str) -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(50):
                group.create_task(sandbox.write_file(f"{place}/{n:02}", str(n)))
        assert await sandbox.readdir(place) == [f"{n:02}" for n in range(50)]
        assert await sandbox.read_file(f"{place}/37") == "37"

    async def test_writes_of_one_file_never_mix(self, sandbox: SandboxApi, place: str) -> None:
        async with asyncio.TaskGroup() as group:
            for letter in "abcdefgh":
                group.create_task(sandbox.write_file(f"{place}/one", letter * 100_000))
        content = await sandbox.read_file(f"{place}/one")
        assert len(content) == 100_000
        assert len(set(content)) == 1

    async def test_reading_what_is_missing(self, sandbox: SandboxApi, place: str) -> None:
        with pytest.raises(PathNotFound) as caught:
            await sandbox.read_file(f"{place}/nope")
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.path == f"{place}/nope"

    async def test_reading_a_directory(self, sandbox: SandboxApi, place: str) -> None:
        with pytest.raises(PathIsDirectory):
            await sandbox.read_bytes(place)

    async def test_writing_over_a_directory(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/d/kept", "x")
        with pytest.raises(PathIsDirectory):
            await sandbox.write_file(f"{place}/d", "x")
        assert await sandbox.readdir(f"{place}/d") == ["kept"]

    async def test_a_file_is_no_directory(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "kept")
        with pytest.raises(PathNotDirectory):
            await sandbox.write_file(f"{place}/f/below", "x")
        with pytest.raises(PathNotDirectory):
            await sandbox.read_file(f"{place}/f/below")
        assert await sandbox.read_file(f"{place}/f") == "kept"

    async def test_stat_of_a_file(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "12345")
        info = await sandbox.stat(f"{place}/f")
        assert (info.path, info.type, info.is_symlink) == (f"{place}/f", "file", False)
        assert info.size in (5, None)
        assert info.mtime is None or abs(info.mtime - time.time()) < 3600

    async def test_stat_of_a_directory(self, sandbox: SandboxApi, place: str) -> None:
        info = await sandbox.stat(place)
        assert (info.type, info.is_directory, info.is_file) == ("directory", True, False)

    async def test_stat_of_the_root(self, sandbox: SandboxApi) -> None:
        assert (await sandbox.stat("/")).is_directory

    async def test_stat_of_what_is_missing(self, sandbox: SandboxApi, place: str) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.stat(f"{place}/nope")

    async def test_exists_answers_and_never_raises(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "")
        assert await sandbox.exists(f"{place}/f") is True
        assert await sandbox.exists(place) is True
        assert await sandbox.exists(f"{place}/nope") is False
        assert await sandbox.exists(f"{place}/f/below") is False

    async def test_modes_hold_where_there_are_modes(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/run.sh", "#!/bin/bash\necho ran\n")
        await sandbox.exec("chmod 755 run.sh", cwd=place)
        await sandbox.write_file(f"{place}/run.sh", "#!/bin/bash\necho ran again\n")
        mode = (await sandbox.stat(f"{place}/run.sh")).mode
        if able.file_modes:
            assert mode is not None and mode & 0o777 == 0o755
        assert await sandbox.read_file(f"{place}/run.sh") == "#!/bin/bash\necho ran again\n"
