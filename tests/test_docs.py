"""Documentation: code blocks run, links are valid, and tables match the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from background_server import stop_server
from smokebox import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
# Languages of code blocks; only python and console are run.
LANGUAGES = {"python", "console", "text", "toml", "json"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
TIMEOUT = 60

# Runs a block that may have `await` at its top level, with the line numbers of its page.
RUN_BLOCK = """
import ast, asyncio, inspect, sys
page, line = sys.argv[1], int(sys.argv[2])
flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
code = compile("\\n" * line + sys.stdin.read(), page, "exec", flags=flags, dont_inherit=True)
space = {"__name__": "__main__"}

async def run():
    value = eval(code, space)
    if inspect.isawaitable(value):
        await value

asyncio.run(run())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block of a page, and the line of its fence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, match.start()) + 1,
            language=match[1],
            text=match[2],
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def blocks_in(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def run(command: list[str], text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        input=text,
        cwd=folder,
        env={**os.environ, "PATH": path, "SMOKEBOX_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of a block, and stop the server that it may have started."""
    yield tmp_path
    stop_server(tmp_path / "home")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("block", blocks_in("python"), ids=str)
def test_python_block_runs(block: Block, folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", RUN_BLOCK, block.page, str(block.line)]
    done = run(command, block.text, folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.timeout(90)
@pytest.mark.parametrize("block", blocks_in("console"), ids=str)
def test_console_block_prints_the_shown_output(block: Block, folder: Path) -> None:
    for entry in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = entry.partition("\n")
        if not command.startswith("smokebox"):
            continue
        done = run(["bash", "-c", command], "", folder)
        assert done.returncode == 0, done.stderr
        if shown.strip() and "..." not in shown:
            assert done.stdout.rstrip() == shown.rstrip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_have_known_languages(page: Path) -> None:
    unknown = [str(block) for block in read_blocks(page) if block.language not in LANGUAGES]
    assert unknown == []
    assert page.read_text().count("\n```") == 2 * len(read_blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_are_valid(page: Path) -> None:
    links = LINK.findall(FENCE.sub("", page.read_text()))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_index_links_every_page() -> None:
    links = {Path(link).name for link in LINK.findall((ROOT / "docs" / "index.md").read_text())}
    assert {page.name for page in DOCS} - {"index.md"} <= links


def known_errors() -> set[type[errors.SmokeboxError]]:
    values = vars(errors).values()
    return {v for v in values if isinstance(v, type) and issubclass(v, errors.SmokeboxError)}


def test_errors_page_has_the_tree_of_the_code() -> None:
    tree = textwrap.dedent((errors.__doc__ or "").split("\n\n")[1])
    assert tree.strip() in (ROOT / "docs" / "errors.md").read_text()


def test_errors_page_has_each_class_with_its_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \| \S",
        (ROOT / "docs" / "errors.md").read_text(),
        re.MULTILINE,
    )
    known = {(e.__name__, e.code, "yes" if e.retryable else "no") for e in known_errors()}
    assert set(rows) == known
