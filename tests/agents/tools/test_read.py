"""Tests of the read tool."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from smokebox.agents.tools.files import MAX_FILE_BYTES
from smokebox.agents.tools.output import MAX_IMAGE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from agents.tools.workspace import Workspace

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 30


async def test_small_file_is_unchanged(work: Workspace) -> None:
    await work.put(a__txt="héllo\r\nworld\n\n")
    assert await work.text("read", path="a.txt") == "héllo\r\nworld\n\n"


async def test_missing_last_newline_stays_missing(work: Workspace) -> None:
    await work.put(a__txt="one\ntwo")
    assert await work.text("read", path="a.txt") == "one\ntwo"


async def test_empty_file_is_reported(work: Workspace) -> None:
    await work.put(a__txt="")
    assert await work.text("read", path="a.txt") == "(empty file)"
    assert "beyond end of file (0 lines total)" in await work.error("read", path="a.txt", offset=2)


async def test_offset_and_limit_select_lines(work: Workspace) -> None:
    await work.put(a__txt="1\n2\n3\n4\n")
    expected = "2\n3\n\n[Showing lines 2-3 of 4. Use offset=4 to continue.]"
    assert await work.text("read", path="a.txt", offset=2, limit=2) == expected
    assert await work.text("read", path="a.txt", offset=4) == "4\n"


async def test_offset_past_the_end_is_an_error(work: Workspace) -> None:
    await work.put(a__txt="1\n2\n")
    error = await work.error("read", path="a.txt", offset=3)
    assert error == "Offset 3 is beyond end of file (2 lines total)"


@pytest.mark.parametrize("limit", [None, 9999])
async def test_at_most_2000_lines_are_shown(work: Workspace, limit: int | None) -> None:
    await work.put(a__txt="".join(f"{n}\n" for n in range(1, 2501)))
    text = await work.text("read", path="a.txt", limit=limit)
    assert text.endswith("\n2000\n\n[Showing lines 1-2000 of 2500. Use offset=2001 to continue.]")


async def test_at_most_50_kib_are_shown(work: Workspace) -> None:
    await work.put(a__txt=("é" * 511 + "\n") * 100)
    text = await work.text("read", path="a.txt")
    body, _, marker = text.partition("\n\n[")
    assert 51200 - 1023 <= len(body.encode()) <= 51200
    assert marker == "Showing lines 1-50 of 100. Use offset=51 to continue.]"


async def test_pages_contain_every_line_once(work: Workspace) -> None:
    lines = [f"{n} " + "x" * (n % 300) for n in range(3000)]
    await work.put(a__txt="\n".join(lines))
    seen: list[str] = []
    while len(seen) < len(lines):
        text = await work.text("read", path="a.txt", offset=len(seen) + 1)
        seen += text.partition("\n\n[Showing")[0].split("\n")
    assert seen == lines


async def test_huge_line_is_cut_between_characters(work: Workspace) -> None:
    await work.put(a__txt="first\n" + "a" + "€" * 40_000 + "\nlast\n")
    text = await work.text("read", path="a.txt", offset=2)
    body, _, marker = text.partition("\n\n[")
    assert body == "a" + "€" * 17066
    assert marker.startswith("Line 2 of 3 has 120001 bytes and is cut after 51199.")
    assert "for the lines after it use offset=3]" in marker


async def test_command_in_the_marker_prints_the_next_part(host: Workspace) -> None:
    await host.sandbox.write_file("-it's", "x" * 60_000 + "END\n")
    text = await host.text("read", path="-it's")
    command = text.rpartition("use bash: ")[2].removesuffix("]")
    assert (await host.sandbox.exec(command)).stdout == "x" * 8800 + "END\n"


async def test_huge_line_starts_the_next_page(work: Workspace) -> None:
    await work.put(a__txt="short\n" + "x" * 60_000)
    text = await work.text("read", path="a.txt")
    assert text == "short\n\n[Showing lines 1-1 of 2. Use offset=2 to continue.]"


async def test_directory_is_listed(work: Workspace) -> None:
    await work.sandbox.write_file("d/b.txt", "x")
    await work.sandbox.write_file("d/.hidden", "x")
    await work.sandbox.write_file("d/sub/c", "x")
    assert await work.text("read", path="d") == ".hidden\nb.txt\nsub/"
    assert await work.text("read", path="d", offset=2, limit=1) == (
        "b.txt\n\n[Showing entries 2-2 of 3. Use offset=3 to continue.]"
    )
    assert "(3 entries total)" in await work.error("read", path="d", offset=4)


async def test_empty_directory_is_reported(work: Workspace) -> None:
    await work.sandbox.mkdir("d")
    assert await work.text("read", path="d") == "(empty directory)"


async def test_dangling_symlink_is_listed(host: Workspace, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "to_dir").symlink_to("/")
    (tmp_path / "a\nb").touch()
    assert await host.text("read", path=".") == '"a\\nb"\ndangling\nto_dir/'


async def test_long_listing_is_truncated(host: Workspace, tmp_path: Path) -> None:
    for number in range(1001):
        (tmp_path / f"{number:04}").touch()
    text = await host.text("read", path=".")
    assert text.endswith("0999\n\n[Showing entries 1-1000 of 1001. Use offset=1001 to continue.]")


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0rest", "image/jpeg"),
        (b"GIF89a\x01\0", "image/gif"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "image/webp"),
    ],
)
async def test_image_is_recognized_by_its_content(
    work: Workspace, data: bytes, media_type: str
) -> None:
    await work.put(picture__txt=data)
    result = await work.call("read", path="picture.txt")
    assert [(i.media_type, i.data) for i in result.images] == [(media_type, data)]
    assert result.text == f"picture.txt: {media_type}, {len(data)} bytes."


async def test_too_large_image_is_refused(work: Workspace) -> None:
    await work.put(a__png=PNG + b"\0" * MAX_IMAGE_BYTES)
    assert "Make a smaller copy" in await work.error("read", path="a.png")


@pytest.mark.parametrize("data", [b"\x7fELF\0\0", bytes(range(128, 256)) * 20])
async def test_binary_file_is_refused(work: Workspace, data: bytes) -> None:
    await work.put(a=data)
    error = await work.error("read", path="a")
    assert f"{len(data)} bytes of binary data" in error
    assert "xxd" in error


async def test_file_with_an_invalid_byte_is_text(work: Workspace) -> None:
    await work.put(a__txt=b"caf\xe9 au lait\nand more\n")
    text = await work.text("read", path="a.txt")
    assert text.startswith("caf\ufffd au lait\nand more\n")
    assert text.endswith("[\ufffd stands for bytes that are not UTF-8.]")


async def test_character_at_the_end_of_the_sample_is_text(work: Workspace) -> None:
    await work.put(a__txt="x" * 8191 + "€\n")
    assert (await work.text("read", path="a.txt")).endswith("€\n")


async def test_missing_file_suggests_the_nearest(work: Workspace) -> None:
    await work.put(README__md="x")
    assert "In the same directory: README.md." in await work.error("read", path="REDME.md")
    assert "no directory" in await work.error("read", path="nope/nope/a")


async def test_path_below_a_file_is_an_error_result(work: Workspace) -> None:
    await work.put(a="x")
    assert await work.error("read", path="a/b")


async def test_read_is_not_cached(work: Workspace) -> None:
    for content in ("one", "two"):
        await work.put(a=content)
        assert await work.text("read", path="a") == content


async def test_fifo_is_refused(host: Workspace, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with asyncio.timeout(10):
        assert "not a regular file" in await host.error("read", path="pipe")


async def test_too_large_file_is_refused(host: Workspace, tmp_path: Path) -> None:
    with (tmp_path / "vast").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert "sed -n, head or tail" in await host.error("read", path="vast")
