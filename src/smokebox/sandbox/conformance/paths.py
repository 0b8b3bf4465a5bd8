"""Cases on paths: resolution of text, globs and symlinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.errors import InvalidPath, PathNotFound, SymlinkLoop
from smokebox.sandbox.api import SandboxApi
from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.types import Capabilities

FILES = ("a.py", "b.py", "c.txt", ".hidden.py", "src/d.py", "src/deep/er/e.py", ".git/f.py")


class PathCases(Cases):
    """Relative, absolute, collapsing and invalid paths."""

    async def test_sandbox_satisfies_the_protocol(self, sandbox: SandboxApi) -> None:
        assert isinstance(sandbox, SandboxApi)

    async def test_cwd_is_absolute_and_normalized(self, sandbox: SandboxApi) -> None:
        assert sandbox.cwd.startswith("/")
        assert sandbox.resolve_path(sandbox.cwd) == sandbox.cwd

    async def test_absolute_path_is_unchanged(self, sandbox: SandboxApi) -> None:
        assert sandbox.resolve_path("/a/b.txt") == "/a/b.txt"

    async def test_relative_path_starts_at_cwd(self, sandbox: SandboxApi) -> None:
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

    async def test_file_methods_accept_relative_paths(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        relative = f"{directory.rsplit('/', 1)[-1]}/note.txt"
        await sandbox.write_file(relative, "here")
        assert await sandbox.read_file(f"{directory}/note.txt") == "here"

    async def test_file_methods_collapse_dotdot(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/gone/../note.txt", "up")
        assert await sandbox.readdir(directory) == ["note.txt"]

    @pytest.mark.parametrize("path", ["", "a\0b", "bad\udcff.txt"])
    async def test_invalid_path_is_refused(self, sandbox: SandboxApi, path: str) -> None:
        with pytest.raises(InvalidPath) as caught:
            await sandbox.write_file(path, "x")
        assert caught.value.code == "invalid_path"
        assert caught.value.hint
        for method in (sandbox.read_bytes, sandbox.stat, sandbox.readdir, sandbox.rm):
            with pytest.raises(InvalidPath):
                await method(path)

    async def test_description_of_capabilities_has_two_lines(
        self, capabilities: Capabilities
    ) -> None:
        assert len(capabilities.describe().splitlines()) == 2

    async def test_listed_commands_exist(
        self, sandbox: SandboxApi, capabilities: Capabilities
    ) -> None:
        wanted = sorted(capabilities.commands or {"cat", "echo", "ls"})
        script = 'for name in $NAMES; do type "$name" >/dev/null 2>&1 || echo "$name"; done'
        result = await sandbox.exec(script, env={"NAMES": " ".join(wanted)})
        assert result.stdout == ""


class GlobCases(Cases):
    """One tree, many patterns."""

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*.py", ["a.py", "b.py"]),
            ("?.txt", ["c.txt"]),
            ("[ab].py", ["a.py", "b.py"]),
            ("[!a].py", ["b.py"]),
            ("*.{py,txt}", ["a.py", "b.py", "c.txt"]),
            (".*.py", [".hidden.py"]),
            ("src/*.py", ["src/d.py"]),
            ("*/d.py", ["src/d.py"]),
            ("**/*.py", ["a.py", "b.py", "src/d.py", "src/deep/er/e.py"]),
            ("src/**/*.py", ["src/d.py", "src/deep/er/e.py"]),
            ("src/**/e.py", ["src/deep/er/e.py"]),
            ("c.txt", ["c.txt"]),
            ("src", ["src"]),
            ("*.rs", []),
            ("nope/*.py", []),
        ],
    )
    async def test_pattern(
        self, sandbox: SandboxApi, directory: str, pattern: str, expected: list[str]
    ) -> None:
        for name in FILES:
            await sandbox.write_file(f"{directory}/{name}", "")
        found = await sandbox.glob(pattern, cwd=directory)
        assert found == [f"{directory}/{name}" for name in expected]

    async def test_hidden_names(self, sandbox: SandboxApi, directory: str) -> None:
        for name in FILES:
            await sandbox.write_file(f"{directory}/{name}", "")
        found = await sandbox.glob("**/*.py", cwd=directory, hidden=True)
        assert found == sorted(f"{directory}/{name}" for name in FILES if name.endswith(".py"))

    async def test_directories_match_unless_files_only(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/d/f", "")
        assert await sandbox.glob("**", cwd=directory) == [f"{directory}/d", f"{directory}/d/f"]
        assert await sandbox.glob("**", cwd=directory, files_only=True) == [f"{directory}/d/f"]

    async def test_absolute_pattern(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f.md", "")
        assert await sandbox.glob(f"{directory}/*.md") == [f"{directory}/f.md"]

    async def test_symlinks_to_directories_are_not_descended(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/d/f.md", "")
        if capabilities.symlinks:
            await sandbox.exec("ln -s .. d/up", cwd=directory)
        assert await sandbox.glob("**/*.md", cwd=directory) == [f"{directory}/d/f.md"]


async def link(
    sandbox: SandboxApi, capabilities: Capabilities, directory: str, target: str, name: str
) -> bool:
    """Create a symlink by command; if unsupported, assert the refusal and return False."""
    result = await sandbox.exec(
        'ln -s -- "$TARGET" "$NAME"', cwd=directory, env={"TARGET": target, "NAME": name}
    )
    if capabilities.symlinks:
        assert result.exit_code == 0, result.stderr
        return True
    assert result.exit_code != 0
    assert name not in await sandbox.readdir(directory)
    return False


class SymlinkCases(Cases):
    """Links to files, to directories, to missing paths and to each other."""

    async def test_reading_through_a_link(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/real", "content")
        for target, name in (("real", "relative"), (f"{directory}/real", "absolute")):
            if await link(sandbox, capabilities, directory, target, name):
                assert await sandbox.read_file(f"{directory}/{name}") == "content"

    async def test_writing_through_a_link_keeps_the_link(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/real", "old")
        if await link(sandbox, capabilities, directory, "real", "link"):
            await sandbox.write_file(f"{directory}/link", "fresh")
            assert await sandbox.read_file(f"{directory}/real") == "fresh"
            assert (await sandbox.stat(f"{directory}/link")).is_symlink

    async def test_writing_through_a_dangling_link_creates_its_target(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        if await link(sandbox, capabilities, directory, "later", "link"):
            await sandbox.write_file(f"{directory}/link", "made")
            assert await sandbox.read_file(f"{directory}/later") == "made"

    async def test_stat_follows(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/real", "12345")
        if await link(sandbox, capabilities, directory, "real", "link"):
            info = await sandbox.stat(f"{directory}/link")
            assert (info.type, info.is_symlink) == ("file", True)
            assert info.size in (5, None)

    async def test_stat_without_following(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.mkdir(f"{directory}/d")
        if await link(sandbox, capabilities, directory, "d", "link"):
            info = await sandbox.stat(f"{directory}/link", follow_symlinks=False)
            assert (info.type, info.is_symlink) == ("symlink", True)

    async def test_dangling_link_is_not_found(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        if await link(sandbox, capabilities, directory, "nowhere", "link"):
            assert await sandbox.exists(f"{directory}/link") is False
            with pytest.raises(PathNotFound):
                await sandbox.stat(f"{directory}/link")
            with pytest.raises(PathNotFound):
                await sandbox.read_file(f"{directory}/link")
            assert await sandbox.readdir(directory) == ["link"]
            assert (await sandbox.stat(f"{directory}/link", follow_symlinks=False)).is_symlink

    async def test_symlink_loop_is_an_error(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        if await link(sandbox, capabilities, directory, "two", "one"):
            await link(sandbox, capabilities, directory, "one", "two")
            assert await sandbox.exists(f"{directory}/one") is False
            with pytest.raises(SymlinkLoop):
                await sandbox.read_file(f"{directory}/one")

    async def test_link_to_a_directory_is_a_directory(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/d/inner", "x")
        if await link(sandbox, capabilities, directory, "d", "link"):
            assert await sandbox.readdir(f"{directory}/link") == ["inner"]
            assert await sandbox.read_file(f"{directory}/link/inner") == "x"
            assert (await sandbox.stat(f"{directory}/link")).is_directory
            await sandbox.write_file(f"{directory}/link/more", "y")
            assert await sandbox.readdir(f"{directory}/d") == ["inner", "more"]

    @pytest.mark.parametrize("recursive", [False, True])
    async def test_rm_removes_the_link_and_not_the_target(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str, recursive: bool
    ) -> None:
        await sandbox.write_file(f"{directory}/d/kept", "x")
        if await link(sandbox, capabilities, directory, "d", "link"):
            await sandbox.rm(f"{directory}/link", recursive=recursive)
            assert await sandbox.readdir(directory) == ["d"]
            assert await sandbox.readdir(f"{directory}/d") == ["kept"]

    async def test_rm_removes_a_dangling_link(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        if await link(sandbox, capabilities, directory, "nowhere", "link"):
            await sandbox.rm(f"{directory}/link")
            assert await sandbox.readdir(directory) == []

    async def test_rm_recursive_does_not_follow_links_below(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/precious/kept", "x")
        await sandbox.mkdir(f"{directory}/d")
        if await link(sandbox, capabilities, f"{directory}/d", "../precious", "link"):
            await sandbox.rm(f"{directory}/d", recursive=True)
            assert await sandbox.readdir(f"{directory}/precious") == ["kept"]
