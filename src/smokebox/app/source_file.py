"""Line numbers of names in a source file, for error messages."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def source_location(file: Path, name: str) -> str:
    """Return the file and the line that assigns a name at the top level."""
    line = None
    for statement in _parse(file.read_text()).body:
        if name in _names(statement):
            line = statement.lineno
    return str(file) if line is None else f"{file}, line {line}"


def env_names(file: Path) -> dict[str, int]:
    """Return the names a file reads from `ctx.env` or smokebox's `env`, with their lines."""
    tree = _parse(file.read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "smokebox"
        for alias in node.names
        if alias.name == "env"
    }
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_env(node.value, imported):
            found.setdefault(node.attr, node.lineno)
    return found


def _is_env(node: ast.expr, imported: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in imported
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "env"
        and isinstance(node.value, ast.Name)
        and node.value.id == "ctx"
    )


def _names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (one.id for one in targets if isinstance(one, ast.Name))


@lru_cache(maxsize=8)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)
