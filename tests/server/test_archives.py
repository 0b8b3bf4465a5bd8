"""Tar archives over HTTP: streamed both ways, noticed when they break, held to their target."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from server.boxes import DEADLINE, Answer, Box, eventually, make_box, open_files

if TYPE_CHECKING:
    from smokebox.server.server import RunningServer

MIB = 1 << 20


@pytest_asyncio.fixture
async def box(server: RunningServer, http: aiohttp.ClientSession) -> Box:
    return await make_box(server, http)


def tar_of(files: dict[str, bytes], mode: str = "w") -> bytes:
    """An archive with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def files_in(archive: bytes) -> dict[str, bytes]:
    """The files of an archive."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                found[member.name] = content.read()
    return found


async def _pack(box: Box, path: str, **query: Any) -> Answer:
    return await box.ask("GET", "archive", params={"path": path, **query})


async def _unpack(box: Box, path: str, data: bytes, **query: Any) -> Answer:
    return await box.ask("PUT", "archive", params={"path": path, **query}, data=data)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
async def test_an_archive_comes_back_as_it_was_unpacked(box: Box, mode: str) -> None:
    files = {"a": b"1", "d/b": os.urandom(3 * MIB), "d/e/é": b"", "x" * 200: b"long"}
    answer = await _unpack(box, "into/here", tar_of(files, mode))
    told = {"files": 4, "directories": 0, "links": 0, "bytes": 3 * MIB + 5}
    assert (answer.status, answer.json) == (200, told)
    packed = await _pack(box, "into/here", compress=str(mode == "w:gz").lower())
    kind = "application/gzip" if mode == "w:gz" else "application/x-tar"
    assert (packed.status, packed.headers["content-type"]) == (200, kind)
    assert "content-encoding" not in packed.headers
    assert files_in(packed.body) == files


async def test_what_is_excluded_is_not_packed(box: Box) -> None:
    await _unpack(box, "d", tar_of({"a.py": b"", "b.log": b"", "node_modules/c": b""}))
    query = {"exclude": ["*.log", "node_modules"]}
    assert sorted(files_in((await _pack(box, "d", **query)).body)) == ["a.py"]


async def test_one_file_is_packed_by_its_name(box: Box) -> None:
    await box.write("d/f", b"x")
    assert files_in((await _pack(box, "d/f")).body) == {"f": b"x"}


async def test_head_packs_nothing(box: Box) -> None:
    await box.engine.exec("truncate -s 4G f")
    answer = await box.ask("HEAD", "archive", params={"path": "."})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-tar")
    assert (await box.ask("HEAD", "archive", params={"path": "gone"})).status == 404


async def test_an_archive_that_cannot_be_finished_breaks_off(box: Box) -> None:
    await box.engine.exec("truncate -s 64M f")
    async with box.http.get(box.url("archive"), params={"path": "."}) as answer:
        await answer.content.readexactly(MIB)
        await box.engine.exec("truncate -s 1M f")
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await eventually(lambda: not box.engine.files.busy)


async def test_a_client_that_leaves_a_download_frees_it(box: Box) -> None:
    await box.engine.exec("head -c 64M /dev/urandom > f")
    before = open_files()
    for compress in ("true", "false"):
        head = f"GET archive?path=.&compress={compress}"
        async with box.connection(head) as (reader, _):
            await asyncio.wait_for(reader.readexactly(1000), DEADLINE)
            assert box.engine.files.busy
        await box.settled(before)


async def test_a_client_that_leaves_before_the_first_byte_frees_it(box: Box) -> None:
    # All that is packed is left out, so nothing is sent until the end.
    await box.engine.exec("mkdir d; cd d; for i in $(seq 20000); do : > $i.log; done")
    before = open_files()
    async with box.connection("GET archive?path=d&exclude=*.log") as (_, _writer):
        await eventually(lambda: box.engine.files.busy)
    await box.settled(before)


async def test_an_upload_that_breaks_off_leaves_whole_files_only(box: Box) -> None:
    before = open_files()
    archive = tar_of({"d/a": b"whole", "d/b": bytes(8 * MIB)})
    head = f"PUT archive?path=here\ncontent-length:{len(archive)}"
    async with box.connection(head) as (_, writer):
        writer.write(archive[: 4 * MIB])
        await asyncio.wait_for(writer.drain(), DEADLINE)
        await eventually(lambda: box.engine.files.busy)
    await box.settled(before)
    assert await box.names("here/d") == ["a"]


BROKEN = tar_of({"a": b"whole", "b": bytes(2000)})


@pytest.mark.parametrize(
    ("path", "data", "status", "code"),
    [
        ("d", b"this is no archive" * 100, 400, "path_error"),
        ("d", b"", 400, "path_error"),
        ("d", BROKEN[:2000], 400, "path_error"),
        ("d", b"\x1f\x8b" + b"junk" * 100, 400, "path_error"),
        ("d", tar_of({"../out": b""}), 400, "path_error"),
        ("d", tar_of({"/out": b""}), 400, "path_error"),
        ("f", BROKEN, 400, "path_not_directory"),
        ("/proc/self", BROKEN, 403, "access_denied"),
        ("", BROKEN, 400, "invalid_path"),
    ],
)
async def test_what_cannot_be_unpacked_is_refused(
    box: Box, path: str, data: bytes, status: int, code: str
) -> None:
    await box.write("f", b"")
    answer = await _unpack(box, path, data)
    assert (answer.status, answer.code) == (status, code)
    assert set(await box.names(".")) <= {"d", "f"}


async def test_a_failure_says_how_far_it_came(box: Box) -> None:
    error = (await _unpack(box, "d", BROKEN[:2000])).json["error"]
    assert error["fields"] == {"member": "b", "files": 1, "bytes": 5}
    assert "cut short" in error["message"]
    assert await box.names("d") == ["a"]


async def test_what_cannot_be_packed_is_refused(box: Box) -> None:
    for path, status in (("gone", 404), ("/proc", 403), ("/dev/null", 400), ("a\0b", 400)):
        assert (await _pack(box, path)).status == status
