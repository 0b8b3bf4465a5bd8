"""The workspace as an archive over the bridge protocol, by plain HTTP."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

from smokebox.server.compat.bridge.files import MAX_UPLOAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from server.compat.bridge_client import Bridge

LONG = "/".join("n" * 100 for _ in range(4))
FILL = f"""
    mkdir -p a/b 'sp ace' {LONG}; printf one > a/one; printf two > a/b/two; printf x > 'sp ace/ä'
    ln -s ../a/one a/link; ln a/one a/hard; printf deep > {LONG}/deep; chmod 750 a/b
    chmod 600 a/one; printf '*' > 'a/st*r'; printf 2 > a/star; head -c 3000000 /dev/urandom > large
"""


async def persist(bridge: Bridge, excludes: str = "") -> bytes:
    params = {"excludes": excludes} if excludes else {}
    async with bridge.ask("POST", "/persist", params=params) as answer:
        assert (answer.status, answer.content_type) == (200, "application/octet-stream")
        return bytes(await answer.read())


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return sorted(tar.getnames())


async def hydrate(bridge: Bridge, archive: bytes) -> None:
    async with bridge.ask("POST", "/hydrate", data=io.BytesIO(archive)) as answer:
        assert (answer.status, await answer.json()) == (200, {"ok": True})


async def test_members_are_named_from_a_dot(bridge: Bridge) -> None:
    await bridge.out("sh", "-c", FILL)
    archive = await persist(bridge)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = {member.name: member for member in tar}
        assert set(members) >= {".", "./a", "./a/b/two", "./sp ace/ä", f"./{LONG}/deep"}
        assert all(name == "." or name.startswith("./") for name in members)
        assert members["./a/link"].linkname == "../a/one"
        hard = next(one for one in members.values() if one.islnk())
        assert {hard.name, hard.linkname} == {"./a/one", "./a/hard"}
        assert members["./a/b"].mode == 0o750
        deep = tar.extractfile(f"./{LONG}/deep")
        assert deep is not None
        assert deep.read() == b"deep"


async def test_gnu_tar_reads_it(bridge: Bridge) -> None:
    await bridge.out("sh", "-c", FILL)
    await bridge.put("workspace/copy.tar", await persist(bridge))
    check = "mkdir /tmp/x; tar xf copy.tar -C /tmp/x && rm copy.tar && diff -r . /tmp/x"
    assert await bridge.out("sh", "-c", check) == ""


async def test_what_comes_out_goes_in_again_any_number_of_times(bridge: Bridge) -> None:
    await bridge.out("sh", "-c", FILL)
    archive = await persist(bridge)
    sums = "find . -type f -exec md5sum {} + | sort; find . -printf '%p %m %y %l\\n' | sort"
    before = await bridge.out("sh", "-c", sums)
    bridge.id = "other"
    for _ in range(3):
        await hydrate(bridge, archive)
        assert await bridge.out("sh", "-c", sums) == before


async def test_excludes_are_paths_and_nothing_else(bridge: Bridge) -> None:
    await bridge.out("sh", "-c", "mkdir -p a/b c/a x; touch a/b/f c/a/f 'x/*' x/y {z} 'i[j]' ij")
    assert names(await persist(bridge, "a,./x/*,{z},i[j]")) == sorted(
        [".", "./c", "./c/a", "./c/a/f", "./x", "./x/y", "./ij"]
    )
    assert "./a/b" not in names(await persist(bridge, "a/b/,,"))


async def test_excludes_that_climb_are_refused(bridge: Bridge) -> None:
    for excludes in ("../secret", "a,b/../c"):
        answer = await bridge.refused("POST", "/persist", params={"excludes": excludes})
        assert answer[:2] == (400, "invalid_request")
        assert ".." in answer[2]


async def test_an_empty_workspace_is_an_archive_too(bridge: Bridge) -> None:
    archive = await persist(bridge)
    assert names(archive) == ["."]
    await hydrate(bridge, archive)


async def test_nothing_and_too_much_are_refused(bridge: Bridge) -> None:
    answer = await bridge.refused("POST", "/hydrate")
    assert answer == (400, "invalid_request", "Empty tar payload")
    for body in (io.BytesIO(bytes(MAX_UPLOAD + 1)), _blanks()):
        answer = await bridge.refused("POST", "/hydrate", data=body)
        assert answer[:2] == (400, "invalid_request")
        assert "too large" in answer[2]


async def test_what_is_no_archive_is_a_failure(bridge: Bridge) -> None:
    for body in (b"not a tar", bytes(100), _tar("../../etc/evil"), _tar("/etc/evil")):
        answer = await bridge.refused("POST", "/hydrate", data=body)
        assert answer[:2] == (502, "workspace_archive_write_error")
    assert await bridge.out("ls", "-A", "/workspace") == ""


def _tar(name: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return out.getvalue()


async def _blanks() -> AsyncIterator[bytes]:
    """The head of a file of 40 MiB, and a body that does not say how long it is."""
    member = tarfile.TarInfo("large")
    member.size = 40 << 20
    yield member.tobuf()
    for _ in range(40):
        yield bytes(1 << 20)
