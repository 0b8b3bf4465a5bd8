"""Tar archives over HTTP: download, upload, interruption and containment in the target."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from server.boxes import (
    DEADLINE,
    Response,
    SandboxClient,
    count_open_files,
    create_sandbox_client,
    eventually,
)

if TYPE_CHECKING:
    from smokebox.server.server import RunningServer

MIB = 1 << 20


@pytest_asyncio.fixture
async def sandbox(server: RunningServer, http: aiohttp.ClientSession) -> SandboxClient:
    return await create_sandbox_client(server, http)


def tar_of(files: dict[str, bytes], mode: str = "w") -> bytes:
    """Return an archive with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def files_in(archive: bytes) -> dict[str, bytes]:
    """Return the files of an archive by name."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                found[member.name] = content.read()
    return found


async def _pack(sandbox: SandboxClient, path: str, **query: Any) -> Response:
    return await sandbox.request("GET", "archive", params={"path": path, **query})


async def _unpack(sandbox: SandboxClient, path: str, data: bytes, **query: Any) -> Response:
    return await sandbox.request("PUT", "archive", params={"path": path, **query}, data=data)


async def test_upload_that_would_pass_the_disk_limit_is_refused(
    http: aiohttp.ClientSession, sandbox: SandboxClient
) -> None:
    limits = {"limits": {"disk": 8 * MIB}}
    async with http.put(f"/api/sandboxes/{sandbox.id}", json=limits) as response:
        assert response.status == 200
    bomb = tar_of({f"f{number}": bytes(MIB) for number in range(30)}, "w:gz")
    assert len(bomb) < MIB
    refused = await _unpack(sandbox, "into", bomb)
    assert (refused.status, refused.json["error"]["code"]) == (429, "limit_reached")
    assert "limit of 8388608" in refused.json["error"]["message"]
    whole = await sandbox.request("PUT", "files", params={"path": "f"}, data=bytes(9 * MIB))
    assert (whole.status, whole.json["error"]["code"]) == (429, "limit_reached")
    missing = await sandbox.request("GET", "files", params={"path": "f"})
    assert missing.status == 404


@pytest.mark.parametrize("mode", ["w", "w:gz"])
async def test_uploaded_archive_downloads_unchanged(sandbox: SandboxClient, mode: str) -> None:
    files = {"a": b"1", "d/b": os.urandom(3 * MIB), "d/e/é": b"", "x" * 200: b"long"}
    response = await _unpack(sandbox, "into/here", tar_of(files, mode))
    expected = {"files": 4, "directories": 0, "links": 0, "bytes": 3 * MIB + 5}
    assert (response.status, response.json) == (200, expected)
    packed = await _pack(sandbox, "into/here", compress=str(mode == "w:gz").lower())
    media = "application/gzip" if mode == "w:gz" else "application/x-tar"
    assert (packed.status, packed.headers["content-type"]) == (200, media)
    assert "content-encoding" not in packed.headers
    assert files_in(packed.body) == files


async def test_excluded_files_are_not_packed(sandbox: SandboxClient) -> None:
    await _unpack(sandbox, "d", tar_of({"a.py": b"", "b.log": b"", "node_modules/c": b""}))
    query = {"exclude": ["*.log", "node_modules"]}
    assert sorted(files_in((await _pack(sandbox, "d", **query)).body)) == ["a.py"]


async def test_archive_of_a_single_file_has_its_base_name(sandbox: SandboxClient) -> None:
    await sandbox.write("d/f", b"x")
    assert files_in((await _pack(sandbox, "d/f")).body) == {"f": b"x"}


async def test_head_responds_without_packing(sandbox: SandboxClient) -> None:
    await sandbox.engine.exec("truncate -s 4G f")
    response = await sandbox.request("HEAD", "archive", params={"path": "."})
    assert (response.status, response.headers["content-type"]) == (200, "application/x-tar")
    assert (await sandbox.request("HEAD", "archive", params={"path": "gone"})).status == 404


async def test_file_truncated_during_download_closes_the_connection(sandbox: SandboxClient) -> None:
    await sandbox.engine.exec("truncate -s 64M f")
    async with sandbox.http.get(sandbox.url("archive"), params={"path": "."}) as response:
        await response.content.readexactly(MIB)
        await sandbox.engine.exec("truncate -s 1M f")
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await eventually(lambda: not sandbox.engine.files.busy)


async def test_disconnect_during_download_releases_files(sandbox: SandboxClient) -> None:
    await sandbox.engine.exec("head -c 64M /dev/urandom > f")
    before = count_open_files()
    for compress in ("true", "false"):
        head = f"GET archive?path=.&compress={compress}"
        async with sandbox.connection(head) as (reader, _):
            await asyncio.wait_for(reader.readexactly(1000), DEADLINE)
            assert sandbox.engine.files.busy
        await sandbox.wait_idle(before)


async def test_disconnect_before_the_first_byte_releases_files(sandbox: SandboxClient) -> None:
    # Every file is excluded, so nothing is sent until the end.
    await sandbox.engine.exec("mkdir d; cd d; for i in $(seq 20000); do : > $i.log; done")
    before = count_open_files()
    async with sandbox.connection("GET archive?path=d&exclude=*.log") as (_, _writer):
        await eventually(lambda: sandbox.engine.files.busy)
    await sandbox.wait_idle(before)


async def test_interrupted_upload_leaves_only_complete_files(sandbox: SandboxClient) -> None:
    before = count_open_files()
    archive = tar_of({"d/a": b"whole", "d/b": bytes(8 * MIB)})
    head = f"PUT archive?path=here\ncontent-length:{len(archive)}"
    async with sandbox.connection(head) as (_, writer):
        writer.write(archive[: 4 * MIB])
        await asyncio.wait_for(writer.drain(), DEADLINE)
        await eventually(lambda: sandbox.engine.files.busy)
    await sandbox.wait_idle(before)
    assert await sandbox.names("here/d") == ["a"]


BROKEN = tar_of({"a": b"whole", "b": bytes(2000)})


@pytest.mark.parametrize(
    ("path", "data", "status", "code"),
    [
        ("d", b"not an archive" * 100, 400, "path_error"),
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
async def test_invalid_archives_and_targets_are_refused(
    sandbox: SandboxClient, path: str, data: bytes, status: int, code: str
) -> None:
    await sandbox.write("f", b"")
    response = await _unpack(sandbox, path, data)
    assert (response.status, response.code) == (status, code)
    assert set(await sandbox.names(".")) <= {"d", "f"}


async def test_error_reports_what_was_unpacked_before_it(sandbox: SandboxClient) -> None:
    error = (await _unpack(sandbox, "d", BROKEN[:2000])).json["error"]
    assert error["fields"] == {"member": "b", "files": 1, "bytes": 5}
    assert "cut short" in error["message"]
    assert await sandbox.names("d") == ["a"]


async def test_paths_that_cannot_be_packed_are_refused(sandbox: SandboxClient) -> None:
    for path, status in (("gone", 404), ("/proc", 403), ("/dev/null", 400), ("a\0b", 400)):
        assert (await _pack(sandbox, path)).status == status
