"""Files excluded from backups by patterns and by .gitignore, compared with git."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.backups import ignore_rules

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.host import Host

FILES = (
    "a.log", "b.txt", "build/out", "src/build/out", "src/keep.log", "src/deep/x.tmp", "doc/a.pdf",
    "doc/sub/b.pdf", "node_modules/m/index.js", "src/node_modules/n", "lit*eral", "literal",
    "#hash", "!bang", "trail ", "deep/a/b/c", "deep/a/x/c", "only/dir", "only2", "x/only2/f",
    "kept/no", "kept/yes", "é.dat", "foo/bar/baz", "foo/baz", "q1", "q22", "r[1]", "r1",
)  # fmt: skip
RULES = """
# a comment
*.log
!src/keep.log
/build/
node_modules/
doc/**/*.pdf
lit\\*eral
\\#hash
\\!bang
trail\\ 
deep/**/c
only/
only2/
kept/*
!kept/yes
foo/*/baz
q?
r\\[1\\]
*.dat   
"""


def write(root: Path, name: str, text: str = "x") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def included(root: Path) -> set[str]:
    """Return the files that are not ignored, in the order of a walk."""
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    skip, found, folders = ignore_rules.IgnoreRules(top), set[str](), [""]
    while folders:
        folder = folders.pop()
        for name in sorted(os.listdir(root / folder)):
            path = f"{folder}/{name}" if folder else name
            if skip(path) or name == ".git":
                continue
            if (root / path).is_dir():
                folders.append(path)
            else:
                found.add(path)
    os.close(top)
    return found


def included_by_git(root: Path) -> set[str]:
    command = ["git", "-C", str(root), "-c", "core.quotePath=false"]
    subprocess.run([*command, "init", "-q"], check=True)
    listed = subprocess.run(
        [*command, "ls-files", "-z", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
    )
    return {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}


@pytest.mark.parametrize(
    "nested", [{}, {"src": "*.tmp\n!build\n"}, {"src": "!*.log\n", "doc/sub": "!*.pdf\n/b.pdf\n"}]
)
def test_gitignore_rules_equal_those_of_git(tmp_path: Path, nested: dict[str, str]) -> None:
    for name in FILES:
        write(tmp_path, name)
    write(tmp_path, ".gitignore", RULES)
    for folder, rules in nested.items():
        write(tmp_path, f"{folder}/.gitignore", rules)
    expected = included_by_git(tmp_path)
    assert included(tmp_path) == expected
    assert "src/keep.log" in expected
    assert "a.log" not in expected


@pytest.mark.parametrize("line", ["", "#x", "   ", "/", "!", "\0", "x" * 1001, "//"])
def test_lines_without_a_rule(line: str) -> None:
    assert ignore_rules.parse(line) is None


def test_gitignore_that_is_not_a_text_file_is_ignored(tmp_path: Path) -> None:
    for number, kind in enumerate(("fifo", "directory", "link", "bytes")):
        root = tmp_path / str(number)
        write(root, "a.log")
        if kind == "fifo":
            os.mkfifo(root / ".gitignore")
        elif kind == "directory":
            (root / ".gitignore").mkdir()
        elif kind == "link":
            write(tmp_path, "rules", "*.log")
            (root / ".gitignore").symlink_to("../rules")
        else:
            (root / ".gitignore").write_bytes(b"\xff\xfe\x00*.log\n[\n**\\")
        assert "a.log" in included(root)


async def test_backup_with_excludes_and_gitignore(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("mkdir -p node_modules/x .git src; touch node_modules/x/y .git/HEAD b.log")
    await sandbox.exec("touch src/a.pyc src/a.py")
    await sandbox.write_file(".gitignore", "*.log\nnode_modules\n")
    excluded = await sandbox.backups.create(excludes=["*.pyc", ".git"])
    ignored = await sandbox.backups.create(gitignore=True)
    for backup, expected in (
        (excluded, [".gitignore", "b.log", "node_modules/x/y", "src/a.py"]),
        (ignored, [".git/HEAD", ".gitignore", "src/a.py", "src/a.pyc"]),
    ):
        await sandbox.backups.restore(backup, path="/copy")
        found = await sandbox.exec("find . -type f -printf '%P\\n' | LC_ALL=C sort", cwd="/copy")
        assert found.stdout.split() == expected
