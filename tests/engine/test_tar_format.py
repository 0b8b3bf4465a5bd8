"""Tar headers compared with the standard library."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import tarfile
from typing import Literal

import pytest

from smokebox.engine.files.tar_format import decode_header, encode_header

FIELDS = ("name", "mode", "uid", "gid", "size", "mtime", "chksum", "type", "linkname")
LENGTHS = (1, 98, 99, 100, 101, 154, 155, 256, 993, 4000)


def decode_with_stdlib(data: bytes) -> tarfile.TarInfo:
    file = io.BytesIO(data + bytes(tarfile.RECORDSIZE))
    with tarfile.open(fileobj=file, encoding="utf-8", errors="surrogateescape") as archive:
        member = archive.next()
    assert member is not None
    return member


def assert_same(data: bytes) -> None:
    """Assert that we decode each block like the standard library."""
    for start in range(0, len(data), tarfile.BLOCKSIZE):
        block = data[start : start + tarfile.BLOCKSIZE]
        try:
            theirs = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").get_info()
        except tarfile.HeaderError as error:
            with pytest.raises(type(error)):
                decode_header(block)
            continue
        ours = decode_header(block).get_info()
        assert [ours[name] for name in FIELDS] == [theirs[name] for name in FIELDS]


@pytest.mark.parametrize("letter", ["a", "é", "\udcff", "日"])
def test_names_and_link_targets_of_any_length(letter: str) -> None:
    for length, other in itertools.product(LENGTHS, LENGTHS):
        name, link = letter * length, letter * other
        data = encode_header(name, tarfile.SYMTYPE, mode=0o777, uid=0, gid=0, mtime=1, link=link)
        member = decode_with_stdlib(data)
        assert (member.name, member.linkname, member.issym()) == (name, link, True)
        assert len(data) % tarfile.BLOCKSIZE == 0


@pytest.mark.parametrize("size", [0, 1, 8**11 - 1, 8**11, 10**15])
@pytest.mark.parametrize("uid", [0, 65534, 8**7 - 1, 8**7, 2**32 - 2])
def test_numbers_of_any_size(size: int, uid: int) -> None:
    data = encode_header("f", tarfile.REGTYPE, mode=0o104751, uid=uid, gid=uid, size=size, mtime=5)
    member = decode_with_stdlib(data)
    assert (member.size, member.uid, member.gid, member.mode) == (size, uid, uid, 0o4751)


@pytest.mark.parametrize("moment", [0, 1, -1, -1_500_000_000, 1_794_971_965_123_456_789, 10**19])
def test_times_to_the_nanosecond(moment: int) -> None:
    exact = encode_header("d", tarfile.DIRTYPE, mode=0, uid=0, gid=0, mtime=0, mtime_ns=moment)
    mtime = decode_with_stdlib(exact).pax_headers["mtime"]
    assert int(mtime.replace(".", "")) == moment
    rough = encode_header("d", tarfile.DIRTYPE, mode=0, uid=0, gid=0, mtime=moment // 10**9)
    assert decode_with_stdlib(rough).mtime == moment // 10**9


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_of_every_format_are_decoded(form: Literal[0, 1, 2]) -> None:
    for name, size, kind in itertools.product(
        ("f", "d/" + "x" * 90, "é" * 60, "p" * 100 + "/" + "q" * 90),
        (0, 8**11 - 1),
        (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE),
    ):
        member = tarfile.TarInfo(name)
        member.type, member.size, member.mtime, member.uid = kind, size, 7, 12
        member.linkname = "to" if kind == tarfile.SYMTYPE else ""
        with contextlib.suppress(ValueError):
            assert_same(member.tobuf(form, "utf-8", "surrogateescape"))


def test_damaged_headers_are_handled_like_in_the_standard_library() -> None:
    rng = random.Random(3)
    whole = encode_header("name", tarfile.SYMTYPE, mode=0o644, uid=1, gid=2, mtime=3, link="to")
    for _ in range(3000):
        block = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            block[rng.randrange(len(block))] = rng.randrange(256)
        if rng.random() < 0.5:
            # With a matching checksum.
            block[148:156] = b"        "
            block[148:156] = b"%06o\0 " % sum(block)
        assert_same(bytes(block))
