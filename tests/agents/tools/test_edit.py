"""Tests of the edit tool."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from smokebox.agents.tools import files

if TYPE_CHECKING:
    from agents.tools.workspace import Workspace


async def edited(work: Workspace, before: str | bytes, old: str, new: str) -> bytes:
    await work.put(f=before)
    await work.text("edit", path="f", old_text=old, new_text=new)
    return await work.sandbox.read_bytes("f")


async def test_one_occurrence_is_replaced(work: Workspace) -> None:
    await work.put(f="one\ntwo\nthree\n")
    text = await work.text("edit", path="f", old_text="two\n", new_text="2\n")
    assert text == "Replaced 1 occurrence in f, at line 2."
    assert await work.sandbox.read_file("f") == "one\n2\nthree\n"


@pytest.mark.parametrize("new", ["$&", "\\1", "\\g<0>", "%s", "{0}", ""])
async def test_texts_are_literal(work: Workspace, new: str) -> None:
    assert await edited(work, "a.*b", ".*", new) == f"a{new}b".encode()


async def test_several_occurrences_are_an_error(work: Workspace) -> None:
    await work.put(f="x\ny\nx\nx x\n")
    error = await work.error("edit", path="f", old_text="x", new_text="z")
    assert error.startswith("Found 4 occurrences of old_text in f, at lines 1, 3, 4; nothing was")
    assert await work.sandbox.read_file("f") == "x\ny\nx\nx x\n"


async def test_replace_all_replaces_every_occurrence(work: Workspace) -> None:
    await work.put(f="x\n" * 30)
    text = await work.text("edit", path="f", old_text="x", new_text="xx", replace_all=True)
    assert text.startswith("Replaced 30 occurrences in f, at lines 1, 2, 3,")
    assert text.endswith("10 and more.")
    assert await work.sandbox.read_file("f") == "xx\n" * 30


async def test_overlapping_occurrences_are_ambiguous(work: Workspace) -> None:
    await work.put(f="aaa")
    assert "Found 2 occurrences" in await work.error("edit", path="f", old_text="aa", new_text="b")


async def test_empty_old_text_is_an_error(work: Workspace) -> None:
    await work.put(f="x")
    assert "old_text is empty" in await work.error("edit", path="f", old_text="", new_text="y")


async def test_equal_texts_are_an_error(work: Workspace) -> None:
    await work.put(f="x")
    assert "nothing to change" in await work.error("edit", path="f", old_text="x", new_text="x")


async def test_text_with_other_whitespace_is_shown(work: Workspace) -> None:
    await work.put(f="def a():\n\treturn  1\n\nx\n")
    error = await work.error("edit", path="f", old_text="def a():\n    return 1", new_text="")
    assert "there except for white space or line endings; lines 1-2" in error
    assert error.endswith("def a():\n\treturn  1")


async def test_nearest_text_is_shown(work: Workspace) -> None:
    await work.put(f="import os\n\ndef compute(a, b):\n    return a + b\n")
    error = await work.error("edit", path="f", old_text="def compute(a):\n    pass", new_text="")
    assert "lines 3-4 of the file:\ndef compute(a, b):\n    return a + b" in error


async def test_no_similar_text_is_reported(work: Workspace) -> None:
    await work.put(f="abc\n")
    error = await work.error("edit", path="f", old_text="zzzzzzzz", new_text="")
    assert "Nothing in the file is similar" in error


async def test_crlf_is_kept_if_the_texts_have_lf(work: Workspace) -> None:
    after = await edited(work, "a\r\nb\r\nc\r\n", "a\nb\n", "1\n2\n3\n")
    assert after == b"1\r\n2\r\n3\r\nc\r\n"


async def test_edit_within_a_line_adds_crlf(work: Workspace) -> None:
    assert await edited(work, "a\r\nb\r\n", "b", "x\ny") == b"a\r\nx\r\ny\r\n"
    assert await edited(work, "a\r\nb\r\n", "\nb", "\nx\ny") == b"a\r\nx\r\ny\r\n"


async def test_crlf_in_the_texts_is_literal(work: Workspace) -> None:
    assert await edited(work, "a\r\nb\r\n", "a\r\n", "a\n") == b"a\nb\r\n"


async def test_mixed_line_endings_are_literal(work: Workspace) -> None:
    assert await edited(work, "a\nb\r\nc\n", "a\nb", "x\ny") == b"x\ny\r\nc\n"
    assert await edited(work, "a\nb\r\nc\n", "b\nc", "x\ny") == b"a\nx\r\ny\n"


async def test_crlf_not_in_the_file_is_explained(work: Workspace) -> None:
    await work.put(f="a\nb\n")
    error = await work.error("edit", path="f", old_text="a\r\nb", new_text="c")
    assert "line endings" in error


async def test_invalid_utf8_is_kept(work: Workspace) -> None:
    assert await edited(work, b"caf\xe9 x \xff", "x", "é") == b"caf\xe9 \xc3\xa9 \xff"


async def test_directory_is_an_error_result(work: Workspace) -> None:
    await work.sandbox.mkdir("d")
    error = await work.error("edit", path="d", old_text="a", new_text="b")
    assert "is a directory" in error


async def test_missing_file_is_an_error_result(work: Workspace) -> None:
    error = await work.error("edit", path="none", old_text="a", new_text="b")
    assert "no such file" in error


async def test_concurrent_edits_of_one_file_are_all_kept(work: Workspace) -> None:
    await work.put(f="".join(f"<{n}>" for n in range(30)))
    async with asyncio.TaskGroup() as group:
        for number in range(30):
            # Different spellings of the same path.
            path = "f" if number % 2 else "./d/../f"
            change = work.text("edit", path=path, old_text=f"<{number}>", new_text=f"[{number}]")
            group.create_task(change)
    assert await work.sandbox.read_file("f") == "".join(f"[{n}]" for n in range(30))


async def test_locks_are_garbage_collected(work: Workspace) -> None:
    await work.put(f="x")
    await work.text("edit", path="f", old_text="x", new_text="y")
    await work.text("write", path="f", content="z")
    gc.collect()
    assert len(files._locks) == 0


async def test_cancelled_edit_releases_the_lock(work: Workspace) -> None:
    await work.put(f="x")
    lock = files.path_lock(work.sandbox, "f")
    async with lock:
        waiting = asyncio.create_task(work.text("edit", path="f", old_text="x", new_text="y"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await work.text("edit", path="f", old_text="x", new_text="z")
    assert await work.sandbox.read_file("f") == "z"


async def test_missing_text_in_a_large_file_is_reported_soon(work: Workspace) -> None:
    await work.put(f="some text in a line\n" * 50_000)
    async with asyncio.timeout(15):
        await work.error("edit", path="f", old_text="some test in a lane, too", new_text="x")
