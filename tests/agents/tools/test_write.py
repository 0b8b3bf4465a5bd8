"""Tests of the write tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from agents.tools.workspace import Workspace


async def test_result_has_the_number_of_bytes(work: Workspace) -> None:
    assert await work.text("write", path="d/a.txt", content="é€\n") == "Wrote 6 bytes to d/a.txt."
    assert await work.sandbox.read_bytes("d/a.txt") == "é€\n".encode()


async def test_replaced_file_is_reported(work: Workspace) -> None:
    await work.put(a="1234567")
    text = await work.text("write", path="a", content="")
    assert text == "Wrote 0 bytes to a, replacing 7 bytes."


@pytest.mark.parametrize("name", ["it's", 'a"b', "-rf", "$HOME", "a b", "ünï", "--", "*"])
async def test_special_characters_in_names_are_literal(work: Workspace, name: str) -> None:
    await work.text("write", path=name, content="odd\n")
    assert await work.text("read", path=name) == "odd\n"
    await work.text("edit", path=name, old_text="odd", new_text="even")
    assert await work.text("grep", pattern="even", path=name) == f"{name}:1:even"
    assert name in await work.text("glob", pattern="*")


async def test_directory_is_an_error_result(work: Workspace) -> None:
    await work.sandbox.mkdir("d")
    assert "Name a file in it." in await work.error("write", path="d", content="x")


async def test_parent_that_is_a_file_is_an_error_result(work: Workspace) -> None:
    await work.put(a="x")
    assert await work.error("write", path="a/b", content="x")
    assert await work.sandbox.read_file("a") == "x"


async def test_missing_permission_is_an_error_result(host: Workspace) -> None:
    assert "/proc" in await host.error("write", path="/proc/smokebox", content="x")


async def test_symlink_is_followed(host: Workspace, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    await host.text("write", path="link", content="fresh")
    assert (tmp_path / "target").read_text() == "fresh"
