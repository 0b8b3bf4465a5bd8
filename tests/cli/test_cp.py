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

    from cli.served import Served


def test_file_is_copied_in_and_out(served: Served, box: str, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 << 20)
    (tmp_path / "in").write_bytes(data)
    assert served.says("cp", f"{tmp_path}/in", f"{box}:there") == ""
    assert served.says("cp", f"{box}:/workspace/there", f"{tmp_path}/out") == ""
    assert (tmp_path / "out").read_bytes() == data


def test_file_is_copied_into_an_existing_directory(
    served: Served, box: str, tmp_path: Path
) -> None:
    (tmp_path / "note").write_text("hello\n")
    (tmp_path / "folder").mkdir()
    served.says("cp", f"{tmp_path}/note", f"{box}:")
    assert served.says("exec", box, "cat note") == "hello\n"
    served.says("cp", f"{box}:note", f"{tmp_path}/folder")
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


def test_directory_is_copied_to_a_new_path(served: Served, box: str, tree: Path) -> None:
    served.says("cp", str(tree), f"{box}:copy")
    assert served.says("exec", box, "cat copy/link; copy/run") == "deep\nran\n"
    out = tree.parent / "out"
    served.says("cp", f"{box}:copy", str(out))
    assert sorted(os.listdir(out)) == ["deep", "link", "run"]
    assert (out / "link").read_text() == "deep\n"
    assert os.access(out / "run", os.X_OK)


def test_directory_is_copied_into_an_existing_directory(
    served: Served, box: str, tree: Path
) -> None:
    served.says("cp", str(tree), f"{box}:/tmp")
    assert served.says("exec", box, "cat /tmp/tree/deep/file") == "deep\n"
    out = tree.parent / "out"
    out.mkdir()
    served.says("cp", f"{box}:/tmp/tree", str(out))
    assert (out / "tree" / "deep" / "file").read_text() == "deep\n"


def test_trailing_dot_copies_the_contents_of_a_directory(
    served: Served, box: str, tree: Path
) -> None:
    served.says("cp", f"{tree}/.", f"{box}:/tmp")
    assert served.says("exec", box, "cat /tmp/deep/file") == "deep\n"
    out = tree.parent / "out"
    out.mkdir()
    served.says("cp", f"{box}:/tmp/deep/.", str(out))
    assert os.listdir(out) == ["file"]


def test_dash_is_standard_input_and_output(served: Served, box: str) -> None:
    # Without newlines, which the terminal would change.
    data = bytes(one for one in range(256) if one not in b"\r\n") * 1000
    text = data.decode("latin-1")
    done = served.apart("cp", "-", f"{box}:bytes", input=text, encoding="latin-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = served.apart("cp", f"{box}:bytes", "-", encoding="latin-1")
    assert (done.returncode, done.stdout == text) == (0, True)


def test_local_path_may_contain_a_colon(served: Served, box: str, tmp_path: Path) -> None:
    (tmp_path / "a:b").write_text("colon\n")
    assert served.apart("cp", "./a:b", f"{box}:c", cwd=tmp_path).returncode == 0
    assert served.says("cp", f"{box}:c", "-") == "colon\n"


def test_failed_download_leaves_no_file(served: Served, box: str, tmp_path: Path) -> None:
    done = served.run("cp", f"{box}:missing", f"{tmp_path}/out")
    assert (done.returncode, done.stdout) == (1, "")
    assert "/workspace/missing" in done.stderr
    assert os.listdir(tmp_path) == []


def test_progress_is_shown_in_a_terminal_after_a_second(tmp_path: Path) -> None:
    script = (
        "import time; from smokebox.cli.output import progress\n"
        "with progress('big') as told:\n"
        "    told(1 << 20, 4 << 20); time.sleep(1.1); told(2 << 20, 4 << 20)"
    )
    terminal = Terminal([sys.executable, "-c", script], tmp_path)
    try:
        seen = terminal.expect(r"big  \[############\.{12}\] 2\.0 MiB of 4\.0 MiB  1\.\d MiB/s")
        assert "1.0 MiB of" not in seen
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_progress_is_silent_without_a_terminal(served: Served, box: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(bytes(1 << 20))
    assert served.apart("cp", f"{tmp_path}/in", f"{box}:out").stderr == ""
