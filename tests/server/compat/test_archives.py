"""The workspace as an archive over the bridge protocol."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

from smokebox.server.compat.bridge.files import MAX_UPLOAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from server.compat.bridge_client import BridgeClient

LONG = "/".join("n" * 100 for _ in range(4))
CREATE_FILES = f"""
    mkdir -p a/b 'sp ace' {LONG}; printf one > a/one; printf two > a/b/two; printf x > 'sp ace/ä'
    ln -s ../a/one a/link; ln a/one a/hard; printf deep > {LONG}/deep; chmod 750 a/b
    chmod 600 a/one; printf '*' > 'a/st*r'; printf 2 > a/star; head -c 3000000 /dev/urandom > large
"""


async def persist(bridge: BridgeClient, excludes: str = "") -> bytes:
    params = {"excludes": excludes} if excludes else {}
    async with bridge.request("POST", "/persist", params=params) as response:
        assert (response.status, response.content_type) == (200, "application/octet-stream")
        return bytes(await response.read())


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return sorted(tar.getnames())


async def hydrate(bridge: BridgeClient, archive: bytes) -> None:
    async with bridge.request("POST", "/hydrate", data=io.BytesIO(archive)) as response:
        assert (response.status, await response.json()) == (200, {"ok": True})


async def test_member_names_start_with_a_dot(bridge: BridgeClient) -> None:
    await bridge.output("sh", "-c", CREATE_FILES)
    archive = await persist(bridge)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = {member.name: member for member in tar}
        assert set(members) >= {".", "./a", "./a/b/two", "./sp ace/ä", f"./{LONG}/deep"}
        assert all(name == "." or name.startswith("./") for name in members)
        assert members["./a/link"].linkname == "../a/one"
        hard = next(member for member in members.values() if member.islnk())
        assert {hard.name, hard.linkname} == {"./a/one", "./a/hard"}
        assert members["./a/b"].mode == 0o750
        deep = tar.extractfile(f"./{LONG}/deep")
        assert deep is not None
        assert deep.read() == b"deep"


async def test_gnu_tar_reads_the_archive(bridge: BridgeClient) -> None:
    await bridge.output("sh", "-c", CREATE_FILES)
    await bridge.put("workspace/copy.tar", await persist(bridge))
    check = "mkdir /tmp/x; tar xf copy.tar -C /tmp/x && rm copy.tar && diff -r . /tmp/x"
    assert await bridge.output("sh", "-c", check) == ""


async def test_hydrate_restores_what_persist_returned(bridge: BridgeClient) -> None:
    await bridge.output("sh", "-c", CREATE_FILES)
    archive = await persist(bridge)
    sums = "find . -type f -exec md5sum {} + | sort; find . -printf '%p %m %y %l\\n' | sort"
    before = await bridge.output("sh", "-c", sums)
    bridge.id = "other"
    for _ in range(3):
        await hydrate(bridge, archive)
        assert await bridge.output("sh", "-c", sums) == before


async def test_excludes_are_literal_paths(bridge: BridgeClient) -> None:
    await bridge.output("sh", "-c", "mkdir -p a/b c/a x; touch a/b/f c/a/f 'x/*' x/y {z} 'i[j]' ij")
    assert names(await persist(bridge, "a,./x/*,{z},i[j]")) == sorted(
        [".", "./c", "./c/a", "./c/a/f", "./x", "./x/y", "./ij"]
    )
    assert "./a/b" not in names(await persist(bridge, "a/b/,,"))


async def test_excludes_with_parent_directories_are_refused(bridge: BridgeClient) -> None:
    for excludes in ("../secret", "a,b/../c"):
        response = await bridge.request_error("POST", "/persist", params={"excludes": excludes})
        assert response[:2] == (400, "invalid_request")
        assert ".." in response[2]


async def test_empty_workspace_is_persisted(bridge: BridgeClient) -> None:
    archive = await persist(bridge)
    assert names(archive) == ["."]
    await hydrate(bridge, archive)


async def test_empty_and_too_large_archives_are_refused(bridge: BridgeClient) -> None:
    response = await bridge.request_error("POST", "/hydrate")
    assert response == (400, "invalid_request", "Empty tar payload")
    for body in (io.BytesIO(bytes(MAX_UPLOAD + 1)), _large_archive()):
        response = await bridge.request_error("POST", "/hydrate", data=body)
        assert response[:2] == (400, "invalid_request")
        assert "too large" in response[2]


async def test_invalid_archives_are_refused(bridge: BridgeClient) -> None:
    for body in (b"not a tar", bytes(100), _tar("../../etc/evil"), _tar("/etc/evil")):
        response = await bridge.request_error("POST", "/hydrate", data=body)
        assert response[:2] == (502, "workspace_archive_write_error")
    assert await bridge.output("ls", "-A", "/workspace") == ""


def _tar(name: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return out.getvalue()


async def _large_archive() -> AsyncIterator[bytes]:
    """Yield an archive of 40 MiB, for a body without a length."""
    member = tarfile.TarInfo("large")
    member.size = 40 << 20
    yield member.tobuf()
    for _ in range(40):
        yield bytes(1 << 20)
