"""`smokebox cp`: files and directories between this machine and a sandbox."""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING

import pytest

from cli.terminal import Terminal

if TYPE_CHECKING:
    from pathlib import Path

    from cli.command_line import CommandLine


def test_file_is_copied_in_and_out(cli: CommandLine, sandbox: str, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 << 20)
    (tmp_path / "in").write_bytes(data)
    assert cli.output("cp", f"{tmp_path}/in", f"{sandbox}:there") == ""
    assert cli.output("cp", f"{sandbox}:/workspace/there", f"{tmp_path}/out") == ""
    assert (tmp_path / "out").read_bytes() == data


def test_file_is_copied_into_an_existing_directory(
    cli: CommandLine, sandbox: str, tmp_path: Path
) -> None:
    (tmp_path / "note").write_text("hello\n")
    (tmp_path / "folder").mkdir()
    cli.output("cp", f"{tmp_path}/note", f"{sandbox}:")
    assert cli.output("exec", sandbox, "cat note") == "hello\n"
    cli.output("cp", f"{sandbox}:note", f"{tmp_path}/folder")
    assert (tmp_path / "folder" / "note").read_text() == "hello\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a directory with a file, a program, a directory and a symlink."""
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("deep\n")
    (tree / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "run").chmod(0o755)
    (tree / "link").symlink_to("deep/file")
    return tree


def test_directory_is_copied_to_a_new_path(cli: CommandLine, sandbox: str, tree: Path) -> None:
    cli.output("cp", str(tree), f"{sandbox}:copy")
    assert cli.output("exec", sandbox, "cat copy/link; copy/run") == "deep\nran\n"
    out = tree.parent / "out"
    cli.output("cp", f"{sandbox}:copy", str(out))
    assert sorted(os.listdir(out)) == ["deep", "link", "run"]
    assert (out / "link").read_text() == "deep\n"
    assert os.access(out / "run", os.X_OK)


def test_directory_is_copied_into_an_existing_directory(
    cli: CommandLine, sandbox: str, tree: Path
) -> None:
    cli.output("cp", str(tree), f"{sandbox}:/tmp")
    assert cli.output("exec", sandbox, "cat /tmp/tree/deep/file") == "deep\n"
    out = tree.parent / "out"
    out.mkdir()
    cli.output("cp", f"{sandbox}:/tmp/tree", str(out))
    assert (out / "tree" / "deep" / "file").read_text() == "deep\n"


def test_trailing_dot_copies_the_contents_of_a_directory(
    cli: CommandLine, sandbox: str, tree: Path
) -> None:
    cli.output("cp", f"{tree}/.", f"{sandbox}:/tmp")
    assert cli.output("exec", sandbox, "cat /tmp/deep/file") == "deep\n"
    out = tree.parent / "out"
    out.mkdir()
    cli.output("cp", f"{sandbox}:/tmp/deep/.", str(out))
    assert os.listdir(out) == ["file"]


def test_dash_is_standard_input_and_output(cli: CommandLine, sandbox: str) -> None:
    # Without newlines, which the terminal would change.
    data = bytes(one for one in range(256) if one not in b"\r\n") * 1000
    text = data.decode("latin-1")
    done = cli.run_process("cp", "-", f"{sandbox}:bytes", input=text, encoding="latin-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = cli.run_process("cp", f"{sandbox}:bytes", "-", encoding="latin-1")
    assert (done.returncode, done.stdout == text) == (0, True)


def test_local_path_may_contain_a_colon(cli: CommandLine, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "a:b").write_text("colon\n")
    assert cli.run_process("cp", "./a:b", f"{sandbox}:c", cwd=tmp_path).returncode == 0
    assert cli.output("cp", f"{sandbox}:c", "-") == "colon\n"


def test_failed_download_leaves_no_file(cli: CommandLine, sandbox: str, tmp_path: Path) -> None:
    done = cli.run("cp", f"{sandbox}:missing", f"{tmp_path}/out")
    assert (done.returncode, done.stdout) == (1, "")
    assert "/workspace/missing" in done.stderr
    assert os.listdir(tmp_path) == []


def test_progress_is_shown_in_a_terminal_after_a_second(tmp_path: Path) -> None:
    script = (
        "import time; from smokebox.cli.output import progress\n"
        "with progress('big') as output:\n"
        "    output(1 << 20, 4 << 20); time.sleep(1.1); output(2 << 20, 4 << 20)"
    )
    terminal = Terminal([sys.executable, "-c", script], tmp_path)
    try:
        seen = terminal.expect(r"big  \[############\.{12}\] 2\.0 MiB of 4\.0 MiB  1\.\d MiB/s")
        assert "1.0 MiB of" not in seen
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_progress_is_silent_without_a_terminal(
    cli: CommandLine, sandbox: str, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(bytes(1 << 20))
    assert cli.run_process("cp", f"{tmp_path}/in", f"{sandbox}:out").stderr == ""
