"""One tree over several filesystems: mounts, symlinks across them, and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.errors import (
    AccessDenied,
    FileTooLarge,
    InvalidOption,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    StorageFull,
    SymlinkLoop,
)
from smokebox.sandbox.filesystems import HostFilesystem, MemoryFilesystem, ReadOnlyFilesystem
from smokebox.sandbox.filesystems.tree import Tree

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def data() -> MemoryFilesystem:
    """Return the filesystem mounted at /mnt/data."""
    return MemoryFilesystem()


@pytest.fixture
def tree(data: MemoryFilesystem) -> Tree:
    """Return a tree of two filesystems, one mounted where the other has no directory."""
    return Tree(MemoryFilesystem(), {"/mnt/data": data})


class TestFiles:
    def test_write_creates_parents(self, tree: Tree) -> None:
        tree.write("/a/b/c", b"x")
        assert tree.read("/a/b/c") == b"x"

    def test_append_creates_and_extends(self, tree: Tree) -> None:
        tree.append("/a/log", b"1")
        tree.append("/a/log", b"2")
        assert tree.read("/a/log") == b"12"

    def test_failed_write_removes_the_parents_it_created(self) -> None:
        tree = Tree(MemoryFilesystem(max_file_size=1))
        tree.mkdir("/a")
        with pytest.raises(FileTooLarge) as caught:
            tree.write("/a/b/c/d", b"12")
        assert (caught.value.path, tree.readdir("/a")) == ("/a/b/c/d", [])

    def test_parents_over_the_limit_are_removed_again(self) -> None:
        tree = Tree(MemoryFilesystem(max_files=2))
        with pytest.raises(StorageFull) as caught:
            tree.mkdir("/a/b/c", recursive=True)
        assert (caught.value.path, tree.readdir("/")) == ("/a/b/c", [])

    def test_file_in_the_middle_of_a_path_is_not_a_directory(self, tree: Tree) -> None:
        tree.write("/a", b"x")
        for call in (tree.read, tree.stat, tree.readdir, tree.remove, lambda p: tree.write(p, b"")):
            for path in ("/a/b", "/a/b/c"):
                with pytest.raises(PathNotDirectory) as caught:
                    call(path)
                assert caught.value.path == path
        with pytest.raises(PathNotDirectory):
            tree.mkdir("/a/b/c", recursive=True)

    def test_missing_paths_raise_not_found(self, tree: Tree) -> None:
        for call in (tree.read, tree.stat, tree.readdir, tree.readlink, tree.remove, tree.mkdir):
            with pytest.raises(PathNotFound):
                call("/no/such")
        assert not tree.exists("/no/such")

    def test_directory_is_not_a_file(self, tree: Tree) -> None:
        tree.mkdir("/d")
        for path in ("/d", "/", "/mnt", "/mnt/data"):
            with pytest.raises(PathIsDirectory):
                tree.read(path)
            with pytest.raises(PathIsDirectory):
                tree.write(path, b"")

    def test_stat_reports_kind_and_size(self, tree: Tree) -> None:
        tree.write("/a", b"123")
        tree.chmod("/a", 0o600)
        info = tree.stat("/a")
        assert (info.path, info.type, info.size, info.mode) == ("/a", "file", 3, 0o600)
        assert not info.is_symlink
        assert tree.stat("/").is_directory

    def test_touch_sets_the_time_and_creates_a_file(self, tree: Tree) -> None:
        tree.symlink("a", "/l")
        tree.touch("/l", 5.0)
        tree.touch("/mnt", 5.0)
        assert (tree.read("/a"), tree.stat("/a").mtime) == (b"", 5.0)
        with pytest.raises(PathNotFound):
            tree.touch("/no/a", 5.0)

    def test_mkdir_accepts_an_existing_directory_only_when_recursive(self, tree: Tree) -> None:
        tree.mkdir("/d")
        tree.mkdir("/d", recursive=True)
        tree.write("/f", b"")
        for path, recursive in (("/d", False), ("/f", False), ("/f", True), ("/", False)):
            with pytest.raises(PathExists):
                tree.mkdir(path, recursive=recursive)


class TestRemove:
    def test_files_symlinks_and_whole_directories(self, tree: Tree) -> None:
        tree.write("/d/e/f", b"")
        tree.symlink("d", "/l")
        tree.remove("/l", recursive=True)
        tree.remove("/d", recursive=True)
        assert tree.readdir("/") == ["mnt"]

    def test_directory_needs_recursive_even_when_empty(self, tree: Tree) -> None:
        tree.mkdir("/d")
        with pytest.raises(PathIsDirectory, match="recursive=True"):
            tree.remove("/d", force=True)
        assert tree.exists("/d")

    def test_force_accepts_only_a_missing_path(self, tree: Tree) -> None:
        tree.remove("/no/such", force=True, recursive=True)
        tree.write("/a", b"")
        with pytest.raises(PathNotDirectory):
            tree.remove("/a/b", force=True)

    @pytest.mark.parametrize("path", ["/", "/mnt", "/mnt/data", "/link/data"])
    def test_roots_and_their_parents_cannot_be_removed(
        self, tree: Tree, data: MemoryFilesystem, path: str
    ) -> None:
        data.write("/a", b"kept")
        tree.symlink("mnt", "/link")
        with pytest.raises(AccessDenied):
            tree.remove(path, recursive=True, force=True)
        with pytest.raises(AccessDenied):
            tree.rename(path, "/elsewhere")
        assert tree.read("/mnt/data/a") == b"kept"

    def test_removing_a_symlink_leaves_its_target(self, tree: Tree) -> None:
        tree.write("/d/a", b"kept")
        tree.symlink("/d", "/l")
        tree.remove("/l", recursive=True)
        tree.symlink("/d", "/l")
        tree.remove("/l/a")
        assert tree.readdir("/d") == []


class TestSymlinks:
    @pytest.mark.parametrize("target", ["d/a", "/d/a", "./d/../d/a", "../../d/a", "l2"])
    def test_files_are_read_and_written_through_them(self, tree: Tree, target: str) -> None:
        tree.write("/d/a", b"1")
        tree.symlink("/d/a", "/l2")
        tree.symlink(target, "/l")
        assert tree.read("/l") == b"1"
        tree.write("/l", b"2")
        tree.append("/l", b"3")
        assert (tree.read("/d/a"), tree.readlink("/l")) == (b"23", target)

    def test_symlinks_are_followed_in_the_middle(self, tree: Tree) -> None:
        tree.write("/d/e/a", b"1")
        tree.symlink("d/e", "/l")
        tree.write("/l/new/b", b"2")
        assert (tree.read("/l/a"), tree.read("/d/e/new/b")) == (b"1", b"2")
        assert tree.readdir("/l") == ["a", "new"]

    def test_symlinks_cross_filesystems(self, tree: Tree, data: MemoryFilesystem) -> None:
        tree.write("/home/a", b"root")
        data.symlink("/home/a", "/absolute")
        data.symlink("../../home", "/relative")
        tree.symlink("/mnt/data", "/in")
        assert tree.read("/in/absolute") == tree.read("/mnt/data/relative/a") == b"root"
        tree.write("/in/b", b"mounted")
        assert data.read("/b") == b"mounted"

    def test_stat_follows_symlinks_unless_disabled(self, tree: Tree) -> None:
        tree.write("/a", b"123")
        tree.symlink("a", "/l")
        followed, itself = tree.stat("/l"), tree.stat("/l", follow_symlinks=False)
        assert (followed.type, followed.size, followed.is_symlink) == ("file", 3, True)
        assert (itself.type, itself.is_symlink, itself.path) == ("symlink", True, "/l")

    def test_dangling_symlink_raises_not_found(self, tree: Tree) -> None:
        tree.symlink("nowhere", "/l")
        assert not tree.exists("/l")
        assert tree.stat("/l", follow_symlinks=False).type == "symlink"
        for call in (tree.read, tree.stat, tree.readdir, lambda p: tree.chmod(p, 0o600)):
            with pytest.raises(PathNotFound):
                call("/l")
        for call in (tree.mkdir, lambda p: tree.mkdir(p, recursive=True)):
            with pytest.raises(PathExists):
                call("/l")
        tree.write("/l", b"x")
        assert tree.read("/nowhere") == b"x"

    @pytest.mark.parametrize("path", ["/self", "/one", "/one/below", "/grow"])
    def test_symlink_loops_raise(self, tree: Tree, path: str) -> None:
        tree.symlink("self", "/self")
        tree.symlink("two", "/one")
        tree.symlink("one", "/two")
        tree.symlink("grow/x", "/grow")
        for call in (tree.read, tree.stat, tree.readdir, lambda p: tree.write(p, b"")):
            with pytest.raises(SymlinkLoop) as caught:
                call(path)
            assert caught.value.path == path
        assert not tree.exists(path)

    def test_forty_symlinks_in_a_row_are_followed(self, tree: Tree) -> None:
        tree.write("/0", b"end")
        for number in range(41):
            tree.symlink(str(number), f"/{number + 1}")
        assert tree.read("/40") == b"end"
        with pytest.raises(SymlinkLoop):
            tree.read("/41")

    def test_symlink_does_not_replace_a_file(self, tree: Tree) -> None:
        tree.write("/a", b"x")
        for path in ("/a", "/mnt", "/"):
            with pytest.raises(PathExists):
                tree.symlink("t", path)


class TestMounts:
    def test_mount_points_are_directories_and_listed(self, tree: Tree) -> None:
        tree.write("/mnt/data/a", b"")
        assert tree.readdir("/") == ["mnt"]
        assert tree.readdir("/mnt") == ["data"]
        assert tree.readdir("/mnt/data") == ["a"]
        assert tree.stat("/mnt").is_directory
        assert tree.stat("/mnt").mtime is None
        tree.mkdir("/mnt/data", recursive=True)

    def test_directory_beside_a_mount_point_is_created(self, tree: Tree) -> None:
        tree.write("/mnt/other/a", b"x")
        assert tree.readdir("/mnt") == ["data", "other"]
        assert tree.read("/mnt/other/a") == b"x"

    def test_innermost_mount_wins(self) -> None:
        outer, inner = MemoryFilesystem(), MemoryFilesystem()
        tree = Tree(MemoryFilesystem(), {"/m": outer, "/m/in": inner})
        tree.write("/m/in/a", b"")
        tree.write("/m/inner", b"")
        assert (list(inner.listdir("/")), list(outer.listdir("/"))) == (["a"], ["inner"])
        assert tree.readdir("/m") == ["in", "inner"]

    def test_not_found_names_the_path_of_the_tree(self, tree: Tree) -> None:
        with pytest.raises(PathNotFound, match="/mnt/data/a") as caught:
            tree.read("/mnt/data/a")
        assert caught.value.path == caught.value.filename == "/mnt/data/a"

    def test_errors_of_a_mount_name_the_path_of_the_tree(self) -> None:
        tree = Tree(MemoryFilesystem(), {"/data": MemoryFilesystem(quota=3)})
        with pytest.raises(StorageFull, match=r"no room for /data/a: .* Remove files") as caught:
            tree.write("/data/a", b"1234")
        assert caught.value.path == "/data/a"

    def test_read_only_mount_is_not_changed(self) -> None:
        inner = MemoryFilesystem()
        inner.write("/a", b"x")
        tree = Tree(MemoryFilesystem(), {"/ro": ReadOnlyFilesystem(inner)})
        for path in ("/ro/b", "/ro/new/b", "/ro/a"):
            with pytest.raises(AccessDenied) as caught:
                tree.write(path, b"")
            assert caught.value.path == path
        with pytest.raises(AccessDenied):
            tree.remove("/ro/a")

    @pytest.mark.parametrize("point", ["data", "/", "/data/", "/a/../b", "//x", ""])
    def test_invalid_mount_point_is_refused(self, point: str) -> None:
        with pytest.raises(InvalidOption):
            Tree(MemoryFilesystem(), {point: MemoryFilesystem()})

    def test_host_symlink_leads_inside_the_tree(self, tmp_path: Path) -> None:
        (tmp_path / "out").symlink_to("/etc/passwd")
        (tmp_path / "up").symlink_to("../" * 30 + "etc/passwd")
        tree = Tree(MemoryFilesystem(), {"/host": HostFilesystem(tmp_path)})
        for path in ("/host/out", "/host/up"):
            with pytest.raises(PathNotFound):
                tree.read(path)
        tree.write("/etc/passwd", b"in the tree")
        assert tree.read("/host/out") == tree.read("/host/up") == b"in the tree"


class TestMoves:
    def test_within_one_filesystem(self, tree: Tree) -> None:
        tree.write("/d/a", b"x")
        tree.rename("/d", "/e")
        assert (tree.read("/e/a"), tree.exists("/d")) == (b"x", False)

    def test_to_another_filesystem(self, tree: Tree, data: MemoryFilesystem) -> None:
        tree.write("/d/e/a", b"x")
        tree.chmod("/d/e/a", 0o700)
        tree.symlink("a", "/d/e/l")
        tree.write("/mnt/data/b", b"old")
        tree.rename("/d", "/mnt/data/d")
        tree.rename("/mnt/data/d/e/a", "/mnt/data/b")
        assert (data.read("/b"), data.lstat("/b").mode) == (b"x", 0o700)
        assert (data.readlink("/d/e/l"), tree.exists("/d")) == ("a", False)

    def test_refused_move_changes_nothing(self, tree: Tree) -> None:
        tree.write("/d/a", b"x")
        tree.write("/mnt/data/f", b"y")
        for source, target, error in (
            ("/no", "/x", PathNotFound),
            ("/d", "/d/e", PathError),
            ("/d", "/mnt/data/f", PathNotDirectory),
            ("/mnt/data/f", "/d", PathIsDirectory),
        ):
            with pytest.raises(error):
                tree.rename(source, target)
        assert (tree.read("/d/a"), tree.read("/mnt/data/f")) == (b"x", b"y")

    def test_errors_name_the_offending_path(self, tree: Tree) -> None:
        tree.write("/mnt/data/f", b"")
        tree.mkdir("/mnt/data/d")
        with pytest.raises(PathIsDirectory) as caught:
            tree.rename("/mnt/data/f", "/mnt/data/d")
        assert caught.value.path == "/mnt/data/d"

    def test_copy_follows_the_source_and_keeps_links_inside(self, tree: Tree) -> None:
        tree.write("/d/a", b"x")
        tree.symlink("a", "/d/l")
        tree.symlink("d", "/link")
        tree.copy("/link", "/mnt/data/copy")
        assert tree.read("/mnt/data/copy/l") == b"x"
        with pytest.raises(PathError, match="itself"):
            tree.copy("/d", "/d/e")


class TestGlobAndWalk:
    def test_glob_crosses_mounts_and_not_links(self, tree: Tree) -> None:
        for path in ("/mnt/data/a.py", "/src/b.py", "/src/.c.py"):
            tree.write(path, b"")
        tree.symlink("src", "/link")
        tree.symlink("nowhere", "/src/dead.py")
        assert tree.glob("**/*.py") == ["/mnt/data/a.py", "/src/b.py", "/src/dead.py"]
        assert tree.glob("*.py", cwd="/link", files_only=True) == ["/link/b.py"]
        assert tree.glob("/s*/*", hidden=True) == ["/src/.c.py", "/src/b.py", "/src/dead.py"]

    def test_walk_yields_parents_first_and_follows_no_symlinks(self, tree: Tree) -> None:
        tree.write("/b/c", b"1")
        tree.write("/a", b"")
        tree.symlink("b", "/l")
        tree.write("/mnt/data/z", b"")
        paths = [(info.path, info.type) for info in tree.walk()]
        assert paths == [
            ("/a", "file"),
            ("/b", "directory"),
            ("/b/c", "file"),
            ("/l", "symlink"),
            ("/mnt", "directory"),
            ("/mnt/data", "directory"),
            ("/mnt/data/z", "file"),
        ]

    def test_deep_trees_are_walked(self, tree: Tree) -> None:
        tree.mkdir("/d" * 1100, recursive=True)
        assert sum(1 for _ in tree.walk("/d")) == 1099
        tree.copy("/d", "/e")
        tree.remove("/d", recursive=True)
        assert tree.readdir("/") == ["e", "mnt"]
