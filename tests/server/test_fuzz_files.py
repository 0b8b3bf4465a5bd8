"""Fuzzing of file requests: none crashes or hangs the server, or escapes its target."""

from __future__ import annotations

import asyncio
import gzip
import io
import random
import tarfile
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote_from_bytes

import msgspec
import pytest
import pytest_asyncio
from yarl import URL

from server.boxes import SandboxClient, create_sandbox_client, eventually
from smokebox.wire.failure import FailureResponse

if TYPE_CHECKING:
    import aiohttp

    from smokebox.server.server import RunningServer

SEEDS = [1, 2, 3]
REQUESTS = 250
# Watching the whole image takes seconds to start on a busy machine.
TIMEOUT = 30.0
# Unsupported, and out of disk space.
DOCUMENTED = (501, 507)

PARTS = [
    *("a", "b", "f", "d", "loop", "out", "pipe", "dangling", "tmp", "etc", "dev/null", "dev/full"),
    *("..", ".", "", "/", "//", "~", "*", "[", "**", "{a,b}", "!(x)", "\\", "'", '"', "$HOME"),
    *("#", "?", "%", "+", "&", ";", "=", "%00", "%2F", "%ff", " ", "\n", "\r\n", "\t", "\x7f"),
    *("\0", "é", "e\u0301", "\u202e", "\ufeff", "\ufffd", "\uffff", "🦊", "x" * 255, "x" * 300),
    *("proc/self/root", "proc/self/fd/0", "proc/1/mem", "sys/kernel", "dev/pts/ptmx", "dev/tty"),
]
FLAGS = [b"true", b"false", b"1", b"", b"maybe", b"-1", b"null", b"[]"]
NUMBERS: list[Any] = [0, 1, -1, 0o755, 0o7777, 1 << 31, 1 << 63, 1 << 70]
NUMBERS += [1.5, 1e308, -1e308, None, "1", []]
FORMATS = [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


class Route(NamedTuple):
    """A route, and the names of its parameters: paths, flags, and numbers in a body."""

    method: str
    path: str
    paths: tuple[str, ...] = ("path",)
    flags: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


ROUTES = [
    Route("GET", "files"),
    Route("HEAD", "files"),
    Route("PUT", "files", flags=("append",)),
    Route("DELETE", "files", flags=("recursive", "force")),
    Route("GET", "files/stat", flags=("follow_symlinks",)),
    Route("GET", "files/list", flags=("recursive", "hidden")),
    Route("GET", "files/names"),
    Route("GET", "files/exists"),
    Route("GET", "files/glob", ("pattern", "cwd"), ("hidden", "files_only")),
    Route("GET", "files/readlink"),
    Route("GET", "files/usage"),
    Route("POST", "files/mkdir", flags=("recursive",)),
    Route("POST", "files/rename", ("source", "target")),
    Route("POST", "files/move", ("source", "target")),
    Route("POST", "files/copy", ("source", "target"), ("recursive",)),
    Route("POST", "files/symlink", ("path", "target")),
    Route("POST", "files/chmod", numbers=("mode",)),
    Route("POST", "files/chown", numbers=("uid", "gid")),
    Route("POST", "files/touch", numbers=("mtime",)),
    Route("GET", "archive", ("path", "exclude"), ("compress",)),
    Route("GET", "watch", ("path", "include", "exclude", "cursor"), ("recursive",)),
]


@pytest_asyncio.fixture
async def sandbox(server: RunningServer, http: aiohttp.ClientSession) -> SandboxClient:
    sandbox = await create_sandbox_client(server, http)
    await sandbox.engine.exec(
        "echo hi > f; mkdir -p d/e; echo deep > d/e/g; ln -s loop loop; ln -s /etc out; "
        "ln -s nowhere dangling; mkfifo pipe; mkdir /other; echo safe > /other/file"
    )
    return sandbox


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_paths_never_crash_or_hang_the_server(
    sandbox: SandboxClient, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(REQUESTS):
        route = rng.choice(ROUTES)
        if route.method == "POST":
            await _check(sandbox, route, "", json=_fields(rng, route))
        else:
            data = rng.choice([b"", b"data"]) if route.method == "PUT" else None
            span = {"range": f"bytes={rng.randrange(9)}-"} if rng.random() < 0.2 else {}
            await _check(sandbox, route, _query(rng, route), data=data, headers=span)
    await eventually(lambda: not sandbox.engine.files.busy)


def _path(rng: random.Random) -> bytes:
    count = rng.choice([0, 1, 1, 2, 2, 3, 5, 40])
    data = "/".join(rng.choice(PARTS) for _ in range(count)).encode()
    if rng.random() < 0.1:
        data += rng.randbytes(rng.randrange(1, 9))
    return (b"/" if rng.random() < 0.3 else b"") + data


def _query(rng: random.Random, route: Route) -> str:
    fields = [(name, _path(rng)) for name in route.paths if rng.random() < 0.9]
    fields += [(name, rng.choice(FLAGS)) for name in route.flags if rng.random() < 0.5]
    if rng.random() < 0.05:
        fields *= 2
    return "&".join(f"{name}={quote_from_bytes(value)}" for name, value in fields)


def _fields(rng: random.Random, route: Route) -> Any:
    if rng.random() < 0.05:
        return rng.choice([[], None, 5, "x", {}, {"": ""}])
    body: dict[str, Any] = {name: _path(rng).decode(errors="replace") for name in route.paths}
    body |= {name: rng.choice([True, False, 1]) for name in route.flags}
    return body | {name: rng.choice(NUMBERS) for name in route.numbers if rng.random() < 0.9}


async def _check(sandbox: SandboxClient, route: Route, query: str, **options: Any) -> int:
    """Send a request, and check that it succeeds or fails with a documented error."""
    url = URL(f"http://localhost{sandbox.url(route.path)}?{query}", encoded=True)
    sent = (route.method, str(url), options)
    async with (
        asyncio.timeout(TIMEOUT),
        sandbox.http.request(route.method, url, **options) as response,
    ):
        assert response.status < 500 or response.status in DOCUMENTED, (sent, await response.text())
        if response.status < 400:
            # Disconnect before the end of a longer body.
            await response.content.read(1 << 16)
        elif route.method != "HEAD":
            failure = msgspec.json.decode(await response.read(), type=FailureResponse).error
            assert failure.code not in ("", "internal"), sent
            assert failure.message, sent
        return response.status


def _archive(rng: random.Random) -> bytes:
    """Return an archive with valid and invalid members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=rng.choice(FORMATS)) as archive:
        for _ in range(rng.randrange(1, 8)):
            member, data = _member(rng)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _member(rng: random.Random) -> tuple[tarfile.TarInfo, bytes]:
    names = ["a", "d/b", "d", "d/../../x", "../other/file", "/other/file", "link/file", "é" * 80]
    targets = ["/other", "../..", "/", "a", "../other/file", "/other/file", "d/b", "loop", ""]
    member = tarfile.TarInfo(rng.choice([*names, "x" * 300, "y/" * 60 + "z", ".", ""]))
    kinds = [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
    member.type = rng.choice([*kinds, *kinds, tarfile.FIFOTYPE, tarfile.CHRTYPE])
    if member.type == tarfile.SYMTYPE and rng.random() < 0.5:
        member.name = "link"
    member.linkname = rng.choice(targets)
    member.mode = rng.choice([0o644, 0o4755, 0o7777, 0])
    member.mtime = rng.choice([0, 1, 2**33 - 1])
    member.uid = member.gid = rng.choice([0, 1000, 2**21 - 1])
    data = rng.randbytes(rng.choice([0, 1, 511, 512, 5000]))
    member.size = len(data) if member.type == tarfile.REGTYPE else 0
    return member, data


def _corrupt(rng: random.Random, data: bytes) -> bytes:
    """Return the archive truncated, compressed or altered."""
    kind = rng.randrange(7)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        return gzip.compress(data, 1)[: rng.randrange(20, 400)]
    if kind == 2:
        return _with_size(data, rng.choice([b"77777777777\0", b"\x80" + b"\xff" * 11, b"-1" * 6]))
    if kind == 3:
        return rng.randbytes(rng.randrange(3000))
    if kind == 4:
        return gzip.compress(data, 1)
    altered = bytearray(data)
    for _ in range(rng.randrange(1, 9) if kind == 5 else 0):
        altered[rng.randrange(min(len(data), 2048))] = rng.randrange(256)
    return bytes(altered)


def _with_size(data: bytes, size: bytes) -> bytes:
    """Return the archive with another size in its first header, and a valid checksum."""
    head = bytearray(data[:512])
    head[124:136] = size[:12]
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + data[512:]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_archives_never_crash_the_server_or_escape_the_target(
    sandbox: SandboxClient, seed: int
) -> None:
    rng = random.Random(seed)
    before = await sandbox.names(".")
    statuses = set()
    for number in range(REQUESTS):
        data = _corrupt(rng, _archive(rng))
        path = rng.choice([f"t/{number}", "t/same"])
        owner = rng.choice(["", "&keep_owner=true"])
        route = Route("PUT", "archive")
        statuses.add(await _check(sandbox, route, f"path={path}{owner}", data=io.BytesIO(data)))
    assert statuses >= {200, 400}
    await eventually(lambda: not sandbox.engine.files.busy)
    assert set(await sandbox.names(".")) == {*before, "t"}
    assert await sandbox.names("/other") == ["file"]
    assert (await sandbox.read("/other/file")).body == b"safe\n"
    found = await sandbox.engine.exec(
        "find t -name '.smokebox-*' -o -perm /6000 -o -type p -o -type c"
    )
    assert (found.stdout, found.stderr) == ("", "")
