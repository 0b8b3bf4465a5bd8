"""Files over HTTP: bytes there and back, ranges, what is known of them, changes to them."""

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

from server.boxes import DEADLINE, Box, eventually, make_box, open_files
from smokebox.engine.files.files import Files
from smokebox.server import responses
from smokebox.server.downloads import ByteRange, span_of
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
async def box(server: RunningServer, http: aiohttp.ClientSession) -> Box:
    return await make_box(server, http)


async def test_bytes_come_back_as_they_were_written(box: Box) -> None:
    for size in (0, 1, 1000, SMALL - 1, SMALL, SMALL + 1, 3 * MIB + 7):
        data = os.urandom(size)
        written = await box.write("sub/dir/f", data)
        assert (written.status, written.json) == (200, {"bytes": size})
        read = await box.read("/workspace/sub/dir/f")
        assert (read.status, read.headers["content-type"]) == (200, "application/octet-stream")
        assert read.headers["content-length"] == str(size)
        assert read.body == data


async def test_a_body_of_unknown_length_is_written(box: Box) -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield bytes([number]) * 100_000

    for count in (0, 3, 40):
        written = await box.write("f", pieces(count))
        assert written.json == {"bytes": count * 100_000}
        assert (await box.read("f")).body == b"".join([piece async for piece in pieces(count)])


async def test_a_body_of_any_content_type_is_bytes(box: Box) -> None:
    for kind in ("text/html", "multipart/form-data; boundary=x", "application/json", ""):
        headers = {"content-type": kind}
        query = {"path": kind or "none"}
        answer = await box.ask("PUT", "files", params=query, data=b"<p>", headers=headers)
        assert answer.status == 200
        assert (await box.read(query["path"])).body == b"<p>"


async def test_append_adds_to_what_is_there(box: Box) -> None:
    for data in (b"one ", b"", b"two", b"x" * (3 * MIB)):
        assert (await box.write("log/f", data, append="true")).json == {"bytes": len(data)}
    assert (await box.read("log/f")).body == b"one two" + b"x" * (3 * MIB)


async def test_names_arrive_as_they_were_meant(box: Box) -> None:
    for name in NAMES:
        path = f"/workspace/n/{name}"
        assert (await box.write(path, name.encode())).status == 200
        assert (await box.read(path)).body == name.encode()
        stat = await box.ask("GET", "files/stat", params={"path": path})
        assert stat.json["path"] == path
        listed = await box.ask("GET", "files/list", params={"path": "n", "recursive": "true"})
        assert path in [found["path"] for found in listed.json["files"]]
        assert (await box.ask("DELETE", "files", params={"path": path})).status == 204


async def test_a_name_that_is_not_utf8_is_refused_and_not_changed(box: Box) -> None:
    for method, route in (("PUT", "files"), ("GET", "files"), ("GET", "files/stat")):
        answer = await _raw(box, f"{method} {route}?path=a%FFb\ncontent-length:0")
        assert answer.startswith(b"HTTP/1.1 400"), answer
        assert b'"invalid_option"' in answer
    assert await box.names(".") == []


async def test_head_says_what_get_would(box: Box) -> None:
    for size in (5, 2 * MIB):
        await box.write("f", bytes(size))
        answer = await box.ask("HEAD", "files", params={"path": "f"})
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["content-length"] == str(size)
        assert answer.headers["accept-ranges"] == "bytes"
    assert (await box.ask("HEAD", "files", params={"path": "gone"})).status == 404
    assert (await box.ask("HEAD", "files", params={"path": "/tmp"})).status == 400


@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_a_range_is_a_part_of_the_file(box: Box, size: int) -> None:
    data = os.urandom(size)
    await box.write("f", data)
    for header, status, start, stop in RANGES:
        answer = await box.read("f", range=header)
        assert (answer.status, answer.body) == (status, data[start:stop]), header
        assert answer.headers["content-length"] == str(len(answer.body))
        if status == 206:
            first = start % size
            told = f"bytes {first}-{first + len(answer.body) - 1}/{size}"
            assert answer.headers["content-range"] == told


async def test_a_range_beyond_the_end_is_416(box: Box) -> None:
    await box.write("f", b"0123456789")
    for header in ("bytes=10-", "bytes=10-20", "bytes=-0"):
        answer = await box.read("f", range=header)
        assert (answer.status, answer.code) == (416, "invalid_option")
        assert answer.headers["content-range"] == "bytes */10"


def test_a_range_is_read_as_the_rfc_has_it() -> None:
    assert span_of("bytes=0-4", 10) == ByteRange(0, 5)
    assert span_of("bytes=-4", 10) == ByteRange(6, 4)
    assert span_of("bytes=4-", 0) == ByteRange(4, 0)
    assert span_of("bytes=4 - 5", 10) is None


async def test_a_range_goes_on_only_in_the_file_that_it_began_in(box: Box) -> None:
    await box.write("f", b"0123456789")
    tag = (await box.read("f", range="bytes=0-4")).headers["etag"]
    assert (await box.read("f", **{"range": "bytes=5-", "if-range": tag})).body == b"56789"
    await box.write("f", b"another file")
    again = await box.read("f", **{"range": "bytes=5-", "if-range": tag})
    assert (again.status, again.body) == (200, b"another file")


async def test_what_is_appended_while_a_file_is_read_is_not_sent(box: Box) -> None:
    await box.engine.exec("truncate -s 64M f")
    async with box.http.get(box.url("files"), params={"path": "f"}) as answer:
        assert answer.headers["content-length"] == str(64 * MIB)
        await answer.content.readexactly(MIB)
        await box.engine.exec("echo more >> f")
        assert len(await answer.read()) == 63 * MIB


async def test_a_file_that_is_cut_short_while_it_is_read_breaks_off(box: Box) -> None:
    await box.engine.exec("truncate -s 64M f")
    async with box.http.get(box.url("files"), params={"path": "f"}) as answer:
        await answer.content.readexactly(MIB)
        await box.engine.exec("truncate -s 1M f")
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert not box.engine.files.busy


async def test_a_file_that_never_looks_the_same_is_sent_to_its_end(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(2 * MIB)
    await box.write("f", data)
    plain = Files.stat

    async def changing(self: Files, path: str, **options: Any) -> FileInfo:
        return dataclasses.replace(await plain(self, path, **options), mtime=time.time())

    monkeypatch.setattr(Files, "stat", changing)
    whole = await box.read("f")
    assert (whole.body, whole.headers.get("content-length")) == (data, None)
    part = await box.read("f", range="bytes=5-9")
    assert (part.status, part.body) == (206, data[5:10])
    assert part.headers["content-range"] == "bytes 5-9/*"
    await eventually(lambda: not box.engine.files.busy)


@pytest.mark.parametrize("head", ["content-length:90000000", "transfer-encoding:chunked"])
@pytest.mark.parametrize("sent", [10, 5 * MIB])
async def test_an_upload_that_breaks_off_leaves_the_file_as_it_was(
    box: Box, head: str, sent: int
) -> None:
    await box.write("d/f", b"before")
    before = open_files()
    async with box.connection(f"PUT files?path=d/f\n{head}") as (_, writer):
        if head.startswith("transfer"):
            writer.write(b"%x\r\n" % 90_000_000)
        writer.write(bytes(sent))
        await asyncio.wait_for(writer.drain(), DEADLINE)
        if sent > SMALL:
            await eventually(lambda: box.engine.files.busy)
    await box.settled(before)
    assert (await box.read("d/f")).body == b"before"
    assert await box.names("d") == ["f"]


async def test_an_upload_that_breaks_off_takes_its_directories_with_it(box: Box) -> None:
    before = open_files()
    head = "PUT files?path=made/for/f\ncontent-length:90000000"
    async with box.connection(head) as (_, writer):
        writer.write(bytes(5 * MIB))
        await eventually(lambda: box.engine.files.busy)
    await box.settled(before)
    assert await box.names(".") == []


async def test_a_reader_that_leaves_frees_the_file(box: Box) -> None:
    await box.engine.exec("truncate -s 4G f")
    before = open_files()
    for query in ("path=f", "path=f\nrange:bytes=5-"):
        async with box.connection(f"GET files?{query}") as (reader, _):
            await asyncio.wait_for(reader.readexactly(100_000), DEADLINE)
            assert box.engine.files.busy
        await box.settled(before)


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_client_that_stalls_is_given_up(
    box: Box, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    await box.engine.exec("truncate -s 1G big")
    monkeypatch.setattr(responses, "STALLED", 0.2)
    head = "GET files?path=big"
    if way == "up":
        head = "PUT files?path=f\ncontent-length:90000000"
    async with box.connection(head) as (reader, _):
        await eventually(lambda: box.engine.files.busy)
        await eventually(lambda: not box.engine.files.busy)
        if way == "up":
            assert (await reader.readline()).startswith(b"HTTP/1.1 504")
    assert await box.names(".") == ["big"]


async def test_a_refused_upload_is_answered_before_it_is_sent(box: Box) -> None:
    head = "PUT files?path=/tmp\ncontent-length:90000000\nexpect:100-continue"
    async with box.connection(head) as (reader, _):
        assert (await asyncio.wait_for(reader.readline(), DEADLINE)).startswith(b"HTTP/1.1 400")


async def test_a_page_of_another_site_cannot_write(box: Box, server_url: str) -> None:
    async with aiohttp.ClientSession() as session:
        where = server_url + box.url("files")
        evil = {"origin": "https://evil.example", "content-type": "text/plain"}
        async with session.put(where, params={"path": "f"}, data=b"x", headers=evil) as answer:
            assert answer.status == 403
    assert await box.names(".") == []


async def test_what_is_known_of_files_is_told(box: Box) -> None:
    await box.write("d/a.txt", b"12345")
    await box.write("d/.hidden", b"")
    await box.engine.exec("ln -s a.txt d/link; ln -s nowhere d/dangling")

    async def get(what: str, **query: str) -> Any:
        return (await box.ask("GET", f"files/{what}", params=query)).json

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


async def test_files_are_changed(box: Box) -> None:
    async def post(what: str, **body: Any) -> Any:
        answer = await box.ask("POST", f"files/{what}", json=body)
        assert answer.status == (204 if answer.json is None else 200), answer
        return answer.json

    await post("mkdir", path="a/b", recursive=True)
    await box.write("a/f", b"x")
    await post("rename", source="a/f", target="a/g")
    assert await post("move", source="a/g", target="a/b") == {"path": "/workspace/a/b/g"}
    await post("copy", source="a", target="c", recursive=True)
    await post("symlink", target="b/g", path="c/link")
    assert (await box.read("c/link")).body == b"x"
    await post("chmod", path="c/b/g", mode=0o600)
    await post("chown", path="c/b/g", uid=0)
    await post("touch", path="c/b/g", mtime=12345.5)
    stat = await box.engine.files.stat("c/b/g")
    assert (stat.mode, stat.mtime) == (0o600, 12345.5)
    await post("touch", path="c/new")
    assert (
        await box.ask("DELETE", "files", params={"path": "c", "recursive": "true"})
    ).status == 204
    gone = {"path": "c", "force": "true"}
    assert (await box.ask("DELETE", "files", params=gone)).status == 204
    assert await box.names(".") == ["a"]


def _at(path: str, **more: Any) -> dict[str, Any]:
    return {"params": {"path": path}, **more}


def _typed(kind: str, data: bytes) -> dict[str, Any]:
    return {"data": data, "headers": {"content-type": kind}}


def _json(**body: Any) -> dict[str, Any]:
    return {"json": body}


RANGE = {"range": "bytes=0-"}
JSON = "application/json"
OPTION = "invalid_option"
BAD: list[tuple[str, str, dict[str, Any], int, str]] = [
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
    ("POST", "files/mkdir", _typed("text/plain", b'{"path": "q"}'), 400, OPTION),
    ("POST", "files/mkdir", _typed(JSON, b'{"path": "\\ud800"}'), 400, OPTION),
    ("POST", "files/mkdir", _typed(JSON, b'{"path": '), 400, OPTION),
    ("POST", "files/mkdir", _typed(JSON, b" " * (17 * MIB)), 413, "request_too_large"),
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


async def test_what_cannot_be_is_refused_as_what_it_is(box: Box) -> None:
    await box.engine.exec("echo hi > f; mkdir -p d full/inner; ln -s loop loop")
    found = []
    for method, path, options, status, code in BAD:
        answer = await box.ask(method, path, **options)
        if (answer.status, answer.code) != (status, code):
            found.append((method, path, str(options)[:80], answer.status, answer.body[:200]))
    assert found == []
    assert await box.names(".") == ["d", "f", "full", "loop"]


async def test_a_missing_sandbox_is_not_made_by_its_files(http: aiohttp.ClientSession) -> None:
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
        async with http.request(method, f"/api/sandboxes/ghost/{path}") as answer:
            assert answer.status == 404, (method, path)
    async with http.get("/api/sandboxes") as answer:
        assert await answer.json() == {"sandboxes": []}


async def test_many_read_and_write_at_once(box: Box) -> None:
    async def one(number: int) -> bool:
        data = hashlib.sha256(str(number).encode()).digest() * (1000 * number)
        await box.write(f"f{number}", data)
        return (await box.read(f"f{number}")).body == data

    assert all(await asyncio.gather(*map(one, range(60))))


async def _raw(box: Box, head: str) -> bytes:
    async with box.connection(f"{head}\nconnection:close") as (reader, _):
        return await asyncio.wait_for(reader.read(), DEADLINE)
