"""Repositories cloned into a sandbox by the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.git.git_server import GitServer, make_repository
from smokebox.errors import GitError, InvalidOption

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.client.client import Client


async def test_repository_is_cloned_or_the_error_says_why(client: Client, tmp_path: Path) -> None:
    make_repository(tmp_path)
    server = GitServer(tmp_path)
    async with server.serving(), await client.create() as sandbox:
        url = f"{server.origin}/plain/project.git"
        cloned = await sandbox.git_checkout(url, "here", depth=1, timeout=60)
        assert (cloned.url, cloned.target) == (url, "/workspace/here")
        assert cloned.commit
        assert await sandbox.exists("here/.git")
        with pytest.raises(GitError):
            await sandbox.git_checkout(f"{server.origin}/plain/none.git")
        with pytest.raises(InvalidOption):
            await sandbox.git_checkout("ssh://example.com/a.git")
