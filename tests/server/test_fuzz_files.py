"""Requests about files that nobody would mean: none fails the server, hangs it, or gets out."""

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

from server.boxes import Box, eventually, make_box
from smokebox.wire.failure import FailureAnswer

if TYPE_CHECKING:
    import aiohttp

    from smokebox.server.server import RunningServer

SEEDS = [1, 2, 3]
REQUESTS = 250
# A watch of the whole image takes seconds to begin, on a machine that does more than that.
HANGS = 30.0
# What the sandbox cannot do, and what its disk does not hold, is told so.
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


class Shape(NamedTuple):
    """A route, and the names of what it takes: paths, flags, and numbers in a body."""

    method: str
    route: str
    paths: tuple[str, ...] = ("path",)
    flags: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


SHAPES = [
    Shape("GET", "files"),
    Shape("HEAD", "files"),
    Shape("PUT", "files", flags=("append",)),
    Shape("DELETE", "files", flags=("recursive", "force")),
    Shape("GET", "files/stat", flags=("follow_symlinks",)),
    Shape("GET", "files/list", flags=("recursive", "hidden")),
    Shape("GET", "files/names"),
    Shape("GET", "files/exists"),
    Shape("GET", "files/glob", ("pattern", "cwd"), ("hidden", "files_only")),
    Shape("GET", "files/readlink"),
    Shape("GET", "files/usage"),
    Shape("POST", "files/mkdir", flags=("recursive",)),
    Shape("POST", "files/rename", ("source", "target")),
    Shape("POST", "files/move", ("source", "target")),
    Shape("POST", "files/copy", ("source", "target"), ("recursive",)),
    Shape("POST", "files/symlink", ("path", "target")),
    Shape("POST", "files/chmod", numbers=("mode",)),
    Shape("POST", "files/chown", numbers=("uid", "gid")),
    Shape("POST", "files/touch", numbers=("mtime",)),
    Shape("GET", "archive", ("path", "exclude"), ("compress",)),
    Shape("GET", "watch", ("path", "include", "exclude", "cursor"), ("recursive",)),
]


@pytest_asyncio.fixture
async def box(server: RunningServer, http: aiohttp.ClientSession) -> Box:
    box = await make_box(server, http)
    await box.engine.exec(
        "echo hi > f; mkdir -p d/e; echo deep > d/e/g; ln -s loop loop; ln -s /etc out; "
        "ln -s nowhere dangling; mkfifo pipe; mkdir /other; echo safe > /other/file"
    )
    return box


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_path_fails_or_hangs_the_server(box: Box, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(REQUESTS):
        shape = chance.choice(SHAPES)
        if shape.method == "POST":
            await _check(box, shape, "", json=_fields(chance, shape))
        else:
            data = chance.choice([b"", b"data"]) if shape.method == "PUT" else None
            span = {"range": f"bytes={chance.randrange(9)}-"} if chance.random() < 0.2 else {}
            await _check(box, shape, _query(chance, shape), data=data, headers=span)
    await eventually(lambda: not box.engine.files.busy)


def _path(chance: random.Random) -> bytes:
    count = chance.choice([0, 1, 1, 2, 2, 3, 5, 40])
    data = "/".join(chance.choice(PARTS) for _ in range(count)).encode()
    if chance.random() < 0.1:
        data += chance.randbytes(chance.randrange(1, 9))
    return (b"/" if chance.random() < 0.3 else b"") + data


def _query(chance: random.Random, shape: Shape) -> str:
    fields = [(name, _path(chance)) for name in shape.paths if chance.random() < 0.9]
    fields += [(name, chance.choice(FLAGS)) for name in shape.flags if chance.random() < 0.5]
    if chance.random() < 0.05:
        fields *= 2
    return "&".join(f"{name}={quote_from_bytes(value)}" for name, value in fields)


def _fields(chance: random.Random, shape: Shape) -> Any:
    if chance.random() < 0.05:
        return chance.choice([[], None, 5, "x", {}, {"": ""}])
    body: dict[str, Any] = {name: _path(chance).decode(errors="replace") for name in shape.paths}
    body |= {name: chance.choice([True, False, 1]) for name in shape.flags}
    return body | {name: chance.choice(NUMBERS) for name in shape.numbers if chance.random() < 0.9}


async def _check(box: Box, shape: Shape, query: str, **options: Any) -> int:
    """Ask, and see that the answer is one, or an error as errors are. Reads its beginning."""
    url = URL(f"http://localhost{box.url(shape.route)}?{query}", encoded=True)
    asked = (shape.method, str(url), options)
    async with (
        asyncio.timeout(HANGS),
        box.http.request(shape.method, url, **options) as answer,
    ):
        assert answer.status < 500 or answer.status in DOCUMENTED, (asked, await answer.text())
        if answer.status < 400:
            # Whatever is longer is left, as an impatient client does.
            await answer.content.read(1 << 16)
        elif shape.method != "HEAD":
            failure = msgspec.json.decode(await answer.read(), type=FailureAnswer).error
            assert failure.code not in ("", "internal"), asked
            assert failure.message, asked
        return answer.status


def _archive(chance: random.Random) -> bytes:
    """An archive with good members and bad ones."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=chance.choice(FORMATS)) as archive:
        for _ in range(chance.randrange(1, 8)):
            member, data = _member(chance)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _member(chance: random.Random) -> tuple[tarfile.TarInfo, bytes]:
    names = ["a", "d/b", "d", "d/../../x", "../other/file", "/other/file", "link/file", "é" * 80]
    leads = ["/other", "../..", "/", "a", "../other/file", "/other/file", "d/b", "loop", ""]
    member = tarfile.TarInfo(chance.choice([*names, "x" * 300, "y/" * 60 + "z", ".", ""]))
    kinds = [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
    member.type = chance.choice([*kinds, *kinds, tarfile.FIFOTYPE, tarfile.CHRTYPE])
    if member.type == tarfile.SYMTYPE and chance.random() < 0.5:
        member.name = "link"
    member.linkname = chance.choice(leads)
    member.mode = chance.choice([0o644, 0o4755, 0o7777, 0])
    member.mtime = chance.choice([0, 1, 2**33 - 1])
    member.uid = member.gid = chance.choice([0, 1000, 2**21 - 1])
    data = chance.randbytes(chance.choice([0, 1, 511, 512, 5000]))
    member.size = len(data) if member.type == tarfile.REGTYPE else 0
    return member, data


def _broken(chance: random.Random, data: bytes) -> bytes:
    """The same archive after an accident."""
    kind = chance.randrange(7)
    if kind == 0:
        return data[: chance.randrange(len(data))]
    if kind == 1:
        return gzip.compress(data, 1)[: chance.randrange(20, 400)]
    if kind == 2:
        return _resized(data, chance.choice([b"77777777777\0", b"\x80" + b"\xff" * 11, b"-1" * 6]))
    if kind == 3:
        return chance.randbytes(chance.randrange(3000))
    if kind == 4:
        return gzip.compress(data, 1)
    spoiled = bytearray(data)
    for _ in range(chance.randrange(1, 9) if kind == 5 else 0):
        spoiled[chance.randrange(min(len(data), 2048))] = chance.randrange(256)
    return bytes(spoiled)


def _resized(data: bytes, size: bytes) -> bytes:
    """The first member claims another size, and its checksum is right."""
    head = bytearray(data[:512])
    head[124:136] = size[:12]
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + data[512:]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_archive_fails_the_server_or_leaves_its_target(box: Box, seed: int) -> None:
    chance = random.Random(seed)
    before = await box.names(".")
    statuses = set()
    for number in range(REQUESTS):
        data = _broken(chance, _archive(chance))
        path = chance.choice([f"t/{number}", "t/same"])
        owner = chance.choice(["", "&keep_owner=true"])
        shape = Shape("PUT", "archive")
        statuses.add(await _check(box, shape, f"path={path}{owner}", data=io.BytesIO(data)))
    assert statuses >= {200, 400}
    await eventually(lambda: not box.engine.files.busy)
    assert set(await box.names(".")) == {*before, "t"}
    assert await box.names("/other") == ["file"]
    assert (await box.read("/other/file")).body == b"safe\n"
    found = await box.engine.exec("find t -name '.smokebox-*' -o -perm /6000 -o -type p -o -type c")
    assert (found.stdout, found.stderr) == ("", "")
