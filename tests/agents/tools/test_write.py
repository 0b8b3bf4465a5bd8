"""The write tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from agents.tools.workspace import Workspace


async def test_bytes_are_counted_as_they_are_written(work: Workspace) -> None:
    assert await work.text("write", path="d/a.txt", content="é€\n") == "Wrote 6 bytes to d/a.txt."
    assert await work.sandbox.read_bytes("d/a.txt") == "é€\n".encode()


async def test_replacing_is_told(work: Workspace) -> None:
    await work.put(a="1234567")
    text = await work.text("write", path="a", content="")
    assert text == "Wrote 0 bytes to a, replacing the 7 bytes that were there."


@pytest.mark.parametrize("name", ["it's", 'a"b', "-rf", "$HOME", "a b", "ünï", "--", "*"])
async def test_odd_names_are_only_names(work: Workspace, name: str) -> None:
    await work.text("write", path=name, content="odd\n")
    assert await work.text("read", path=name) == "odd\n"
    await work.text("edit", path=name, old_text="odd", new_text="even")
    assert await work.text("grep", pattern="even", path=name) == f"{name}:1:even"
    assert name in await work.text("glob", pattern="*")


async def test_a_directory_is_a_mendable_error(work: Workspace) -> None:
    await work.sandbox.mkdir("d")
    assert "Name a file in it." in await work.error("write", path="d", content="x")


async def test_a_parent_that_is_a_file_is_a_mendable_error(work: Workspace) -> None:
    await work.put(a="x")
    assert await work.error("write", path="a/b", content="x")
    assert await work.sandbox.read_file("a") == "x"


async def test_a_place_without_permission_is_a_mendable_error(host: Workspace) -> None:
    assert "/proc" in await host.error("write", path="/proc/smokebox", content="x")


async def test_a_link_is_written_through(host: Workspace, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    await host.text("write", path="link", content="fresh")
    assert (tmp_path / "target").read_text() == "fresh"
