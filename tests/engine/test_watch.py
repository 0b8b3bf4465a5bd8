"""Watching a directory: reported changes and their order, filters, cursors and limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.engine import inotify
from smokebox.engine.files import observer, watches
from smokebox.engine.files.files import Files
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.jail.spec import Owner
from smokebox.engine.workers import Workers
from smokebox.errors import (
    InvalidOption,
    LimitReached,
    PathNotFound,
    SandboxGone,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.files.watches import WatchStream
    from smokebox.types import WatchEvent

ME = Owner(uid=os.geteuid(), gid=os.getegid(), count=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "workspace").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def workspace(root: Path) -> Path:
    return root / "workspace"


@pytest_asyncio.fixture
async def files(root: Path) -> AsyncIterator[Files]:
    async def open_root() -> tuple[int, Owner]:
        fd = os.open(root, os.O_PATH)
        asyncio.get_running_loop().call_soon(os.close, fd)
        return fd, ME

    workers = Workers()
    before = len(os.listdir("/proc/self/fd"))
    files = Files(open_root, workers=workers)
    yield files
    await files.release()
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"
    workers.close()


async def read_until(stream: WatchStream, last: str) -> list[str]:
    """Read events up to `last`, each as `kind name`."""
    events: list[str] = []
    async with asyncio.timeout(10):
        while not events or events[-1] != last:
            events.append(shorten(await anext(stream)))
    return events


def shorten(event: WatchEvent) -> str:
    return f"{event.kind} {event.path.removeprefix('/workspace/')}{'/' * event.is_directory}"


class TestChanges:
    async def test_changes_of_a_file(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as stream:
            (workspace / "a").write_text("1")
            (workspace / "a").chmod(0o600)
            (workspace / "a").rename(workspace / "b")
            (workspace / "b").unlink()
            assert await read_until(stream, "delete b") == [
                "create a",
                "modify a",
                "attrib a",
                "move_from a",
                "move_to b",
                "delete b",
            ]

    async def test_write_file_is_one_event(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as stream:
            await files.write_file("a", "1")
            await files.write_file("a", "2")
            await files.write_file("end", "")
            assert await read_until(stream, "create end") == ["create a", "modify a", "create end"]

    async def test_repeated_writes_to_a_file_are_merged(
        self, files: Files, workspace: Path
    ) -> None:
        async with await files.watch(".") as stream:
            with (workspace / "log").open("w", buffering=1) as log:
                for n in range(5_000):
                    print(n, file=log)
            (workspace / "end").touch()
            assert len(await read_until(stream, "create end")) < 1_000

    async def test_recursive_and_flat_watches(self, files: Files, workspace: Path) -> None:
        (workspace / "d/e").mkdir(parents=True)
        deep = await files.watch(".")
        flat = await files.watch(".", recursive=False)
        (workspace / "d/e/f").touch()
        (workspace / "end").touch()
        assert "create d/e/f" in await read_until(deep, "create end")
        assert "create d/e/f" not in await read_until(flat, "create end")

    async def test_nothing_is_missed_in_new_directories(
        self, files: Files, workspace: Path
    ) -> None:
        async with await files.watch(".") as stream:
            expected: set[str] = set()

            def make() -> None:
                for n in range(30):
                    folder = workspace / f"{n}/x/y"
                    folder.mkdir(parents=True)
                    (folder / "f").touch()
                    expected.update((f"create {n}/", f"create {n}/x/", f"create {n}/x/y/"))
                    expected.add(f"create {n}/x/y/f")
                (workspace / "end").touch()

            await asyncio.to_thread(make)
            await asyncio.sleep(0.2)
            (workspace / "last").touch()
            events = await read_until(stream, "create last")
            created = [event for event in events if event.startswith("create")]
            assert set(created) == expected | {"create end", "create last"}
            assert len(created) == len(set(created)), "something was reported twice"

    async def test_directory_renamed_inside(self, files: Files, workspace: Path) -> None:
        (workspace / "old/sub").mkdir(parents=True)
        async with await files.watch(".") as stream:
            (workspace / "old").rename(workspace / "fresh")
            await read_until(stream, "move_to fresh/")
            (workspace / "fresh/sub/f").touch()
            assert await read_until(stream, "create fresh/sub/f")

    async def test_directory_renamed_right_after_its_creation(
        self, files: Files, workspace: Path
    ) -> None:
        (workspace / "old").mkdir()
        async with await files.watch(".") as stream:
            # The event loop does not run meanwhile: all names have changed when they are listed.
            (workspace / "old/sub").mkdir()
            (workspace / "old/sub/f").touch()
            (workspace / "old").rename(workspace / "fresh")
            (workspace / "brief").mkdir()
            (workspace / "brief").rename(workspace / "lasting")
            assert "create fresh/sub/f" in await read_until(stream, "move_to lasting/")
            (workspace / "fresh/sub/g").touch()
            assert await read_until(stream, "create fresh/sub/g")
            (workspace / "lasting/h").touch()
            assert await read_until(stream, "create lasting/h")

    async def test_directory_moved_in_and_out(
        self, files: Files, root: Path, workspace: Path
    ) -> None:
        (root / "outside/sub").mkdir(parents=True)
        (root / "outside/sub/f").touch()
        async with await files.watch(".") as stream:
            (root / "outside").rename(workspace / "in")
            assert await read_until(stream, "create in/sub/f") == [
                "move_to in/",
                "create in/sub/",
                "create in/sub/f",
            ]
            (workspace / "in").rename(root / "out")
            await read_until(stream, "move_from in/")
            await asyncio.sleep(0.1)
            (root / "out/sub/g").touch()
            (workspace / "end").touch()
            events = await read_until(stream, "create end")
            assert not any("g" in event.split("/")[-1] for event in events[:-1])

    async def test_watch_of_a_single_file(self, files: Files, workspace: Path) -> None:
        (workspace / "a").touch()
        async with await files.watch("a") as stream:
            (workspace / "other").touch()
            (workspace / "a").write_text("1")
            assert await read_until(stream, "modify a") == ["modify a"]
            await files.write_file("a", "2")
            assert await read_until(stream, "modify a") == ["modify a"]
            (workspace / "a").unlink()
            assert await read_until(stream, "delete a") == ["delete a"]

    async def test_stream_ends_when_the_directory_is_removed(
        self, files: Files, workspace: Path
    ) -> None:
        (workspace / "d").mkdir()
        async with await files.watch("d") as stream:
            shutil.rmtree(workspace / "d")
            assert [shorten(event) async for event in stream] == ["delete d/"]

    async def test_names_with_invalid_utf8(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as stream:
            (workspace / os.fsdecode(b"\xff")).touch()
            assert await read_until(stream, "create \\xff")

    async def test_missing_path(self, files: Files) -> None:
        with pytest.raises(PathNotFound):
            await files.watch("nope")

    async def test_symlinks_are_not_followed(
        self, files: Files, root: Path, workspace: Path
    ) -> None:
        host = root.parent / "host"
        host.mkdir()
        (workspace / "out").symlink_to(host)
        async with await files.watch(".") as stream:
            (workspace / "again").symlink_to(host)
            (host / "secret").touch()
            (workspace / "end").touch()
            assert await read_until(stream, "create end") == ["create again", "create end"]
        with pytest.raises(PathNotFound):
            await files.watch("out")


class TestFilters:
    async def test_include_and_exclude(self, files: Files, workspace: Path) -> None:
        (workspace / ".git").mkdir()
        async with await files.watch(
            ".", include=["*.py", "docs/**"], exclude=[".git", "*_test.py"]
        ) as stream:
            (workspace / "docs").mkdir()
            for name in ("a.txt", "a_test.py", ".git/x.py", "docs/n.md", "a.py"):
                (workspace / name).touch()
            events = await read_until(stream, "create a.py")
            assert {event for event in events if event.startswith("create")} == {
                "create docs/n.md",
                "create a.py",
            }

    async def test_default_excludes(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as stream:
            (workspace / "node_modules/x").mkdir(parents=True)
            (workspace / "end").touch()
            assert await read_until(stream, "create end") == ["create end"]

    @pytest.mark.parametrize(
        ("pattern", "path", "matches"),
        [
            ("*.py", "a/b.py", True),
            ("*.py", "a.py/b", False),
            ("a/*.py", "a/b.py", True),
            ("a/*.py", "x/a/b.py", False),
            ("/a", "a", True),
            ("/a", "x/a", False),
            ("**/a", "a", True),
            ("**/a/**", "x/a/y/z", True),
            ("a/**", "a", False),
            ("a/**", "a/b", True),
            ("{a,b}/c", "b/c", True),
            ("**/" * 40 + "x", "/".join("y" * 40), False),
        ],
    )
    def test_patterns(self, pattern: str, path: str, matches: bool) -> None:
        assert Patterns("include", [pattern]).match(path) is matches

    async def test_invalid_patterns(self, files: Files) -> None:
        with pytest.raises(InvalidOption):
            await files.watch(".", include=["x"] * 1_000)
        with pytest.raises(InvalidOption):
            await files.watch(".", exclude="*.py" * 1_000)


class TestCursors:
    async def test_cursor_resumes_without_gap(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as stream:
            (workspace / "a").touch()
            await read_until(stream, "create a")
            cursor = stream.cursor
        (workspace / "b").touch()
        await asyncio.sleep(0.05)
        async with await files.watch(".", cursor=cursor) as stream:
            (workspace / "c").touch()
            events = [e for e in await read_until(stream, "create c") if e.startswith("create")]
            assert events == ["create b", "create c"]

    async def test_cursor_of_an_event_resumes_after_it(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as stream:
            (workspace / "a").touch()
            (workspace / "b").touch()
            first = await anext(stream)
            await read_until(stream, "create b")
        async with await files.watch(".", cursor=first.cursor) as again:
            assert "create b" in await read_until(again, "create b")

    async def test_two_streams_share_a_watch(self, files: Files, workspace: Path) -> None:
        one = await files.watch(".")
        two = await files.watch(".", cursor=one.cursor)
        (workspace / "a").touch()
        assert await read_until(one, "create a") == await read_until(two, "create a")

    async def test_unknown_cursor_starts_with_resync(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as stream:
            cursor = stream.cursor
        for old, recursive in ((cursor, False), ("0123456789abcdef:7", True)):
            async with await files.watch(".", cursor=old, recursive=recursive) as stream:
                (workspace / "a").touch()
                assert (await anext(stream)).kind == "resync"
                assert "a" in (await anext(stream)).path
            (workspace / "a").unlink()

    @pytest.mark.parametrize("cursor", ["", "x", "a:b", "a:-1", "a:1" * 50])
    async def test_invalid_cursor(self, files: Files, cursor: str) -> None:
        with pytest.raises(InvalidOption):
            await files.watch(".", cursor=cursor)

    async def test_slow_reader_gets_a_resync(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as slow, await files.watch(".") as quick:
            for n in range(observer.MAX_CHANGES + 500):
                (workspace / str(n)).symlink_to("x")
                if n % 500 == 0:
                    # So that no change is lost before it is recorded.
                    await read_until(quick, f"create {n}")
            (workspace / "end").touch()
            await read_until(quick, "create end")
            async with asyncio.timeout(10):
                # Each watch has its own history.
                while slow._watch.end <= observer.MAX_CHANGES:
                    await asyncio.sleep(0.01)
            assert (await anext(slow)).kind == "resync"
            (workspace / "more").touch()
            assert await read_until(slow, "create more")

    async def test_watch_without_readers_expires(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fd = os.open(root, os.O_PATH)

        async def open_root() -> tuple[int, Owner]:
            return fd, ME

        workers = Workers()
        files = Files(open_root, workers=workers, linger=0.05)
        before = len(os.listdir("/proc/self/fd"))
        async with await files.watch("/"):
            assert files.busy
        assert not files.busy
        async with asyncio.timeout(5):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)
        os.close(fd)
        workers.close()


class TestLimits:
    async def test_overflow_reports_resync_and_continues(
        self, files: Files, workspace: Path
    ) -> None:
        async with await files.watch(".") as stream:
            # The event loop does not run meanwhile, so that the queue of the kernel overflows.
            for _ in range(9_000):
                (workspace / "x").touch()
                (workspace / "x").unlink()
            (workspace / "late").mkdir()
            async with asyncio.timeout(10):
                while (await anext(stream)).kind != "resync":
                    pass
            await asyncio.sleep(0.1)
            (workspace / "late/f").touch()
            assert await read_until(stream, "create late/f")

    async def test_too_many_watches(self, files: Files) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(watches.MAX_WATCHES):
                await stack.enter_async_context(await files.watch("."))
            with pytest.raises(LimitReached):
                await files.watch(".")
        # Lingering watches make room.
        async with await files.watch("."):
            pass

    async def test_too_many_directories(
        self, files: Files, workspace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(observer, "MAX_DIRECTORIES", 5)
        async with await files.watch(".") as stream:
            for n in range(6):
                (workspace / str(n)).mkdir()
            with pytest.raises(LimitReached) as caught:
                await read_until(stream, "never")
            assert "xclude" in caught.value.hint
        with pytest.raises(LimitReached):
            await files.watch(".")

    def test_inotify_limit_of_the_host(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(LimitReached) as caught:
                inotify.Inotify()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "sysctl fs.inotify.max_user_instances" in caught.value.hint

    async def test_release_raises_sandbox_gone(self, files: Files, workspace: Path) -> None:
        async with await files.watch(".") as stream:
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.01)
            await files.release()
            with pytest.raises(SandboxGone):
                await waiting
        async with await files.watch(".") as stream:
            (workspace / "a").touch()
            assert await read_until(stream, "create a")
