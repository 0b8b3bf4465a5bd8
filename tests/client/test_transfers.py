"""Files and directories copied between this machine and a sandbox."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.errors import PathNotFound, ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox


@pytest_asyncio.fixture
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with await client.create() as sandbox:
        yield sandbox


async def test_file_is_copied_both_ways_with_progress(sandbox: Sandbox, tmp_path: Path) -> None:
    data, calls = os.urandom(3_000_000), []
    (tmp_path / "in").write_bytes(data)
    await sandbox.upload(
        tmp_path / "in", "/data/file", progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (len(data), len(data))
    calls.clear()
    await sandbox.download(
        "/data/file", tmp_path / "out", progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (len(data), len(data))
    assert (tmp_path / "out").read_bytes() == data


async def test_executable_bit_is_kept(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "tool").chmod(0o755)
    await sandbox.upload(tmp_path / "tool", "/usr/local/bin/")
    assert (await sandbox.exec("tool")).stdout == "ran\n"
    await sandbox.download("/usr/local/bin/tool", tmp_path / "back")
    assert os.access(tmp_path / "back", os.X_OK)


async def test_directory_is_copied_both_ways(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "sub" / "ü.txt").write_text("text")
    (tree / "big").write_bytes(bytes(2_500_000))
    (tree / "link").symlink_to("sub/ü.txt")
    os.link(tree / "big", tree / "same")
    os.mkfifo(tree / "fifo")
    await sandbox.upload(tree, "/data")
    assert await sandbox.readlink("/data/link") == "sub/ü.txt"
    assert await sandbox.readdir("/data") == ["big", "link", "same", "sub"]
    await sandbox.download("/data", tmp_path / "back")
    back = tmp_path / "back"
    assert (back / "link").read_text() == "text"
    assert (back / "same").stat().st_size == 2_500_000
    assert (back / "sub" / "empty").is_dir()


async def test_missing_path_is_an_error_and_leaves_nothing(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with pytest.raises(PathNotFound):
        await sandbox.download("/none", tmp_path / "out")
    with pytest.raises(FileNotFoundError):
        await sandbox.upload(tmp_path / "none", "/x")
    assert list(tmp_path.iterdir()) == []


async def test_links_of_a_sandbox_cannot_escape_the_directory(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    await sandbox.exec("mkdir /evil; ln -s / /evil/root")
    with pytest.raises(ServiceUnavailable, match="absolute path"):
        await sandbox.download("/evil", tmp_path / "out")
    assert not (tmp_path / "out" / "root").is_symlink()


async def test_file_is_copied_into_an_existing_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write_file("report.txt", "done")
    await sandbox.download("report.txt", tmp_path)
    assert (tmp_path / "report.txt").read_text() == "done"
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]
