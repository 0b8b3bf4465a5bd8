"""Files over HTTP: content, ranges, metadata, changes, and interrupted transfers."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from server.boxes import (
    DEADLINE,
    SandboxClient,
    count_open_files,
    create_sandbox_client,
    eventually,
)
from smokebox.engine.files.files import Files
from smokebox.server import responses
from smokebox.server.downloads import ByteRange, parse_range
from smokebox.server.responses import SMALL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.server.server import RunningServer
    from smokebox.types import FileInfo

MIB = 1 << 20
NAMES = ("#?%+&=;", " a b ", "%2e%2e%2f", "a\nb\tc", "é", "e\u0301", "日本語/🦊", "\ufffd")
RANGES: list[tuple[str, int, int, int | None]] = [
    ("bytes=0-0", 206, 0, 1),
    ("bytes=2-5", 206, 2, 6),
    ("bytes=7-", 206, 7, None),
    ("bytes=-3", 206, -3, None),
    ("bytes=-99999999", 206, 0, None),
    ("bytes=5-999999999999", 206, 5, None),
    ("Bytes= 1-2", 206, 1, 3),
    ("bytes=5-2", 200, 0, None),
    ("bytes=-", 200, 0, None),
    ("bytes=0-1,4-5", 200, 0, None),
    ("lines=0-1", 200, 0, None),
    ("bytes=" + "9" * 5000 + "-", 200, 0, None),
]


@pytest_asyncio.fixture
async def sandbox(server: RunningServer, http: aiohttp.ClientSession) -> SandboxClient:
    return await create_sandbox_client(server, http)


async def test_files_of_any_size_are_read_back_unchanged(sandbox: SandboxClient) -> None:
    for size in (0, 1, 1000, SMALL - 1, SMALL, SMALL + 1, 3 * MIB + 7):
        data = os.urandom(size)
        written = await sandbox.write("sub/dir/f", data)
        assert (written.status, written.json) == (200, {"bytes": size})
        read = await sandbox.read("/workspace/sub/dir/f")
        assert (read.status, read.headers["content-type"]) == (200, "application/octet-stream")
        assert read.headers["content-length"] == str(size)
        assert read.body == data


async def test_chunked_body_is_written(sandbox: SandboxClient) -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield bytes([number]) * 100_000

    for count in (0, 3, 40):
        written = await sandbox.write("f", pieces(count))
        assert written.json == {"bytes": count * 100_000}
        assert (await sandbox.read("f")).body == b"".join([piece async for piece in pieces(count)])


async def test_content_type_of_an_upload_is_ignored(sandbox: SandboxClient) -> None:
    for media in ("text/html", "multipart/form-data; boundary=x", "application/json", ""):
        headers = {"content-type": media}
        query = {"path": media or "none"}
        response = await sandbox.request("PUT", "files", params=query, data=b"<p>", headers=headers)
        assert response.status == 200
        assert (await sandbox.read(query["path"])).body == b"<p>"


async def test_append_extends_the_file(sandbox: SandboxClient) -> None:
    for data in (b"one ", b"", b"two", b"x" * (3 * MIB)):
        assert (await sandbox.write("log/f", data, append="true")).json == {"bytes": len(data)}
    assert (await sandbox.read("log/f")).body == b"one two" + b"x" * (3 * MIB)


async def test_special_characters_in_names_are_preserved(sandbox: SandboxClient) -> None:
    for name in NAMES:
        path = f"/workspace/n/{name}"
        assert (await sandbox.write(path, name.encode())).status == 200
        assert (await sandbox.read(path)).body == name.encode()
        stat = await sandbox.request("GET", "files/stat", params={"path": path})
        assert stat.json["path"] == path
        listed = await sandbox.request(
            "GET", "files/list", params={"path": "n", "recursive": "true"}
        )
        assert path in [found["path"] for found in listed.json["files"]]
        assert (await sandbox.request("DELETE", "files", params={"path": path})).status == 204


async def test_name_that_is_not_utf8_is_refused(sandbox: SandboxClient) -> None:
    for method, route in (("PUT", "files"), ("GET", "files"), ("GET", "files/stat")):
        response = await _raw(sandbox, f"{method} {route}?path=a%FFb\ncontent-length:0")
        assert response.startswith(b"HTTP/1.1 400"), response
        assert b'"invalid_option"' in response
    assert await sandbox.names(".") == []


async def test_head_has_the_headers_of_get(sandbox: SandboxClient) -> None:
    for size in (5, 2 * MIB):
        await sandbox.write("f", bytes(size))
        response = await sandbox.request("HEAD", "files", params={"path": "f"})
        assert (response.status, response.body) == (200, b"")
        assert response.headers["content-length"] == str(size)
        assert response.headers["accept-ranges"] == "bytes"
    assert (await sandbox.request("HEAD", "files", params={"path": "gone"})).status == 404
    assert (await sandbox.request("HEAD", "files", params={"path": "/tmp"})).status == 400


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_range_header_selects_a_part_of_the_file(sandbox: SandboxClient, size: int) -> None:
    data = os.urandom(size)
    await sandbox.write("f", data)
    for header, status, start, stop in RANGES:
        response = await sandbox.read("f", range=header)
        assert (response.status, response.body) == (status, data[start:stop]), header
        assert response.headers["content-length"] == str(len(response.body))
        if status == 206:
            first = start % size
            content_range = f"bytes {first}-{first + len(response.body) - 1}/{size}"
            assert response.headers["content-range"] == content_range


async def test_range_beyond_the_end_is_416(sandbox: SandboxClient) -> None:
    await sandbox.write("f", b"0123456789")
    for header in ("bytes=10-", "bytes=10-20", "bytes=-0"):
        response = await sandbox.read("f", range=header)
        assert (response.status, response.code) == (416, "invalid_option")
        assert response.headers["content-range"] == "bytes */10"


def test_parse_range_follows_the_rfc() -> None:
    assert parse_range("bytes=0-4", 10) == ByteRange(0, 5)
    assert parse_range("bytes=-4", 10) == ByteRange(6, 4)
    assert parse_range("bytes=4-", 0) == ByteRange(4, 0)
    assert parse_range("bytes=4 - 5", 10) is None


async def test_if_range_of_a_replaced_file_returns_the_whole_file(sandbox: SandboxClient) -> None:
    await sandbox.write("f", b"0123456789")
    tag = (await sandbox.read("f", range="bytes=0-4")).headers["etag"]
    assert (await sandbox.read("f", **{"range": "bytes=5-", "if-range": tag})).body == b"56789"
    await sandbox.write("f", b"another file")
    again = await sandbox.read("f", **{"range": "bytes=5-", "if-range": tag})
    assert (again.status, again.body) == (200, b"another file")


async def test_bytes_appended_during_a_download_are_not_sent(sandbox: SandboxClient) -> None:
    await sandbox.engine.exec("truncate -s 64M f")
    async with sandbox.http.get(sandbox.url("files"), params={"path": "f"}) as response:
        assert response.headers["content-length"] == str(64 * MIB)
        await response.content.readexactly(MIB)
        await sandbox.engine.exec("echo more >> f")
        assert len(await response.read()) == 63 * MIB


async def test_file_truncated_during_a_download_closes_the_connection(
    sandbox: SandboxClient,
) -> None:
    await sandbox.engine.exec("truncate -s 64M f")
    async with sandbox.http.get(sandbox.url("files"), params={"path": "f"}) as response:
        await response.content.readexactly(MIB)
        await sandbox.engine.exec("truncate -s 1M f")
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert not sandbox.engine.files.busy


async def test_file_that_keeps_changing_is_sent_without_a_length(
    sandbox: SandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(2 * MIB)
    await sandbox.write("f", data)
    stat = Files.stat

    async def changing(self: Files, path: str, **options: Any) -> FileInfo:
        return dataclasses.replace(await stat(self, path, **options), mtime=time.time())

    monkeypatch.setattr(Files, "stat", changing)
    whole = await sandbox.read("f")
    assert (whole.body, whole.headers.get("content-length")) == (data, None)
    part = await sandbox.read("f", range="bytes=5-9")
    assert (part.status, part.body) == (206, data[5:10])
    assert part.headers["content-range"] == "bytes 5-9/*"
    await eventually(lambda: not sandbox.engine.files.busy)


@pytest.mark.parametrize("head", ["content-length:90000000", "transfer-encoding:chunked"])
@pytest.mark.parametrize("sent", [10, 5 * MIB])
async def test_interrupted_upload_leaves_the_file_unchanged(
    sandbox: SandboxClient, head: str, sent: int
) -> None:
    await sandbox.write("d/f", b"before")
    before = count_open_files()
    async with sandbox.connection(f"PUT files?path=d/f\n{head}") as (_, writer):
        if head.startswith("transfer"):
            writer.write(b"%x\r\n" % 90_000_000)
        writer.write(bytes(sent))
        await asyncio.wait_for(writer.drain(), DEADLINE)
        if sent > SMALL:
            await eventually(lambda: sandbox.engine.files.busy)
    await sandbox.wait_idle(before)
    assert (await sandbox.read("d/f")).body == b"before"
    assert await sandbox.names("d") == ["f"]


async def test_interrupted_upload_removes_directories_it_created(sandbox: SandboxClient) -> None:
    before = count_open_files()
    head = "PUT files?path=new/dir/f\ncontent-length:90000000"
    async with sandbox.connection(head) as (_, writer):
        writer.write(bytes(5 * MIB))
        await eventually(lambda: sandbox.engine.files.busy)
    await sandbox.wait_idle(before)
    assert await sandbox.names(".") == []


async def test_disconnect_during_download_closes_the_file(sandbox: SandboxClient) -> None:
    await sandbox.engine.exec("truncate -s 4G f")
    before = count_open_files()
    for query in ("path=f", "path=f\nrange:bytes=5-"):
        async with sandbox.connection(f"GET files?{query}") as (reader, _):
            await asyncio.wait_for(reader.readexactly(100_000), DEADLINE)
            assert sandbox.engine.files.busy
        await sandbox.wait_idle(before)


@pytest.mark.parametrize("direction", ["upload", "download"])
async def test_stalled_transfer_is_aborted(
    sandbox: SandboxClient, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    await sandbox.engine.exec("truncate -s 1G big")
    monkeypatch.setattr(responses, "STALL_SECONDS", 0.2)
    head = "GET files?path=big"
    if direction == "upload":
        head = "PUT files?path=f\ncontent-length:90000000"
    async with sandbox.connection(head) as (reader, _):
        await eventually(lambda: sandbox.engine.files.busy)
        await eventually(lambda: not sandbox.engine.files.busy)
        if direction == "upload":
            assert (await reader.readline()).startswith(b"HTTP/1.1 504")
    assert await sandbox.names(".") == ["big"]


async def test_upload_is_refused_before_its_body_is_sent(sandbox: SandboxClient) -> None:
    head = "PUT files?path=/tmp\ncontent-length:90000000\nexpect:100-continue"
    async with sandbox.connection(head) as (reader, _):
        assert (await asyncio.wait_for(reader.readline(), DEADLINE)).startswith(b"HTTP/1.1 400")


async def test_foreign_origin_cannot_write_files(sandbox: SandboxClient, server_url: str) -> None:
    async with aiohttp.ClientSession() as session:
        url = server_url + sandbox.url("files")
        headers = {"origin": "https://evil.example", "content-type": "text/plain"}
        async with session.put(url, params={"path": "f"}, data=b"x", headers=headers) as response:
            assert response.status == 403
    assert await sandbox.names(".") == []


async def test_metadata_and_listings(sandbox: SandboxClient) -> None:
    await sandbox.write("d/a.txt", b"12345")
    await sandbox.write("d/.hidden", b"")
    await sandbox.engine.exec("ln -s a.txt d/link; ln -s nowhere d/dangling")

    async def get(route: str, **query: str) -> Any:
        return (await sandbox.request("GET", f"files/{route}", params=query)).json

    stat = await get("stat", path="d/link")
    assert (stat["type"], stat["size"], stat["is_symlink"]) == ("file", 5, True)
    assert (await get("stat", path="d/link", follow_symlinks="false"))["type"] == "symlink"
    assert await get("names", path="d") == {"names": [".hidden", "a.txt", "dangling", "link"]}
    listed = [found["path"] for found in (await get("list", path="d"))["files"]]
    assert listed == [f"/workspace/d/{name}" for name in ("a.txt", "dangling", "link")]
    assert len((await get("list", path="/workspace", recursive="1", hidden="1"))["files"]) == 5
    assert await get("exists", path="d") == {"exists": True}
    assert await get("exists", path="d/dangling") == {"exists": False}
    assert await get("glob", pattern="**/*.txt") == {"paths": ["/workspace/d/a.txt"]}
    assert await get("glob", pattern="*", cwd="d", files_only="true", hidden="true") == {
        "paths": [f"/workspace/d/{name}" for name in (".hidden", "a.txt", "link")]
    }
    assert await get("readlink", path="d/link") == {"path": "a.txt"}
    used = await get("usage", path="d")
    assert (used["files"], used["directories"]) == (4, 1)


async def test_file_operations(sandbox: SandboxClient) -> None:
    async def post(route: str, **body: Any) -> Any:
        response = await sandbox.request("POST", f"files/{route}", json=body)
        assert response.status == (204 if response.json is None else 200), response
        return response.json

    await post("mkdir", path="a/b", recursive=True)
    await sandbox.write("a/f", b"x")
    await post("rename", source="a/f", target="a/g")
    assert await post("move", source="a/g", target="a/b") == {"path": "/workspace/a/b/g"}
    await post("copy", source="a", target="c", recursive=True)
    await post("symlink", target="b/g", path="c/link")
    assert (await sandbox.read("c/link")).body == b"x"
    await post("chmod", path="c/b/g", mode=0o600)
    await post("chown", path="c/b/g", uid=0)
    await post("touch", path="c/b/g", mtime=12345.5)
    stat = await sandbox.engine.files.stat("c/b/g")
    assert (stat.mode, stat.mtime) == (0o600, 12345.5)
    await post("touch", path="c/new")
    assert (
        await sandbox.request("DELETE", "files", params={"path": "c", "recursive": "true"})
    ).status == 204
    gone = {"path": "c", "force": "true"}
    assert (await sandbox.request("DELETE", "files", params=gone)).status == 204
    assert await sandbox.names(".") == ["a"]


def _at(path: str, **options: Any) -> dict[str, Any]:
    return {"params": {"path": path}, **options}


def _body(media: str, data: bytes) -> dict[str, Any]:
    return {"data": data, "headers": {"content-type": media}}


def _json(**body: Any) -> dict[str, Any]:
    return {"json": body}


RANGE = {"range": "bytes=0-"}
JSON = "application/json"
OPTION = "invalid_option"
INVALID: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("GET", "files", {}, 400, OPTION),
    ("GET", "files", _at(""), 400, "invalid_path"),
    ("GET", "files", _at("a\0b"), 400, "invalid_path"),
    ("GET", "files", _at("gone"), 404, "path_not_found"),
    ("GET", "files", _at("f/below"), 400, "path_not_directory"),
    ("GET", "files", _at("/tmp"), 400, "path_is_directory"),
    ("GET", "files", _at("/dev/null"), 400, "path_error"),
    ("GET", "files", _at("/proc/version"), 403, "access_denied"),
    ("GET", "files", _at("loop"), 400, "symlink_loop"),
    ("GET", "files", _at("x" * 300), 400, "path_error"),
    ("GET", "files", _at("x/" * 4000), 400, "path_error"),
    ("GET", "files", {"params": {"path": "f", "pth": "g"}}, 400, OPTION),
    ("GET", "files", {"params": [("path", "f"), ("path", "g")]}, 400, OPTION),
    ("GET", "files", _at("gone", headers=RANGE), 404, "path_not_found"),
    ("GET", "files", _at("/tmp", headers=RANGE), 400, "path_is_directory"),
    ("PUT", "files", {"data": b"x"}, 400, OPTION),
    ("PUT", "files", _at("/tmp", data=b"x"), 400, "path_is_directory"),
    ("PUT", "files", _at("/", data=b"x"), 400, "path_is_directory"),
    ("PUT", "files", _at("f/below", data=b"x"), 400, "path_not_directory"),
    ("PUT", "files", _at("/proc/version", data=b"x"), 403, "access_denied"),
    ("PUT", "files", {"params": {"path": "f", "append": "perhaps"}}, 400, OPTION),
    ("DELETE", "files", _at("gone"), 404, "path_not_found"),
    ("DELETE", "files", _at("d"), 400, "path_is_directory"),
    ("DELETE", "files", {"params": {"path": "/", "recursive": "true"}}, 403, "access_denied"),
    ("GET", "files/stat", _at("gone"), 404, "path_not_found"),
    ("GET", "files/names", _at("f"), 400, "path_not_directory"),
    ("GET", "files/list", _at("gone"), 404, "path_not_found"),
    ("GET", "files/glob", {"params": {"pattern": ""}}, 400, "invalid_path"),
    ("GET", "files/readlink", _at("f"), 400, "path_error"),
    ("GET", "files/usage", _at("gone"), 404, "path_not_found"),
    ("POST", "files/mkdir", _json(path="d"), 409, "path_exists"),
    ("POST", "files/mkdir", _json(path="p/q"), 404, "path_not_found"),
    ("POST", "files/mkdir", _json(path=5), 400, OPTION),
    ("POST", "files/mkdir", _json(path="q", mode=5), 400, OPTION),
    ("POST", "files/mkdir", _body("text/plain", b'{"path": "q"}'), 400, OPTION),
    ("POST", "files/mkdir", _body(JSON, b'{"path": "\\ud800"}'), 400, OPTION),
    ("POST", "files/mkdir", _body(JSON, b'{"path": '), 400, OPTION),
    ("POST", "files/mkdir", _body(JSON, b" " * (17 * MIB)), 413, "request_too_large"),
    ("POST", "files/rename", _json(source="gone", target="x"), 404, "path_not_found"),
    ("POST", "files/rename", _json(source="d", target="full"), 409, "directory_not_empty"),
    ("POST", "files/rename", _json(source="d", target="x", recursive=True), 400, OPTION),
    ("POST", "files/move", _json(source="full", target="full/inner"), 400, "path_error"),
    ("POST", "files/copy", _json(source="d", target="x"), 400, "path_is_directory"),
    ("POST", "files/symlink", _json(target="x", path="f"), 409, "path_exists"),
    ("POST", "files/symlink", _json(target="", path="x"), 400, "invalid_path"),
    ("POST", "files/chmod", _json(path="f", mode=0o10000), 400, OPTION),
    ("POST", "files/chown", _json(path="f", uid=1 << 40), 501, "unsupported"),
    ("POST", "files/chown", _json(path="f", uid=-1), 400, OPTION),
    ("POST", "files/touch", _json(path="f", mtime=1e300), 400, OPTION),
]


async def test_invalid_requests_get_specific_errors(sandbox: SandboxClient) -> None:
    await sandbox.engine.exec("echo hi > f; mkdir -p d full/inner; ln -s loop loop")
    mismatches = []
    for method, path, options, status, code in INVALID:
        response = await sandbox.request(method, path, **options)
        if (response.status, response.code) != (status, code):
            mismatches.append(
                (method, path, str(options)[:80], response.status, response.body[:200])
            )
    assert mismatches == []
    assert await sandbox.names(".") == ["d", "f", "full", "loop"]


async def test_file_requests_do_not_create_a_missing_sandbox(http: aiohttp.ClientSession) -> None:
    for method, path in (
        ("GET", "files?path=f"),
        ("HEAD", "files?path=f"),
        ("PUT", "files?path=f"),
        ("DELETE", "files?path=f"),
        ("GET", "files/stat?path=f"),
        ("GET", "archive?path=f"),
        ("PUT", "archive?path=f"),
        ("GET", "watch?path=f"),
    ):
        async with http.request(method, f"/api/sandboxes/ghost/{path}") as response:
            assert response.status == 404, (method, path)
    async with http.get("/api/sandboxes") as response:
        assert await response.json() == {"sandboxes": []}


async def test_concurrent_reads_and_writes(sandbox: SandboxClient) -> None:
    async def write_and_read(number: int) -> bool:
        data = hashlib.sha256(str(number).encode()).digest() * (1000 * number)
        await sandbox.write(f"f{number}", data)
        return (await sandbox.read(f"f{number}")).body == data

    assert all(await asyncio.gather(*map(write_and_read, range(60))))


async def _raw(sandbox: SandboxClient, head: str) -> bytes:
    async with sandbox.connection(f"{head}\nconnection:close") as (reader, _):
        return await asyncio.wait_for(reader.read(), DEADLINE)
