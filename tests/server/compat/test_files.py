"""Files over the bridge protocol."""

from __future__ import annotations

import asyncio
import io
import socket
from typing import TYPE_CHECKING
from urllib.parse import quote

from yarl import URL

from smokebox.server.compat.bridge.files import MAX_UPLOAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from server.compat.bridge_client import BridgeClient
    from smokebox.server.server import RunningServer

DATA = bytes(range(256)) * 3000
OUTSIDE = (403, "invalid_request", "path must resolve to a location within /workspace")


async def test_file_is_read_back_unchanged(bridge: BridgeClient) -> None:
    for data in (DATA, b"", b'data: {"type":"metadata"}\n\n', b"short"):
        await bridge.put("workspace/new/dir/file.bin", data)
        assert await bridge.get("workspace/new/dir/file.bin") == data


async def test_names_are_percent_decoded_once(bridge: BridgeClient) -> None:
    names = ["a#b", "a?b", "a+b", "a%41b", "a%2Fb", "a b", "ä€", "a\nb", "&=;", "%", "\\"]
    for name in names:
        url = URL(f"/v1/sandbox/box/file/workspace/{quote(name, safe='')}", encoded=True)
        async with bridge.http.put(url, data=name.encode()) as written:
            assert written.status == 200
        async with bridge.http.get(url) as response:
            assert (response.status, await response.read()) == (200, name.encode())
    found = await bridge.output("sh", "-c", 'for f in *; do printf "%s|" "$f"; done')
    assert sorted(found.split("|")[:-1]) == sorted(names)


async def test_slashes_may_be_percent_encoded(bridge: BridgeClient) -> None:
    await bridge.put("workspace/dir/file", b"x")
    url = URL("/v1/sandbox/box/file/%2Fworkspace%2Fdir%2Ffile", encoded=True)
    async with bridge.http.get(url) as response:
        assert (response.status, await response.read()) == (200, b"x")


async def test_missing_files_are_not_found(bridge: BridgeClient) -> None:
    await bridge.put("workspace/file", b"")
    for path in ("missing", "missing/deeper", "file/below"):
        response = await bridge.request_error("GET", f"/file/workspace/{path}")
        assert response[:2] == (404, "workspace_read_not_found")


async def test_directories_are_refused(bridge: BridgeClient) -> None:
    await bridge.output("mkdir", "dir")
    for path in ("workspace", "workspace/dir", "workspace/dir/"):
        assert (await bridge.request_error("GET", f"/file/{path}"))[0] == 400
    assert (await bridge.request_error("PUT", "/file/workspace", data=b"x"))[0] == 400
    response = await bridge.request_error("PUT", "/file/workspace/dir", data=b"x")
    assert response[:2] == (502, "workspace_archive_write_error")


async def test_paths_outside_the_workspace_are_refused(bridge: BridgeClient) -> None:
    for path in (
        "tmp/secret",
        "workspacex/a",
        "workspace/%2e%2e/etc/passwd",
        "workspace/..%2f..%2fetc/passwd",
        "workspace/a/%2E%2E/%2E%2E/etc",
        "%2Fetc%2Fpasswd",
    ):
        url = URL(f"/v1/sandbox/box/file/{path}", encoded=True)
        for method in ("GET", "PUT"):
            async with bridge.http.request(method, url, data=b"") as response:
                body = await response.json()
                assert (response.status, body["code"], body["error"]) == OUTSIDE
    assert not await bridge.running()


async def test_parent_directories_inside_the_workspace_are_allowed(bridge: BridgeClient) -> None:
    await bridge.put("workspace/a", b"x")
    url = URL("/v1/sandbox/box/file/workspace/b/%2e%2e/./a", encoded=True)
    async with bridge.http.get(url) as response:
        assert (response.status, await response.read()) == (200, b"x")


async def test_symlinks_out_of_the_workspace_are_refused(bridge: BridgeClient) -> None:
    script = """
        ln -s /etc absolute; ln -s ../etc relative; ln -s absolute twice; ln -s / root
        ln -s /etc/new dangling; ln -s loop loop; ln -s /proc/self/root proc
        mkdir d; ln -s ../../etc d/up; ln -s missing/../../etc behind
    """
    await bridge.output("sh", "-c", script)
    for path in (
        *("absolute/passwd", "relative/passwd", "twice/passwd", "root/etc/passwd", "dangling"),
        *("loop", "proc/etc/passwd", "d/up/passwd", "behind/passwd", "absolute"),
    ):
        for method in ("GET", "PUT"):
            response = await bridge.request_error(method, f"/file/workspace/{path}", data=b"x")
            assert (path, response[0]) == (path, 403)
    assert "x" not in await bridge.output("sh", "-c", "ls /etc/new 2>&1 | grep -v cannot || true")


async def test_symlinks_inside_the_workspace_are_followed(bridge: BridgeClient) -> None:
    await bridge.output(
        "sh", "-c", "mkdir d; ln -s d l; ln -s /workspace/d/f f; ln -s .././workspace w"
    )
    await bridge.put("workspace/l/f", b"one")
    assert await bridge.get("workspace/f") == b"one"
    await bridge.put("workspace/f", b"two")
    assert await bridge.get("workspace/w/d/f") == b"two"


async def test_workspace_replaced_by_a_symlink_is_refused(bridge: BridgeClient) -> None:
    await bridge.output("sh", "-c", "cd / && rmdir workspace && ln -s / workspace")
    assert await bridge.request_error("GET", "/file/workspace/etc/passwd") == OUTSIDE
    assert await bridge.request_error("POST", "/persist") == OUTSIDE
    assert await bridge.request_error("POST", "/hydrate", data=b"x") == OUTSIDE


async def test_empty_path_is_refused(bridge: BridgeClient) -> None:
    for path in ("/file/", "/file//"):
        for method in ("GET", "PUT"):
            response = await bridge.request_error(method, path)
            assert response == (400, "invalid_request", "file path must not be empty")


async def test_name_that_is_not_utf8_is_refused(bridge: BridgeClient) -> None:
    url = URL("/v1/sandbox/box/file/workspace/a%ff", encoded=True)
    async with bridge.http.get(url) as response:
        assert (response.status, (await response.json())["code"]) == (400, "invalid_request")


async def test_upload_size_is_limited(bridge: BridgeClient) -> None:
    await bridge.put("workspace/most", bytes(MAX_UPLOAD))
    for body in (io.BytesIO(bytes(MAX_UPLOAD + 1)), _pieces(MAX_UPLOAD + 1)):
        response = await bridge.request_error("PUT", "/file/workspace/more", data=body)
        assert response[:2] == (413, "payload_too_large")
    assert await bridge.output("ls") == "most\n"


async def test_incomplete_body_writes_nothing(bridge: BridgeClient, server: RunningServer) -> None:
    await bridge.put("workspace/file", b"before")
    assert server.url is not None
    port = URL(server.url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"PUT /v1/sandbox/box/file/workspace/file HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
    writer.write(f"{head}content-length: 1000\r\n\r\nafter".encode())
    await writer.drain()
    writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
    await reader.read()
    writer.close()
    assert await bridge.get("workspace/file") == b"before"
    assert await bridge.output("ls", "-A") == "file\n"


async def _pieces(size: int) -> AsyncIterator[bytes]:
    while size > 0:
        yield bytes(min(size, 1 << 20))
        size -= 1 << 20
