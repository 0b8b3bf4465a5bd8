"""The house rules that a program can check: who may import whom, sizes, and names."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "smokebox"
LONGEST_FILE = 600
BANNED_NAMES = {"utils.py", "helpers.py", "manager.py", "base.py"}

# Room -> the rooms it may import besides itself. Imports go down only.
LEAVES = {"errors", "isolation", "limits", "options", "types"}
FOUNDATION = LEAVES | {"foundation", "project"}
CONTRACT = FOUNDATION | {"wire", "egress", "runtime", "sandbox"}
ENGINE = CONTRACT | {"engine"}
AGENTS = CONTRACT | {"client", "agents"}
EVERYTHING = (
    ENGINE
    | AGENTS
    | {
        "app",
        "cli",
        "integrations",
        "server",
        "sync",
        "testing",
    }
)
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "isolation": {"errors"},
    "limits": {"errors", "options"},
    "options": {"errors"},
    "types": set(),
    "project": {"errors", "options"},
    "foundation": LEAVES,
    "wire": FOUNDATION,
    "egress": FOUNDATION | {"wire"},
    "runtime": FOUNDATION,
    "sandbox": CONTRACT,
    "integrations": CONTRACT,
    "engine": CONTRACT,
    "server": ENGINE,
    "client": CONTRACT,
    "sync": CONTRACT | {"client"},
    "agents": CONTRACT | {"client"},
    "app": AGENTS,
    "cli": EVERYTHING,
    "testing": EVERYTHING,
}
# What `import smokebox` and the contract touch stays free of everything that is not stdlib.
STDLIB_ONLY = [
    SOURCE / "__init__.py",
    SOURCE / "errors.py",
    SOURCE / "types.py",
    SOURCE / "sandbox" / "__init__.py",
    SOURCE / "sandbox" / "api.py",
    SOURCE / "options.py",
    SOURCE / "foundation" / "paths.py",
    SOURCE / "sandbox" / "filesystems" / "__init__.py",
    SOURCE / "sandbox" / "filesystems" / "filesystem.py",
]
LEFT_BY_TOOLS = (".git", ".venv", ".hypothesis", ".benchmarks", "dist", "node_modules")
# This checkout and this home (a short path could be anybody's), and where packages come from.
HERE = [re.escape(str(path)) + r"\b" for path in (ROOT, Path.home()) if len(path.parts) > 2]
HOSTS = [r"\bpypi\.\w+\.?\w*/", r"pythonhosted\.", r"registry\.\w+\.(?:org|io|com|dev)"]
NAMES_A_MACHINE = re.compile("|".join([*HERE, *HOSTS, "[.]pyenv"]))


def python_files() -> list[Path]:
    folders = ("src", "tests", "bench", "examples")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def kept_files() -> Iterator[Path]:
    """Every file of the repository, without what tools leave in it."""
    for entry in ROOT.iterdir():
        if entry.name in LEFT_BY_TOOLS or entry.name.endswith("_cache"):
            continue
        files = entry.rglob("*") if entry.is_dir() else [entry]
        yield from (file for file in files if file.is_file() and file.suffix != ".pyc")


def modules(file: Path, tree: ast.AST) -> Iterator[str]:
    """Every module that `file` imports anywhere in it, also under TYPE_CHECKING."""
    package = file.relative_to(ROOT / "src").parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*above, *(node.module or "").split("."))).strip(".")


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def rooms_imported(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    rooms = set()
    for module in modules(file, tree):
        parts = module.split(".")
        if parts[0] == "smokebox":
            # `from smokebox import x` names a room, or what the package offers to users.
            rooms |= {parts[1]} if len(parts) > 1 else names & MAY_IMPORT.keys()
    return rooms


@pytest.mark.parametrize(
    "file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE))
)
def test_imports_go_down_the_rooms_only(file: Path) -> None:
    if file.parent == SOURCE and file.name in ("__init__.py", "__main__.py"):
        return
    room = room_of(file)
    assert room in MAY_IMPORT, f"{room} is not a room: add it to the table, or move the file"
    assert rooms_imported(file) <= MAY_IMPORT[room] | {room}


def test_contributors_are_told_of_every_room() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    firsts = [line.split("|")[1] for line in lines if line.startswith("| `")]
    told = {name for first in firsts for name in re.findall(r"`(\w+)(?:/|\.py)`", first)}
    there = {room_of(file) for file in SOURCE.rglob("*.py")} - {"__init__", "__main__"}
    assert there == told == MAY_IMPORT.keys()


def test_places_that_contributors_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:src|docs|tests)/[\w./-]+)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("file", STDLIB_ONLY, ids=lambda file: str(file.relative_to(SOURCE)))
def test_the_contract_imports_only_the_standard_library(file: Path) -> None:
    tops = {name.split(".")[0] for name in modules(file, ast.parse(file.read_text()))}
    assert tops <= set(sys.stdlib_module_names) | {"smokebox"}


def test_no_file_is_too_long() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in python_files()}
    assert [str(file) for file, length in lengths.items() if length > LONGEST_FILE] == []


def test_every_file_is_named_by_what_it_owns() -> None:
    assert [str(file) for file in python_files() if file.name in BANNED_NAMES] == []


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in kept_files()
        for match in NAMES_A_MACHINE.finditer(file.read_text(errors="replace"))
    ]
    assert found == []
