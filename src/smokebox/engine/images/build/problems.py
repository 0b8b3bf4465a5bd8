"""Errors about a Dockerfile, each with its file and line."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from smokebox.errors import InvalidDockerfile, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable


def invalid(file: str, line: int | None, problem: str, hint: str = "") -> InvalidDockerfile:
    """Return the error for text that is not a valid Dockerfile."""
    return InvalidDockerfile(f"{place(file, line)}: {problem}.", hint=hint, file=file, line=line)


def refused(file: str, line: int, feature: str, reason: str, hint: str) -> Unsupported:
    """Return the error for a feature of Dockerfiles that builds do not have."""
    return Unsupported(
        f"{place(file, line)}: {feature} is not supported: {reason}.",
        hint=hint,
        operation=feature,
        file=file,
        line=line,
    )


def place(file: str, line: int | None) -> str:
    """Return the place of a problem as compilers write it."""
    return file if line is None else f"{file}:{line}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint with the nearest known name, or with all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else f"Known: {', '.join(names)}."
