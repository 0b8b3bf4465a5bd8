"""Uploading and downloading tar archives, including hostile and damaged ones."""

from __future__ import annotations

import gzip
import io
import os
import stat
import subprocess
import tarfile
import tracemalloc
import zlib
from typing import TYPE_CHECKING

import pytest

from engine.root_files import files_of
from smokebox.engine.jail.spec import Owner
from smokebox.errors import AccessDenied, LimitReached, PathError, SmokeboxError, Unsupported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.files.files import Files
    from smokebox.engine.workers import Workers
    from smokebox.types import Extracted

FIRST = 0x50000000
SECRET = "secret of the host"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing owners needs root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def files(root: Path, workers: Workers) -> Files:
    return files_of(root, workers)


async def stream_of(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar_of(*members: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


async def upload(files: Files, data: bytes, path: str = "/to") -> Extracted:
    return await files.upload_tar(path, stream_of(data))


async def download(files: Files, path: str, *, compress: bool = False) -> bytes:
    return b"".join([chunk async for chunk in files.download_tar(path, compress=compress)])


def gnu_tar(*args: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(["tar", *args], input=stdin, capture_output=True, check=True).stdout


def fill(folder: Path) -> None:
    (folder / "sub/empty").mkdir(parents=True)
    (folder / "sub/file").write_bytes(os.urandom(700_000))
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("/anywhere")
    (folder / os.fsdecode(b"not-\xff-utf8")).write_text("odd")
    (folder / ("long" * 40)).write_text("long")
    os.link(folder / "run.sh", folder / "same.sh")
    os.mkfifo(folder / "pipe")
    os.utime(folder / "sub", (5, 5))


class TestRoundTrip:
    @pytest.mark.parametrize("compress", [False, True])
    async def test_tree_is_restored(self, files: Files, root: Path, compress: bool) -> None:
        (root / "from").mkdir()
        fill(root / "from")
        data = await download(files, "/from", compress=compress)
        assert data.startswith(b"\x1f\x8b") is compress
        result = await upload(files, data, "/deep/to")
        to = root / "deep/to"
        assert sorted(os.listdir(to)) == sorted(set(os.listdir(root / "from")) - {"pipe"})
        assert (to / "sub/file").read_bytes() == (root / "from/sub/file").read_bytes()
        assert (to / "run.sh").stat().st_mode & 0o777 == 0o755
        assert (to / "same.sh").stat().st_ino == (to / "run.sh").stat().st_ino
        assert os.readlink(to / "link") == "/anywhere"
        assert (to / "sub").stat().st_mtime == 5
        assert (result.files, result.links, result.directories) == (4, 2, 2)

    async def test_gnu_tar_reads_our_archives(
        self, files: Files, root: Path, tmp_path: Path
    ) -> None:
        (root / "from").mkdir()
        fill(root / "from")
        (tmp_path / "out").mkdir()
        gnu_tar("-x", "-C", str(tmp_path / "out"), stdin=await download(files, "/from"))
        assert (tmp_path / "out/sub/file").read_bytes() == (root / "from/sub/file").read_bytes()
        assert b"not-\xff-utf8" in os.listdir(os.fsencode(tmp_path / "out"))

    @pytest.mark.parametrize("form", ["gnu", "pax", "ustar", "v7"])
    async def test_archives_of_gnu_tar_are_read(
        self, files: Files, root: Path, tmp_path: Path, form: str
    ) -> None:
        (tmp_path / "from").mkdir()
        fill(tmp_path / "from")
        if form in ("ustar", "v7"):
            (tmp_path / "from" / ("long" * 40)).unlink()
        source = ("-C", str(tmp_path / "from"), ".")
        data = gnu_tar("-c", f"--format={form}", "--exclude=pipe", *source)
        await upload(files, data)
        assert sorted(os.listdir(root / "to")) == sorted(
            set(os.listdir(tmp_path / "from")) - {"pipe"}
        )
        assert (root / "to/sub").stat().st_mtime == 5

    async def test_large_archive_in_constant_memory(self, files: Files, root: Path) -> None:
        (root / "from").mkdir()
        with (root / "from/big").open("wb") as file:
            file.truncate(100 << 20)
        tracemalloc.start()
        try:
            await files.upload_tar("/to", files.download_tar("/from", compress=True))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (root / "to/big").stat().st_size == 100 << 20
        assert peak < 16 << 20

    async def test_single_file(self, files: Files, root: Path) -> None:
        (root / "a").write_text("a")
        with tarfile.open(fileobj=io.BytesIO(await download(files, "/a"))) as tar:
            assert tar.getnames() == ["a"]

    async def test_exclude(self, files: Files, root: Path) -> None:
        for name in ("a/.git/x", "a/b.pyc", "a/b.py", "build/out"):
            (root / "from" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "from" / name).touch()
        stream = files.download_tar("/from", exclude=[".git", "*.py[co]", "build/**"])
        data = b"".join([chunk async for chunk in stream])
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            assert tar.getnames() == [".", "a", "build", "a/b.py"]

    async def test_small_chunks(self, files: Files, root: Path) -> None:
        data = tar_of(member("a", b"content"), member("b" * 150, b"more"))
        for form in (
            data,
            gzip.compress(data),
            gzip.compress(data[:700]) + gzip.compress(data[700:]),
        ):
            await files.upload_tar("/to", stream_of(form, 1 if len(form) < 2000 else 100))
        assert (root / "to/a").read_text() == "content"

    async def test_growing_file_is_packed_up_to_its_first_size(
        self, files: Files, root: Path
    ) -> None:
        (root / "from").mkdir()
        (root / "from/log").write_bytes(b"x" * 1_000_000)
        stream = files.download_tar("/from")
        data = await anext(stream)
        os.truncate(root / "from/log", 2_000_000)
        data += b"".join([chunk async for chunk in stream])
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            assert tar.getmember("log").size == 1_000_000

    async def test_shrinking_file_is_an_error(self, files: Files, root: Path) -> None:
        (root / "from").mkdir()
        (root / "from/log").write_bytes(b"x" * 1_000_000)
        stream = files.download_tar("/from")
        await anext(stream)
        os.truncate(root / "from/log", 10)
        with pytest.raises(PathError, match="/from/log was truncated"):
            async for _ in stream:
                pass

    async def test_symlinks_are_not_followed(self, files: Files, root: Path) -> None:
        (root / "from").mkdir()
        (root / "from/out").symlink_to(root.parent / "secret")
        data = await download(files, "/from")
        assert SECRET.encode() not in data


class TestHostile:
    """Archives that try to write outside the target, or to exhaust resources."""

    @pytest.mark.parametrize("name", ["/etc/evil", "../evil", "a/../../evil", "..", "a/.."])
    async def test_names_outside_the_target(self, files: Files, root: Path, name: str) -> None:
        with pytest.raises(PathError, match="leads out") as caught:
            await upload(files, tar_of(member("ok", b"1"), member(name, b"x")))
        assert (caught.value.member, caught.value.files, caught.value.bytes) == (name, 1, 1)
        assert os.listdir(root) == ["to"]
        assert os.listdir(root / "to") == ["ok"]

    @pytest.mark.parametrize("target", ["/", "..", "../elsewhere", "."])
    async def test_member_below_a_symlink_of_the_archive(
        self, files: Files, root: Path, target: str
    ) -> None:
        (root / "elsewhere").mkdir()
        link = member("link", type=tarfile.SYMTYPE, linkname=target)
        with pytest.raises(AccessDenied, match="symlink in it"):
            await upload(files, tar_of(link, member("link/evil", b"x")))
        assert os.listdir(root / "elsewhere") == []
        assert not (root / "evil").exists()

    async def test_existing_symlink_is_replaced(self, files: Files, root: Path) -> None:
        (root / "to").mkdir()
        (root / "kept").write_text("kept")
        (root / "to/a").symlink_to("../kept")
        await upload(files, tar_of(member("a", b"fresh")))
        assert (root / "kept").read_text() == "kept"
        assert (root / "to/a").read_text() == "fresh"
        assert not (root / "to/a").is_symlink()

    @pytest.mark.parametrize("target", ["../outside", "/outside", "link", "nowhere", "", "folder"])
    async def test_hard_links_to_other_than_files_of_the_target(
        self, files: Files, root: Path, target: str
    ) -> None:
        (root / "outside").write_text("kept")
        (root / "to/folder").mkdir(parents=True)
        (root / "to/link").symlink_to("../outside")
        with pytest.raises(PathError):
            await upload(files, tar_of(member("hard", type=tarfile.LNKTYPE, linkname=target)))
        assert not (root / "to/hard").exists()
        assert (root / "outside").stat().st_nlink == 1

    @pytest.mark.parametrize(
        "kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Z", tarfile.CONTTYPE]
    )
    async def test_devices_and_unknown_types(self, files: Files, root: Path, kind: bytes) -> None:
        data = tar_of(member("odd", type=kind, devmajor=1, devminor=3))
        if kind == tarfile.CONTTYPE:
            assert (await upload(files, data)).files == 1
            return
        with pytest.raises(AccessDenied) as caught:
            await upload(files, data)
        assert caught.value.member == "odd"
        assert os.listdir(root / "to") == []

    async def test_setuid_bits_are_dropped(self, files: Files, root: Path) -> None:
        folder = member("d", type=tarfile.DIRTYPE, mode=0o7755)
        await upload(files, tar_of(member("suid", b"x", mode=0o6755), folder))
        assert stat.S_IMODE((root / "to/suid").stat().st_mode) == 0o755
        assert stat.S_IMODE((root / "to/d").stat().st_mode) == 0o1755

    async def test_conflict_of_file_and_directory(self, files: Files, root: Path) -> None:
        (root / "to/a").mkdir(parents=True)
        with pytest.raises(IsADirectoryError):
            await upload(files, tar_of(member("a", b"x")))
        with pytest.raises(NotADirectoryError):
            await upload(files, tar_of(member("f", b"x"), member("f/below", b"x")))

    @pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    async def test_header_of_a_gigabyte(self, files: Files, form: int) -> None:
        kind = tarfile.XHDTYPE if form == tarfile.PAX_FORMAT else tarfile.GNUTYPE_LONGNAME
        header = tarfile.TarInfo("x")
        header.type, header.size = kind, 1 << 30
        with pytest.raises(PathError, match="claims"):
            await upload(files, header.tobuf(tarfile.GNU_FORMAT) + bytes(100_000))

    async def test_negative_size(self, files: Files) -> None:
        block = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
        block[124:136] = b"\xff" * 12
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        with pytest.raises(PathError, match="claims -1"):
            await upload(files, bytes(block) + bytes(1024))

    async def test_too_many_headers(self, files: Files) -> None:
        header = tarfile.TarInfo("x")
        header.type = tarfile.XGLTYPE
        with pytest.raises(PathError, match="too many headers"):
            await upload(files, header.tobuf(tarfile.GNU_FORMAT) * 1000)

    async def test_sparse_members_are_refused(self, files: Files) -> None:
        pax = member("sparse", b"x", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
        for data in (tar_of(pax), tar_of(member("sparse", b"", type=tarfile.GNUTYPE_SPARSE))):
            with pytest.raises(PathError, match="'sparse' is sparse"):
                await upload(files, data)

    async def test_max_bytes(self, files: Files, root: Path) -> None:
        data = tar_of(member("a", b"x" * 500), member("b", b"x" * 600))
        with pytest.raises(LimitReached) as caught:
            await files.upload_tar("/to", stream_of(data), max_bytes=1_000)
        assert (caught.value.member, caught.value.bytes) == ("b", 500)
        assert os.listdir(root / "to") == ["a"]

    async def test_decompression_bomb_is_stopped(self, files: Files, root: Path) -> None:
        deflate = zlib.compressobj(9, wbits=31)
        head = tarfile.TarInfo("bomb")
        head.size = 1 << 40
        data = deflate.compress(head.tobuf(tarfile.GNU_FORMAT))
        for _ in range(20):
            data += deflate.compress(bytes(1 << 20))
        data += deflate.flush()
        with pytest.raises(LimitReached):
            await files.upload_tar("/to", stream_of(data), max_bytes=1 << 30)
        assert os.listdir(root / "to") == []


class TestDamaged:
    async def test_truncated_archives(self, files: Files, root: Path) -> None:
        data = tar_of(
            member("first", b"1"), member("second", b"2" * 5_000), member("b" * 200, b"3")
        )
        end = data.rindex(b"3") + 1
        for size in (0, 100, 512, 700, 1024, 1600, 5_000, 7_000, end - 300, end):
            with pytest.raises(PathError, match="unpacking into /to failed") as caught:
                await upload(files, data[:size])
            assert set(os.listdir(root / "to")) <= {"first", "second", "b" * 200}
            if size == 5_000:
                assert caught.value.member == "second"
                assert "1 files with 1 bytes were written" in caught.value.message

    @pytest.mark.parametrize(
        "data",
        [
            b"not a tar" * 100,
            b"\x1f\x8bnot gzip",
            b"x",
            gzip.compress(b"no tar" * 500, mtime=0),
        ],
    )
    async def test_data_that_is_no_archive(self, files: Files, data: bytes) -> None:
        with pytest.raises(PathError, match="the archive is broken"):
            await upload(files, data)

    async def test_truncated_gzip(self, files: Files) -> None:
        data = gzip.compress(tar_of(member("a", os.urandom(50_000))))
        with pytest.raises(PathError, match="compressed bytes end too early"):
            await upload(files, data[:-20_000])

    async def test_damaged_pax_records(self, files: Files) -> None:
        for record in (b"99 path=x\n", b"x", b"5 a\n\n", b"-1 a=b\n", b"12 size=foo\n"):
            header = tarfile.TarInfo("x")
            header.type, header.size = tarfile.XHDTYPE, len(record)
            data = header.tobuf(tarfile.GNU_FORMAT) + record.ljust(512, b"\0")
            with pytest.raises(PathError, match="extended header is damaged"):
                await upload(files, data + tar_of(member("a")))

    async def test_flipped_bits_are_errors_or_harmless(self, files: Files, root: Path) -> None:
        data = tar_of(member("a" * 120, b"1"), member("d/x", b"2"))
        for position in range(0, 3_000, 37):
            broken = bytearray(data)
            broken[position] ^= 0x41
            try:
                await upload(files, bytes(broken))
            except SmokeboxError as error:
                assert error.fields["files"] in (0, 1, 2)
        assert os.listdir(root) == ["to"]

    async def test_failing_source_leaves_no_partial_file(self, files: Files, root: Path) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield tar_of(member("a", b"x" * 5_000))[:3_000]
            raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await files.upload_tar("/to", broken())
        assert os.listdir(root / "to") == []


class TestOwners:
    async def test_sandbox_with_one_user_cannot_keep_owners(self, files: Files, root: Path) -> None:
        with pytest.raises(Unsupported):
            await files.upload_tar("/to", stream_of(tar_of(member("a"))), keep_owner=True)
        assert os.listdir(root) == []

    @as_root
    async def test_ids_are_mapped_to_the_sandbox(self, root: Path, workers: Workers) -> None:
        files = files_of(root, workers, Owner(uid=FIRST, gid=FIRST, count=65536))
        data = tar_of(member("a", b"x", uid=1000, gid=1001))
        await files.upload_tar("/plain", stream_of(data))
        await files.upload_tar("/kept", stream_of(data), keep_owner=True)
        assert (root / "plain/a").stat().st_uid == FIRST
        found = (root / "kept/a").stat()
        assert (found.st_uid, found.st_gid) == (FIRST + 1000, FIRST + 1001)
        with tarfile.open(fileobj=io.BytesIO(await download(files, "/kept"))) as tar:
            assert (tar.getmember("a").uid, tar.getmember("a").gid) == (1000, 1001)
        with pytest.raises(AccessDenied, match="no id 70000"):
            alien = tar_of(member("b", uid=70_000))
            await files.upload_tar("/kept", stream_of(alien), keep_owner=True)
