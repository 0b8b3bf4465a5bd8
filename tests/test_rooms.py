"""House rules that a program can check: imports between rooms, file sizes and names."""

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
MAX_LINES = 600
BANNED_NAMES = {"utils.py", "helpers.py", "manager.py", "base.py"}

# Room -> the rooms it may import besides itself. Imports go down only.
LEAVES = {"errors", "isolation", "limits", "options", "types"}
FOUNDATION = LEAVES | {"foundation", "project"}
CONTRACT = FOUNDATION | {"wire", "egress", "runtime", "sandbox"}
TENANCY = FOUNDATION | {"wire", "egress", "tenancy"}
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
        "tenancy",
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
    "tenancy": FOUNDATION | {"wire", "egress"},
    "server": ENGINE | TENANCY,
    "client": CONTRACT,
    "sync": CONTRACT | {"client"},
    "agents": CONTRACT | {"client"},
    "app": AGENTS | TENANCY,
    "cli": EVERYTHING,
    "testing": EVERYTHING,
}
# Modules that `import smokebox` and the sandbox contract load. They import no other packages.
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
TOOL_DIRECTORIES = (".git", ".venv", ".hypothesis", ".benchmarks", "dist", "node_modules")
# Paths of this checkout and home directory (short ones are too common), and package registries.
LOCAL_PATHS = [re.escape(str(path)) + r"\b" for path in (ROOT, Path.home()) if len(path.parts) > 2]
REGISTRIES = [
    r"\bpypi\.org|\bpypi\.\w+\.?\w*/",
    r"pythonhosted\.",
    r"registry\.\w+\.(?:org|io|com|dev)",
    r"(?:deb|security)\.debian\.",
    r"(?:archive|security)\.ubuntu\.",
]
MACHINE_OR_REGISTRY = re.compile("|".join([*LOCAL_PATHS, *REGISTRIES, "[.]pyenv"]))


def python_files() -> list[Path]:
    folders = ("src", "tests", "bench", "examples")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def repository_files() -> Iterator[Path]:
    """Yield every file of the repository except caches and tool directories."""
    for entry in ROOT.iterdir():
        if entry.name in TOOL_DIRECTORIES or entry.name.endswith("_cache"):
            continue
        files = entry.rglob("*") if entry.is_dir() else [entry]
        yield from (file for file in files if file.is_file() and file.suffix != ".pyc")


def imported_modules(file: Path, tree: ast.AST) -> Iterator[str]:
    """Yield every module that `file` imports, also in functions and under TYPE_CHECKING."""
    package = file.relative_to(ROOT / "src").parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*parent, *(node.module or "").split("."))).strip(".")


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    rooms = set()
    for module in imported_modules(file, tree):
        parts = module.split(".")
        if parts[0] == "smokebox":
            # `from smokebox import x` imports a room or a public name of the package.
            rooms |= {parts[1]} if len(parts) > 1 else names & MAY_IMPORT.keys()
    return rooms


@pytest.mark.parametrize(
    "file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE))
)
def test_imports_only_go_down(file: Path) -> None:
    if file.parent == SOURCE and file.name in ("__init__.py", "__main__.py"):
        return
    room = room_of(file)
    assert room in MAY_IMPORT, f"{room} is not a room: add it to the table, or move the file"
    assert imported_rooms(file) <= MAY_IMPORT[room] | {room}


def test_contributing_lists_every_room() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)}
    existing = {room_of(file) for file in SOURCE.rglob("*.py")} - {"__init__", "__main__"}
    assert existing == listed == MAY_IMPORT.keys()


def test_paths_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:src|docs|tests)/[\w./-]+)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("file", STDLIB_ONLY, ids=lambda file: str(file.relative_to(SOURCE)))
def test_contract_imports_only_the_standard_library(file: Path) -> None:
    packages = {name.split(".")[0] for name in imported_modules(file, ast.parse(file.read_text()))}
    assert packages <= set(sys.stdlib_module_names) | {"smokebox"}


def test_no_file_is_too_long() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in python_files()}
    assert [str(file) for file, length in lengths.items() if length > MAX_LINES] == []


def test_no_file_has_a_banned_name() -> None:
    assert [str(file) for file in python_files() if file.name in BANNED_NAMES] == []


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in repository_files()
        for match in MACHINE_OR_REGISTRY.finditer(file.read_text(errors="replace"))
    ]
    assert found == []
