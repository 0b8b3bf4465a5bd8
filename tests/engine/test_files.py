"""`Files`: the file methods of the contract, streams, cancellation and release."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from engine.root_files import ME, files_of
from smokebox.engine.files.files import Files
from smokebox.engine.jail.spec import Owner
from smokebox.engine.workers import Job, Workers, checkpoint
from smokebox.errors import (
    FileTooLarge,
    InvalidOption,
    InvalidPath,
    NotText,
    PathExists,
    PathNotFound,
    SandboxGone,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FIRST = 0x50000000

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "workspace").mkdir(parents=True)
    return tmp_path / "root"


@pytest_asyncio.fixture
async def files(root: Path, workers: Workers) -> AsyncIterator[Files]:
    files = files_of(root, workers)
    before = len(os.listdir("/proc/self/fd"))
    yield files
    await files.release()
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"


async def stream_of(*data: bytes) -> AsyncIterator[bytes]:
    for chunk in data:
        await asyncio.sleep(0)
        yield chunk


async def start_large_copy(files: Files, root: Path) -> asyncio.Task[None]:
    """Start a copy of many files, and return once it has begun."""
    for n in range(2_000):
        (root / f"tree/{n % 50}").mkdir(parents=True, exist_ok=True)
        (root / f"tree/{n % 50}/{n}").touch()
    task = asyncio.create_task(files.copy("/tree", "/copy", recursive=True))
    async with asyncio.timeout(5):
        while len(os.listdir(root)) < 3:
            await asyncio.sleep(0.001)
    return task


class TestContract:
    async def test_text_and_bytes(self, files: Files, root: Path) -> None:
        await files.write_file("notes/a.txt", "grüße")
        assert await files.read_file("/workspace/notes/a.txt") == "grüße"
        assert await files.read_bytes("notes/../notes/a.txt") == "grüße".encode()
        await files.write_file("raw", b"\xff")
        with pytest.raises(NotText):
            await files.read_file("raw")
        assert (root / "workspace/notes/a.txt").stat().st_mode & 0o777 == 0o644

    async def test_invalid_paths_and_options(self, files: Files) -> None:
        for path in ("", "a\0b", "\udcff"):
            with pytest.raises(InvalidPath):
                await files.read_bytes(path)
        with pytest.raises(InvalidOption):
            await files.read_range("x", -1)
        with pytest.raises(InvalidOption):
            await files.chmod("x", 0o10000)
        with pytest.raises(InvalidOption):
            await files.write_file("x", 3)  # type: ignore[arg-type]

    async def test_directories(self, files: Files) -> None:
        await files.mkdir("a/b", recursive=True)
        await files.write_file("a/.c", "")
        assert await files.readdir("a") == [".c", "b"]
        with pytest.raises(PathExists):
            await files.mkdir("a")
        assert [info.path for info in await files.list_files(".", recursive=True, hidden=True)] == [
            "/workspace/a",
            "/workspace/a/.c",
            "/workspace/a/b",
        ]
        await files.rm("a", recursive=True)
        assert await files.exists("a") is False
        await files.rm("a", force=True)

    async def test_stat_glob_and_usage(self, files: Files) -> None:
        await files.write_file("src/x.py", "12345")
        await files.symlink("src", "link")
        assert (await files.stat("link")).is_directory
        assert (await files.stat("link", follow_symlinks=False)).type == "symlink"
        assert await files.readlink("link") == "src"
        assert await files.glob("**/*.py") == ["/workspace/src/x.py"]
        assert await files.glob("*.py", cwd="src", files_only=True) == ["/workspace/src/x.py"]
        assert (await files.disk_usage()).files == 2

    async def test_modifications(self, files: Files) -> None:
        await files.append_file("a", "one")
        await files.append_file("a", b" two")
        await files.chmod("a", 0o600)
        await files.touch("a", mtime=5)
        await files.copy("a", "b")
        await files.rename("a", "c")
        await files.mkdir("d")
        assert await files.move("c", "d") == "/workspace/d/c"
        await files.copy("d", "e", recursive=True)
        await files.chown("b", 0)
        assert await files.read_file("e/c") == "one two"
        assert (await files.stat("d/c")).mtime == 5
        assert (await files.stat("b")).mode == 0o600

    async def test_concurrent_writes_do_not_mix(self, files: Files) -> None:
        async with asyncio.TaskGroup() as group:
            for letter in "abcdefgh":
                group.create_task(files.write_file("one", letter * 100_000))
        content = await files.read_file("one")
        assert (len(content), len(set(content))) == (100_000, 1)

    async def test_file_above_max_read_is_refused(self, root: Path, workers: Workers) -> None:
        files = files_of(root, workers, max_read=10)
        await files.write_file("a", "x" * 11)
        with pytest.raises(FileTooLarge):
            await files.read_file("a")
        assert await files.read_range("a", 1, 10) == b"x" * 10

    @as_root
    async def test_new_files_belong_to_the_owner(self, root: Path, workers: Workers) -> None:
        files = files_of(root, workers, Owner(uid=FIRST, gid=FIRST, count=65536))
        await files.write_file("new/file", "x")
        await files.chown("new/file", 1000)
        await files.write_file("new/file", "again")
        assert (root / "workspace/new").stat().st_uid == FIRST
        assert (root / "workspace/new/file").stat().st_uid == FIRST + 1000


class TestStreams:
    async def test_read_stream(self, files: Files, root: Path) -> None:
        content = os.urandom(3_000_000)
        (root / "big").write_bytes(content)
        assert b"".join([chunk async for chunk in files.read_stream("/big")]) == content
        part = files.read_stream("/big", offset=1_000_000, length=1_500_000)
        assert b"".join([chunk async for chunk in part]) == content[1_000_000:2_500_000]

    async def test_read_stream_of_a_missing_file(self, files: Files) -> None:
        with pytest.raises(PathNotFound):
            await anext(files.read_stream("nope"))

    async def test_closing_a_stream_early_closes_the_file(self, files: Files, root: Path) -> None:
        (root / "big").write_bytes(bytes(3_000_000))
        async with aclosing(files.read_stream("/big")) as stream:
            assert await anext(stream)
            assert files.busy
        assert not files.busy

    async def test_write_stream(self, files: Files, root: Path) -> None:
        written = await files.write_stream("deep/a", stream_of(b"one ", b"", b"two"))
        assert written == 7
        assert (root / "workspace/deep/a").read_bytes() == b"one two"

    async def test_failed_source_leaves_the_old_file(self, files: Files, root: Path) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"half"
            raise ConnectionResetError

        await files.write_file("a", "before")
        for path in ("a", "b/c"):
            with pytest.raises(ConnectionResetError):
                await files.write_stream(path, broken())
        assert await files.read_file("a") == "before"
        assert os.listdir(root / "workspace") == ["a"]

    async def test_cancelled_write_stream_leaves_nothing(self, files: Files, root: Path) -> None:
        started = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(100_000)
                started.set()
                await asyncio.sleep(0)

        task = asyncio.create_task(files.write_stream("a/b", endless()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert os.listdir(root / "workspace") == []


class TestCancellation:
    async def test_cancel_stops_the_work_and_waits_for_it(self, workers: Workers) -> None:
        inside, ended = threading.Event(), threading.Event()

        def endless() -> None:
            inside.set()
            try:
                while True:
                    checkpoint()
            finally:
                ended.set()

        task = asyncio.create_task(workers.run(Job(), endless))
        await asyncio.to_thread(inside.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    async def test_cancelled_copy_leaves_nothing(self, files: Files, root: Path) -> None:
        task = await start_large_copy(files, root)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert sorted(os.listdir(root)) == ["tree", "workspace"]

    async def test_cancelled_write_is_atomic(self, files: Files) -> None:
        for delay in range(20):
            await files.write_file("a", "before")
            task = asyncio.create_task(files.write_file("a", b"x" * 8_000_000))
            await asyncio.sleep(delay / 2_000)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert await files.read_bytes("a") in (b"before", b"x" * 8_000_000)
        assert await files.readdir(".") == ["a"]


class TestRelease:
    async def test_open_streams_raise_sandbox_gone(self, files: Files, root: Path) -> None:
        (root / "big").write_bytes(bytes(3_000_000))
        stream = files.read_stream("/big")
        await anext(stream)
        await files.release()
        with pytest.raises(SandboxGone):
            await anext(stream)
        assert await files.exists("/big")

    async def test_running_copy_raises_sandbox_gone(self, files: Files, root: Path) -> None:
        task = await start_large_copy(files, root)
        await files.release()
        with pytest.raises(SandboxGone):
            await task
        assert sorted(os.listdir(root)) == ["tree", "workspace"]

    async def test_each_call_duplicates_the_root(self, root: Path, workers: Workers) -> None:
        """The number of a closed descriptor may be that of a host directory when a thread runs."""
        (root / "a").write_text("inside")
        (root.parent / "a").write_text("secret of the host")

        async def root_fd() -> tuple[int, Owner]:
            fd = os.open(root, os.O_PATH)

            def replace() -> None:
                host = os.open(root.parent, os.O_PATH)
                os.dup2(host, fd)
                os.close(host)
                asyncio.get_running_loop().call_later(0.05, os.close, fd)

            asyncio.get_running_loop().call_soon(replace)
            return fd, ME

        files = Files(root_fd, workers=workers)
        contents = await asyncio.gather(*(files.read_file("/a") for _ in range(20)))
        assert set(contents) == {"inside"}
        await asyncio.sleep(0.06)
