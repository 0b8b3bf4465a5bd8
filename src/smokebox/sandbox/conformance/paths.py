"""Cases on paths as text, including invalid ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.errors import InvalidPath
from smokebox.sandbox.api import SandboxApi
from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.types import Capabilities


class PathCases(Cases):
    """Relative, absolute, collapsing and invalid paths."""

    async def test_the_sandbox_satisfies_the_protocol(self, sandbox: SandboxApi) -> None:
        assert isinstance(sandbox, SandboxApi)

    async def test_cwd_is_absolute_and_normal(self, sandbox: SandboxApi) -> None:
        assert sandbox.cwd.startswith("/")
        assert sandbox.resolve_path(sandbox.cwd) == sandbox.cwd

    async def test_an_absolute_path_passes_through(self, sandbox: SandboxApi) -> None:
        assert sandbox.resolve_path("/a/b.txt") == "/a/b.txt"

    async def test_a_relative_path_starts_at_cwd(self, sandbox: SandboxApi) -> None:
        assert sandbox.resolve_path("a/b") == sandbox.resolve_path(f"{sandbox.cwd}/a/b")

    async def test_dot_is_cwd(self, sandbox: SandboxApi) -> None:
        assert sandbox.resolve_path(".") == sandbox.cwd

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/a/./b", "/a/b"),
            ("/a/../b", "/b"),
            ("/a//b", "/a/b"),
            ("//a", "/a"),
            ("/a/b/", "/a/b"),
            ("/..", "/"),
            ("/../../a", "/a"),
            ("/a/../../..", "/"),
        ],
    )
    async def test_segments_collapse(self, sandbox: SandboxApi, path: str, expected: str) -> None:
        assert sandbox.resolve_path(path) == expected

    async def test_file_methods_take_relative_paths(self, sandbox: SandboxApi, place: str) -> None:
        relative = f"{place.rsplit('/', 1)[-1]}/note.txt"
        await sandbox.write_file(relative, "here")
        assert await sandbox.read_file(f"{place}/note.txt") == "here"

    async def test_file_methods_collapse_dotdot(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/gone/../note.txt", "up")
        assert await sandbox.readdir(place) == ["note.txt"]

    @pytest.mark.parametrize("path", ["", "a\0b", "bad\udcff.txt"])
    async def test_an_impossible_path_is_refused(self, sandbox: SandboxApi, path: str) -> None:
        with pytest.raises(InvalidPath) as caught:
            await sandbox.write_file(path, "x")
        assert caught.value.code == "invalid_path"
        assert caught.value.hint
        for method in (sandbox.read_bytes, sandbox.stat, sandbox.readdir, sandbox.rm):
            with pytest.raises(InvalidPath):
                await method(path)

    async def test_capabilities_describe_themselves_in_two_lines(self, able: Capabilities) -> None:
        assert len(able.describe().splitlines()) == 2

    async def test_listed_commands_exist(self, sandbox: SandboxApi, able: Capabilities) -> None:
        wanted = sorted(able.commands or {"cat", "echo", "ls"})
        script = 'for name in $NAMES; do type "$name" >/dev/null 2>&1 || echo "$name"; done'
        result = await sandbox.exec(script, env={"NAMES": " ".join(wanted)})
        assert result.stdout == ""
