"""Files that `init`, `build` and `deploy` write, as plain templates with {{name}} fields."""

from __future__ import annotations

import importlib.resources
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

_FIELD = re.compile(r"\{\{(\w+)\}\}")
_SUFFIX = ".tmpl"


def render(folder: str, **fields: str) -> dict[str, str]:
    """Return the files of a template folder by path, with fields replaced in names and text."""

    def fill(text: str) -> str:
        return _FIELD.sub(lambda match: fields[match[1]], text)

    root = importlib.resources.files(__package__) / folder
    return {fill(path): fill(file.read_text()) for path, file in _walk(root)}


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield f"{prefix}{entry.name.removesuffix(_SUFFIX)}", entry
