"""Watching a directory: what is told, in which order, and how a watch is left and taken up."""

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
from smokebox.engine.jail.api import Owner
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
def place(root: Path) -> Path:
    return root / "workspace"


@pytest_asyncio.fixture
async def files(root: Path) -> AsyncIterator[Files]:
    async def give() -> tuple[int, Owner]:
        fd = os.open(root, os.O_PATH)
        asyncio.get_running_loop().call_soon(os.close, fd)
        return fd, ME

    workers = Workers()
    before = len(os.listdir("/proc/self/fd"))
    files = Files(give, workers=workers)
    yield files
    await files.release()
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"
    workers.close()


async def told(stream: WatchStream, last: str) -> list[str]:
    """What a stream tells until it has told `last`, as `kind name`."""
    events: list[str] = []
    async with asyncio.timeout(10):
        while not events or events[-1] != last:
            events.append(brief(await anext(stream)))
    return events


def brief(event: WatchEvent) -> str:
    return f"{event.kind} {event.path.removeprefix('/workspace/')}{'/' * event.is_directory}"


class TestEvents:
    async def test_what_happens_to_a_file(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            (place / "a").write_text("1")
            (place / "a").chmod(0o600)
            (place / "a").rename(place / "b")
            (place / "b").unlink()
            assert await told(stream, "delete b") == [
                "create a",
                "modify a",
                "attrib a",
                "move_from a",
                "move_to b",
                "delete b",
            ]

    async def test_our_own_writes_are_one_event(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            await files.write_file("a", "1")
            await files.write_file("a", "2")
            await files.write_file("end", "")
            assert await told(stream, "create end") == ["create a", "modify a", "create end"]

    async def test_a_flood_of_writes_to_one_file_is_told_in_few(
        self, files: Files, place: Path
    ) -> None:
        async with await files.watch(".") as stream:
            with (place / "log").open("w", buffering=1) as log:
                for n in range(5_000):
                    print(n, file=log)
            (place / "end").touch()
            assert len(await told(stream, "create end")) < 1_000

    async def test_below_and_not_below(self, files: Files, place: Path) -> None:
        (place / "d/e").mkdir(parents=True)
        deep = await files.watch(".")
        flat = await files.watch(".", recursive=False)
        (place / "d/e/f").touch()
        (place / "end").touch()
        assert "create d/e/f" in await told(deep, "create end")
        assert "create d/e/f" not in await told(flat, "create end")

    async def test_no_gap_in_directories_that_appear(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            expected: set[str] = set()

            def make() -> None:
                for n in range(30):
                    folder = place / f"{n}/x/y"
                    folder.mkdir(parents=True)
                    (folder / "f").touch()
                    expected.update((f"create {n}/", f"create {n}/x/", f"create {n}/x/y/"))
                    expected.add(f"create {n}/x/y/f")
                (place / "end").touch()

            await asyncio.to_thread(make)
            await asyncio.sleep(0.2)
            (place / "last").touch()
            events = await told(stream, "create last")
            created = [event for event in events if event.startswith("create")]
            assert set(created) == expected | {"create end", "create last"}
            assert len(created) == len(set(created)), "something was told twice"

    async def test_a_directory_that_moves_within(self, files: Files, place: Path) -> None:
        (place / "old/sub").mkdir(parents=True)
        async with await files.watch(".") as stream:
            (place / "old").rename(place / "fresh")
            await told(stream, "move_to fresh/")
            (place / "fresh/sub/f").touch()
            assert await told(stream, "create fresh/sub/f")

    async def test_a_directory_that_moves_as_soon_as_it_is_there(
        self, files: Files, place: Path
    ) -> None:
        (place / "old").mkdir()
        async with await files.watch(".") as stream:
            # The loop does not turn meanwhile: all names are others once they are looked at.
            (place / "old/sub").mkdir()
            (place / "old/sub/f").touch()
            (place / "old").rename(place / "fresh")
            (place / "brief").mkdir()
            (place / "brief").rename(place / "lasting")
            assert "create fresh/sub/f" in await told(stream, "move_to lasting/")
            (place / "fresh/sub/g").touch()
            assert await told(stream, "create fresh/sub/g")
            (place / "lasting/h").touch()
            assert await told(stream, "create lasting/h")

    async def test_a_directory_that_moves_in_and_out(
        self, files: Files, root: Path, place: Path
    ) -> None:
        (root / "outside/sub").mkdir(parents=True)
        (root / "outside/sub/f").touch()
        async with await files.watch(".") as stream:
            (root / "outside").rename(place / "in")
            assert await told(stream, "create in/sub/f") == [
                "move_to in/",
                "create in/sub/",
                "create in/sub/f",
            ]
            (place / "in").rename(root / "out")
            await told(stream, "move_from in/")
            await asyncio.sleep(0.1)
            (root / "out/sub/g").touch()
            (place / "end").touch()
            events = await told(stream, "create end")
            assert not any("g" in event.split("/")[-1] for event in events[:-1])

    async def test_a_single_file(self, files: Files, place: Path) -> None:
        (place / "a").touch()
        async with await files.watch("a") as stream:
            (place / "other").touch()
            (place / "a").write_text("1")
            assert await told(stream, "modify a") == ["modify a"]
            await files.write_file("a", "2")
            assert await told(stream, "modify a") == ["modify a"]
            (place / "a").unlink()
            assert await told(stream, "delete a") == ["delete a"]

    async def test_the_end_of_what_is_watched(self, files: Files, place: Path) -> None:
        (place / "d").mkdir()
        async with await files.watch("d") as stream:
            shutil.rmtree(place / "d")
            assert [brief(event) async for event in stream] == ["delete d/"]

    async def test_names_that_are_not_utf8(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            (place / os.fsdecode(b"\xff")).touch()
            assert await told(stream, "create \\xff")

    async def test_what_is_missing(self, files: Files) -> None:
        with pytest.raises(PathNotFound):
            await files.watch("nope")

    async def test_links_are_not_entered(self, files: Files, root: Path, place: Path) -> None:
        host = root.parent / "host"
        host.mkdir()
        (place / "out").symlink_to(host)
        async with await files.watch(".") as stream:
            (place / "again").symlink_to(host)
            (host / "secret").touch()
            (place / "end").touch()
            assert await told(stream, "create end") == ["create again", "create end"]
        with pytest.raises(PathNotFound):
            await files.watch("out")


class TestFilters:
    async def test_include_and_exclude(self, files: Files, place: Path) -> None:
        (place / ".git").mkdir()
        async with await files.watch(
            ".", include=["*.py", "docs/**"], exclude=[".git", "*_test.py"]
        ) as stream:
            (place / "docs").mkdir()
            for name in ("a.txt", "a_test.py", ".git/x.py", "docs/n.md", "a.py"):
                (place / name).touch()
            events = await told(stream, "create a.py")
            assert {event for event in events if event.startswith("create")} == {
                "create docs/n.md",
                "create a.py",
            }

    async def test_what_is_left_out_unless_said(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            (place / "node_modules/x").mkdir(parents=True)
            (place / "end").touch()
            assert await told(stream, "create end") == ["create end"]

    @pytest.mark.parametrize(
        ("pattern", "path", "fits"),
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
    def test_patterns(self, pattern: str, path: str, fits: bool) -> None:
        assert Patterns("include", [pattern]).fit(path) is fits

    async def test_bad_patterns(self, files: Files) -> None:
        with pytest.raises(InvalidOption):
            await files.watch(".", include=["x"] * 1_000)
        with pytest.raises(InvalidOption):
            await files.watch(".", exclude="*.py" * 1_000)


class TestCursors:
    async def test_what_was_missed_is_told_later(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            (place / "a").touch()
            await told(stream, "create a")
            cursor = stream.cursor
        (place / "b").touch()
        await asyncio.sleep(0.05)
        async with await files.watch(".", cursor=cursor) as stream:
            (place / "c").touch()
            events = [e for e in await told(stream, "create c") if e.startswith("create")]
            assert events == ["create b", "create c"]

    async def test_an_event_names_its_own_cursor(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            (place / "a").touch()
            (place / "b").touch()
            first = await anext(stream)
            await told(stream, "create b")
        async with await files.watch(".", cursor=first.cursor) as again:
            assert "create b" in await told(again, "create b")

    async def test_two_readers_of_one_watch(self, files: Files, place: Path) -> None:
        one = await files.watch(".")
        two = await files.watch(".", cursor=one.cursor)
        (place / "a").touch()
        assert await told(one, "create a") == await told(two, "create a")

    async def test_a_cursor_of_another_watch_or_time(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            cursor = stream.cursor
        for old, recursive in ((cursor, False), ("0123456789abcdef:7", True)):
            async with await files.watch(".", cursor=old, recursive=recursive) as stream:
                (place / "a").touch()
                assert (await anext(stream)).kind == "resync"
                assert "a" in (await anext(stream)).path
            (place / "a").unlink()

    @pytest.mark.parametrize("cursor", ["", "x", "a:b", "a:-1", "a:1" * 50])
    async def test_what_is_no_cursor(self, files: Files, cursor: str) -> None:
        with pytest.raises(InvalidOption):
            await files.watch(".", cursor=cursor)

    async def test_a_reader_far_behind(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as slow, await files.watch(".") as quick:
            for n in range(observer.MAX_CHANGES + 500):
                (place / str(n)).symlink_to("x")
                if n % 500 == 0:
                    # So that none is lost before it is noted.
                    await told(quick, f"create {n}")
            (place / "end").touch()
            await told(quick, "create end")
            async with asyncio.timeout(10):
                # Each has a journal of its own.
                while slow._watch.end <= observer.MAX_CHANGES:
                    await asyncio.sleep(0.01)
            assert (await anext(slow)).kind == "resync"
            (place / "more").touch()
            assert await told(slow, "create more")

    async def test_a_watch_that_nobody_reads_goes(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fd = os.open(root, os.O_PATH)

        async def give() -> tuple[int, Owner]:
            return fd, ME

        workers = Workers()
        files = Files(give, workers=workers, linger=0.05)
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
    async def test_an_overflow_says_resync_and_goes_on(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            # The loop does not turn meanwhile, so that nobody reads what the kernel queues.
            for _ in range(9_000):
                (place / "x").touch()
                (place / "x").unlink()
            (place / "late").mkdir()
            async with asyncio.timeout(10):
                while (await anext(stream)).kind != "resync":
                    pass
            await asyncio.sleep(0.1)
            (place / "late/f").touch()
            assert await told(stream, "create late/f")

    async def test_too_many_watches(self, files: Files) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(watches.MAX_WATCHES):
                await stack.enter_async_context(await files.watch("."))
            with pytest.raises(LimitReached):
                await files.watch(".")
        # Those that linger make room.
        async with await files.watch("."):
            pass

    async def test_too_many_directories(
        self, files: Files, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(observer, "MAX_DIRECTORIES", 5)
        async with await files.watch(".") as stream:
            for n in range(6):
                (place / str(n)).mkdir()
            with pytest.raises(LimitReached) as caught:
                await told(stream, "never")
            assert "xclude" in caught.value.hint
        with pytest.raises(LimitReached):
            await files.watch(".")

    def test_what_the_host_does_not_give(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(LimitReached) as caught:
                inotify.Inotify()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "sysctl fs.inotify.max_user_instances" in caught.value.hint

    async def test_the_sandbox_stops(self, files: Files, place: Path) -> None:
        async with await files.watch(".") as stream:
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.01)
            await files.release()
            with pytest.raises(SandboxGone):
                await waiting
        async with await files.watch(".") as stream:
            (place / "a").touch()
            assert await told(stream, "create a")
